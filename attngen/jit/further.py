"""What some forwards take and give beside O and LSE: O before the epilogue for a backward, the largest score of a row.

A spec without epilogue and max logit pays nothing for them: it has a plain Launcher and a plain Attention.
"""

from __future__ import annotations

from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.kernel import Attention
from attngen.jit.launch import Launcher, Ready
from attngen.jit.ragged import RaggedLauncher, RaggedTableLauncher
from attngen.jit.tables import TableLauncher
from attngen.jit.traced import traced
from attngen.jit.unnormalized import Unnormalized
from attngen.passes.epilogue import has_epilogue


class FurtherLauncher(Launcher):
    """A Launcher of kernels that take more tensors last (`passes.epilogue.further_names`); to be mixed in first."""

    def launch(
        self, ready: Ready, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any, out: Any, lse: Any,
        return_lse: bool, further: tuple[Any, ...] = (),
    ) -> Any:  # fmt: skip
        """As a Launcher's: nothing is saved for a backward, and the largest scores are dropped."""
        if self._ends_in_o:
            return super().launch(ready, q, k, v, tail, scale, out, lse, return_lse)
        found = self.launch_whole(ready, q, k, v, tail, scale, False, out, lse, return_lse)
        return found[:2] if return_lse else found[0]

    def launch_saving(
        self, ready: Ready, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any
    ) -> tuple[Any, Any, Any]:
        """As a Launcher's."""
        o, lse, pre, _ = self.launch_whole(ready, q, k, v, tail, scale, True)
        return o, lse, o if pre is None else pre

    def launch_whole(
        self, ready: Ready, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any, saves_o: bool, out: Any = None,
        lse: Any = None, return_lse: bool = True,
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """(o, lse, O before the epilogue, largest scores): the last two None where the spec has or saves none."""
        if out is None:
            shape = (*q.shape[:-1], self.spec.head_dim_v)
            out = torch.empty(shape, dtype=self._dtype, device=q.device)
        pre = top = None
        further: tuple[Any, ...] = ()
        if has_epilogue(self.spec):
            pre = torch.empty_like(out) if saves_o else None
            further = (out, 0) if pre is None else (pre, 1)
        if self.spec.max_logit:
            top = torch.empty(row_shape(self.spec, q), dtype=torch.float32, device=q.device)
            further = (*further, top)
        if self.is_empty(q, k, tail):  # nothing is launched
            for x, value in ((pre, 0.0), (top, -torch.inf)):
                if x is not None:
                    x.fill_(value)
        found = super().launch(ready, q, k, v, tail, scale, out, lse, return_lse, further)
        o, rows = found if return_lse else (found, lse)
        return o, rows, pre, top

    def is_empty(self, q: Any, k: Any, tail: tuple[Any, ...]) -> bool:
        """Whether a call has no rows, no keys or no sequences."""
        return not (q.numel() and k.numel())


class FurtherTableLauncher(FurtherLauncher, TableLauncher):
    """Of a kernel with tables too: they come first."""


class FurtherRaggedLauncher(FurtherLauncher, RaggedLauncher):
    """Of a ragged layout."""

    def is_empty(self, q: Any, k: Any, tail: tuple[Any, ...]) -> bool:
        return super().is_empty(q, k, tail) or not self.sequences(tail)


class FurtherRaggedTableLauncher(FurtherRaggedLauncher, RaggedTableLauncher):
    """Of a ragged layout and a mask with tables."""


def row_shape(spec: AttentionSpec, q: Any) -> tuple[int, ...]:
    """(batch, heads_q, seqlen_q), of packed sequences (heads_q, total_q)."""
    if spec.layout is Layout.VARLEN:
        return q.shape[1], q.shape[0]
    a, b, c = q.shape[:3]
    return (a, b, c) if spec.layout is Layout.BHSD else (a, c, b)


def run_whole(
    attention: Attention, q: Any, k: Any, v: Any, scale: Any, named: dict[str, Any], saves_o: bool
) -> tuple[Any, Any, Any, Any]:
    """(o, lse, O before the epilogue, largest scores) on real tensors, no gradient; empty tensors for what is not made.

    On CPU tensors O before the epilogue is not made: the reference computes it again.
    """
    none = q.new_empty(0), q.new_empty(0, dtype=torch.float32)
    if q.device.type != "cuda":
        o, lse = attention.run(q, k, v, True, None, None, scale, False, named)
        top = _largest(attention, q, k, v, scale, named) if attention.spec.max_logit else none[1]
        return o, lse, none[0], top
    tail = attention.bound(q, k, v, named)
    launcher: Any = attention.launcher
    o, lse, pre, top = launcher.launch_whole(attention.ready(q.device.index), q, k, v, tail, scale, saves_o)
    return o, lse, none[0] if pre is None else pre, none[1] if top is None else top


def _largest(attention: Attention, q: Any, k: Any, v: Any, scale: Any, named: dict[str, Any]) -> Any:
    """The largest kept scores by the reference."""
    from attngen.jit.scale import number
    from attngen.ref import blockwise

    spec, tail = attention.spec, attention.bound(q, k, v, named)
    value = attention.launcher.scale.of(tail) if scale is None else number(scale, spec)
    if spec.layout.is_ragged:
        launcher: Any = attention.launcher
        return launcher.largest(q, k, v, tail, value)
    wide = [x.transpose(1, 2) if spec.layout is Layout.BHSD else x for x in (q, k, v)]
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return blockwise.largest(spec, wide[0], wide[1], wide[2], *attention.binder.split(tail), value)


class MaxLogit(Attention):
    """Attention whose spec has `output { max_logit = true }`: called as `Attention` is, and with `return_max_logit`.

    `return_max_logit=True` appends the largest kept score of each row to what is returned: fp32 (batch, heads_q,
    seqlen_q), natural units, the sink apart, -inf where a row keeps no key. It has no gradient.
    """

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        return_lse: bool = False,
        return_max_logit: bool = False,
        out: Any = None,
        lse: Any = None,
        scale: float | None = None,
        check: bool = False,
        **named: Any,
    ) -> Any:
        """See the class."""
        named = named if self._fill is None else self._fill(named, q, k)
        if not return_max_logit:
            return super().__call__(q, k, v, return_lse=return_lse, out=out, lse=lse, scale=scale, check=check, **named)
        if out is not None or lse is not None:
            raise error(
                "E0616",
                f"`{self.spec.name}` was called with return_max_logit=True and with `out` or `lse`",
                helps=("leave `out` and `lse` out: new tensors are returned",),
            )
        if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
            return super().__call__(q, k, v, scale=scale, check=check, **named)  # says what is wrong
        if check:
            self.bound(q, k, v, named, check=True)
        o, rows, top = traced(self, q, k, v, True, None, None, scale, named, whole=True)
        if not return_lse:
            return o, top
        return o, self.rows_of(q, k, scale, named, rows), top

    def rows_of(self, q: Any, k: Any, scale: float | None, named: dict[str, Any], rows: Any) -> Any:
        """LSE, given what the kernel wrote."""
        return rows


class UnnormalizedMaxLogit(MaxLogit, Unnormalized):
    """Both: the kernel writes the largest scores, and the twin gives LSE."""

    def rows_of(self, q: Any, k: Any, scale: float | None, named: dict[str, Any], rows: Any) -> Any:
        """LSE from the twin, where the kernel wrote none."""
        return rows if k.device.type == "cpu" else self.lse_of(q, k, scale, None, named)
