"""Values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast, overload

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
Document: TypeAlias = "dict[str, Any]"  # an object as it was read from a file or a message: what it holds is not checked


@overload
def plain(data: Document) -> Document: ...
@overload
def plain(data: object) -> Json: ...
def plain(data: object) -> Json:
    """Data that JSON can hold: NumPy numbers unwrapped, infinite and undefined numbers as null."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if hasattr(data, "tolist"):
        inside: object = data.tolist()
        return plain(inside)
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return str(data) if isinstance(data, Path) else cast(Json, data)  # what else there is, json refuses
