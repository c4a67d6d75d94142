"""Typed values back to spec text: expressions with the fewest parentheses, whole specs in canonical form."""

from __future__ import annotations

from attngen.ir.expr import Apply, Atom, Const, Expr, Load, Param, const
from attngen.ir.functions import FUNCTIONS
from attngen.ir.spec import AttentionSpec, ParamDecl, TensorDecl
from attngen.ir.types import DType, Layout, Normalizer
from attngen.syntax.resolve import default_scale

_ATOM_PRECEDENCE = 100
_COMPARE = FUNCTIONS["lt"].precedence


def print_expr(e: Expr) -> str:
    """Spec spelling of a typed expression; it parses back to an equal one."""
    return _print(e)[0]


def _print(e: Expr) -> tuple[str, int]:
    """Text and binding strength."""
    if isinstance(e, Const):
        return print_literal(e.value), _ATOM_PRECEDENCE if e.type == "bool" or e.value >= 0 else FUNCTIONS[
            "neg"
        ].precedence
    if isinstance(e, Atom | Param):
        return e.name, _ATOM_PRECEDENCE
    if isinstance(e, Load):
        return f"{e.tensor}[{', '.join(print_expr(i) for i in e.indices)}]", _ATOM_PRECEDENCE
    assert isinstance(e, Apply)
    return join(e.fn, [_print(a) for a in e.args], isinstance(e.args[0], Const))


def join(fn: str, args: list[tuple[str, int]], bare_literal: bool = False) -> tuple[str, int]:
    """Operands with their binding strengths under a function. `bare_literal`: the operand of a minus is a literal."""
    row = FUNCTIONS[fn]
    strength = row.precedence
    if fn == "where":
        test, then, other = args
        middle = strength + 1
        return f"{_wrap(then, middle)} if {_wrap(test, middle)} else {_wrap(other, strength)}", strength
    if fn == "neg":
        return (f"-({args[0][0]})" if bare_literal else f"-{_wrap(args[0], strength)}"), strength
    if fn == "not":
        return f"not {_wrap(args[0], strength)}", strength
    if row.infix:
        left, right = args
        # Comparisons do not associate (a chain means something else); everything else does to the left.
        low = strength + 1 if strength == _COMPARE else strength
        return f"{_wrap(left, low)} {row.infix} {_wrap(right, strength + 1)}", strength
    return f"{fn}({', '.join(text for text, _ in args)})", _ATOM_PRECEDENCE


def _wrap(operand: tuple[str, int], least: int) -> str:
    text, strength = operand
    return text if strength >= least else f"({text})"


def print_literal(value: bool | int | float) -> str:
    """A literal: `true`, `128`, `0.5`, `1.0e-5`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{e}{exponent}" if e else text


def print_spec(spec: AttentionSpec) -> str:
    """Canonical `.attn` text of a resolved spec, `fmt`'s layout; it loads back to an equal spec."""
    from attngen.syntax.fmt import format_text

    lines = [
        "attn 1",
        "",
        *(_string(x) for x in (spec.doc or "").split("\n") if spec.doc is not None),
        f"attention {spec.name} {{",
    ]
    lines.append(
        f"head_dim = {spec.head_dim_qk}" + (f", v = {spec.head_dim_v}" if spec.head_dim_v != spec.head_dim_qk else "")
    )
    if spec.v_view_start is not None:
        lines.append(f"v = k[{spec.v_view_start}:{spec.v_view_start + spec.head_dim_v}]")
    lines += [f"dtype = {spec.dtype.value}"] * (spec.dtype is not DType.BF16)
    lines += [f"layout = {spec.layout.value}"] * (spec.layout is not Layout.BSHD)
    lines += [f"scale = {print_expr(spec.scale)}"] * (spec.scale != default_scale(spec.head_dim_qk))
    lines += [_param(p) for p in spec.params] + [_tensor(t) for t in spec.tensors]
    lines += _settings(spec.score, spec.mask, spec.sink)
    lines += [f"normalizer = {spec.normalizer.value}"] * (spec.normalizer is not Normalizer.SOFTMAX)
    lines += [f"epilogue = {print_expr(spec.epilogue)}"] * (print_expr(spec.epilogue) != "o")
    for branch in spec.branches:
        # A branch inherits from the block, so what it does not share is always written.
        weight = [] if branch.weight == const(1.0) else [f"weight = {print_expr(branch.weight)}"]
        score = [f"score = {print_expr(branch.score)}"] if branch.score != spec.score else []
        mask = [f"mask = {print_expr(branch.mask)}"] if branch.mask != spec.mask else []
        sink = [f"sink = {print_expr(branch.sink)}"] if branch.sink is not None and branch.sink != spec.sink else []
        lines += [f"branch {branch.name} {{", *score, *mask, *sink, *weight, "}"]
    for segment in spec.segments:
        lines += [f"segment {segment.name} {{", *_settings(segment.score, segment.mask, None), "}"]
    lines += _blocks(spec)
    lines += [f"target = {', '.join(spec.targets)}"] * bool(spec.targets)
    return format_text("\n".join([*lines, "}"]) + "\n")


def _settings(score: Expr, mask: Expr, sink: Expr | None) -> list[str]:
    lines = [] if isinstance(score, Atom) and score.name == "s" else [f"score = {print_expr(score)}"]
    lines += [] if mask == const(True) else [f"mask = {print_expr(mask)}"]
    return lines + ([f"sink = {print_expr(sink)}"] if sink is not None else [])


def _string(line: str) -> str:
    return '"' + line.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _param(p: ParamDecl) -> str:
    if p.minimum is not None and p.maximum is not None:
        bounds = f" in {print_literal(p.minimum)}..{print_literal(p.maximum)}"
    else:
        bounds = f" >= {print_literal(p.minimum)}" if p.minimum is not None else ""
        bounds += f" <= {print_literal(p.maximum)}" if p.maximum is not None else ""
    return f"param {p.name}: {p.type.value}{bounds}" + (
        f" = {print_literal(p.default)}" if p.default is not None else ""
    )


def _tensor(t: TensorDecl) -> str:
    return f"tensor {t.name}: {t.dtype.value}[{', '.join(map(str, t.dims))}]" + " grad" * t.grad + " sorted" * t.sorted


def _blocks(spec: AttentionSpec) -> list[str]:
    output = [f"dtype = {spec.out_dtype.value}"] if spec.out_dtype else []
    output += ["max_logit = true"] if spec.max_logit else []
    blocks = [("output", output)]
    if spec.block_sparse:
        lists = ["lists = given"] if spec.block_sparse.given else []
        blocks.append(("block_sparse", [f"q = {spec.block_sparse.q}", f"kv = {spec.block_sparse.kv}", *lists]))
    blocks.append(("schedule", _schedule(spec)))
    blocks.append(("backward", ["deterministic = true"] if spec.backward.deterministic else []))
    return [f"{word} {{ {', '.join(entries)} }}" for word, entries in blocks if entries]


def _schedule(spec: AttentionSpec) -> list[str]:
    h = spec.schedule
    if h.tile_m is not None and h.tile_n is not None:
        entries = [f"tile = {h.tile_m} x {h.tile_n}"]
    else:
        entries = [f"{n} = {v}" for n, v in (("tile_m", h.tile_m), ("tile_n", h.tile_n)) if v is not None]
    for name in ("stages", "order", "persistent", "cluster", "split_kv", "pack_gqa", "sm_margin", "pingpong"):
        value = getattr(h, name)
        if isinstance(value, bool):
            entries.append(f"{name} = {print_literal(value)}")
        elif isinstance(value, tuple):
            entries.append(f"{name} = {value[0]} x {value[1]}")
        elif value is not None:
            entries.append(f"{name} = {value}")
    return entries
