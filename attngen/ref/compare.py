"""The error rule of every numeric test: at most twice the error of plain torch code in the same dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attngen.ir.spec import AttentionSpec
from attngen.ref.dense import attention, same_dtype
from attngen.ref.evaluate import Tensor


class Closeness(NamedTuple):
    """Largest absolute errors against float64: of the output under test, of plain torch, and what is allowed."""

    error: float
    baseline: float
    allowed: float
    lse_error: float

    @property
    def ratio(self) -> float:
        """error over allowed: 1 or less passes."""
        return self.error / self.allowed if self.allowed else (0.0 if self.error == 0 else float("inf"))


def error_ratio(
    out: Tensor,
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    *,
    lse: Tensor | None = None,
    factor: float = 2.0,
    **arguments: Any,
) -> Closeness:
    """How `out` (B, Sq, Hq, Dv) compares with the float64 meaning of the very inputs given (bf16, fp16 or fp32
    tensors).

    allowed = factor * baseline + 2 ulps of the output dtype at its magnitude, the rule that FlashAttention-4 tests
    itself by. `lse` errors count finite entries only; an infinity in the wrong place counts as infinite. Runs on any
    device.
    """
    with torch.no_grad():
        exact = attention(spec, q, k, v, **arguments)
        plain = same_dtype(spec, q, k, v, **arguments)
    if out.shape != exact.o.shape:
        raise AssertionError(f"output shape {tuple(out.shape)}, expected {tuple(exact.o.shape)}")
    rounded = exact.o.to(out.dtype)
    ulp = _largest((rounded + 0.3 - 0.3).double() - rounded.double()) + _largest(rounded.double() - exact.o)
    baseline = _largest(plain.o.double() - exact.o)
    return Closeness(
        error=_largest(out.double() - exact.o),
        baseline=baseline,
        allowed=factor * baseline + 2 * ulp,
        lse_error=0.0 if lse is None else _largest_finite(lse.double(), exact.lse),
    )


def assert_close(
    out: Tensor, spec: AttentionSpec, q: Any, k: Any, v: Any, *, lse: Tensor | None = None, **arguments: Any
) -> Closeness:
    """`error_ratio`, failing past 1, on NaN, and where LSE errs by more than 2e-3 (or in an infinity)."""
    found = error_ratio(out, spec, q, k, v, lse=lse, **arguments)
    if not found.ratio <= 1.0:
        raise AssertionError(
            f"{spec.name}: error {found.error:.3e}, allowed {found.allowed:.3e} (torch {found.baseline:.3e})"
        )
    if not found.lse_error <= 2e-3:
        raise AssertionError(f"{spec.name}: LSE error {found.lse_error:.3e}, allowed 2e-3")
    return found


def _largest(x: Tensor) -> float:
    """Largest magnitude; NaN if any."""
    return float(x.abs().max()) if x.numel() else 0.0


def _largest_finite(a: Tensor, b: Tensor) -> float:
    same = (a == b) & ~torch.isfinite(b)
    return _largest(torch.where(same, torch.zeros_like(a), a - b))
