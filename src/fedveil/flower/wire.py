"""Messages: a small JSON document of public facts and named arrays. Nothing else ever leaves a node.

Losses, norms and counts of private data are not part of any message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

FORMAT = 1
FACTS, ARRAYS = "fedveil.facts", "fedveil.arrays"
_SLACK = 1024  # bytes of an array's own header on the wire

Facts = dict[str, Any]
Arrays = Mapping[str, np.ndarray]


def content(facts: Mapping[str, Any], arrays: Arrays) -> Any:
    """The records of one message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    named = {name: Array(np.ascontiguousarray(value)) for name, value in arrays.items()}
    document = json.dumps({"format": FORMAT, **facts}, allow_nan=False)
    return RecordDict({FACTS: ConfigRecord({"json": document}), ARRAYS: ArrayRecord(named)})


def answer(message: Any, facts: Mapping[str, Any], arrays: Arrays) -> Any:
    """A reply to `message`."""
    from flwr.app import Message

    return Message(content(facts, arrays), reply_to=message)


def read(message: Any, largest: int | None = None) -> tuple[Facts, dict[str, np.ndarray]]:
    """(facts, arrays) of a message; ValueError with the reason if it is not one of ours.

    largest: refuse arrays of more bytes than this before they are decoded.
    """
    try:
        records = message.content
        document = records[FACTS]["json"]
        named = records[ARRAYS]
    except (KeyError, ValueError, TypeError) as wrong:
        raise ValueError("not a fedveil message") from wrong
    total = sum(len(item.data) for item in named.values())
    if largest is not None and (total > largest + _SLACK * (1 + len(named)) or len(document) > 2**20):
        raise ValueError(f"oversized: {total} bytes of arrays, at most {largest} expected")
    try:
        facts = json.loads(document)
    except (json.JSONDecodeError, TypeError) as wrong:
        raise ValueError("its facts are not JSON") from wrong
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"message format {facts.get('format') if isinstance(facts, dict) else None!r}, not {FORMAT}: "
                         "install the same fedveil on server and nodes")  # fmt: skip
    arrays = {}
    for name, item in named.items():
        try:
            arrays[str(name)] = item.numpy()  # plain .npy bytes; pickles are refused by NumPy
        except Exception as wrong:
            raise ValueError(f"array '{name}' cannot be read: {wrong}") from wrong
    return facts, arrays


# The same pair as bytes, between a thin ClientApp and the trainer of its node.


def pack(facts: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Facts and arrays as bytes."""
    from safetensors.numpy import save

    head = json.dumps(facts, allow_nan=False).encode()
    body = save({name: np.ascontiguousarray(value) for name, value in arrays.items()})
    return len(head).to_bytes(8, "little") + head + body


def unpack(data: bytes) -> tuple[Facts, dict[str, np.ndarray]]:
    """Inverse of `pack`."""
    from safetensors.numpy import load

    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), load(data[8 + size :])
