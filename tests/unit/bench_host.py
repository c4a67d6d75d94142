"""Host cost of an eager call without its launch: the kernel's entry point is replaced by a function that does nothing.

    python tests/unit/bench_host.py

Prints microseconds a call (the best of several runs), and of that the two or one allocations, which any implementation
pays. Add the TVM-FFI call (6.5 us with its launch) for the cost on a GPU machine. Not collected by pytest.
The last lines are calls that need gradients, and whole steps (forward, then `backward` of a given gradient).
"""

from __future__ import annotations

import tempfile
import timeit
from pathlib import Path
from typing import Any

import backward_standin
import jit_standin as standin
import torch

from attngen.jit import launch, variants
from attngen.jit.cache import Entry, KernelCache
from attngen.jit.device import DeviceState
from attngen.jit.kernel import Attention
from attngen.jit.load import Loaded


def stubbed(spec: Any, function: Any, plans: int = 1, limits: tuple[int, ...] = ()) -> Attention:
    """An Attention whose launches on CPU tensors call `function` as a kernel's entry point."""
    source = standin.source(spec, plans=plans, limits=limits)
    cache = KernelCache(Path(tempfile.gettempdir()) / "attngen-bench")
    attention = Attention(
        spec, source, "sm_90a", cache, backward=lambda captured: backward_standin.source(spec, captured)
    )
    loaded = Loaded((function,), Entry(Path(), Path(), ()), 0.0)
    variants.load = lambda *_, **__: loaded  # type: ignore[assignment]
    launch._current_device, launch._raw_stream, launch._capturing = lambda: -1, lambda index: 0, lambda: False
    attention.launcher.functions = (function,) * plans
    attention.launcher.ready[-1] = (DeviceState(-1, 132), 132)
    return attention


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        ctx.inputs = q.detach(), k.detach(), v.detach()
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, do: Any) -> Any:
        return ctx.inputs


def main() -> None:
    q = torch.randn(2, 256, 8, 64, dtype=torch.bfloat16)
    k = torch.randn(2, 256, 2, 64, dtype=torch.bfloat16)
    bias = torch.randn(2, 8)
    out, lse = torch.empty_like(q), torch.empty(2, 8, 256)

    def nothing(*arguments: Any) -> None:
        pass

    plain = stubbed(standin.plain(), nothing)
    three = stubbed(standin.plain(), nothing, plans=3, limits=(128, 200))
    rich = stubbed(standin.rich(), nothing)
    cases = {
        "o = attn(q, k, v)": lambda: plain(q, k, k),
        "o, lse = attn(q, k, v, return_lse=True)": lambda: plain(q, k, k, return_lse=True),
        "attn(q, k, v, out=, lse=)": lambda: plain(q, k, k, out=out, lse=lse),
        "three plans": lambda: three(q, k, k),
        "three params, one tensor": lambda: rich(q, k, k, window=64, bias=bias),
        "   torch.empty_like(q)": lambda: torch.empty_like(q, memory_format=torch.contiguous_format),
        "   torch.empty(lse)": lambda: torch.empty((2, 8, 256), dtype=torch.float32, device=q.device),
        "   an empty lambda": lambda: None,
    }
    with torch.no_grad():
        for name, call in cases.items():
            measure(name, call, 20000)
    x = [t.clone().requires_grad_() for t in (q, k, k)]
    named = {"window": 64, "bias": bias.clone().requires_grad_()}
    learned = stubbed(standin.rich().replace(tensors=(standin.BIAS.replace(grad=True),)), nothing)
    do = torch.ones_like(q)
    cases = {
        "with gradients": lambda: plain(*x),
        "with gradients, return_lse=True": lambda: plain(*x, return_lse=True),
        "with gradients, three params, one tensor": lambda: learned(*x, **named),
        "forward and backward": lambda: torch.autograd.grad(plain(*x), x, do),
        "forward and backward, gradient of the tensor too": lambda: torch.autograd.grad(
            learned(*x, **named), (*x, named["bias"]), do
        ),
        "   an autograd.Function that does nothing, forward and backward": lambda: torch.autograd.grad(
            _Nothing.apply(*x), x, do
        ),
        "   torch.empty_like(q), three times": lambda: [torch.empty_like(t) for t in x],
    }
    for name, call in cases.items():
        measure(name, call, 5000)


def measure(name: str, call: Any, number: int) -> None:
    call()
    best = min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6
    print(f"{best:6.2f} us  {name}")


if __name__ == "__main__":
    main()
