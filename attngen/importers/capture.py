"""What a function captures: names of its tensors and numbers, and copies of it in which numbers are traced values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_DEEPEST, _WIDEST = 12, 256
Number = bool | int | float


class Captures:
    """Tensors by identity and numbers by name, of functions and what they call, by closures, globals and defaults."""

    def __init__(self, *functions: object) -> None:
        self.tensors: dict[int, tuple[torch.Tensor, str]] = {}
        self.numbers: dict[str, set[Number]] = {}
        self._seen: set[int] = set()
        for f in functions:
            self._walk(f, "", 0)

    def _walk(self, value: object, name: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(id(value), (value, name))
        elif type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            self._walk(value.item(), name, depth)  # type: ignore[attr-defined]
        elif isinstance(value, Number):
            self.numbers.setdefault(name, set()).add(value)
        elif isinstance(value, str | bytes | ModuleType | type) or depth >= _DEEPEST:
            return
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            for inner, item in _parts(value):
                self._walk(item, inner or name, depth + 1)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What `value` holds, by name; an empty name: that of the holder serves."""
    if isinstance(value, functools.partial):
        yield "", value.func
        names = _positional(value.func)
        yield from zip(names, value.args, strict=False)
        yield from value.keywords.items()
    elif isinstance(value, MethodType):
        yield "", value.__func__
        yield "", value.__self__
    elif isinstance(value, FunctionType):
        yield from _cells(value)
        yield from _globals(value)
        defaults = value.__defaults__ or ()
        yield from zip(_positional(value)[-len(defaults) :] if defaults else (), defaults, strict=False)
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, tuple | list):
        yield from (("", x) for x in value[:_WIDEST])
    elif isinstance(value, dict):
        yield from ((str(k), x) for k, x in list(value.items())[:_WIDEST])
    elif isinstance(value, torch.nn.Module):
        yield from [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
        yield from _plain(value)
    elif not type(value).__module__.startswith(("torch", "builtins", "numpy")):
        yield from _plain(value)
        yield "", vars(type(value)).get("__call__")


def _plain(value: object) -> Iterator[tuple[str, object]]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        yield from ((k, x) for k, x in list(held.items())[:_WIDEST] if not k.startswith("_"))


def _positional(function: object) -> list[str]:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return list(code.co_varnames[: code.co_argcount]) if isinstance(code, CodeType) else []


def _cells(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    if function.__module__ and function.__module__.split(".")[0] == "torch":
        return
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: CodeType) -> set[str]:
    """Global names that a function or one defined inside it reads."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def rebound(value: Any, table: Mapping[str, object]) -> Any:
    """`value`, a copy of it where it captures a number that `table` names: the number replaced by the table's entry.

    Functions themselves are never changed: a copy shares code and everything else.
    """
    return _Rebinding(table).of(value)


class _Rebinding:
    def __init__(self, table: Mapping[str, object]) -> None:
        self.table = table
        self.done: dict[int, tuple[object, Any]] = {}

    def entry(self, name: str, value: object) -> Any:
        number = isinstance(value, Number) or type(value).__module__ == "numpy"
        return self.table[name] if name in self.table and number else self.of(value)

    def of(self, value: Any) -> Any:
        if id(value) in self.done:
            return self.done[id(value)][1]
        self.done[id(value)] = (value, value)
        copy = value
        if isinstance(value, FunctionType):
            copy = self.function(value)
        elif isinstance(value, functools.partial):
            names = [*_positional(value.func), *[""] * len(value.args)]
            args = [self.entry(n, a) for n, a in zip(names, value.args, strict=False)]
            copy = functools.partial(
                self.of(value.func), *args, **{k: self.entry(k, a) for k, a in value.keywords.items()}
            )
        elif type(value) in (tuple, list):
            copy = type(value)(self.of(x) for x in value)
        self.done[id(value)] = (value, copy)
        return copy

    def function(self, f: FunctionType) -> Callable[..., Any]:
        cells = {n: (v, self.entry(n, v)) for n, v in _cells(f)}
        outer = {n: (v, self.entry(n, v)) for n, v in _globals(f)}
        names, defaults = _positional(f), f.__defaults__ or ()
        given = [(v, self.entry(n, v)) for n, v in zip(names[len(names) - len(defaults) :], defaults, strict=False)]
        keywords = {n: (v, self.entry(n, v)) for n, v in (f.__kwdefaults__ or {}).items()}
        if all(a is b for a, b in [*cells.values(), *outer.values(), *given, *keywords.values()]):
            return f
        scope = {**f.__globals__, **{n: new for n, (_, new) in outer.items()}}
        closure = tuple(
            CellType(cells[n][1]) if n in cells else c
            for n, c in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        )
        copy = FunctionType(f.__code__, scope, f.__name__, tuple(new for _, new in given), closure)
        copy.__kwdefaults__ = {n: new for n, (_, new) in keywords.items()}
        return copy
