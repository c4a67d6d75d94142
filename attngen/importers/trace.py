"""Tracing: a function of 0-dimensional tensors runs once on stand-ins, which note what torch does to them.

A stand-in is a tensor without data; a torch function mode sees every function, method and operator that meets one, and
also `captured[index]`, which a tensor subclass alone would not see.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attngen.diag.diagnostic import AttnError, error
from attngen.importers import index, ops, place, special
from attngen.importers.capture import Captures
from attngen.importers.imported import declared, identifier
from attngen.importers.value import Untraceable, Value, literal
from attngen.ir.expr import Expr, Load, Param, const
from attngen.ir.spec import ParamDecl
from attngen.ir.types import DType, Type

_DTYPES = {Type.BOOL: torch.bool, Type.INT: torch.int32, Type.FLOAT: torch.float32}


class Standin(torch.Tensor):
    """A traced number, or a captured tensor of which some axes are indexed."""

    #: Names that torch.Tensor does not have.
    traced: Value | None
    partly: index.View | None


def standin(value: Value) -> Standin:
    """The stand-in of a number."""
    made = torch.Tensor._make_subclass(Standin, torch.empty((), dtype=_DTYPES[value.type], device="meta"))
    made.traced, made.partly = value, None
    return made


class Trace(TorchFunctionMode):
    """One trace. After it: tensors as `given`, with `dtypes` and the `loads` that read them, `params` and `notes`."""

    def __init__(self, captures: Captures) -> None:
        super().__init__()
        self.captures = captures
        self.given: dict[str, torch.Tensor] = {}
        self.dtypes: dict[str, DType] = {}
        self.loads: dict[str, list[tuple[Expr, ...]]] = {}
        self.params: dict[str, ParamDecl] = {}
        self.values: dict[str, bool | int | float] = {}
        self.notes: list[str] = []
        self._names: dict[int, tuple[torch.Tensor, str]] = {}

    # -- what torch calls -----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        traced = any(isinstance(x, Standin) for x in _flat((args, kwargs)))
        try:
            if special.in_place(name, kwargs):
                raise Untraceable(
                    "E0703",
                    f"`{special.shown(name)}` changes a tensor in place",
                    "make a new value: `x = x + 1` in place of `x += 1`",
                    notes=("a mod is a function of its arguments; one that changes what it captures has no spec",),
                )
            if not traced:
                return self._concrete(func, args, kwargs)
            if _custom(func):
                raise special.unknown(str(func))
            return self._traced(name, func, args, kwargs)
        except Untraceable as fault:
            raise self.fault(fault) from None

    def _traced(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "getitem":
            return self._getitem(args[0], args[1])
        if name in special.QUERIES or (name == "get" and special.attribute(func) in special.ATTRIBUTES):
            if special.attribute(func) == "device":
                return torch.device("cpu")  # what is made on it has a value
            return func(*args, **kwargs)
        if name in special.PYTHON:
            raise special.data_dependent(name, place.here())
        if name == "get":
            raise special.unknown(f"Tensor.{special.attribute(func)}")
        row = special.ROWS.get(name)
        if row is not None:
            return self._made(row(self, *args, **kwargs))
        one, two = ops.ONE.get(name), ops.TWO.get(name)
        if one is None and two is None:
            raise special.unknown(special.shown(name))
        kwargs = {k: v for k, v in kwargs.items() if not special.harmless(k, v)}
        values = [self.value(x) for x in (*args, *(kwargs.pop(k) for k in ("input", "other") if k in kwargs))]
        if kwargs:
            raise special.unknown(f"{name}({next(iter(kwargs))}=…)")
        if one is not None and len(values) == 1:
            return standin(one(values[0]))
        if two is not None and len(values) == 2:
            return standin(two(*values))
        raise special.unknown(special.shown(name))

    def _made(self, result: Value | Any) -> Any:
        return standin(result) if isinstance(result, Value) else result

    def _concrete(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of tensors that are no stand-ins runs; what it makes of a captured tensor goes by its name."""
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and id(result) not in self.captures.tensors:
            sources = [x for x in _flat((args, kwargs)) if isinstance(x, torch.Tensor)]
            names = [self.captures.tensors[id(x)][1] for x in sources if id(x) in self.captures.tensors]
            if names:
                self.captures.tensors[id(result)] = (result, names[0])
        return result

    # -- values ---------------------------------------------------------------------------------------------------

    def value(self, x: object) -> Value:
        """An operand: a stand-in, a Python number, or a captured or made tensor of one element."""
        if isinstance(x, Standin):
            if x.traced is None:
                assert x.partly is not None
                raise Untraceable(
                    "E0705",
                    f"`{x.partly.name}` is used with {x.partly.open} of its axes not indexed",
                    "index every axis: a mod computes one number for one pair",
                )
            return x.traced
        if isinstance(x, torch.Tensor):
            return self._scalar(x)
        if type(x).__module__ == "numpy" and getattr(x, "ndim", 1) == 0:
            x = x.item()  # type: ignore[attr-defined]
        if isinstance(x, bool | int | float):
            return literal(x)
        raise Untraceable("E0701", f"an operand of type {type(x).__name__}", "use numbers and tensors")

    def _scalar(self, x: torch.Tensor) -> Value:
        captured = self.captures.tensors.get(id(x))
        if x.dim():
            name = captured[1] if captured else "a tensor made here"
            raise Untraceable(
                "E0705",
                f"`{name}`, of shape {tuple(x.shape)}, is used as a number",
                "index every axis, `bias[h, q_idx, kv_idx]`: a mod computes one number for one pair",
            )
        if captured is None:
            return literal(x.item())
        if x.requires_grad:
            return self._load(x.reshape(1), captured[1], (const(0),), key=x)
        return Value(self._param(x, captured[1]))

    def _param(self, x: torch.Tensor, name: str) -> Param:
        if id(x) not in self._names:
            word = self._declare(x, name, "value")
            value = x.item()
            literal(value)
            self.add_param(ParamDecl(name=word, type=literal(value).type, default=value), value)
        word = self._names[id(x)][1]
        return Param(type=self.params[word].type, name=word)

    def add_param(self, decl: ParamDecl, value: bool | int | float) -> None:
        self.params[decl.name], self.values[decl.name] = decl, value

    def _declare(self, x: torch.Tensor, name: str, otherwise: str) -> str:
        word = identifier(name, {**self.given, **self.params}, otherwise)
        self._names[id(x)] = (x, word)
        return word

    def _load(self, x: torch.Tensor, name: str, indices: tuple[Expr, ...], key: torch.Tensor | None = None) -> Value:
        """One element, the tensor declared when it is first read. `key`: the object that stands for it."""
        key = x if key is None else key
        if id(key) not in self._names:
            word = self._declare(key, name, "captured")
            self.dtypes[word], self.given[word] = declared(word, x)
            self.loads[word] = []
        word = self._names[id(key)][1]
        if indices not in self.loads[word]:
            self.loads[word].append(indices)
        dtype = self.dtypes[word]
        return Value(Load(type=dtype.type, tensor=word, dtype=dtype, indices=indices))

    def _getitem(self, base: torch.Tensor, key: object) -> Standin:
        view = base.partly if isinstance(base, Standin) else None
        if isinstance(base, Standin) and view is None:
            raise Untraceable(
                "E0705", "a traced number is indexed", "index captured tensors only; a mod's arguments are numbers"
            )
        if view is None:
            captured = self.captures.tensors.get(id(base))
            view = index.whole(base, captured[1] if captured else "captured")
        view = index.indexed(view, key, self.value, self.given)
        for note in view.notes:
            self.note(note)
        if view.open:
            shape = [n for n, i in zip(view.base.shape, view.indices, strict=True) if i is None]
            made = torch.Tensor._make_subclass(Standin, torch.empty(shape, dtype=view.base.dtype, device="meta"))
            made.traced, made.partly = None, view
            return made
        exprs = tuple(i.expr for i in view.indices if i is not None)
        load = self._load(view.base, view.name, exprs)
        sizes = [i for i in view.indices if i is not None]
        return standin(Value(load.expr, 1 + sum(i.size for i in sizes), 1 + max(i.depth for i in sizes)))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, function: Any, what: str, arguments: Mapping[str, Expr]) -> Value:
        """The value of `function` at these arguments. Raises E0701 to E0705."""
        try:
            signature = inspect.signature(function)
            signature.bind(*arguments)
        except TypeError as fault:
            other = {"score_mod": ("mask_mod", 4), "mask_mod": ("score_mod", 5)}[what]
            mend = f"write `def {what}({', '.join(arguments)})`; bind what else it takes with functools.partial"
            if callable(function) and _takes(signature, other[1]):
                mend = f"it takes what a {other[0]} takes: pass it as {other[0]}="
            raise error(
                "E0704",
                f"the {what} does not take ({', '.join(arguments)}): {fault}",
                at=place.definition(function),
                helps=(mend,),
            ) from None
        except ValueError:
            pass  # no signature to be had: the call will tell
        inputs = [standin(Value(e)) for e in arguments.values()]
        try:
            with self:
                result = function(*inputs)
            return self.value(result)
        except Untraceable:
            raise error(
                "E0704",
                f"the {what} returns {_described(result)}",
                at=place.definition(function),
                helps=("return one number for one pair" + (", a condition" if what == "mask_mod" else ""),),
            ) from None
        except AttnError:
            raise
        except Exception as fault:
            raise error(
                "E0704",
                f"the {what} raised {type(fault).__name__}: {str(fault)[:200]}",
                at=place.of(fault.__traceback__),
                notes=("it ran on stand-ins for the score and the indices, as 0-dimensional tensors",),
                helps=("call it with 0-dimensional torch tensors to see the fault by itself",),
            ) from fault

    def fault(self, fault: Untraceable) -> AttnError:
        """The fault at the user's expression that is running."""
        return error(fault.code, fault.message, at=place.here(), label="here", notes=fault.notes, helps=fault.helps)


def _flat(x: object) -> Iterator[object]:
    if isinstance(x, tuple | list):
        for item in x:
            yield from _flat(item)
    elif isinstance(x, dict):
        yield from _flat(list(x.values()))
    else:
        yield x


def _name(func: Any) -> str:
    """`add` for Tensor.add, torch.add, Tensor.__add__ and aten's add.Tensor; in-place names keep their underscore."""
    name = str(getattr(func, "__name__", func)).split(".")[0]
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]  # int(x) and x.int() are different things
        return f"python {bare}" if bare in ("int", "float", "bool", "complex") else bare
    return name.removeprefix("special_")


def _custom(func: Any) -> bool:
    """Whether an operator is from a library of somebody's own, whatever its name."""
    schema = str(func) if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket) else "aten."
    return not schema.startswith(("aten.", "prims."))


def _takes(signature: inspect.Signature, count: int) -> bool:
    """Whether a function can be called with `count` positional arguments."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _described(result: object) -> str:
    if result is None:
        return "nothing"
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return f"a {type(result).__name__}"
