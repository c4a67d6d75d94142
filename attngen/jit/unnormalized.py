"""The callable of a spec whose weights no other key moves (sigmoid, relu): its kernel computes no LSE.

LSE would cost such a kernel an exponential, a maximum and a sum for each score. Who asks for it gets it from a second
kernel, the spec's softmax twin with a V of eight columns, and pays for that pass; nobody else does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attngen.ir.expr import atom
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.jit.kernel import Attention

#: Columns of the twin's V: the fewest that a kernel takes.
_COLUMNS = 8


def twin_of(spec: AttentionSpec) -> AttentionSpec:
    """The spec whose LSE is that of `spec`: softmax over the same scores and mask, nothing after it."""
    return spec.replace(
        name=f"{spec.name}_lse",
        normalizer=Normalizer.SOFTMAX,
        head_dim_v=_COLUMNS,
        epilogue=atom("o"),
        out_dtype=None,
        max_logit=False,
    )


class Unnormalized(Attention):
    """Attention under the sigmoid or relu normaliser; called as `Attention` is, and with the same results.

    LSE, the log of the sum of exp(score) over kept keys, comes from `twin`, with its gradient, and only where a call
    asks for it (`return_lse`, `lse`): that call takes a second launch. On CPU tensors the reference gives both.
    """

    def __init__(self, *arguments: Any, twin: Attention, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.twin = twin

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        return_lse: bool = False,
        out: Any = None,
        lse: Any = None,
        scale: float | None = None,
        check: bool = False,
        **named: Any,
    ) -> Any:
        """See the class."""
        alone = not return_lse and lse is None
        if alone or not isinstance(k, torch.Tensor) or k.device.type == "cpu":
            return super().__call__(q, k, v, return_lse=return_lse, out=out, lse=lse, scale=scale, check=check, **named)
        o = super().__call__(q, k, v, out=out, scale=scale, check=check, **named)
        rows = self.lse_of(q, k, scale, lse, named)
        return (o, rows) if return_lse else o

    def lse_of(self, q: Any, k: Any, scale: float | None, lse: Any, named: dict[str, Any]) -> Any:
        """LSE (batch, heads_q, seqlen_q), fp32, differentiable in q, k and learned tensors; into `lse`, where given."""
        return self.twin(q, k, k.detach()[..., :_COLUMNS], return_lse=True, lse=lse, scale=scale, **named)[1]


def kind_of(spec: AttentionSpec, build: Callable[[AttentionSpec], Attention]) -> Callable[..., Attention]:
    """What makes the callable of `spec`; `build` makes that of the twin."""
    from attngen.jit.further import MaxLogit, UnnormalizedMaxLogit

    if spec.normalizer is Normalizer.SOFTMAX:
        return MaxLogit if spec.max_logit else Attention
    return partial(UnnormalizedMaxLogit if spec.max_logit else Unnormalized, twin=build(twin_of(spec)))
