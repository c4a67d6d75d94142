"""FlashAttention-4's own kernels as inputs of the checker, cross-compiled without a GPU.

The package is a test-only dependency (extra `fa4`). Its Python interface runs twice: under torch's FakeTensorMode,
where it only compiles, and on CPU tensors, where every compiled function that it calls goes to `launch` instead of a
GPU. So shapes of workspaces, order of launches and arguments are FlashAttention-4's own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ptxcheck.compile import OPTIONS, Code, code_of

# (stage, compiled function, its arguments): "forward", "preprocess", "backward" or "postprocess".
Launch = Callable[[str, Code, tuple[Any, ...]], None]

_STAGES = {
    "_flash_attn_fwd": "forward",
    "_bwd_preprocess": "preprocess",
    "_flash_attn_bwd": "backward",
    "_bwd_postprocess_convert": "postprocess",
}
# Compiled functions of each target and stage: the keys of FlashAttention-4's caches do not all name the target.
_COMPILED: dict[tuple[str, str], dict[Any, Code]] = {}


class OnDevice(torch.Tensor):
    """A CPU tensor that passes FlashAttention-4's check for CUDA tensors."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


VERSION = "4.0.0b36"


@lru_cache(maxsize=1)
def missing() -> str:
    """Why FlashAttention-4 cannot be used here; empty if it can."""
    try:
        found = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return f"flash-attn-4 is not installed: the extra `fa4` has it (version {VERSION})"
    if found != VERSION:
        return f"flash-attn-4 {found} is installed, and what is known of its kernels is about {VERSION}"
    for name in ("quack", "einops"):
        if importlib.util.find_spec(name) is None:
            return f"flash-attn-4 needs the package {name}: install the extra `fa4`"
    return ""


@lru_cache(maxsize=1)
def _interface() -> Any:
    """The module flash_attn.cute.interface. The package `quack` is entered without running its `__init__`, which wants
    triton for parts that attention does not use."""
    if "quack" not in sys.modules:
        spec = importlib.util.find_spec("quack")
        assert spec is not None and spec.submodule_search_locations is not None
        package = types.ModuleType("quack")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["quack"] = package
        importlib.import_module("quack.dsl")
    return importlib.import_module("flash_attn.cute.interface")


@lru_cache(maxsize=1)
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Where the DSL dumps what it was asked to keep."""
    return tempfile.TemporaryDirectory(prefix="ptxcheck-fa4-", ignore_cleanup_errors=True)


class _Cache:
    """Stands where FlashAttention-4 keeps compiled functions; what it gives back to be called is `launch`."""

    def __init__(self, arch: str, stage: str, launch: Launch) -> None:
        self.functions = _COMPILED.setdefault((arch, stage), {})
        self.stage, self.launch = stage, launch

    def __contains__(self, key: Any) -> bool:
        return key in self.functions

    def __setitem__(self, key: Any, function: Any) -> None:
        self.functions[key] = code_of(function)

    def __getitem__(self, key: Any) -> Callable[..., None]:
        function = self.functions[key]
        return lambda *args: self.launch(self.stage, function, args)


@contextmanager
def _target(arch: str, sms: int, clc: bool, launch: Launch) -> Iterator[Any]:
    """FlashAttention-4's interface, set to compile for `arch` with PTX and line information kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interface = _interface()
        from cutlass.base_dsl.arch import Arch
        from cutlass.cutlass_dsl import BaseDSL
        from cutlass.utils import HardwareInfo
        from flash_attn.cute import utils

        cute, target = interface.cute, Arch.from_string(arch)
        compile_as_is = cute.compile

        def compile_for_target(*args: Any, options: str = "", **named: Any) -> Any:
            extra = f" --gpu-arch {arch} {OPTIONS} --dump-dir {_scratch().name}"
            return compile_as_is(*args, options=options + extra, **named)

        with ExitStack() as stack:
            enter = stack.enter_context
            enter(patch.dict(os.environ, FLASH_ATTENTION_ARCH=arch.rstrip("af"), FLASH_ATTENTION_NUM_SMS=str(sms)))
            enter(patch.object(cute, "compile", compile_for_target))
            enter(patch.object(type(BaseDSL._get_dsl()), "get_arch_enum", lambda self: target))
            enter(patch.object(HardwareInfo, "__init__", lambda self, *args, **named: None))
            enter(patch.object(HardwareInfo, "get_device_multiprocessor_count", lambda self: sms))
            enter(patch.object(utils, "_fa_clc_enabled", clc))
            for function, stage in _STAGES.items():
                enter(patch.object(getattr(interface, function), "compile_cache", _Cache(arch, stage, launch)))
            interface._get_device_arch.cache_clear()
            stack.callback(interface._get_device_arch.cache_clear)
            yield interface


def _fake(t: Any) -> Any:
    return torch.empty(t.shape, dtype=t.dtype, device="cuda") if isinstance(t, torch.Tensor) else t


def _real(t: Any) -> Any:
    return t.as_subclass(OnDevice) if isinstance(t, torch.Tensor) else t


def _twice(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Compile on fake tensors, then run on the real ones."""
    with FakeTensorMode():
        call(*map(_fake, args), **{k: _fake(v) for k, v in named.items()})
    return call(*map(_real, args), **{k: _real(v) for k, v in named.items()})


def forward(
    arch: str,
    launch: Launch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    lengths: torch.Tensor | None = None,
    sms: int = 4,
    clc: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp. `q, k, v` are (batch, sequence, heads, d); with `lengths` (cumulative, int32) they are
    (tokens, heads, d). `clc`: the forward of sm_100a takes its tiles by cluster launch control."""
    with _target(arch, sms, clc, launch) as interface:
        out, lse, *_ = _twice(interface._flash_attn_fwd, q, k, v, causal=causal, return_lse=True, **_ragged(lengths))
    return out.as_subclass(torch.Tensor), lse.as_subclass(torch.Tensor)


def backward(
    arch: str,
    launch: Launch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    lengths: torch.Tensor | None = None,
    sms: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v: preprocess, main kernel, postprocess."""
    with _target(arch, sms, False, launch) as interface:
        grads = _twice(interface._flash_attn_bwd, q, k, v, out, dout, lse, causal=causal, **_ragged(lengths))
    dq, dk, dv = (g.as_subclass(torch.Tensor) for g in grads[:3])
    return dq, dk, dv


def _ragged(lengths: torch.Tensor | None) -> dict[str, Any]:
    if lengths is None:
        return {}
    longest = int(lengths.diff().max())
    return {
        "cu_seqlens_q": lengths,
        "cu_seqlens_k": lengths,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
