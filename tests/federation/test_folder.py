"""A run's folder: one writer, the lock before the first change, and no ledger that says less than the folder knows."""

import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedveil.errors import UserError
from fedveil.federation import folder as run_folder
from fedveil.federation import store
from fedveil.federation.config import load_config
from fedveil.federation.loop import run
from fedveil.privacy.ledger import Damaged, Locked

SMALL = ["dataset=cancer", "clients=3", "rounds=6", "local_steps=2", "report=false", "checkpoint_every=2"]


def config(*more):
    return load_config("fed-cdp-sound", [*SMALL, *more])


class Cut(Exception):
    pass


def broken_off(folder, after, *more):
    """A run that was interrupted after so many rounds."""

    def cut(facts):
        if facts.round == after:
            raise Cut

    with contextlib.suppress(Cut):
        run(config(*more), folder, on_round=cut)


def shortened(folder, records):
    """Take so many records from the end of the ledger."""
    path = folder / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-records]))


def lines(folder):
    return [line["round"] for line in store.read_lines(folder / "metrics.jsonl")]


def test_resume_beside_a_running_run_changes_nothing(tmp_path):
    folder, seen = tmp_path / "run", []

    def beside(facts):
        if facts.round == 3:
            before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
            with pytest.raises(Locked, match="another process"):
                run(config(), folder, resume=True)
            assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
            seen.append(facts.round)

    run(config(), folder, on_round=beside)
    assert seen == [3] and lines(folder) == [1, 2, 3, 4, 5, 6]


def _start(folder, seed, results):
    try:
        run(load_config("fed-cdp-sound", [*SMALL, f"seed={seed}"]), folder)
        results.put((seed, "done"))
    except UserError as wrong:
        results.put((seed, str(wrong)))


def test_two_configurations_started_in_one_folder_at_once_are_one_run(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    both = [context.Process(target=_start, args=(tmp_path / "run", seed, results)) for seed in (1, 2)]
    for process in both:
        process.start()
    said = dict(results.get(timeout=120) for _ in both)
    for process in both:
        process.join()
    (winner,) = [seed for seed, text in said.items() if text == "done"]
    assert store.open_run(tmp_path / "run").config.seed == winner
    run_folder.verify(tmp_path / "run")


@pytest.mark.parametrize("keep_head", [True, False])
@pytest.mark.parametrize("records", [1, 2, 3])
def test_a_ledger_cut_between_records_is_noticed_by_verify_and_on_resume(tmp_path, records, keep_head):
    """Also after the last checkpoint: metrics.jsonl knows its rounds."""
    folder = tmp_path / "run"
    broken_off(folder, 5)
    shortened(folder, records)
    if not keep_head:
        (folder / "ledger.head").unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(Damaged, match="cut or rolled back"):
        run_folder.verify(folder)
    with pytest.raises(Damaged, match="cut or rolled back"):
        run(config(), folder, resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == before
    done = subprocess.run(
        [sys.executable, "-m", "fedveil", "ledger", str(folder), "--verify"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "cut or rolled back" in done.stderr and "Traceback" not in done.stderr


def test_a_whole_run_verifies_and_says_what_was_compared(tmp_path):
    folder = tmp_path / "run"
    run(config(), folder)
    found = run_folder.verify(folder)
    assert found["records"] == 7 and found["rounds"] == 6 and found["checkpoints"] == 3
    assert found["anchors"][0] == "ledger.head" and len(found["anchors"]) == 4


def test_a_lost_ledger_is_not_begun_again(tmp_path):
    folder = tmp_path / "run"
    broken_off(folder, 1)  # before the first checkpoint
    (folder / "ledger.jsonl").unlink()
    (folder / "ledger.head").unlink()
    with pytest.raises(UserError, match="is gone"):
        run(config(), folder, resume=True)


@pytest.mark.parametrize("left", [b"", b'{"hash":"ab', None])
def test_a_kill_while_the_ledger_is_created_can_be_resumed(tmp_path, left):
    folder = tmp_path / "run"
    run(config(), tmp_path / "whole")
    broken_off(folder, 1)
    for name in ("ledger.head", "metrics.jsonl", "private.jsonl"):
        (folder / name).unlink(missing_ok=True)
    if left is None:
        (folder / "ledger.jsonl").unlink()
    else:
        (folder / "ledger.jsonl").write_bytes(left)
    run(config(), folder, resume=True)
    assert _same(folder, tmp_path / "whole")


def _same(one, other):
    mine, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return all(np.array_equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("name", ["round-000004.safetensors", "round-000004.json"])
def test_any_flipped_bit_of_a_checkpoint_is_noticed(tmp_path, name):
    folder = tmp_path / "run"
    broken_off(folder, 5)
    path = folder / "checkpoints" / name
    whole = path.read_bytes()
    places = range(len(whole)) if name.endswith("json") else range(0, len(whole), max(1, len(whole) // 150))
    for at in places:
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        with pytest.raises(UserError):
            store.check_checkpoint(folder / "checkpoints", 4)
    for step in ("json", "safetensors"):  # the documented way on
        (folder / "checkpoints" / f"round-000004.{step}").unlink()
    run(config(), tmp_path / "whole")
    run(config(), folder, resume=True)
    assert _same(folder, tmp_path / "whole")


def test_checkpoints_of_earlier_versions_are_read_with_a_note(tmp_path, capsys):
    folder = tmp_path / "run"
    broken_off(folder, 5)
    for path in (folder / "checkpoints").glob("*.json"):
        facts = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in facts.items() if k not in ("sha256", "check")}))
    run(config(), folder, resume=True)
    assert "without a checksum" in capsys.readouterr().err


def test_files_of_interrupted_writes_are_removed_and_others_are_not(tmp_path):
    folder = tmp_path / "run"
    broken_off(folder, 3)
    strange = folder / "notes.tmp"
    unfinished = [
        folder / ".run.json.123.tmp",
        folder / "checkpoints" / ".round-000004.json.77.tmp",
        folder / "checkpoints" / "round-000004.safetensors",
    ]
    for path in (strange, *unfinished):
        path.write_bytes(b"x")
    with run_folder.hold(folder):
        assert strange.exists() and not any(path.exists() for path in unfinished)
        assert store.checkpoints(folder / "checkpoints") == [2]


def test_the_lock_ends_with_its_process(tmp_path):
    code = "import sys, time; from pathlib import Path; from fedveil.federation.folder import hold\n"
    code += "with hold(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    with pytest.raises(Locked), run_folder.hold(tmp_path):
        pass
    process.kill()
    process.wait()
    with run_folder.hold(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write into"), run_folder.hold(tmp_path / "file" / "run"):
        pass
    real = os.open

    def read_only(path, flags, *rest, **more):
        if flags & os.O_CREAT and str(path).endswith(".lock"):
            raise OSError(30, "Read-only file system")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(run_folder.os, "open", read_only)
    with pytest.raises(UserError, match="Read-only file system"), run_folder.hold(tmp_path):
        pass


def test_a_full_disk_ends_with_a_clear_error_and_resumes_to_the_same_model(tmp_path, monkeypatch):
    run(config(), tmp_path / "whole")
    from fedveil.privacy.ledger import journal

    real, count = os.pwrite, [0]

    def full(handle, data, at):
        count[0] += 1
        if count[0] == 8:
            raise OSError(28, "No space left on device")
        return real(handle, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "pwrite", full)
        with pytest.raises(UserError, match="No space left"):
            run(config(), tmp_path / "run")
    run(config(), tmp_path / "run", resume=True)
    assert _same(tmp_path / "run", tmp_path / "whole")
    run_folder.verify(tmp_path / "run")


DAMAGE = [
    b"",
    b"\0" * 50,
    b"[]",
    b"7",
    b"null",
    b'{"round": "x"}',
    b"{" * 100_000,
    b"\xff\xfe",
    b'{"a": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "ledger.jsonl", "ledger.head", "result.json",
                                  "checkpoints/round-000004.json", "checkpoints/round-000004.safetensors"])  # fmt: skip
def test_a_damaged_file_in_the_folder_is_a_clear_error_or_no_matter(tmp_path, name):
    folder = tmp_path / "run"
    broken_off(folder, 5)
    if name == "result.json":
        (folder / name).write_text("{}")
    whole = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for damage in DAMAGE:
        shutil.rmtree(folder)
        for path, data in whole.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (folder / name).write_bytes(damage)
        for work in (lambda: run_folder.verify(folder), lambda: run(config(), folder, resume=True)):
            with contextlib.suppress(UserError):
                work()
