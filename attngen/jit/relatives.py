"""Kernels of a spec beside its own: in the other 16-bit dtype, and with other row tiles. Each is made by the call that
first has a use for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType
from attngen.jit.named import TORCH_DTYPE
from attngen.passes.few import Sibling

if TYPE_CHECKING:
    from attngen.jit.kernel import Attention


class Relatives:
    """Of the attention that `spec` describes. `rebuild` makes one of a changed spec; None: there are none."""

    def __init__(self, spec: AttentionSpec, rebuild: Callable[[AttentionSpec], Attention] | None) -> None:
        self.spec = spec
        self.rebuild = rebuild
        self.siblings: dict[Sibling, Attention] = {}
        self._twin: Attention | None = None
        self._lock = threading.Lock()

    def twin(self, dtype: torch.dtype, *, joint: bool) -> Attention | None:
        """In the other 16-bit dtype, if `dtype` is that. `joint`: gradients are given back as of packed tensors."""
        other = DType.FP16 if self.spec.dtype is DType.BF16 else DType.BF16
        if dtype != TORCH_DTYPE[other] or self.rebuild is None:
            return None
        with self._lock:
            if self._twin is None:
                self._twin = self.rebuild(self.spec.replace(dtype=other))
                self._twin.backward.joint = joint
        return self._twin

    def sibling(self, which: Sibling) -> Attention:
        """With other row tiles."""
        assert self.rebuild is not None
        with self._lock:
            if which not in self.siblings:
                self.siblings[which] = self.rebuild(which.of(self.spec))
        return self.siblings[which]
