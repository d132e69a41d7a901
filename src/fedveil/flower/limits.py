"""Limits for everything that comes from outside, checked before work is done.

A parser here either returns plain values of the promised form or raises `Malformed` with one short sentence. It never
recurses deeper, allocates more or reads longer than the limits say, whatever the bytes are.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedveil.errors import UserError, did_you_mean
from fedveil.jsons import Document, JsonObject

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

DOCUMENT = 2**18  # bytes of a document of facts (256 KiB)
DEPTH = 12  # nested objects and lists in one
FILE = 2**20  # bytes of a contract, roster, invite or policy file
LOG_LINE = 2000  # characters of one entry of a node's log
LOG_FILE = 4 * 2**20  # bytes; a full log is moved aside once
REASON = 300  # characters of a reason that is repeated to somebody else
DIGITS = 40  # of one number: longer ones take quadratic time to read

_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (DIGITS + 1))
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


class Malformed(ValueError):
    """Bytes from outside that are not what they should be. The text quotes nothing private."""


def plain(text: object, most: int = REASON) -> str:
    """Text from outside as one short line: control characters and line ends are written out, the rest is cut."""
    whole = str(text)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in whole[:most])
    return shown if len(whole) <= most else shown[:most] + " …"


def read_json(data: bytes | str, largest: int = DOCUMENT, depth: int = DEPTH) -> object:
    """A JSON value within limits: size, depth, digits; no repeated keys, no NaN or infinity."""
    if not isinstance(data, (bytes, str)):
        raise Malformed(f"expected JSON text, got {type(data).__name__}")
    if len(data) > largest:
        raise Malformed(f"{len(data)} bytes of JSON, at most {largest} are read")
    try:
        raw = data.encode("utf-8") if isinstance(data, str) else bytes(data)
    except UnicodeEncodeError:
        raise Malformed("not UTF-8") from None
    if len(raw) > largest:
        raise Malformed(f"{len(raw)} bytes of JSON, at most {largest} are read")
    bare = _TEXTS.sub(b"", raw)
    if _deepest(bare) > depth:
        raise Malformed(f"nested deeper than {depth}")
    if _LONG_NUMBER.search(bare):
        raise Malformed(f"a number of more than {DIGITS} digits")
    try:
        return json.loads(raw, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
    except Malformed:
        raise
    except (ValueError, RecursionError) as wrong:
        raise Malformed(f"not JSON ({type(wrong).__name__})") from None


def _deepest(bare: bytes) -> int:
    level = deepest = 0
    for byte in bare:
        if byte in b"[{":
            level += 1
            deepest = max(deepest, level)
        elif byte in b"]}":
            level -= 1
    return deepest


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a key stands twice")
    return found


def _no_constant(name: str) -> object:
    raise Malformed(f"{name} is no number here")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed("a number beyond the range of floats")
    return value


def canonical(value: object) -> bytes:
    """The one way to write a plain value down for hashing and signing."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def read_file(path: Path | str, what: str, largest: int = FILE) -> bytes:
    """The bytes of a file of at most `largest` bytes; `UserError` with the reason otherwise."""
    try:
        with open(path, "rb") as file:
            data = file.read(largest + 1)
    except OSError as wrong:
        raise UserError(f"{what} {path}: {wrong.strerror}") from None
    if len(data) > largest:
        raise UserError(f"{what} {path}: longer than {largest} bytes")
    return data


def read_toml(path: Path | str, what: str) -> JsonObject:
    """A TOML file within limits; `UserError` with the reason otherwise."""
    data = read_file(path, what)
    bare = _TEXTS.sub(b"", data)
    if max((line.count(b"[") + line.count(b"{") for line in bare.split(b"\n")), default=0) > 4000:
        raise UserError(f"{what} {path}: nested too deep")
    if _LONG_NUMBER.search(bare):
        raise UserError(f"{what} {path}: a number of more than {DIGITS} digits")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as wrong:
        raise UserError(f"{what} {path}: not valid TOML: {plain(wrong)}") from None


def json_file(path: Path | str, what: str) -> object:
    """A JSON file within limits; `UserError` with the reason otherwise."""
    try:
        return read_json(read_file(path, what), FILE)
    except Malformed as wrong:
        raise UserError(f"{what} {path}: {wrong}") from None


# --- fields of documents ---

Check = Callable[[Any], bool]


def fields(value: object, what: str, must: Mapping[str, Check], may: Mapping[str, Check] = {}) -> Document:
    """`value` as a dictionary with exactly these keys, each passing its check; `Malformed` otherwise."""
    if not isinstance(value, dict):
        raise Malformed(f"{what}: expected a table, got {type(value).__name__}")
    for key in value:
        if key not in must and key not in may:
            raise Malformed(
                f"{what}: unknown key '{plain(key, 40)}'.{did_you_mean(str(key)[:40], [*must, *may])}"
            )
    for key in must:
        if key not in value:
            raise Malformed(f"{what}: '{key}' is missing")
    for key, item in value.items():
        if not (must.get(key) or may[key])(item):
            raise Malformed(f"{what}: {key} = {plain(repr(item), 60)} is not allowed")
    return value


def is_int(low: int, high: int) -> Check:
    """A whole number in a range (true and false are none)."""
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def is_number(low: float, high: float) -> Check:
    """A finite number in a range."""
    return lambda v: (
        isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and low <= v <= high
    )


def is_text(most: int, least: int = 0) -> Check:
    """Printable text of a bounded length."""
    return lambda v: isinstance(v, str) and least <= len(v) <= most and v.isprintable()


def is_hex(size: int) -> Check:
    """`size` bytes in lower-case hexadecimal digits."""
    pattern = re.compile(f"[0-9a-f]{{{2 * size}}}")
    return lambda v: isinstance(v, str) and pattern.fullmatch(v) is not None


def is_list(of: Check, most: int) -> Check:
    """A list of at most `most` such values."""
    return lambda v: isinstance(v, list) and len(v) <= most and all(of(item) for item in v)


def is_one_of(names: Iterable[str]) -> Check:
    """One of these texts."""
    known = frozenset(names)
    return lambda v: isinstance(v, str) and v in known


def is_bool(value: object) -> bool:
    """true or false."""
    return isinstance(value, bool)
