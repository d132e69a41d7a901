"""The names of losses, and the user's own functions among them; what they compute is in `training.losses`. Loads no torch."""

from __future__ import annotations

import hashlib
import math
import sys

from fedveil.data.functions import is_function
from fedveil.errors import UserError, did_you_mean
from fedveil.protect.recipe import files_digest

CLASSES = ("cross-entropy", "label-smoothing", "binary-cross-entropy")
VALUES = ("squared", "huber")
OPTIONS = {"label-smoothing": ("share", 0.1), "huber": ("width", 1.0)}
PLAIN = ("cross-entropy", "squared")
STATISTICS = "statistics"


def parse(text: str) -> tuple[str, float]:
    """(name, its option's value, 0 without one) of a built-in loss."""
    name, sign, rest = text.partition(":")
    if name not in (*CLASSES, *VALUES):
        raise UserError(
            f"loss = '{text}' is not known: use {', '.join((*CLASSES, *VALUES))}, or package.module:function."
            f"{did_you_mean(name, (*CLASSES, *VALUES))}"
        )
    key, value = OPTIONS.get(name, ("", 0.0))
    if not sign:
        return name, value
    given, _, number = (part.strip() for part in rest.partition("="))
    try:
        value = float(number) if given == key else math.nan
    except ValueError:
        value = math.nan
    most = 1.0 if name == "label-smoothing" else math.inf
    if not 0 < value < most:
        wanted = f"{name}:{key}=0.1, a number above 0{' and below 1' if most == 1 else ''}" if key else f"'{name}' alone"
        raise UserError(f"loss = '{text}': write {wanted}.")
    return name, value


def own(text: str) -> bool:
    """Does the text name the user's own function?"""
    return is_function(text)


def chosen(text: str, regression: bool) -> str:
    """The loss of a run: "auto" is squared error for values, cross-entropy for classes. Imports nothing."""
    if text == "auto":
        return "squared" if regression else "cross-entropy"
    if own(text):
        return text
    name, _ = parse(text)
    if (name in VALUES) != regression:
        task, known = ("values", VALUES) if regression else ("classes", CLASSES)
        raise UserError(f"loss = '{text}': this dataset has {task}: use {', '.join(known)}, or a function of your own.")
    return text


def named(function: object, key: str = "loss", more: str = "") -> str:
    """The name by which a run, its workers and its folder find a given function. key: of the configuration, for messages."""
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None) if is_function(f"{module}:{name}") else None
    if found is None or found is not function or not callable(found):
        raise UserError(
            f"{key}: give a name, or a function that is defined at the top of a module or script: a run's folder and workers "
            f"know it by that name{more}"
        )
    return f"{module}:{name}"


def digest(text: str) -> str:
    """Hash of the files that an own loss comes from, without importing them; in a notebook, of the function's code."""
    module, _, name = text.partition(":")
    found = files_digest(module.partition(".")[0])
    code = getattr(getattr(sys.modules.get(module), name, None), "__code__", None)
    told = found or (repr((code.co_code, code.co_consts, code.co_names)) if code is not None else "")
    return hashlib.sha256(told.encode()).hexdigest()
