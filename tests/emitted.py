"""Emitted kernels run as plain Python, as far as their walks go: no GPU, no DSL, a call in milliseconds.

The text of a generated file is executed with stand-ins for the DSL. A warp is one call whose lane number is a vector of
32, so that votes, shuffles and tile maps mean what they mean on a GPU; whatever moves or multiplies data is `Nothing`,
which takes part in any expression. The host entry `__call__` runs, too: grids, groups, lags and shares are its own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LANES = np.arange(32)
#: Modules that a generated file imports for good.
REAL = ("copy", "dataclasses", "math", "sys", "types")


class Nothing:
    """Stands for what has no meaning here: atoms, layouts, fragments, barriers. Any operation on it is it again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    __getitem__ = __enter__ = __call__

    def __setitem__(self, *_: Any) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def __iter__(self) -> Any:
        return iter((self, self))  # a tensor in shared and in global memory

    def __bool__(self) -> bool:
        return False


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    for _prefix in ("__", "__r"):
        setattr(Nothing, f"{_prefix}{_operator}__", Nothing.__call__)
for _operator in ("lt", "le", "gt", "ge", "neg", "invert"):
    setattr(Nothing, f"__{_operator}__", Nothing.__call__)
NOTHING = Nothing()


class Module(Nothing):
    """A module of the DSL, some of whose names have a meaning."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


class Sized:
    """A tensor of which only the extents count: (rows, columns, heads, batch), rows of packed heads a pair."""

    iterator = layout = NOTHING

    def __init__(self, *shape: Any) -> None:
        self.shape = shape

    def __getitem__(self, _: Any) -> Any:
        return NOTHING


def _size(x: Any, mode: Sequence[int] = ()) -> Any:
    found: Any = x.shape if isinstance(x, Sized) else 0
    for m in mode:
        found = found[m]
    return int(np.prod(found))


def _by_lane(scalar: Callable[..., Any], vector: Callable[..., Any]) -> Callable[..., Any]:
    """Of plain numbers a plain number; lane by lane where one of them is a vector."""

    def both(*values: Any) -> Any:
        if any(isinstance(x, Nothing) for x in values):
            return NOTHING
        return (vector if any(isinstance(x, np.ndarray) for x in values) else scalar)(*values)

    return both


def _int(x: Any) -> Any:
    return x if isinstance(x, np.ndarray | Nothing) else int(x)


def _ballot(condition: Any) -> int:
    return sum(1 << int(lane) for lane in LANES[np.broadcast_to(np.asarray(condition, dtype=bool), 32)])


def _range(*bounds: Any, **_: Any) -> range:
    return range(*map(int, bounds))


def _dsl() -> dict[str, Any]:
    """What a generated file imports of the DSL, and those of its own functions whose bodies are instructions."""
    arch = Module(
        thread_idx=lambda: (LANES, 0, 0), block_idx=lambda: (0, 0, 0), lane_idx=lambda: LANES,
        make_warp_uniform=lambda x: x, vote_ballot_sync=_ballot, popc=lambda x: int(x).bit_count(),
        shuffle_sync=lambda x, lane: x[lane] if isinstance(x, np.ndarray) else x,
    )  # fmt: skip
    cute = Module(
        arch=arch, size=_size, ceil_div=lambda a, b: -(-a // b), assume=lambda x, **_: x, jit=lambda f: f,
        kernel=lambda f: f,
    )  # fmt: skip
    return {
        "cute": cute,
        "cutlass": Module(
            min=_by_lane(min, np.minimum), max=_by_lane(max, np.maximum), range=_range, range_constexpr=_range
        ),
        "cpasync": Module(make_tiled_tma_atom=lambda op, tensor, *_: (NOTHING, tensor)),
        **dict.fromkeys(("sm90", "warp", "warpgroup", "cuda", "arith", "SmemAllocator", "LayoutEnum"), NOTHING),
        **dict.fromkeys(("make_fake_stream", "make_fake_tensor", "Float32", "gemm", "as_operand_a"), NOTHING),
        **dict.fromkeys(("Int32", "Int64"), _int),
        **dict.fromkeys(("Boolean", "const_expr", "dsl_user_op"), lambda x: x),
        "select": _by_lane(lambda condition, a, b: a if condition else b, np.where),
        "lowest_bit": lambda x: (int(x) & -int(x)).bit_length() - 1,
    }


def load(text: str) -> dict[str, Any]:
    """The names of a generated file; `KERNELS`: names of its kernels; `PROBLEM`: see `problem`."""
    dsl, tree = _dsl(), ast.parse(text)

    def kept(n: ast.stmt) -> bool:
        if isinstance(n, ast.ImportFrom):
            return n.module in REAL
        if isinstance(n, ast.Import):
            return n.names[0].name in REAL
        return not (isinstance(n, ast.FunctionDef) and n.name in dsl)

    tree.body = [n for n in tree.body if kept(n)]
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for f in functions:
        for argument in f.args.args:
            argument.annotation = None
    kernels = [
        f.name for f in functions if any(isinstance(d, ast.Attribute) and d.attr == "kernel" for d in f.decorator_list)
    ]
    names = {**dsl, "__name__": "emitted", "KERNELS": kernels, "PROBLEM": _problem(functions)}
    exec(compile(tree, "emitted", "exec"), names)
    return names


class Launch:
    """A kernel: the arguments and the grid of its launch, once the host entry has run."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.grid: list[int] = []

    def set_name_prefix(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *arguments: Any) -> Launch:
        self.arguments = arguments
        return self

    def launch(self, *, grid: list[int], **_: Any) -> None:
        self.grid = grid


def _problem(functions: Sequence[ast.FunctionDef]) -> tuple[list[str], Any]:
    """The main kernel's arguments, and its first statements, up to the one that makes the namespace `p`."""
    kernel = next(f for f in functions if f.name == "kernel")
    last = next(
        i
        for i, n in enumerate(kernel.body)
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and n.targets[0].id == "p"
    )
    statements = ast.Module(body=kernel.body[1 : last + 1], type_ignores=[])
    return [a.arg for a in kernel.args.args[1:]], compile(statements, "emitted", "exec")


def problem(names: dict[str, Any], owner: Any, kernel: Launch) -> Any:
    """The namespace `p` that the main kernel makes of the arguments of its launch."""
    arguments, statements = names["PROBLEM"]
    space = {**names, "self": owner, **dict(zip(arguments, kernel.arguments, strict=True))}
    exec(statements, space)
    return space["p"]
