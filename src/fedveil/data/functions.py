"""The user's own code by name: "package.module:function"."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from fedveil.errors import UserError, did_you_mean

_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_function(text: str) -> bool:
    """Whether the text has the form package.module:function."""
    return _SPEC.fullmatch(text) is not None


def call(spec: str, function: Callable[..., object], **arguments: object) -> Any:
    """Call the user's function; what it raises becomes one sentence that says where (a `UserError` of its own stays)."""
    try:
        return function(**arguments)
    except UserError:
        raise
    except Exception as broken:
        at = broken.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = "" if at is None else f", {os.path.basename(at.tb_frame.f_code.co_filename)} line {at.tb_lineno}"
        raise UserError(f"'{spec}' failed: {type(broken).__name__}: {broken}{where}.") from broken


def import_function(spec: str) -> Callable[..., Any]:
    """Import what "package.module:function" names, from installed packages or the working directory.

    This runs the user's code, so it is only ever called for a name the user typed as model or dataset.
    """
    module_name, _, name = spec.partition(":")
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (module_name + ".").startswith(missing.name + "."):
            raise UserError(
                f"'{spec}': there is no module '{missing.name}'; install it or start fedveil in the "
                "folder that "
                "holds it."
            ) from missing
        raise UserError(
            f"'{spec}': importing '{module_name}' needs '{missing.name}', which is missing."
        ) from missing
    except Exception as broken:
        raise UserError(
            f"'{spec}': importing '{module_name}' failed: {type(broken).__name__}: {broken}."
        ) from broken
    finally:
        if added:
            sys.path.remove(here)
    found = getattr(module, name, None)
    if found is None:
        public = [word for word in vars(module) if not word.startswith("_")]
        raise UserError(f"'{spec}': module '{module_name}' has no '{name}'.{did_you_mean(name, public)}")
    if not callable(found):
        raise UserError(f"'{spec}': '{name}' is a {type(found).__name__}, not a function.")
    return found
