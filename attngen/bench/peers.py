"""How each library is called. A peer says why it cannot serve a cell; nothing is emulated.

All peers get the same tensors: q (batch, seqlen_q, heads_q, d), k and v likewise, contiguous in that order. Libraries
that take (batch, heads, seqlen, d) get transposed views, as models give them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attngen.bench.cells import Cell
from attngen.bench.recognize import Features

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """What a peer is asked to run."""

    cell: Cell
    features: Features
    q: Any
    k: Any
    v: Any
    params: dict[str, Any]
    tensors: dict[str, Any]


class Unsupported(Exception):
    """The peer has no word for this case."""


@dataclass(frozen=True)
class Peer:
    """A library: `prepare` gives a call without arguments that returns O as (batch, seqlen_q, heads_q, d_v)."""

    name: str
    what: str
    modules: tuple[str, ...]
    prepare: Callable[[Case], Call]

    def module(self) -> str | None:
        """The first of its modules that is installed."""
        return next((m for m in self.modules if _found(m)), None)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise Unsupported(why)


def _common(case: Case) -> Features:
    f = case.features
    _need(f.plain_output, "normaliser or epilogue")
    _need(f.mask != "other", "mask")
    _need(f.plain_score or f.softcap is not None, "score")
    return f


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _fa3(case: Case) -> Call:
    f = _common(case)
    _need(f.sink is None, "sink")
    module = importlib.import_module(PEERS["fa3"].module() or "flash_attn_interface")
    options: dict[str, Any] = {"softmax_scale": f.scale, "causal": f.mask == "causal"}
    if f.mask == "window" and f.window is not None:
        options["window_size"] = (f.window - 1, 0)
    if f.softcap is not None:
        options["softcap"] = f.softcap
    q, k, v = case.q, case.k, case.v
    return lambda: _first(module.flash_attn_func(q, k, v, **options))


def _fa4(case: Case) -> Call:
    f = _common(case)
    _need(f.sink != "other", "sink")
    module = importlib.import_module("flash_attn.cute")
    options: dict[str, Any] = {"softmax_scale": f.scale, "causal": f.mask == "causal"}
    if f.mask == "window" and f.window is not None:
        options["window_size"] = (f.window - 1, 0)
    if f.softcap is not None:
        options["softcap"] = f.softcap
    if f.sink is not None:
        options["learnable_sink"] = case.tensors[f.sink].to(case.q.dtype)
    q, k, v = case.q, case.k, case.v
    return lambda: _first(module.flash_attn_func(q, k, v, **options))


def _sdpa(backend: str) -> Callable[[Case], Call]:
    def prepare(case: Case) -> Call:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        f = _common(case)
        _need(f.sink is None and f.plain_score, "score or sink")
        _need(f.mask in ("full", "causal"), "window")
        _need(
            f.mask == "full" or case.cell.seqlen_q == case.cell.seqlen_kv,
            "causal with seqlen_q != seqlen_kv is top-left",
        )
        q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
        options = {"is_causal": f.mask == "causal", "scale": f.scale, "enable_gqa": q.shape[1] != k.shape[1]}
        which = getattr(SDPBackend, backend)
        function = torch.nn.functional.scaled_dot_product_attention

        def call() -> Any:
            with sdpa_kernel(which):
                return function(q, k, v, **options).transpose(1, 2)

        return call

    return prepare


def _flex(case: Case) -> Call:
    import torch

    from attngen.bench import flex

    f = case.features
    _need(f.plain_output, "normaliser or epilogue")
    _need(f.sink != "other", "sink")
    # Past its limit of recompilations dynamo falls back to the eager form, which holds all scores: start anew.
    torch.compiler.reset()
    flex.compile_alone()
    return flex.call(case)


#: Every peer by the name that `--peers` takes.
PEERS: dict[str, Peer] = {
    p.name: p
    for p in (
        Peer("fa3", "FlashAttention-3", ("flash_attn_interface", "fa3_fwd_interface"), _fa3),
        Peer("fa4", "FlashAttention-4 (CuTe DSL)", ("flash_attn.cute",), _fa4),
        Peer("cudnn", "cuDNN through torch SDPA", ("torch",), _sdpa("CUDNN_ATTENTION")),
        Peer("fa2", "FlashAttention-2 through torch SDPA", ("torch",), _sdpa("FLASH_ATTENTION")),
        Peer("flex", "FlexAttention, compiled", ("torch",), _flex),
    )
}
