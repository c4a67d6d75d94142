"""Calls of several kernels that need no gradient: each kernel adds to what the one before gave; see `passes.chained`.

Nothing is launched but the kernels. They are others than those of the parts, made when a call first has a use for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.jit.further import row_shape
from attngen.jit.kernel import Attention
from attngen.jit.modes import any_autocast, dispatch_modes, forward_ad, functorch_level, grad_enabled
from attngen.jit.named import TORCH_DTYPE
from attngen.jit.tables import NAME
from attngen.passes.chained import PRIOR, PRIOR_LSE, chained
from attngen.passes.parts import Part

_Tensor = torch.Tensor


class Chain:
    """The kernels of `spec` in order, or none; `make` makes the Attention of one."""

    def __init__(self, spec: AttentionSpec, make: Callable[[AttentionSpec], Attention]) -> None:
        self.spec = spec
        self.parts: tuple[Part, ...] = chained(spec)
        self._names = tuple(p.name for p in self.parts)
        self._make = make
        self._made: tuple[Attention, ...] = ()
        self._dtype = TORCH_DTYPE[spec.dtype]
        self._merges = bool(spec.segments) and spec.normalizer is Normalizer.SOFTMAX
        #: Of an LSE that no kernel computes, parts put together know more.
        self._has_lse = spec.normalizer is Normalizer.SOFTMAX
        #: Of each kernel, what it takes of a call's named arguments.
        self._reads = [
            (*(n.name for n in p.spec.params), *(t.name for t in p.spec.inputs if t.name not in (PRIOR, PRIOR_LSE)))
            for p in self.parts
        ]

    @property
    def kernels(self) -> tuple[Attention, ...]:
        """The Attention of each."""
        if not self._made:
            self._made = tuple(self._make(p.spec) for p in self.parts)
        return self._made

    def serves(self, calls: Sequence[Any], named: Mapping[str, Any], wants_lse: bool) -> bool:
        """Whether it takes a call: eager, on a GPU, in the spec's dtype, and no tensor of it requires a gradient."""
        q = calls[0].q
        if (
            not self.parts
            or type(q) is not _Tensor
            or q.dtype is not self._dtype
            or not (q.is_cuda or (self._made and q.get_device() in self._made[0].launcher.ready))
            or (wants_lse and not self._has_lse)
            or any_autocast()
            or dispatch_modes()
            or functorch_level() is not None
            or forward_ad._current_level >= 0
        ):
            return False
        if not grad_enabled():
            return True
        given = [x for call in calls for x in (call.q, call.k, call.v)]
        return not any(getattr(x, "requires_grad", False) for x in (*given, *named.values()))

    def __call__(
        self,
        calls: Sequence[Any],
        named: Mapping[str, Any],
        kept: Mapping[str, Any],
        scale: float | None,
        return_lse: bool,
        run: Callable[..., Any],
    ) -> tuple[Any, Any]:
        """(o, lse or None) of a call; `run(name, attention, call, keywords)` calls a kernel of it."""
        q, count = calls[0].q, len(self.parts)
        o = lse = None
        rows: Any = [None] * count
        whole = None
        if return_lse and not self._merges:  # of branches, each by itself
            whole = torch.empty((count, *row_shape(self.spec, q)), dtype=torch.float32, device=q.device)
            rows = whole.unbind(0)
        kernels, merges = self.kernels, self._merges
        for i, call in enumerate(calls):
            name, passes = self._names[i], merges and (return_lse or i < count - 1)
            own: dict[str, Any] = {"scale": scale, "return_lse": passes, "lse": rows[i]}
            for n in self._reads[i]:
                if n in named:
                    own[n] = named[n]
            if call.lengths:
                own.update(call.lengths)
            if name in kept:
                own[NAME] = kept[name]
            if i:
                own[PRIOR] = o
                if merges:
                    own[PRIOR_LSE] = lse
            found = run(name, kernels[i], call, own)
            o, lse = found if passes else (found, None)
        return o, lse if self._merges else whole
