"""serves: what a target's kernels cannot do yet, said with its place and its mend before any planning."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from attngen.diag.diagnostic import AttnError, Diagnostic, Label
from attngen.diag.span import Span
from attngen.ir.plan import PACKS
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Layout
from attngen.passes.launch import CLUSTERS, unpaired
from attngen.passes.packing import unpackable
from attngen.passes.parts import Part, gaps, is_composed, parts, pick
from attngen.passes.placed import places_of
from attngen.passes.selected import OWN_NAMES, is_selected, selected_spec
from attngen.targets import sm90

#: What is left to do with a valid spec that no kernel serves.
_DENSE = (
    "the spec is valid: without a GPU `build` gives a callable that runs it on CPU tensors, and `attngen run SPEC` and "
    "`attngen.ref.dense.attention` compute it by its dense meaning; `compile` needs a kernel"
)
_DIMS = "head dims are multiples of 8 from 8 to 256"
_ABSORBED = (
    "a tile of K with its latent columns does not fit beside Q in registers and shared memory: prefill and training "
    "take the form that is not absorbed, head_dim = 192, v = 128 (examples/mla.attn)"
)


def _is_absorbed(spec: AttentionSpec) -> bool:
    """Latent attention with V's projection moved behind the softmax: one wide K, V its first columns."""
    return spec.v_view_start is not None and spec.head_dim_qk > 256 and not spec.head_dim_qk % 8


def why_not(spec: AttentionSpec, target: str) -> tuple[Diagnostic, ...]:
    """Every reason why no kernel for `target` serves `spec`; empty when one does."""
    if target != sm90.NAME:
        known = f"kernels are generated for {sm90.NAME}"
        return (
            Diagnostic(
                "E0401", f"no kernels for target `{target}`", None, notes=(known,), helps=(f"use `{sm90.NAME}`",)
            ),
        )
    found = chain(_gaps(spec), _of_ragged(spec))
    lists = _of_lists(spec) if is_selected(spec) else ()
    if is_composed(spec):
        found = chain(gaps(spec), lists, _of_ragged(spec), _of_views(spec), *(_gaps(p.spec) for p in parts(spec)))
    elif is_selected(spec):
        found = chain(lists, _of_ragged(spec), _gaps(selected_spec(spec)))
    return tuple(
        Diagnostic(
            "E0402", f"{sm90.NAME} kernels do not serve {what} yet", Label(span) if span else None,
            notes=(_DENSE,), helps=(mend,),
        )
        for what, span, mend in {gap[0]: gap for gap in found}.values()
    )  # fmt: skip


def served_parts(spec: AttentionSpec, target: str, name: str | None = None) -> tuple[Part, ...]:
    """The kernels that `spec` takes on `target`, or the one of that name.

    Raises: AttnError E0401, E0402 where none serves a part of it, or the whole; E0404, E0405 as `parts.pick`.
    """
    reasons = why_not(spec, target)
    if reasons:
        raise AttnError(*reasons)
    return parts(spec) if name is None else (pick(spec, name),)


def _gaps(spec: AttentionSpec) -> Iterator[tuple[str, Span | None, str]]:
    s = spec.schedule
    if spec.dtype not in (DType.BF16, DType.FP16):
        yield f"{spec.dtype} inputs", spec.span, "use bf16 or fp16"
    dims = (("head_dim", spec.head_dim_qk), ("v", spec.head_dim_v))
    for name, d in dims[: 1 if spec.head_dim_qk == spec.head_dim_v else 2]:
        if d % 8 or not 8 <= d <= 256:
            yield f"{name} = {d}", spec.span, _ABSORBED if name == "head_dim" and _is_absorbed(spec) else _DIMS
    if spec.layout is Layout.PAGED:
        yield f"layout {spec.layout}", spec.span, "use layout = bshd, bhsd, packed_qkv, varlen or padded"
    yield from _of_views(spec)
    unpacked, ctas = unpackable(spec), s.cluster or (1, 1)
    hints: tuple[tuple[str, object, str], ...] = (
        (f"a cluster of {ctas[0]} x {ctas[1]}", ctas not in CLUSTERS or None, "use 2 x 1, or leave `cluster` out"),
        (f"a cluster with {unpaired(spec)}", (ctas == (2, 1) and unpaired(spec)) or None, "leave `cluster` out"),
        ("split_kv", s.split_kv if s.split_kv not in (None, 1) else None, "leave `split_kv` out"),
        ("this pack_gqa", s.pack_gqa if s.pack_gqa not in (None, *PACKS) else None, "use 2, 4 or 8"),
        (f"pack_gqa with {unpacked}", ((s.pack_gqa or 1) > 1 and unpacked) or None, "leave `pack_gqa` out"),
        ("persistent = false", s.persistent is False or None, "kernels are persistent: leave it out"),
    )
    places = dict(s.places)
    for what, value, mend in hints:
        if value is not None:
            span = next((v for k, v in places.items() if k in what), s.span or spec.span)
            yield what, span, mend


def _of_ragged(spec: AttentionSpec) -> Iterator[tuple[str, Span | None, str]]:
    """What does not go together with sequences of lengths of their own."""
    if not spec.layout.is_ragged:
        return
    yield from _taken(spec, {t.name for t in spec.lengths}, f"layout {spec.layout} has")
    for segment in spec.segments:
        yield from _taken(spec, places_of(spec, segment), f"the kernel over segment `{segment.name}` has")


def _taken(spec: AttentionSpec, own: Collection[str], whose: str) -> Iterator[tuple[str, Span | None, str]]:
    """Declared names that a kernel's arguments have already."""
    for name, span in [(p.name, p.span) for p in spec.params] + [(t.name, t.span) for t in spec.tensors]:
        if name in own:
            yield f"`{name}`, which {whose} of its own,", span, "give it another name"


def _of_views(spec: AttentionSpec) -> Iterator[tuple[str, Span | None, str]]:
    """Of the ways in which q, k and v are views of fewer tensors."""
    if spec.layout is Layout.PACKED_QKV and spec.head_dim_v != spec.head_dim_qk:
        yield "layout packed_qkv where V has a head dim of its own", spec.span, "one tensor has one: use layout = bshd"
    if spec.layout is Layout.PACKED_QKV and spec.v_view_start is not None:
        yield "layout packed_qkv with V as a view of K", spec.span, "use layout = bshd, and pass q and k"
    if spec.v_view_start is not None and spec.v_view_start % 8:
        yield (
            f"a view of K that starts at column {spec.v_view_start}",
            spec.span,
            "start it at a multiple of 8, where TMA can: 16 bytes",
        )


def _of_lists(spec: AttentionSpec) -> Iterator[tuple[str, Span | None, str]]:
    """Of lists of single keys or for single rows."""
    span = spec.block_sparse.span if spec.block_sparse is not None else None
    what = "lists of single keys or for single rows"
    yield from _taken(spec, OWN_NAMES, "a kernel over listed keys has")
    if spec.layout is Layout.PAGED:
        yield f"{what} in layout {spec.layout}", spec.span or span, "use another layout"
    if spec.layout is Layout.PACKED_QKV:
        yield from _of_views(spec)
    if spec.v_view_start is not None:
        yield f"{what} with V as a view of K", spec.span or span, "pass v: a slice of k, gathered beside it"
