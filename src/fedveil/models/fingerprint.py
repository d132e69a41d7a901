"""What decides a module's outputs, as one digest: weights, buffers, attributes and the code that runs.

Equal weights under another forward pass are another network. Its code is read as Python compiled it, with all that it reaches:
functions it calls, values around it, defaults. What belongs to torch, NumPy or Python itself counts by its name and version.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
import weakref
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, np.dtype, np.generic)
_PACKAGES = {"torch", "numpy", "builtins", *sys.stdlib_module_names}
_UNUSED = {  # of a class: says nothing about what it computes
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__static_attributes__",
    "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__",
}  # fmt: skip


def fingerprint(module: nn.Module) -> tuple[str, bool]:
    """A digest of the module, and whether it holds everything: False where a part cannot be looked into (compiled code, objects
    that are neither plain values nor modules), so that an equal digest does not show equal networks."""
    found = _Reader()
    found.read((torch.__version__, np.__version__, sys.version_info[:3]))
    found.read(module)
    return found.mark.hexdigest(), found.whole


class _Reader:
    """Walks over values in a fixed order; what was met before is named by its number."""

    def __init__(self) -> None:
        self.mark, self.whole = hashlib.sha256(), True
        self.met: dict[int, int] = {}
        self.held: list[object] = []  # an identity is only good while its object lives

    def say(self, *words: object) -> None:
        for word in words:
            text = word if isinstance(word, bytes) else str(word).encode()
            self.mark.update(len(text).to_bytes(8, "little") + text)

    def read(self, value: object) -> None:
        if isinstance(value, _PLAIN):
            self.say(type(value).__name__, repr(value))
            return
        if id(value) in self.met:
            self.say("again", self.met[id(value)])
            return
        if not isinstance(value, tuple | frozenset | types.CodeType):  # whether equal constants are one object is up to Python
            self.met[id(value)] = len(self.met)
            self.held.append(value)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.say("array", value.dtype, value.shape, np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Mapping):
            self.say("mapping", type(value).__name__, len(value))
            for key, item in value.items():
                self.read(key)
                self.read(item)
        elif isinstance(value, tuple | list):
            self.say(type(value).__name__, len(value))
            for item in value:
                self.read(item)
        elif isinstance(value, set | frozenset):
            self.say("set", *sorted(map(repr, value)))
            self.whole &= all(isinstance(item, _PLAIN) for item in value)
        else:
            self._object(value)

    def _tensor(self, value: torch.Tensor) -> None:
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            self._unclear(value)
            return
        numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self.say("tensor", value.dtype, tuple(value.shape), numbers.tobytes())

    def _object(self, value: object) -> None:
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            self._module(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif _known(value):
            self.say("known", getattr(value, "__module__", ""), getattr(value, "__qualname__", getattr(value, "__name__", "")))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.MethodType):
            self.read((value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            self.read(value.__func__)
        elif isinstance(value, property):
            self.read((value.fget, value.fset))
        elif isinstance(value, functools.partial):
            self.read((value.func, value.args, value.keywords))
        elif isinstance(value, weakref.ReferenceType):
            self.read(value())
        else:
            self._unclear(value)

    def _unclear(self, value: object) -> None:
        self.say("unclear", type(value).__module__, type(value).__qualname__)
        self.whole = False

    def _module(self, part: nn.Module) -> None:
        self.read(type(part))
        for name, value in part.__dict__.items():  # parameters, buffers, parts, hooks and attributes
            if name != "training":  # a backbone runs in eval mode
                self.say(name)
                self.read(value)

    def _class(self, kind: type) -> None:
        self.say("class", kind.__module__, kind.__qualname__)
        for base in kind.__bases__:
            self.read(base)
        for name, value in vars(kind).items():
            if name not in _UNUSED:
                self.say(name)
                self.read(value)

    def _function(self, function: types.FunctionType) -> None:
        self._code(function.__code__)
        self.read((function.__defaults__, function.__kwdefaults__, getattr(function, "__wrapped__", None)))
        for cell in function.__closure__ or ():
            try:
                self.read(cell.cell_contents)
            except ValueError:  # not filled yet
                self.say("empty")
        for name in _names(function.__code__):
            if name in function.__globals__:
                self.say(name)
                self.read(function.__globals__[name])

    def _code(self, code: types.CodeType) -> None:
        self.say("code", code.co_code, code.co_flags, *code.co_names, *code.co_varnames, *code.co_freevars)
        self.read(code.co_consts)


def _names(code: types.CodeType) -> list[str]:
    """Names that a function may look up around itself, those of functions inside it too."""
    inner = [name for item in code.co_consts if isinstance(item, types.CodeType) for name in _names(item)]
    return sorted({*code.co_names, *inner})


def _known(value: object) -> bool:
    """A function, class or module of torch, NumPy or Python that its name leads to."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _PACKAGES
    if not (inspect.isroutine(value) or isinstance(value, type)):
        return False
    where, name = getattr(value, "__module__", None) or "builtins", getattr(value, "__qualname__", "")
    if where.partition(".")[0] not in _PACKAGES:
        return False
    if not isinstance(value, types.FunctionType | type):
        return True  # compiled; it cannot be the caller's
    found: object = sys.modules.get(where)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value
