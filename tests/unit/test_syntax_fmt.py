"""`attngen fmt`: its layout, pinned on the language's own examples, and what happens to comments and blank lines."""

from __future__ import annotations

import pytest

from attngen import resources
from attngen.diag.diagnostic import AttnError
from attngen.syntax import format_text, load_all, load_spec

CANONICAL = [
    """attn 1

"Causal attention; query heads share KV heads as the tensors say."
attention causal {
  head_dim = 128
  mask     = kv_idx <= q_pos
}
""",
    """attn 1

"GPT-OSS local layer: the last `window` keys and one learned sink per query head."
attention gpt_oss_local {
  head_dim = 64
  param  window: int = 128                # keys visible, the query's own included
  tensor sinks: f32[heads_q] grad
  mask = kv_idx <= q_pos and q_pos - kv_idx < window
  sink = sinks[h]
  backward { deterministic = true }
}
""",
    """attn 1
include "std.attn"                        # named masks and scores

"Gemma 2 local layer."
attention gemma2_local {
  head_dim = 256
  scale    = 1 / 16
  param cap: float = 50.0
  param keys: int = 4096
  score = softcap(s, cap)
  mask  = causal and window(keys)
}

"Packed documents, DeepSeek head dims, tuned by hand."
attention packed_mla {
  head_dim = 192, v = 128
  tensor doc: i32[batch, seqlen_kv] sorted
  mask = causal and doc[b, q_pos] == doc[b, kv_idx]
  block_sparse { q = 128, kv = 128 }      # lists computed from the mask; `lists = given` takes the caller's
  schedule { tile = 128 x 128, order = lpt, cluster = 2 x 1, stages = 2 }
  target = sm_90a, sm_100a
}
""",
]


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_text_stays_as_it_is(text: str) -> None:
    assert format_text(text) == text
    assert load_all(text)


def test_layout() -> None:
    messy = """# file
attn   1
def  f( x:int>=1,y ) =x+ y*(2)   # sum


def g=((kv_idx))
attention   a   extends  base{head_dim=64}


attention base # trailing of the head
{ # first


  head_dim=64,v=32
  # own line

  scale=(1/16)  # why
  let  d1 = q_pos-kv_idx
  let distance2=  d1*d1   # squared

  mask=((kv_idx<=q_pos))and not(f(d1,3)<(-(2))) # mask
  branch  one{weight=1.0
  # about the mask
  mask=true}
  branch two { }
  schedule{tile=128x128,order=lpt # best
   stages=2,}
  output{}
  # last
}
# end
"""
    assert (
        format_text(messy)
        == """# file
attn 1
def f(x: int >= 1, y) = x + y * 2         # sum

def g = kv_idx

attention a extends base {
  head_dim = 64
}

# trailing of the head
attention base {                          # first
  head_dim = 64, v = 32
  # own line

  scale = 1 / 16                          # why
  let d1        = q_pos - kv_idx
  let distance2 = d1 * d1                 # squared

  mask = kv_idx <= q_pos and not f(d1, 3) < -(2) # mask
  branch one {
    weight = 1.0
    # about the mask
    mask   = true
  }
  branch two {
  }
  schedule {
    tile   = 128 x 128
    order  = lpt                                  # best
    stages = 2
  }
  output {}
  # last
}
# end
""".replace("-(2) # mask", "-(2)  # mask")
    )


def test_long_expressions_break_at_their_loosest_operator() -> None:
    terms = [f"kv_idx // 128 == q_pos // 128 + {i} and kv_idx % 2 == 0" for i in range(3)]
    once = format_text(f"attn 1\nattention a {{\n head_dim = 64\n mask = {' or '.join(terms)} # why\n}}\n")
    assert once == (
        "attn 1\n\nattention a {\n  head_dim = 64\n"
        f"  mask     = {terms[0]}\n             or {terms[1]}\n             or {terms[2]}  # why\n}}\n"
    )
    assert format_text(once) == once


def test_comments_inside_an_expression_move_before_their_clause() -> None:
    text = "attn 1\nattention a {\n  head_dim = 64 # d\n  mask = kv_idx # one\n    <= # two\n    q_pos # three\n}\n"
    assert format_text(text) == (
        "attn 1\n\nattention a {\n  head_dim = 64                           # d\n  # one\n  # two\n"
        "  mask     = kv_idx <= q_pos              # three\n}\n"
    )


def test_syntax_errors_are_reported() -> None:
    with pytest.raises(AttnError) as caught:
        format_text("attn 1\nattention a { maks = true }\n", name="x.attn")
    assert caught.value.code == "E0103" and "x.attn:2:15" in str(caught.value)


def test_meaning_is_no_business_of_the_formatter() -> None:
    assert format_text("attn 1\nattention a { mask = unknown }\n") == "attn 1\n\nattention a {\n  mask = unknown\n}\n"


def test_files_that_ship_are_canonical() -> None:
    root = resources.root()
    for path in [root / "grammar" / "std.attn"]:
        text = path.read_text(encoding="utf-8")
        assert format_text(text) == text, path
    assert load_spec('attn 1\ninclude "std.attn"\nattention a { head_dim = 64 }\n').name == "a"
