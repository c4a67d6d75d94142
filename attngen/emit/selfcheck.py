"""What the self-check at the end of a generated kernel needs: the spec in torch, and inputs to try it on."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit.check_exprs import ScalarPrinter, TorchPrinter
from attngen.emit.exprs import dim_name, safe_name
from attngen.emit.straight import WIDTH, fold, straight_line
from attngen.ir.expr import Atom, Expr, atoms_of, params_of
from attngen.ir.spec import AttentionSpec, ParamDecl, TensorDecl
from attngen.ir.types import DType, Layout, Normalizer, Type

#: Names that `reference` holds; nothing is read from a problem `p`.
_ATOMS = frozenset(
    ("b", "h", "h_kv", "q_idx", "kv_idx", "q_pos", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "batch", "s", "o")
) | {"d", "sink_weight"}


@dataclass(frozen=True)
class Scalar:
    """A run-time scalar and the value that the check passes."""

    name: str
    value: str


@dataclass(frozen=True)
class Captured:
    """A captured tensor and how the check makes one."""

    name: str
    make: str


@dataclass(frozen=True)
class CheckView:
    """Torch texts of the clauses, names of the extra arguments, sample inputs."""

    shapes: str
    timed_heads_kv: int
    mask_lines: tuple[str, ...]
    mask: str
    lines: tuple[str, ...]
    score: str
    weights: str
    has_sink: bool
    sink: str
    has_epilogue: bool
    reads_sink_weight: bool
    epilogue_lines: tuple[str, ...]
    epilogue: str
    has_scale_rule: bool
    scale_lines: tuple[str, ...]
    scale_rule: str
    scale: str
    has_extra: bool
    scalars: tuple[Scalar, ...]
    tensors: tuple[Captured, ...]
    is_bhsd: bool
    params: str
    packed: str
    uses_floor_div: bool
    uses_has_bit: bool
    uses_log2: bool
    uses_take: bool
    free_dims: tuple[Scalar, ...]


def _packed_shapes(group: int) -> tuple[tuple[int, ...], ...]:
    """Shapes whose row tiles hold several query heads."""
    return (2, 2 * group, 2, 33, 517), (1, 3 * group, 3, 160, 1024), (1, group, 1, 50, 37)


def check_view(spec: AttentionSpec) -> CheckView:
    """Spell the dense meaning in torch."""
    printer = TorchPrinter()
    has_epilogue = not isinstance(spec.epilogue, Atom)
    mask_lines, (mask,) = straight_line(printer, [spec.mask], _ATOMS, from_problem=False)
    exprs: list[Expr] = [spec.score, *([spec.sink] if spec.sink is not None else [])]
    lines, texts = straight_line(printer, exprs, _ATOMS, from_problem=False)
    epilogue_lines, (epilogue,) = straight_line(printer, [spec.epilogue], _ATOMS, from_problem=False)
    free = sorted({d for t in spec.tensors for d in t.dims if isinstance(d, str)} - _KNOWN)
    given = spec.block_sparse if spec.block_sparse is not None and spec.block_sparse.given else None
    blocks = {} if given is None else {
        "blocks_q": f"-(-seqlen_q // {given.q})", "blocks_kv": f"-(-seqlen_kv // {given.kv})"
    }  # fmt: skip
    scale_lines, (scale,) = straight_line(ScalarPrinter(), [spec.scale], _ATOMS, from_problem=False)
    has_rule = bool(scale_lines or params_of(spec.scale))
    group = spec.schedule.pack_gqa or 1
    return CheckView(
        shapes=repr(_SHAPES if group == 1 else _packed_shapes(group)),
        timed_heads_kv=16 // group,
        mask_lines=mask_lines,
        mask=_framed(mask),
        lines=lines,
        score=_framed(texts[0]),
        weights="torch.sigmoid(s)" if spec.normalizer is Normalizer.SIGMOID else "s.clamp_min(0.0)",
        has_sink=spec.sink is not None,
        sink=_framed(texts[1]) if spec.sink is not None else "",
        has_epilogue=has_epilogue,
        reads_sink_weight="sink_weight" in atoms_of(spec.epilogue),
        epilogue_lines=epilogue_lines if has_epilogue else (),
        epilogue=_framed(epilogue) if has_epilogue else "",
        has_scale_rule=has_rule,
        scale_lines=scale_lines,
        scale_rule=scale,
        scale=f"default_scale(*extra[:{len(spec.params)}])" if has_rule else scale,
        has_extra=bool(spec.params or spec.inputs),
        scalars=tuple(Scalar(safe_name(p.name), _example(p)) for p in spec.params),
        tensors=tuple(Captured(safe_name(t.name), fold(_maker(t, spec))) for t in spec.tensors),
        is_bhsd=spec.layout is Layout.BHSD,
        params=str(len(spec.params)),
        packed=fold(_packed(spec)),
        uses_floor_div="floor_div" in printer.used,
        uses_has_bit="has_bit" in printer.used,
        uses_log2="log2" in printer.used,
        uses_take="take" in printer.used,
        free_dims=tuple(Scalar(dim_name(d), blocks.get(d, "64")) for d in free),
    )


def _framed(text: str) -> str:
    """A text that stands inside `as_tensor(…).expand_as(…)`: with its frame it fills a line."""
    return fold(text, WIDTH)


def _packed(spec: AttentionSpec) -> str:
    """Of each captured tensor the axes that hold rows or keys of sequences: (axis, 0 for rows or 1 for keys)."""
    sides = {"seqlen_q": 0, "seqlen_kv": 1}
    return repr(
        tuple(tuple((axis, sides[str(d)]) for axis, d in enumerate(t.dims) if d in sides) for t in spec.tensors)
    )


#: Batch, heads_q, heads_kv, seqlen_q and seqlen_kv of a file's own check.
_SHAPES = ((2, 4, 2, 333, 517), (1, 6, 2, 1024, 1024), (1, 2, 2, 200, 77))
_KNOWN = frozenset(("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v"))


def _example(p: ParamDecl) -> str:
    if p.default is not None:
        return repr(p.default)
    low = p.minimum if p.minimum is not None else 0
    value = max(low, 64 if p.type is Type.INT else 0.5)
    if p.maximum is not None:
        value = min(value, p.maximum)
    return repr({Type.INT: int, Type.FLOAT: float, Type.BOOL: bool}[p.type](value))


def _maker(t: TensorDecl, spec: AttentionSpec) -> str:
    known = {"head_dim": str(spec.head_dim_qk), "head_dim_v": str(spec.head_dim_v)}
    extents = [str(d) if isinstance(d, int) else known.get(d, d if d in _KNOWN else dim_name(d)) for d in t.dims]
    shape = f"({', '.join(extents)},)" if extents else "(1,)"
    if t.dtype is DType.I32:
        made = f"torch.randint(0, 8, {shape}, device=device, dtype=torch.int32)"
        return f"{made}.sort(-1).values" if t.sorted else made
    if t.dtype is DType.BOOL:
        return f"torch.rand({shape}, device=device) < 0.8"
    kind = {DType.F32: "torch.float32", DType.BF16: "torch.bfloat16", DType.FP16: "torch.float16"}[t.dtype]
    return f"torch.randn({shape}, device=device).to({kind})"
