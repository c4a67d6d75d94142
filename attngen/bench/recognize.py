"""What a spec means in the words that other libraries have: causal, window, softcap, sink.

Recognition is numeric: mask and score are evaluated on small shapes and compared with the candidates' definitions. A
benchmark compares every peer's output with attngen's as well, so a wrong guess is seen and dropped, not published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec

_SHAPES = ((48, 48), (31, 57), (1, 40))


@dataclass(frozen=True)
class Features:
    """A spec in a peer's words. `window` counts the query's own key; `mask` is `other` where no word fits."""

    mask: str
    window: int | None
    softcap: float | None
    plain_score: bool
    sink: str | None
    scale: float
    plain_output: bool


def features(spec: AttentionSpec, params: dict[str, Any]) -> Features:
    """Recognise `spec` at these values of its params."""
    from attngen.ir.expr import Atom, Load, tensors_of

    mask, window = ("other", None) if tensors_of(spec.mask) else _mask(spec, params)
    cap = None if tensors_of(spec.score) else _softcap(spec, params)
    sink = None
    if spec.sink is not None:
        heads = isinstance(spec.sink, Load) and spec.sink.indices == (Atom(type=spec.sink.indices[0].type, name="h"),)
        sink = spec.sink.tensor if heads and isinstance(spec.sink, Load) else "other"
    plain_score = isinstance(spec.score, Atom)
    plain_output = (
        isinstance(spec.epilogue, Atom)
        and spec.normalizer.value == "softmax"
        and not spec.branches
        and not spec.segments
        and spec.out_dtype in (None, spec.dtype)
    )
    return Features(mask, window, cap, plain_score, sink, scale_of(spec, params), plain_output)


def scale_of(spec: AttentionSpec, params: dict[str, Any]) -> float:
    """The softmax scale at these values of the params."""
    return float(_evaluate(spec.scale, _scalars(params)))


def _scalars(params: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {k: torch.tensor(float(v) if isinstance(v, float) else v) for k, v in params.items()}


def _evaluate(e: Any, env: dict[str, Any]) -> Any:
    from attngen.ref.evaluate import evaluate

    return evaluate(e, env, {})


def keep(spec: AttentionSpec, params: dict[str, Any], seqlen_q: int, seqlen_kv: int) -> Any:
    """The mask as a bool tensor (seqlen_q, seqlen_kv) of batch 0, head 0; only for masks without captured tensors."""
    import torch

    rows, columns = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_kv)[None, :]
    zero = torch.tensor(0)
    env = {
        "q_idx": rows, "kv_idx": columns, "q_pos": rows + (seqlen_kv - seqlen_q), "b": zero, "h": zero, "h_kv": zero,
        "seqlen_q": torch.tensor(seqlen_q), "seqlen_kv": torch.tensor(seqlen_kv), "heads_q": torch.tensor(1),
        "heads_kv": torch.tensor(1), "batch": torch.tensor(1), **_scalars(params),
    }  # fmt: skip
    return torch.as_tensor(_evaluate(spec.mask, env)).bool().expand(seqlen_q, seqlen_kv)


def _mask(spec: AttentionSpec, params: dict[str, Any]) -> tuple[str, int | None]:
    import torch

    if any(isinstance(v, int) and v > 100_000 for v in params.values()):
        return "other", None
    kinds: list[set[tuple[str, int | None]]] = []
    widths = [v for v in params.values() if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    sizes = [*_SHAPES, *((w + 40, w + 40) for w in widths if w <= 8192)]
    for seqlen_q, seqlen_kv in sizes:
        kept = keep(spec, params, seqlen_q, seqlen_kv)
        distance = torch.arange(seqlen_q)[:, None] + (seqlen_kv - seqlen_q) - torch.arange(seqlen_kv)[None, :]
        fits: set[tuple[str, int | None]] = {("full", None)} if bool(kept.all()) else set()
        if torch.equal(kept, distance >= 0):
            fits.add(("causal", None))
        fits |= {("window", w) for w in widths if torch.equal(kept, (distance >= 0) & (distance < w))}
        kinds.append(fits)
    common = set.intersection(*kinds)
    return min(common, key=lambda f: (f[0] == "window", f[1] or 0)) if common else ("other", None)


def _softcap(spec: AttentionSpec, params: dict[str, Any]) -> float | None:
    import torch

    from attngen.ir.expr import atoms_of

    if atoms_of(spec.score) != {"s"}:
        return None
    s = torch.linspace(-200, 200, 101, dtype=torch.float64)
    got = _evaluate(spec.score, {"s": s, **_scalars(params)})
    floats = [float(v) for v in params.values() if isinstance(v, float) and v > 0]
    limit = float(_evaluate(spec.score, {"s": torch.tensor(1e9, dtype=torch.float64), **_scalars(params)}))
    for cap in [*floats, limit]:
        if 0 < cap < 1e6 and torch.allclose(got, cap * torch.tanh(s / cap), rtol=1e-5, atol=1e-6):
            return cap
    return None
