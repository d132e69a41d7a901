"""A trial of several sites with every paper a real study has: keys, contract, invitations, roster, signed requests.

    python -m fedveil.flower.trial papers DIR --sites 3 --host localhost      # lay everything out below DIR
    fedveil flower link --home DIR/link --tls DIR/tls --host localhost
    fedveil flower node --home DIR/site-0                                     # and the other sites
    python -m fedveil.flower.trial run DIR                                    # register, submit, follow; exit code of the run

The rows are scikit-learn's public breast cancer table, dealt to the sites. `deploy/compose.yaml` starts the same in containers.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from pathlib import Path

from fedveil.errors import UserError
from fedveil.flower import identity, onboard, stack
from fedveil.flower.contract import write_contract
from fedveil.flower.project import write_project
from fedveil.jsons import JsonObject

CONNECTION = "trial"
PUBLIC_ROWS = 119


def tables(folder: Path, sites: int) -> int:
    """public.csv and one file per site; returns the number of rows of each site."""
    import numpy as np
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    header = [str(name).replace(" ", "_") for name in found.feature_names]
    words = [str(found.target_names[k]) for k in found.target]
    order = np.random.default_rng(0).permutation(len(words))
    each = (len(order) - PUBLIC_ROWS) // sites
    cuts = {"public": order[:PUBLIC_ROWS]}
    cuts |= {f"site-{n}": order[PUBLIC_ROWS + n * each : PUBLIC_ROWS + (n + 1) * each] for n in range(sites)}
    for name, rows in cuts.items():
        with open(folder / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*header, "diagnosis"])
            writer.writerows([*(f"{v:g}" for v in found.data[k]), words[k]] for k in rows)
    return each


def papers(folder: Path, sites: int = 3, host: str = "localhost", port: int = 8000, rounds: int = 3) -> None:
    """Lay out a study of `sites` nodes below `folder`. A folder that holds one already is left as it is."""
    from fedveil.federation.config import make_config

    folder = folder.absolute()
    if (folder / "project/pyproject.toml").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    each = tables(folder, sites)
    stack.make_certificates(folder / "tls", sorted({host, "localhost", "127.0.0.1"}))
    for name in ("owner.key", "server.key"):
        identity.write_identity(folder / name)
    config = make_config({
        "recipe": "fed-cdp", "clients": sites, "rounds": rounds, "local_steps": 20, "batch_size": 10, "learning_rate": 0.1,
        "model": "papers-mlp", "model_options": {"hidden": [16]}, "dataset": "cancer", "delta": 1e-3,
    })  # fmt: skip
    data = onboard.data_of_public(folder / "public.csv", "diagnosis", each, {}, ())
    server = identity.public_of(identity.read_identity(folder / "server.key")).hex()
    agreed = onboard.contract_of_study(
        config, data, study="trial", epsilon=8.0, delta=1e-3, submitters=[server]
    )
    write_contract(folder / "contract.toml", agreed)
    owner = identity.read_identity(folder / "owner.key")
    for number in range(sites):
        name, letter = f"site-{number}", folder / f"site-{number}.invite.json"
        onboard.invite(letter, folder / "roster.json", owner, name, study="trial", superlink=f"{host}:{port}",
                       ca=folder / "tls/ca.crt", contract=folder / "contract.toml")  # fmt: skip
        joined = onboard.accept(letter, folder / name, str(folder / f"{name}.csv"))
        onboard.admit(joined.answer, folder / "roster.json", owner)
    options: JsonObject = {"out": str(folder / "project/run"), "deadline": 120.0, "join": 300.0,
                               "public": str(folder / "public.csv")}  # fmt: skip
    options |= {key: str(folder / name) for key, name in
                (("contract", "contract.toml"), ("roster", "roster.json"), ("identity", "server.key"))}  # fmt: skip
    (folder / "flwr").mkdir(exist_ok=True)
    (folder / "flwr/config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{host}:{port}"\n'
        f'root-certificates = "{folder / "tls/ca.crt"}"\n',
        "utf-8",
    )
    write_project(folder / "project", config, options)


def run(folder: Path, patience: float = 120.0) -> int:
    """Register the sites' keys, submit the project and follow it; the exit code of `fedveil flower run`."""
    import subprocess

    folder = folder.absolute()
    env = stack.environment(folder / "flwr")
    until = time.monotonic() + patience
    for path in sorted(folder.glob("site-*/supernode.pub")):
        while True:
            done = stack.flwr(env, "supernode", "register", str(path), CONNECTION)
            said = (done.stdout + done.stderr).lower()
            if done.returncode == 0 or "already" in said:
                break
            if time.monotonic() > until:
                raise UserError(f"the SuperLink does not register {path}: {said.strip()[-300:]}")
            time.sleep(2.0)
    command = [
        sys.executable,
        "-m",
        "fedveil",
        "flower",
        "run",
        str(folder / "project"),
        "--superlink",
        CONNECTION,
    ]
    return subprocess.run([*command, "--poll", "5"], env={**os.environ, **env}).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fedveil.flower.trial", description="A trial of several sites."
    )
    parser.add_argument("what", choices=("papers", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args()
    try:
        if told.what == "run":
            return run(told.folder)
        papers(told.folder, told.sites, told.host, told.port, told.rounds)
        return 0
    except UserError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
