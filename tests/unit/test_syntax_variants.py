"""Attention variants that models and papers use, each said in the language, loaded, printed back and formatted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from attngen.syntax import check_text, format_text, load_spec, print_spec

#: Body of the attention block by variant; `head_dim` stands in it.
VARIANTS = {
    "qwen3_next_gate": """
  head_dim = 256
  tensor gate: bf16[batch, seqlen_q, heads_q, head_dim_v] grad
  mask     = causal
  epilogue = gated(o, gate)
""",
    "mla_decode": """
  head_dim = 576
  v        = k[0:512]
  layout   = paged
  scale    = mscale * mscale / sqrt(192.0)
  param mscale: float = 1.37
  mask = causal
  schedule { split_kv = 8, pack_gqa = 8 }
""",
    "longformer": """
  head_dim = 64
  param  half: int >= 0 = 256
  tensor marks: bool[batch, seqlen_kv]
  mask = band(half) or global_tokens(marks)
""",
    "bigbird": """
  head_dim = 64
  let row    = q_pos // 64
  let column = kv_idx // 64
  mask = abs(row - column) <= 1 or column == 0 or column == (seqlen_kv - 1) // 64
  block_sparse { q = 64, kv = 64, lists = given }
""",
    "natten_2d": """
  head_dim = 32
  param  height: int >= 1 = 56
  param  width: int >= 1 = 56
  mask = neighborhood_2d(width, height, 3)
""",
    "natten_dilated_1d": """
  head_dim = 64
  param  dilation: int >= 1 = 2
  let center = clamp(q_pos // dilation, 3, (seqlen_kv - 1) // dilation - 3)
  mask = kv_idx % dilation == q_pos % dilation and abs(kv_idx // dilation - center) <= 3
""",
    "alibi_any_head_count": """
  head_dim = 128
  tensor slopes: f32[heads_q]
  score = alibi(s, slopes[h])
  mask  = causal
""",
    "t5": """
  head_dim = 64
  scale    = 1.0
  tensor table: f32[32, heads_q] grad
  score = s + table[t5_bucket_two_sided(32, 128), h]
""",
    "swin_shifted": """
  head_dim = 32
  tensor table: f32[169, heads_q] grad
  tensor region: i32[windows, seqlen_kv]
  let dy = q_idx // 7 - kv_idx // 7
  let dx = q_idx % 7 - kv_idx % 7
  score = s + table[(dy + 6) * 13 + dx + 6, h]
  mask  = region[b % 64, q_idx] == region[b % 64, kv_idx]
""",
    "evoformer_row": """
  head_dim = 32
  tensor pair: f32[1, heads_q, seqlen_q, seqlen_kv] grad
  tensor present: bool[batch, seqlen_kv]
  tensor gate: f32[batch, seqlen_q, heads_q, head_dim_v] grad
  score    = s + pair[0, h, q_idx, kv_idx]
  mask     = key_mask(present)
  epilogue = gated(o, gate)
""",
    "forgetting": """
  head_dim = 64
  tensor f: f32[batch, heads_q, seqlen_kv] grad
  score = forgetting(s, f)
  mask  = causal
""",
    "sigmoid_attention": """
  head_dim = 64
  score      = s - log(float(seqlen_kv))
  normalizer = sigmoid
""",
    "off_by_one": """
  head_dim = 64
  mask     = causal
  sink     = 0.0
""",
    "sink_per_token": """
  head_dim = 64
  tensor sinks: f32[batch, heads_q, seqlen_q] grad
  mask = causal
  sink = sinks[b, h, q_idx]
""",
    "differential": """
  head_dim = 64, v = 128
  tensor lam: f32[heads_q] grad
  mask = causal
  branch positive {
  }
  branch negative {
    weight = -lam[h]
  }
""",
    "native_sparse": """
  head_dim = 192, v = 128
  tensor gates: f32[batch, seqlen_q, heads_q, 2] grad
  branch local {
    mask   = causal and window(512)
    weight = sigmoid(gates[b, q_idx, h, 0])
  }
  branch chosen {
    mask   = causal and kv_idx // 64 == q_pos // 64
    weight = sigmoid(gates[b, q_idx, h, 1])
  }
""",
    "packed_documents": """
  head_dim = 128
  tensor doc: i32[batch, seqlen_kv] sorted
  layout = varlen
  mask   = causal and document(doc)
""",
    "prefix_lm": """
  head_dim = 256
  tensor lengths: i32[batch]
  mask = causal or prefix(lengths[b])
""",
    "block_diffusion": """
  head_dim = 64
  param half: int >= 1
  param size: int >= 1 = 16
  mask = block_diffusion(half, size)
""",
    "tree_verification": """
  head_dim = 128
  param  verified: int >= 0
  tensor ancestors: bool[seqlen_q, seqlen_q]
  layout = paged
  mask   = tree(verified, ancestors)
""",
    "cascade_decode": """
  head_dim = 128
  mask     = kv_idx <= q_pos
  segment shared {
    mask = true
  }
""",
    "ring_step": """
  head_dim = 128
  param q_start: int >= 0
  param kv_start: int >= 0
  mask = causal_shards(q_start, kv_start)
  output { dtype = f32 }
""",
    "seqused_decode": """
  head_dim = 128
  tensor lengths: i32[batch]
  layout = padded
  mask   = key_length(lengths[b]) and lengths[b] - kv_idx <= 4096
""",
    "temperature_per_row": """
  head_dim = 64
  tensor temperature: f32[batch, seqlen_q] grad
  score = s * temperature[b, q_idx] if q_pos > 0 else s
  mask  = causal
  output { max_logit = true }
  backward { deterministic = true }
""",
}


def text(name: str) -> str:
    return f'attn 1\ninclude "std.attn"\n\nattention {name} {{{VARIANTS[name]}}}\n'


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str) -> None:
    assert check_text(text(name)) == []
    spec = load_spec(text(name))
    assert spec.name == name
    assert load_spec(print_spec(spec)) == spec
    assert format_text(print_spec(spec)) == print_spec(spec)
    assert load_spec(format_text(text(name))) == spec


def test_many_threads_at_once() -> None:
    wanted = {name: load_spec(text(name)) for name in VARIANTS}
    with ThreadPoolExecutor(8) as pool:
        names = list(VARIANTS) * 6
        found = list(pool.map(lambda n: load_spec(text(n)), names))
    assert all(
        spec == wanted[name] and spec.mask.span == wanted[name].mask.span
        for name, spec in zip(names, found, strict=True)
    )
