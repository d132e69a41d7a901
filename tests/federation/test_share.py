"""The shareable copy holds nothing private: looked for in every byte of it."""

import json
import re

import pytest

from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.loop import run
from fedveil.federation.share import share, shareable
from fedveil.federation.store import open_run

SMALL = ["dataset=cancer", "rounds=2", "batch_size=4", "report=false", "seed=918273645", "learning_rate=0.01"]
PRIVATE = ("918273645", "private", "client_loss", "norm_m", "skipped", "uploads", "seconds", "groups", "fingerprint", "made")


def made(tmp_path, recipe, *more):
    run(load_config(recipe, [*SMALL, *more]), tmp_path / "run", command="fedveil run /home/somebody")
    return open_run(tmp_path / "run")


@pytest.mark.parametrize("recipe, more", [("dp-fedavg", ["clients=8"]), ("fed-cdp-sound", ["clients=3", "local_steps=2"])])
def test_nothing_private_is_in_the_copy(recipe, more, tmp_path):
    told = share(made(tmp_path, recipe, *more), tmp_path / "copy")
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {*told["files"], "shareable.json"} and "model.safetensors" not in names  # a guessed seed subtracts the noise
    for name in told["files"]:
        text = (tmp_path / "copy" / name).read_text()
        assert name.startswith("shareable-") and not [word for word in PRIVATE if word in text.replace("non-private", "")], name
        assert "somebody" not in text and str(tmp_path) not in text
    rows = json.loads((tmp_path / "copy" / "shareable-ledger.json").read_text())["rows"]
    assert {row["observer"] for row in rows} == {"server", "client-process", "participants", "public"}


def test_what_is_one_clients_own_stays_at_home(tmp_path):
    own = ["client_epsilons=[4.25, 8.125]", "client_deltas=[1.5e-5]", 'client_mechanisms=["gaussian", "laplace"]', "clients=2"]
    timed = ["client_radii=[0.03125]", "compute_seconds=[3.0625]", "network_seconds=[5.0625]", "overrun_seconds=[7.0625]"]
    (tmp_path / "other").mkdir()
    made_runs = made(tmp_path, "udp-fl", *own), made(tmp_path / "other", "ldp-fl", "clients=2", "channel=none", *timed)
    for number, one in enumerate(made_runs):
        share(one, tmp_path / f"copy{number}")
        config = json.loads((tmp_path / f"copy{number}" / "shareable-run.json").read_text())["config"]
        assert not [key for key in config if key.startswith("client_") or key.endswith(("_seconds", "_proposals"))]


def test_a_model_goes_along_where_the_public_row_holds_or_its_owner_says_so(tmp_path):
    ours = made(tmp_path, "fed-cdp-sound", "clients=3", "secure_noise=true")
    assert "model.safetensors" in share(ours, tmp_path / "sound")["files"]
    (tmp_path / "other").mkdir()
    plain = made(tmp_path / "other", "non-private", "clients=3")
    assert "model.safetensors" in share(plain, tmp_path / "b")["left_out"]
    assert "model.safetensors" in share(plain, tmp_path / "c", model=True)["files"]
    with pytest.raises(UserError, match="not empty"):
        share(plain, tmp_path / "c")


def test_no_reason_in_the_copy_says_which_clients_it_is_about(tmp_path):
    """Two of four clients take part without protection: the copy says how many they are, the run's owner reads who."""
    ours = made(tmp_path, "udp-fl", "clients=4", "client_epsilons=[1.0, inf]", "local_steps=2")
    said = "for clients 0, 2 alone, nothing is counted of clients 1, 3"
    assert said in (tmp_path / "run" / "result.json").read_text()
    for name, content in shareable(ours).items():
        text = content.decode()
        assert not re.search(r"clients? \d", text), name
        told = "for 2 clients alone, nothing is counted of 2 clients (" in text
        assert told == name.endswith(("ledger.json", "result.json"))
