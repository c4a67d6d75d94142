"""Calls that went wrong without a word: `out` over an input, a lost gradient; and names of a wrong type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen import AttnError, build, compile

SPEC = """attn 1
attention a {
  head_dim = 64
  tensor bias: f32[heads_q]
  tensor gate: f32[heads_q] grad
  score = s + bias[h] * gate[h]
}
"""
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")


def arguments() -> tuple[list[Any], dict[str, Any]]:
    return list(torch.zeros(3, 1, 4, 2, 64, dtype=torch.bfloat16)), {"bias": torch.ones(2), "gate": torch.ones(2)}


@pytest.mark.parametrize(("i", "name"), [(0, "q"), (1, "k"), (2, "v")])
def test_out_over_an_input(i: int, name: str) -> None:
    attn = build(SPEC)
    qkv, named = arguments()
    for out in (qkv[i], qkv[i].view_as(qkv[i])):
        with pytest.raises(AttnError, match=f"`out` is the memory of `{name}`") as caught:
            attn(*qkv, **named, out=out)
        assert caught.value.code == "E0616"
    assert attn(*qkv, **named, out=torch.empty_like(qkv[0])).isfinite().all()


def test_out_over_an_input_on_the_short_path() -> None:
    attn = build(SPEC)
    qkv, named = arguments()
    tail = attn.binder.bind(named, qkv[0], qkv[1])
    from attngen.jit import launch
    from attngen.jit.device import DeviceState

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launch, "_current_device", lambda: -1)
        attn.launcher.functions = (lambda *x: None,)
        for x in (*qkv, qkv[1].view_as(qkv[1])):
            with pytest.raises(AttnError, match="E0616"):
                attn.launcher.launch((DeviceState(-1, 132), 132), *qkv, tail, None, x, None, False)


def test_a_gradient_that_would_be_lost() -> None:
    attn = build(SPEC)
    qkv, named = arguments()
    named["bias"].requires_grad_()
    with pytest.raises(AttnError, match=r"`bias` requires gradients, and `a` does not declare it `grad`") as caught:
        attn(*qkv, **named)
    assert caught.value.code == "E0611" and "bias.detach()" in str(caught.value)
    with torch.no_grad():
        attn(*qkv, **named)
    named["bias"] = named["bias"].detach()
    named["gate"].requires_grad_()
    attn(*qkv, **named).sum().backward()
    assert named["gate"].grad is not None


@pytest.mark.parametrize("made", [build, compile])
def test_a_name_that_is_none(made: Any) -> None:
    with pytest.raises(AttnError, match="`name` does not take 3") as caught:
        made(SPEC, name=3)
    assert caught.value.code == "E0503"
