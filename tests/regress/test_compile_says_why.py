"""torch.compile(fullgraph=True) hid a missing tensor behind `super().__init__`: Dynamo cannot trace AttnError."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen import AttnError, build

SPEC = """attn 1
attention a {
  head_dim = 64
  param keys: int >= 1
  tensor bias: f32[heads_q]
  score = s + bias[h]
  mask = q_pos - kv_idx < keys
}
"""
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
BIAS = torch.ones(1)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"keys": 3}, "error[E0602]: `a` needs the tensor `bias`"),
        ({"bias": BIAS}, "error[E0602]: `a` needs the param `keys`"),
        ({"keys": 3, "bias": BIAS, "kez": 3}, "error[E0601]: `a` has no param or tensor `kez`"),
        ({"keys": 2.5, "bias": BIAS}, "error[E0603]: param `keys`"),
    ],
)
def test_the_cause_is_reported(named: dict[str, Any], message: str) -> None:
    attn = build(SPEC)
    q, k, v = torch.zeros(3, 1, 4, 1, 64, dtype=torch.bfloat16)

    def call(q: Any, k: Any, v: Any) -> Any:
        return attn(q, k, v, **named)

    torch._dynamo.reset()
    with pytest.raises(Exception) as caught:
        torch.compile(call, fullgraph=True, backend="eager")(q, k, v)
    assert message in str(caught.value)
    torch._dynamo.reset()
    with pytest.raises(AttnError) as eager:
        torch.compile(call, backend="eager")(q, k, v)
    assert message[:13] in str(eager.value)


def test_gradients() -> None:
    attn = build(SPEC)
    q, k, v = torch.zeros(3, 1, 4, 1, 64, dtype=torch.bfloat16)
    torch._dynamo.reset()
    with pytest.raises(Exception) as caught:
        bias = BIAS.clone().requires_grad_()
        torch.compile(lambda q: attn(q, k, v, keys=3, bias=bias), fullgraph=True, backend="eager")(q)
    assert "E0611" in str(caught.value) and "`bias` requires gradients" in str(caught.value)
