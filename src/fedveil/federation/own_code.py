"""What of the user's own code runs on private rows, where no clip can see into it: the promises rest on its word."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

OURS = ("torch.", "fedveil.")
CALLING = ("functional", "reference")  # engines that call the module's code on private rows; the others only read it beforehand


def of_module(module: nn.Module) -> list[str]:
    """The classes in a module whose code is neither torch's nor ours."""
    names = {type(part).__qualname__ for part in module.modules() if not f"{type(part).__module__}.".startswith(OURS)}
    return sorted(f"model {name}" for name in names)


def named(kind: str, code: object) -> list[str]:
    """A function or class, if it is neither torch's nor ours."""
    if f"{getattr(code, '__module__', '')}.".startswith(("builtins.", *OURS)):
        return []
    return [f"{kind} {getattr(code, '__qualname__', type(code).__qualname__)}"]


def caveat(called: Sequence[str]) -> tuple[str, ...]:
    """The note about it, if any of it is called."""
    if not called:
        return ()
    return (
        f"promises assume that your own code ({', '.join(called)}) treats each example alone and remembers none; "
        "it was tried on made-up examples as far as it takes them, which is no proof",
    )
