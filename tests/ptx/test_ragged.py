"""Ragged forwards executed by the checker: lengths that differ, zero lengths, NaN in what belongs to nobody."""

from __future__ import annotations

import pytest
import torch
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call
from ragged_calls import Call

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.ref import ragged
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl

LOCAL = """attn 1
"A window, sinks, a bias over packed keys, a temperature for each sequence."
attention ragged_local {{
  head_dim = 64
  layout = {layout}
  param window: int >= 1 = 50
  tensor sinks: f32[heads_q]
  tensor bias: f32[heads_q, seqlen_kv]
  tensor gain: f32[batch]
  score = s * gain[b] + bias[h, kv_idx]
  mask = kv_idx <= q_pos and q_pos - kv_idx < window
  sink = sinks[h]
}}
"""
PLAIN = {
    "full": "attn 1\nattention full {{\n  head_dim = 64\n  layout = {layout}\n}}\n",
    "causal": "attn 1\nattention causal {{\n  head_dim = 128\n  layout = {layout}\n  mask = kv_idx <= q_pos\n}}\n",
    "longformer": """attn 1
attention longformer {{
  head_dim = 64
  layout = {layout}
  mask = abs(q_pos - kv_idx) <= 20 or kv_idx < 3
}}
""",
    "gated": """attn 1
attention gated {{
  head_dim = 64, v = 72
  layout = {layout}
  tensor gate: f32[seqlen_q, heads_q]
  mask = kv_idx <= q_pos
  epilogue = o * sigmoid(gate[q_idx, h]) + 1.0
}}
""",
    "wide": """attn 1
attention wide {{
  head_dim = 64
  layout = {layout}
  tensor gate: f32[batch, heads_q]
  score = s + 0.01 * float(kv_idx)
  mask = kv_idx <= q_pos
  epilogue = o * gate[b, h] + 0.5
  output {{ dtype = f32, max_logit = true }}
}}
""",
    "sigmoid": """attn 1
attention sigmoid_ragged {{
  head_dim = 64
  layout = {layout}
  normalizer = sigmoid
  score = s - log(float(max(seqlen_kv, 1)))
  mask = kv_idx <= q_pos
  output {{ max_logit = true }}
}}
""",
    "documents": """attn 1
attention documents {{
  head_dim = 64
  layout = {layout}
  tensor doc: i32[seqlen_kv] sorted
  mask = kv_idx <= q_pos and doc[max(q_pos, 0)] == doc[kv_idx]
}}
""",
    "times": """attn 1
attention times {{
  head_dim = 64
  layout = {layout}
  tensor when: i32[batch, 300] sorted
  tensor upto: i32[batch, heads_q]
  mask = when[b, kv_idx] <= upto[b, h]
}}
""",
    "relu": "attn 1\nattention relu_ragged {{\n  head_dim = 64\n  layout = {layout}\n  normalizer = relu\n}}\n",
}
#: Fewer and more keys than rows, no rows, no keys, neither; past a tile's end and on it.
BATCHES = [
    [(131, 70), (0, 7), (5, 0), (0, 0), (33, 200), (64, 64)],
    [(1, 1)],
    [(0, 0), (0, 3), (2, 0)],
    [(270, 140), (64, 128)],
]


def spec_of(text: str, layout: str) -> AttentionSpec:
    return load_spec(text.format(layout=layout))


@pytest.mark.parametrize("layout", ["varlen", "padded"])
@pytest.mark.parametrize("name", ["local", *PLAIN])
def test_values(name: str, layout: str) -> None:
    spec = spec_of(LOCAL if name == "local" else PLAIN[name], layout)
    module, _ = compile_spec(spec)
    batches = BATCHES if name == "local" else [[(70, 66), (0, 7), (5, 0), (33, 130)]]
    assert name not in ("documents", "times") or module.ATTN_META["tables"]
    for seed, lengths in enumerate(batches):
        heads = (4, 2) if seed == 1 else (2, 1)
        call = Call(spec, lengths, heads, tail=seed % 2 * 70 + 2, extent=(271, 202), seed=seed)
        if name == "documents":  # ids begin anew in each sequence: sorted there, and not over all
            held = ragged.sequences(spec, *call.qkv[:2], call.lengths)
            for s in held if layout == "varlen" else []:
                call.tensors["doc"][s.keys] = torch.arange(s.keys.stop - s.keys.start, dtype=torch.int32) // 20
        call.verify(module, seed=seed, workers=(3, 1, 2, 40)[seed])


def test_many_sequences() -> None:
    """More than the lanes of a warp, twice over: ranks are searched for in steps."""
    spec = spec_of(PLAIN["full"], "varlen")
    module, _ = compile_spec(spec)
    g = torch.Generator().manual_seed(3)
    lengths = [(int(m), int(n)) for m, n in torch.randint(0, 5, (40, 2), generator=g)]
    Call(spec, lengths, (1, 1)).verify(module)


def test_last_plan() -> None:
    spec = spec_of(PLAIN["causal"], "varlen")
    module, _ = compile_spec(spec)
    last = len(module.PLANS) - 1
    compile_spec(spec, last)
    Call(spec, [(10, 300), (200, 200), (0, 9)]).verify(module, last)


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_bits_are_those_of_one_call_a_sequence(layout: str) -> None:
    """Same tiles, same numbers: a sequence's rows and keys end where those of a call of its own would."""
    spec = spec_of(PLAIN["causal"], layout)
    module, _ = compile_spec(spec)
    call = Call(spec, [(131, 70), (66, 210)], extent=(140, 220))
    o, lse = call.verify(module)
    dense_spec = spec.replace(layout=Layout.BSHD)
    dense_module, _ = compile_spec(dense_spec)
    q, k, v = call.qkv
    for b, (rows, keys) in enumerate([(slice(0, 131), slice(0, 70)), (slice(131, 197), slice(70, 280))]):
        if layout == "varlen":
            alone = [q[rows][None], k[keys][None], v[keys][None]]
            ours, ours_lse = o[rows][None], lse[:, rows][None]
        else:
            m, n = rows.stop - rows.start, keys.stop - keys.start
            alone = [q[b : b + 1, :m], k[b : b + 1, :n], v[b : b + 1, :n]]
            ours, ours_lse = o[b : b + 1, :m], lse[b : b + 1, :, :m]
        want, want_lse, _ = attngen_call(dense_module, 0, *alone)
        assert torch.equal(ours, want) and torch.equal(ours_lse, want_lse)


@pytest.mark.parametrize("broken", [[0, 90, 30, 999], [-5, 2**31 - 1, -(2**31), 7]])
@pytest.mark.parametrize("text", [LOCAL, PLAIN["documents"]], ids=["local", "documents"])
def test_broken_starts_reach_nothing_else(text: str, broken: list[int]) -> None:
    """Without `check=True` starts that cannot be are held within the tensors: no stray access, no hang."""
    spec = spec_of(text, "varlen")
    module, _ = compile_spec(spec)
    call = Call(spec, [(40, 40), (50, 50), (10, 10)])
    call.lengths["cu_seqlens_q"] = torch.tensor(broken, dtype=torch.int32)
    _, _, report = call.run(module, collect=10**6, workers=1)
    assert {f.kind for f in report.faults} <= {"race"}, str(report)  # sequences that overlap write the same rows


def test_broken_lengths_reach_nothing_else() -> None:
    spec = spec_of(LOCAL, "padded")
    module, _ = compile_spec(spec)
    call = Call(spec, [(40, 40), (50, 50)], extent=(60, 70))
    call.lengths = {"seqused_q": torch.tensor([-7, 2**31 - 1]).int(), "seqused_kv": torch.tensor([99, -1]).int()}
    _, _, report = call.run(module)
    assert not report.faults
