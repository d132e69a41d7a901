"""The secure sum over any transport: nodes that live on their disks, a server that asks and waits."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.flower import identity
from fedveil.flower.secure_sum import Seat, answer, collect
from fedveil.secure_sum import journal, party
from fedveil.secure_sum.coordinator import Failure, Sum
from fedveil.secure_sum.parameters import Parameters, Policy
from fedveil.secure_sum.party import Session

SIZE = 20


class Federation:
    """Nodes with homes; each message is answered by a fresh look at the disk. silent: (node, stage) that never answer."""

    def __init__(self, folder, n=5, t=4, c=1, silent=(), attempt=0):
        self.secrets = [bytes([k + 1]) * 32 for k in range(n)]
        parameters = Parameters(bytes(32), SIZE, 2.0**-10, 1.0, 4.0, n, t, c)
        roster = tuple(identity.public_of(s) for s in self.secrets)
        self.session = Session(b"r" * 16, 3, attempt, roster, parameters)
        self.folder, self.silent = folder, set(silent)
        self.values = {i: np.full(SIZE, float(i)) for i in range(1, n + 1)}
        self.log: list[tuple[int, str]] = []
        self.broken: set[int] = set()
        self.over: set[int] = set()
        self.stage = -1
        self.seen: list[tuple[str, tuple[int, ...]]] = []
        self.refusals: list[str] = []
        self.drawn: list[bytes] = []
        self.told: dict[int, dict[bytes, bytes]] = {}  # node -> message -> its answer

    def seat(self, i: int, **more) -> Seat:
        return Seat(self.folder / str(i), self.session, i, self.secrets[i - 1], **more)

    def reply(self, i: int, data: bytes) -> bytes:
        def charge() -> None:
            if i in self.over:
                raise UserError("budget: nothing left")
            self.log.append((i, "charged"))

        def values() -> np.ndarray:
            self.log.append((i, "data"))
            if i in self.broken:
                raise RuntimeError("a private row broke training")
            return self.values[i]

        def entropy() -> bytes:
            self.drawn.append(os.urandom(32))
            return self.drawn[-1]

        found = answer(self.seat(i), data, charge=charge, values=values, entropy=entropy)
        self.told.setdefault(i, {})[data] = found
        return found

    def ask(self, wanted, seconds):
        self.stage += 1
        for i, data in wanted.items():
            if (i, self.stage) in self.silent:
                continue
            try:
                reply = self.reply(i, data)
            except UserError as why:
                self.refusals.append(str(why))
                continue
            assert self.reply(i, data) == reply  # asked twice: the same bytes
            yield i, reply

    def play(self):
        return collect(
            self.session, self.ask, 1.0, lambda stage, missing, left: self.seen.append((stage, missing))
        )


def _noise_only(result: Sum, federation: Federation, nodes) -> np.ndarray:
    grid = federation.session.parameters.grid
    return result.total * grid - sum(federation.values[i] for i in nodes)


def test_a_sum_over_nodes_that_remember_by_disk_alone_with_one_silent_and_one_lost(tmp_path):
    federation = Federation(tmp_path, 6, 4, 1, silent={(2, 2), (5, 3), (5, 4)})
    found = federation.play()
    assert isinstance(found.result, Sum) and found.result.survivors == (1, 3, 4, 5, 6)
    left = _noise_only(found.result, federation, found.result.survivors)
    # five shares of deviation 4/sqrt(3): 5.2 in all; 20 values stay within 7 deviations but for a chance of 6e-11
    assert np.abs(left).max() < 7 * 4 * np.sqrt(5 / 3) and np.abs(left).max() > 0
    assert federation.seen[-1][0] == "done"
    assert any(stage == "vector" and missing == (2,) for stage, missing in federation.seen)


def test_the_ledger_is_charged_before_data_is_opened_and_once_for_resends(tmp_path):
    federation = Federation(tmp_path)
    federation.play()
    for i in range(1, 6):
        assert [what for node, what in federation.log if node == i] == ["charged", "data"]


def test_a_node_over_its_budget_uploads_nothing_and_the_others_go_on(tmp_path):
    federation = Federation(tmp_path)
    federation.over = {3}
    found = federation.play()
    assert isinstance(found.result, Sum) and found.result.survivors == (1, 2, 4, 5)
    assert federation.refusals and "budget" in federation.refusals[0]
    assert len(journal.read(federation.seat(3).folder / "journal")) == 2
    assert (3, "data") not in federation.log


def test_training_that_fails_uploads_zeros_with_noise_in_the_same_form(tmp_path):
    federation = Federation(tmp_path)
    federation.broken = {2}
    found = federation.play()
    assert isinstance(found.result, Sum) and 2 in found.result.survivors
    left = _noise_only(found.result, federation, (1, 3, 4, 5))
    assert np.abs(left).max() < 7 * 4 * np.sqrt(5 / 3)


def test_too_few_nodes_end_the_attempt_with_the_reason_and_a_new_attempt_is_fresh_and_charged_again(tmp_path):
    first = Federation(tmp_path, silent={(1, 2), (2, 2)})
    failed = first.play()
    assert isinstance(failed.result, Failure) and failed.result.missing == (1, 2)
    assert failed.result.stage == "vector"
    sent = party.resume(
        first.session, 3, first.secrets[2], journal.read(first.seat(3).folder / "journal")
    ).sent
    again = Federation(tmp_path, attempt=1)
    found = again.play()
    assert isinstance(found.result, Sum) and len(found.result.survivors) == 5
    state = party.resume(again.session, 3, again.secrets[2], journal.read(again.seat(3).folder / "journal"))
    assert not set(sent) & set(state.sent)
    assert (3, "charged") in again.log
    assert not first.seat(3).folder.exists()  # the older attempt's secrets are gone


def test_an_attempt_that_is_not_newer_is_never_begun_again(tmp_path):
    new, old = Federation(tmp_path, attempt=1), Federation(tmp_path, attempt=0)
    new.play()
    with pytest.raises(UserError, match="not newer"):
        old.reply(1, b"")
    with pytest.raises(UserError, match="no such attempt"):
        old.reply(1, b"anything")


def test_a_node_refuses_a_sum_below_its_owners_policy_or_under_another_identity(tmp_path):
    federation = Federation(tmp_path)
    nothing = dict(charge=lambda: None, values=lambda: np.zeros(SIZE))
    with pytest.raises(UserError, match="this node asks for 4"):
        answer(federation.seat(1, policy=Policy(honest=4)), b"", **nothing)
    with pytest.raises(UserError, match="not number 2"):
        answer(replace(federation.seat(2), signing=federation.secrets[0]), b"", **nothing)


def test_journals_are_readable_by_their_owner_alone(tmp_path):
    federation = Federation(tmp_path)
    federation.play()
    path = federation.seat(1).folder / "journal"
    assert os.stat(path).st_mode & 0o077 == 0
    assert os.stat(path.parent).st_mode & 0o077 == 0


def _on_disk(federation: Federation, i: int) -> bytes:
    return b"".join(path.read_bytes() for path in federation.seat(i).home.rglob("*") if path.is_file())


def test_after_the_reveal_no_secret_of_the_attempt_is_left_on_the_disk_and_resends_are_the_same_bytes(
    tmp_path,
):
    federation = Federation(tmp_path, silent={(3, 4)})
    federation.play()
    roots = [
        drawn for drawn in federation.drawn if drawn in b"".join(_on_disk(federation, i) for i in range(1, 6))
    ]
    assert len(roots) == 1 and roots[0] in _on_disk(federation, 3)  # the node that was never asked to reveal
    for data, reply in list(federation.told[1].items()):
        assert federation.reply(1, data) == reply
    with pytest.raises(UserError, match="after this node sent its reveal"):
        federation.reply(1, [*federation.told[2]][-2])  # what another node was told, in a stage that is past
    assert federation.log.count((1, "charged")) == 1


def test_a_kill_before_the_secrets_are_removed_keeps_the_answers_and_they_go_with_the_next_message(
    tmp_path, monkeypatch
):
    federation = Federation(tmp_path)
    with monkeypatch.context() as killed:
        killed.setattr(journal, "replace", lambda path, record: None)
        federation.play()
    assert any(root in _on_disk(federation, 1) for root in federation.drawn)
    last, reply = list(federation.told[1].items())[-1]
    assert federation.reply(1, last) == reply
    assert not any(root in _on_disk(federation, 1) for root in federation.drawn)


def test_a_closed_journal_of_another_attempt_or_with_a_changed_byte_is_refused(tmp_path):
    federation = Federation(tmp_path)
    federation.play()
    path = federation.seat(1).folder / "journal"
    (record,) = journal.read(path)
    other = Federation(tmp_path, attempt=1).session
    with pytest.raises(UserError):
        party.resume(other, 1, federation.secrets[0], [record])
    with pytest.raises(UserError, match="damaged"):
        party.resume(federation.session, 1, federation.secrets[0], [record[:50] + b"x" + record[51:]])


def test_secrets_of_another_run_that_ended_without_a_sum_go_a_day_later(tmp_path):
    failed = Federation(tmp_path, silent={(1, 2), (2, 2)})
    failed.play()
    here = failed.seat(3).folder
    later = Federation(tmp_path)
    later.session = replace(later.session, run=b"s" * 16)
    later.reply(3, b"")
    assert here.exists()  # it may be under way
    os.utime(here / "journal", (0, 0))
    later.session = replace(later.session, run=b"t" * 16)
    later.reply(3, b"")
    assert not here.exists()
    with pytest.raises(UserError, match="not newer"):
        failed.reply(3, b"")


def synced(monkeypatch) -> list[str]:
    """The paths of all that is synced from now on."""
    found, usual = [], os.fsync

    def fsync(descriptor: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads names of open files from /proc")


@needs_proc
def test_that_an_attempt_was_begun_is_on_the_disk_up_to_the_nodes_home_before_its_keys_leave(tmp_path, monkeypatch):
    """Otherwise a loss of power takes the note back, and the same attempt can be signed twice."""
    federation = Federation(tmp_path)
    found = synced(monkeypatch)
    federation.reply(1, b"")
    seat = federation.seat(1)
    assert {str(folder) for folder in (seat.run, seat.run.parent, seat.home)} <= set(found)


class Killed(BaseException):
    pass


@needs_proc
def test_an_answer_from_a_record_that_a_kill_left_unsynced_is_synced_first(tmp_path, monkeypatch):
    federation = Federation(tmp_path)
    path = federation.seat(1).folder / "journal"
    with monkeypatch.context() as patch:

        def kill(descriptor: int) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
                raise Killed

        patch.setattr(os, "fsync", kill)
        with pytest.raises(Killed):
            federation.reply(1, b"")
    assert len(journal.read(path)) == 1
    found = synced(monkeypatch)
    federation.reply(1, b"")
    assert str(path) in found and str(path.parent) in found


@needs_proc
def test_a_record_that_cannot_be_synced_is_taken_back(tmp_path, monkeypatch):
    """A disk that fails once may forget what it was given: nothing is answered from there."""
    path = tmp_path / "journal"
    journal.append(path, b"first")

    def fail(descriptor: int) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="input/output"):
        journal.append(path, b"second")
    assert journal.read(path) == [b"first"]
