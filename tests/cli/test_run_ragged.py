"""`attngen run` of ragged layouts: every execution beside the dense meaning of each sequence."""

from __future__ import annotations

import pytest
import torch

from attngen import samples
from attngen.cli import ragged
from attngen.cli.numeric import verify_spec
from attngen.syntax import load_spec

SPEC = """attn 1
"A mask and a score that know the sequence."
attention known {{
  head_dim = 16
  layout = {layout}
  tensor reach: i32[batch]
  tensor bias: f32[heads_q, seqlen_kv]
  score = s + bias[h, kv_idx]
  mask = kv_idx <= q_pos + reach[b]
}}
"""


def test_outcomes() -> None:
    for layout in ("varlen", "padded"):
        spec = load_spec(SPEC.format(layout=layout))
        outcomes = verify_spec(spec, samples.Shape(3, 4, 2, 30, 70), {}, target="sm_90a", with_gpu=False)
        assert len(outcomes) >= 2 and outcomes[0].what == "CPU reference" and outcomes[1].what.startswith("plan")
        assert not [o for o in outcomes if o.failed or o.skipped], outcomes


SEVERAL = {
    "branches": """branch one {
    weight = 1.0
  }
  branch two {
    weight = float(b + 1)
    mask = kv_idx <= q_pos
  }""",
    "segments": """mask = kv_idx <= q_pos
  segment past {
    mask = q_pos - kv_idx < 9 + b
  }""",
    "lists of a row": """mask = kv_idx <= q_pos
  block_sparse { q = 1, kv = 4, lists = given }""",
    "lists of keys": """mask = q_pos - kv_idx < 9 + b
  block_sparse { q = 8, kv = 1, lists = given }""",
    "other keys": """tensor mark: i32[AXES]
  mask = kv_idx <= q_pos
  segment past {
    mask = kv_idx < 1 and mark[AT] < 40 and seqlen_q > 0
  }""",
    "view": """v = k[0:8]
  mask = kv_idx <= q_pos""",
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_kernels_and_views(name: str) -> None:
    for layout in ("varlen", "padded"):
        body = f"head_dim = 16\n  layout = {layout}\n  {SEVERAL[name]}\n  output {{ dtype = f32 }}"
        axes, at = ("seqlen_kv", "q_idx // 100") if layout == "varlen" else ("batch, seqlen_kv", "b, q_idx // 100")
        body = body.replace("AXES", axes).replace("AT", at)
        spec = load_spec(f"attn 1\nattention several {{\n  {body}\n}}\n")
        outcomes = verify_spec(spec, samples.Shape(3, 4, 2, 30, 70), {}, target="sm_90a", with_gpu=False)
        assert len(outcomes) >= 2 and not [o for o in outcomes if o.failed or o.skipped], outcomes


def test_what_belongs_to_no_sequence_is_nan() -> None:
    spec = load_spec(SPEC.format(layout="varlen"))
    made = ragged.call(spec, samples.Shape(3, 4, 2, 30, 70), 5)
    (q, k, _), lengths, tensors = made.qkv, made.lengths, made.tensors
    assert len(lengths["cu_seqlens_q"]) == 4 and lengths["cu_seqlens_q"].dtype == torch.int32
    for x, n in zip((q, k), lengths.values(), strict=True):
        end = int(n[-1])
        assert x.shape[0] > end and x[:end].isfinite().all() and x[end:].isnan().all()
    assert tensors["bias"].shape == (4, k.shape[0]) and tensors["reach"].shape == (3,)
