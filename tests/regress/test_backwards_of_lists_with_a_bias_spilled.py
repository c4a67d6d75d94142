"""A bias read at listed keys: steps of 96 and 112 query rows spilled 236 and 516 bytes a thread, those of 64 none."""

from __future__ import annotations

import pytest
from ptxcheck.compile import compile_backward, load_text

from attngen.emit.backward import emit_backward
from attngen.ir.backward import BackwardPlanSet
from attngen.passes.selected import selected_spec
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec
from attngen.verify import machine


def planned(
    q: int, kv: int, dim: int, *, score: str = "s + bias[b, h, q_idx, kv_idx]", learned: bool = False
) -> BackwardPlanSet:
    spec = load_spec(
        f"attn 1\nattention listed {{\n  head_dim = {dim}\n"
        "  tensor bias: f32[batch, heads_q, seqlen_q, seqlen_kv] grad\n  tensor gain: f32[heads_q]\n"
        f"  score = {score}\n  mask = kv_idx <= q_pos\n  block_sparse {{ q = {q}, kv = {kv}, lists = given }}\n}}\n"
    )
    return plan_backward(selected_spec(spec), captured=("bias",) if learned else ())


@pytest.mark.parametrize(
    ("q", "kv", "dim", "learned", "name"),
    [(64, 1, 64, False, "64x128"), (1, 16, 64, False, "64x128"), (64, 1, 64, True, "48x128"),
     (64, 1, 128, False, "48x128"), (1, 16, 128, True, "48x128"), (1, 16, 96, False, "64x128"),
     (64, 1, 256, False, "64x2x64")],
)  # fmt: skip
def test_steps_are_short(q: int, kv: int, dim: int, learned: bool, name: str) -> None:
    assert planned(q, kv, dim, learned=learned).plans[0].name == name


def test_what_no_key_is_looked_up_for_keeps_its_step() -> None:
    assert planned(64, 1, 64, score="s * gain[h]").plans[0].name == "96x128"


@pytest.mark.dsl
@pytest.mark.skipif(machine.tool("ptxas") is None, reason="needs the development tools: pip install 'attngen[dev]'")
def test_machine_code() -> None:
    plans = planned(64, 1, 64)
    code = compile_backward(load_text(emit_backward(plans).text, "listed")).machine_code
    assert (code.spill_bytes, code.stack_bytes, code.serialized) == (0, 0, ())
