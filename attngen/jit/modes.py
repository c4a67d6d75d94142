"""What a call is under: Dynamo, functorch, dispatch modes, autocast, forward-mode differentiation. Asked in every call:
torch's own functions, by names of their own.
"""

from __future__ import annotations

from typing import Any

import torch

is_dynamo = torch.compiler.is_dynamo_compiling
grad_enabled = torch.is_grad_enabled
dispatch_modes = torch._C._len_torch_dispatch_stack
functorch_level = torch._C._functorch.peek_interpreter_stack
any_autocast = torch._C._is_any_autocast_enabled
forward_ad = torch.autograd.forward_ad


def is_dual(*given: Any) -> bool:
    """Whether forward-mode differentiation goes through a tensor: a kernel would drop its tangent in silence."""
    if forward_ad._current_level < 0:
        return False
    unpack: Any = forward_ad.unpack_dual
    return any(unpack(x).tangent is not None for x in given if isinstance(x, torch.Tensor))


def learns(*given: torch.Tensor) -> bool:
    """Whether a gradient of one of them is asked for, or torch traces the call."""
    return is_dynamo() or (grad_enabled() and any(x.requires_grad for x in given))
