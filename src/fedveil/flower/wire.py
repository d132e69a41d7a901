"""Messages: a small JSON document of public facts and named arrays. Nothing else ever leaves a node.

Losses, norms and counts of private data are not part of any message.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib import format as npy

from fedveil.flower import limits
from fedveil.jsons import Document

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

FORMAT = 1
FACTS, ARRAYS, PACKED = "fedveil.facts", "fedveil.arrays", "fedveil.packed"
SMALL = 2**16  # bytes of arrays that travel in one record: Flower carries each record, array and chunk in requests of its own
MOST_ARRAYS = 16
KINDS = ("<f4", "<f8", "|u1")
_SLACK = 1024  # bytes of an array's own header on the wire

Facts = Document
Arrays = Mapping[str, np.ndarray]


def content(facts: Mapping[str, object], arrays: Arrays) -> RecordDict:
    """The records of one message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    if sum(value.nbytes for value in arrays.values()) <= SMALL:
        return RecordDict({PACKED: ConfigRecord({"bytes": pack({"format": FORMAT, **facts}, arrays)})})
    named = {name: Array(np.ascontiguousarray(value)) for name, value in arrays.items()}
    document = json.dumps({"format": FORMAT, **facts}, allow_nan=False)
    return RecordDict({FACTS: ConfigRecord({"json": document}), ARRAYS: ArrayRecord(named)})


def answer(message: Message, facts: Mapping[str, object], arrays: Arrays) -> Message:
    """A reply to `message`."""
    from flwr.app import Message

    return Message(content(facts, arrays), reply_to=message)


def read(message: Message, largest: int | None = None) -> tuple[Facts, dict[str, np.ndarray]]:
    """(facts, arrays) of a message; ValueError with the reason if it is not one of ours.

    largest: refuse arrays of more bytes than this before they are decoded. Nothing is unpickled or unzipped, and no
    array is allocated before its header was found to fit its bytes.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    try:
        records = message.content
        names = set(records)
        if names == {PACKED}:
            return _read_packed(records[PACKED], largest)
        document, named = records[FACTS], records[ARRAYS]
    except limits.Malformed:
        raise
    except Exception as wrong:  # whatever Flower raises for contents it cannot read
        raise limits.Malformed("not a fedveil message") from wrong
    if (
        names != {FACTS, ARRAYS}
        or not isinstance(document, ConfigRecord)
        or not isinstance(named, ArrayRecord)
    ):
        raise limits.Malformed("not a fedveil message: other records than facts and arrays")
    if set(document) != {"json"} or not isinstance(document["json"], str):
        raise limits.Malformed("its facts are not JSON text")
    if len(named) > MOST_ARRAYS:
        raise limits.Malformed(f"{len(named)} arrays, at most {MOST_ARRAYS} are read")
    total = sum(len(item.data) for item in named.values())
    if largest is not None and total > largest + _SLACK * (1 + len(named)):
        raise limits.Malformed(f"oversized: {total} bytes of arrays, at most {largest} expected")
    facts = _of_this_format(limits.read_json(document["json"]))
    return facts, {
        limits.plain(name, 100): read_array(item.data, limits.plain(name, 40)) for name, item in named.items()
    }


def _read_packed(record: object, largest: int | None) -> tuple[Facts, dict[str, np.ndarray]]:
    """(facts, arrays) of a message that travels in one record."""
    from flwr.app import ConfigRecord

    if not isinstance(record, ConfigRecord) or set(record) != {"bytes"} or not isinstance(record["bytes"], bytes):
        raise limits.Malformed("not a fedveil message: its record is not bytes")
    data = record["bytes"]
    most = SMALL if largest is None else min(largest, SMALL)
    if len(data) > most + _SLACK * (1 + MOST_ARRAYS) + limits.DOCUMENT:
        raise limits.Malformed(f"oversized: {len(data)} bytes in one record")
    facts, arrays = unpack(data)
    if largest is not None and sum(value.nbytes for value in arrays.values()) > largest:
        raise limits.Malformed(f"oversized: more than the {largest} bytes of arrays that are expected")
    return _of_this_format(facts), {limits.plain(name, 100): value for name, value in arrays.items()}


def _of_this_format(facts: object) -> Facts:
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        told = facts.get("format") if isinstance(facts, dict) else None
        raise limits.Malformed(f"message format {limits.plain(repr(told), 40)}, not {FORMAT}: "
                               "install the same fedveil on server and nodes")  # fmt: skip
    return facts


def read_array(data: bytes, name: str) -> np.ndarray:
    """The array in .npy bytes: plain little-endian numbers of a few kinds, exactly as many as the header says."""
    file = io.BytesIO(data)
    try:
        version = npy.read_magic(file)
        header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran, kind = header(file, max_header_size=_SLACK)
    except Exception as wrong:  # NumPy raises several kinds for bytes that are no array
        raise limits.Malformed(f"array '{name}' is not in NumPy's format") from wrong
    if kind.str not in KINDS or fortran or len(shape) > 4:
        raise limits.Malformed(
            f"array '{name}' has type {limits.plain(kind.str, 20)} or a form that is not used here"
        )
    count = math.prod(shape)
    if any(n < 0 for n in shape) or count * kind.itemsize != len(data) - file.tell():
        raise limits.Malformed(f"array '{name}': its bytes are not those of its shape")
    return np.frombuffer(data, kind, count, file.tell()).reshape(shape).copy()


# The same pair as bytes, between a thin ClientApp and the trainer of its node: the length of the facts, the facts, and
# each array in the format above after its own length.


def pack(facts: Mapping[str, object], arrays: Arrays) -> bytes:
    """Facts and arrays as bytes."""
    head = json.dumps({"facts": facts, "arrays": list(arrays)}, allow_nan=False).encode()
    parts = [len(head).to_bytes(8, "little"), head]
    for value in arrays.values():
        file = io.BytesIO()
        npy.write_array(file, np.ascontiguousarray(value), version=(1, 0), allow_pickle=False)
        parts += [file.tell().to_bytes(8, "little"), file.getvalue()]
    return b"".join(parts)


def unpack(data: bytes) -> tuple[Facts, dict[str, np.ndarray]]:
    """Inverse of `pack`; `Malformed` for any other bytes."""
    at = 0

    def piece(most: int) -> bytes:
        nonlocal at
        size = int.from_bytes(data[at : at + 8], "little")
        if len(data) < at + 8 or size > most or size > len(data) - at - 8:
            raise limits.Malformed("a part is longer than the message")
        at += 8 + size
        return data[at - size : at]

    head = limits.read_json(piece(limits.DOCUMENT + 4096), limits.DOCUMENT + 4096, limits.DEPTH + 1)
    top = limits.fields(head, "message", {"facts": lambda v: isinstance(v, dict),
                                          "arrays": limits.is_list(limits.is_text(100, 1), MOST_ARRAYS)})  # fmt: skip
    arrays = {name: read_array(piece(len(data)), name) for name in top["arrays"]}
    if at != len(data) or len(arrays) != len(top["arrays"]):
        raise limits.Malformed("bytes are left over, or an array stands twice")
    return top["facts"], arrays
