"""What a part of a recipe remembers between rounds: frozen values that say what is broadcast and what is kept.

A memory is a frozen dataclass of arrays and of tables {client: array}. All of it goes into checkpoints; `BROADCAST` names the
fields that the clients of a round get along with the model. `to_arrays` and `from_arrays` are inverses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from fedveil.errors import UserError

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Memory:
    """Nothing to remember; the base of all memories."""

    BROADCAST: ClassVar[tuple[str, ...]] = ()


NOTHING = Memory()
Kind = TypeVar("Kind", bound=Memory)


def to_arrays(memory: Memory, prefix: str) -> dict[str, np.ndarray]:
    """The fields as named arrays: prefix.field, or prefix.field/client for tables. None is left out."""
    out: dict[str, np.ndarray] = {}
    for item in fields(memory):
        value = getattr(memory, item.name)
        if isinstance(value, Mapping):
            out.update({f"{prefix}.{item.name}/{client}": np.asarray(own) for client, own in value.items()})
        elif value is not None:
            out[f"{prefix}.{item.name}"] = np.asarray(value)
    return out


def from_arrays(blank: Kind, arrays: Arrays, prefix: str) -> Kind:
    """`blank` with the fields that `arrays` has; one that it does not know is refused."""
    known = {item.name: getattr(blank, item.name) for item in fields(blank)}
    changes: dict[str, Any] = {}
    for name, value in arrays.items():
        head, _, rest = name.partition(".")
        if head != prefix:
            continue
        item, _, client = rest.partition("/")
        if item not in known:
            raise UserError(f"'{name}' is not something this recipe remembers ({', '.join(known) or 'nothing'})")
        if client:
            changes.setdefault(item, {})[int(client)] = value
        elif isinstance(known[item], float):
            changes[item] = float(np.asarray(value).reshape(-1)[0])
        elif isinstance(known[item], int):
            changes[item] = int(np.asarray(value).reshape(-1)[0])
        else:
            changes[item] = value
    return replace(blank, **changes)


def broadcast(memory: Memory, prefix: str, client: int) -> dict[str, np.ndarray]:
    """What one client of a round gets of it: the named fields; of a table, its own entry."""
    out: dict[str, np.ndarray] = {}
    for name in memory.BROADCAST:
        value = getattr(memory, name)
        if isinstance(value, Mapping):
            if client in value:
                out[f"{prefix}.{name}/{client}"] = np.asarray(value[client])
        elif value is not None:
            out[f"{prefix}.{name}"] = np.asarray(value)
    return out
