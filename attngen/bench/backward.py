"""The backward as a call of its own: O is made once, then its gradient is taken as often as the clock asks.

Every library goes through torch.autograd and gets the same leaves and the same dO; what it launches before and after
its main kernel counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attngen.bench.peers import Call


def leaves(*tensors: Any) -> list[Any]:
    """The tensors, detached and asking for gradients."""
    return [t.detach().requires_grad_() for t in tensors]


def backward_of(forward: Call, inputs: Sequence[Any], do: Any) -> Call:
    """A call that returns (dq, dk, dv) of `inputs` for dO = `do`, with the forward outside of it.

    `forward` returns O in the shape of `do`, made from `inputs`. Raises RuntimeError where O has no gradient.
    """
    import torch

    o = forward()
    if not o.requires_grad:
        raise RuntimeError("O has no gradient: this library's forward is not differentiable")
    return lambda: torch.autograd.grad(o, list(inputs), do, retain_graph=True)


def peak_bytes(step: Callable[[], Any]) -> int:
    """Most memory of the current CUDA device that `step` held at a time beyond what it found; 0 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def keep_for_many() -> None:
    """Let compiled graphs be differentiated more than once: torch.compile otherwise gives their buffers away."""
    from torch._functorch import config

    config.donated_buffer = False
