"""serves: what the backward's kernels cannot do yet, said with its place and its mend before any planning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attngen.diag.diagnostic import Diagnostic, Label
from attngen.diag.span import Span
from attngen.ir.gradient import GradientForm
from attngen.ir.spec import AttentionSpec
from attngen.passes import serves
from attngen.passes.gradient import reduced_tensors
from attngen.targets import sm90

_DENSE = "gradients of this spec are computed on CPU tensors, and by autograd of `attngen.ref.dense.attention`"


def why_not(
    spec: AttentionSpec, gradient: GradientForm, target: str, captured: Sequence[str], deterministic: bool
) -> tuple[Diagnostic, ...]:
    """Every reason why no backward for `target` serves `spec` with gradients of the tensors `captured`."""
    forward = serves.why_not(spec, target)
    if forward:
        return forward
    return tuple(
        Diagnostic(
            "E0402", f"{sm90.NAME} backward kernels do not serve {what} yet", Label(span) if span else None,
            notes=(_DENSE,), helps=(mend,),
        )
        for what, span, mend in _gaps(spec, gradient, captured, deterministic)
    )  # fmt: skip


def _gaps(
    spec: AttentionSpec, gradient: GradientForm, captured: Sequence[str], deterministic: bool
) -> Iterator[tuple[str, Span | None, str]]:
    for name in sorted(reduced_tensors(gradient) & {*captured}) if deterministic else ():
        yield (
            f"a deterministic gradient of `{name}`, which many pairs add to,",
            spec.tensor(name).span or spec.span,
            f"a call takes it from the blockwise reference; for a kernel leave `deterministic` or {name} out",
        )
