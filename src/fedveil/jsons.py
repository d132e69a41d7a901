"""Values that JSON can hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any


def plain(data: object) -> Any:
    """Data that JSON can hold: NumPy numbers unwrapped, infinite and undefined numbers as null."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if hasattr(data, "tolist"):
        return plain(data.tolist())
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return str(data) if isinstance(data, Path) else data
