"""Rosters, identities and the limits of parsers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import UserError
from fedveil.flower import identity, limits
from fedveil.flower import roster as rosters
from fedveil.flower.roster import Member, Roster


def keys(count: int) -> list[bytes]:
    return [identity.public_of(bytes([n + 1]) * 32) for n in range(count)]


def three() -> Roster:
    return Roster("flu", 1, tuple(Member(n, f"site-{n}", key) for n, key in enumerate(keys(3))))


def test_a_signature_holds_for_one_key_purpose_and_message_only() -> None:
    secret = identity.new_identity()
    made = identity.sign(secret, "roster", b"abc")
    public = identity.public_of(secret)
    assert identity.verify(public, "roster", b"abc", made)
    assert not identity.verify(public, "contract", b"abc", made)
    assert not identity.verify(public, "roster", b"abd", made)
    assert not identity.verify(keys(1)[0], "roster", b"abc", made)
    assert not identity.verify(b"short", "roster", b"abc", made)
    assert not identity.verify(public, "roster", b"abc", b"")


def test_no_signature_is_right_under_a_key_of_small_order() -> None:
    """Under such a key S = 0 and R of small order verify for one message."""
    for public in identity.WEAK:
        for r in identity.WEAK:
            assert not any(identity.verify(public, "p", bytes([n]), r + bytes(32)) for n in range(4))
    assert len(identity.WEAK) == 14
    with pytest.raises(limits.Malformed, match="anybody can sign"):
        Roster("x", 1, (Member(0, "a", bytes(32)),))


def test_an_identity_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "id"
    public = identity.write_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert identity.public_of(identity.read_identity(path)) == public
    with pytest.raises(UserError, match="never overwritten"):
        identity.write_identity(path)
    os.chmod(path, 0o640)
    with pytest.raises(UserError, match="others may read"):
        identity.read_identity(path)


def test_a_roster_reads_back_and_is_pinned_or_signed(tmp_path: Path) -> None:
    secret, path = identity.new_identity(), tmp_path / "roster.json"
    rosters.write_roster(path, three(), secret)
    owner = identity.public_of(secret)
    assert rosters.read_roster(path, pinned=three().digest, owner=owner) == three()
    with pytest.raises(UserError, match="is pinned here"):
        rosters.read_roster(path, pinned="0" * 64)
    with pytest.raises(UserError, match="not signed"):
        rosters.read_roster(path, owner=keys(1)[0])
    changed = json.loads(path.read_text())
    changed["roster"]["members"][0]["name"] = "mallory"
    path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match="not signed"):
        rosters.read_roster(path, owner=owner)


def test_a_digest_does_not_depend_on_the_order_of_writing() -> None:
    one = three()
    assert Roster(one.study, 1, tuple(reversed(one.members))).digest == one.digest
    assert rosters.from_json(json.loads(rosters.to_bytes(one))) == one


def test_numbers_names_and_keys_stand_for_one_node_each() -> None:
    one = three()
    with pytest.raises(UserError, match="this number"):
        rosters.add(one, Member(2, "new", keys(4)[3]))
    with pytest.raises(UserError, match="identity key"):
        rosters.add(one, Member(3, "new", keys(3)[0]))
    with pytest.raises(limits.Malformed, match="same identity key"):
        Roster("x", 1, (Member(0, "a", keys(1)[0]), Member(1, "b", keys(1)[0])))
    smaller = rosters.remove(one, 1)
    assert (smaller.version, smaller.retired) == (2, (1,))
    with pytest.raises(UserError, match="retired"):
        rosters.add(smaller, Member(1, "new", keys(4)[3]))
    turned = rosters.rotate(one, 1, keys(4)[3])
    assert rosters.changes(one, turned)[0].startswith("node 1 (site-1) has a new identity key")
    assert rosters.changes(one, smaller) == ["node 1 (site-1) is removed"]


BAD_JSON = [
    b"[" * 100_000, b'{"a":' * 5000, b"NaN", b"1e999", b"9" * 5000, b'{"a":1,"a":2}', b"\xff\xfe", b"", b"{",
    b'"\\ud800', b"[1,2", b"-Infinity", b"null" * 3,
]  # fmt: skip


@pytest.mark.parametrize("data", BAD_JSON)
def test_json_beyond_the_limits_is_malformed_and_nothing_else(data: bytes) -> None:
    with pytest.raises(limits.Malformed):
        limits.read_json(data)


def test_brackets_inside_texts_do_not_count_as_depth() -> None:
    assert limits.read_json(json.dumps({"a": "[" * 500 + '"' + "{" * 500})) == {
        "a": "[" * 500 + '"' + "{" * 500
    }


def test_random_changes_of_a_roster_file_never_end_in_a_traceback(tmp_path: Path) -> None:
    """1,000 mutations: each is read as a roster or is a UserError."""
    path, draw = tmp_path / "r.json", random.Random(5)
    rosters.write_roster(path, three(), identity.new_identity())
    good = path.read_bytes()
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            kind = draw.randrange(3)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                del data[at : at + draw.randint(1, 40)]
            else:
                data[at:at] = draw.choice(
                    [b"[", b"{", b"1e9", b"null", b'"', b"-1", bytes([draw.randrange(256)])]
                )
        path.write_bytes(data)
        with contextlib.suppress(UserError):
            rosters.read_roster(path)


@pytest.mark.parametrize("value", [None, 3, [], "x", {}, {"format": "fedveil roster 1"}, {"a": 1}])
def test_values_that_are_no_roster_say_so(value: Any) -> None:
    with pytest.raises(limits.Malformed, match="roster"):
        rosters.from_json(value)


def test_outside_text_becomes_one_short_line() -> None:
    assert limits.plain("a\nb\x1b[31mc") == "a\\nb\\x1b[31mc"
    assert len(limits.plain("x" * 10**6)) < 310
