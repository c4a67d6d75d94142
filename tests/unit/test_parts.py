"""Specs of several kernels: the parts, what each declares, the formula that puts them together, what is refused."""

from __future__ import annotations

import pytest

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.ir.expr import Atom
from attngen.ir.types import DType
from attngen.passes.parts import formula, is_composed, kernel_spec, parts, pick
from attngen.passes.serves import served_parts, why_not
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec, print_expr, print_spec

BRANCHES = """attn 1
attention two {
  head_dim = 64, v = 128
  param temperature: float = 1.0
  param window: int >= 1 = 9
  tensor lam: f32[heads_q] grad
  tensor bias: f32[heads_q, seqlen_q, seqlen_kv] grad
  tensor gate: f32[batch, heads_q, seqlen_q] grad
  scale    = 0.125 * temperature
  mask     = kv_idx <= q_pos
  epilogue = o * gate[b, h, q_idx]
  branch whole {
    score = s + bias[h, q_idx, kv_idx]
  }
  branch near {
    mask   = q_pos - kv_idx < window
    sink   = 0.0
    weight = -lam[h]
  }
}
"""
SEGMENTS = """attn 1
"A cache before the call's own keys."
attention cache {
  head_dim = 64
  layout   = LAYOUT
  tensor doc: i32[batch, seqlen_kv]
  tensor kind: i32[batch, seqlen_kv]
  tensor sinks: f32[heads_q] grad
  mask = kv_idx <= q_pos and doc[b, kv_idx] > 0
  sink = sinks[h]
  segment past {
    mask = kv_idx < kind[b, 0]
  }
  segment main {
    score = 2.0 * s
  }
}
"""


def test_branches() -> None:
    spec = load_spec(BRANCHES)
    first, second = parts(spec)
    assert (first.name, second.name) == ("whole", "near") and is_composed(spec)
    assert (first.spec.name, second.spec.name) == ("two_whole", "two_near")
    assert [t.name for t in first.spec.tensors] == ["bias"] and second.spec.tensors == ()
    assert [p.name for p in first.spec.params] == ["temperature"], "the scale reads it"
    assert [p.name for p in second.spec.params] == ["temperature", "window"]
    for p in (first, second):
        assert not p.spec.branches and isinstance(p.spec.epilogue, Atom) and p.spec.scale == spec.scale
        assert load_spec(print_spec(p.spec)) == p.spec, "a part is a spec like any other"
    assert second.spec.sink is not None and first.spec.sink is None
    assert print_expr(second.spec.mask) == "q_pos - kv_idx < window"
    assert formula(spec) == "O = (1.0) O_whole + (-lam[h]) O_near"


def test_segments() -> None:
    """The sink joins the first part alone; tensors over the call's own keys keep their length elsewhere."""
    spec = load_spec(SEGMENTS.replace("LAYOUT", "bshd"))
    own, past, other = parts(spec)
    assert [p.name for p in (own, past, other)] == ["main_", "past", "main"], "a segment may be called main"
    assert own.spec.sink == spec.sink and past.spec.sink is None and other.spec.sink is None
    assert [(t.name, t.dims) for t in own.spec.tensors] == [("doc", ("batch", "seqlen_kv")), ("sinks", ("heads_q",))]
    assert [(t.name, t.dims) for t in past.spec.tensors] == [("kind", ("batch", "seqlen_kv_main"))]
    assert print_expr(other.spec.score) == "2.0 * s"
    assert own.spec.doc.startswith("A cache before the call's own keys.\n")
    assert formula(spec).endswith("LSE = log(exp(LSE_main_) + exp(LSE_past) + exp(LSE_main))")
    for p in parts(spec):
        assert plan(p.spec).plans


def test_given_blocks_and_fp32() -> None:
    """Blocks are over the call's own keys, in every branch; parts of an fp32 output are fp32."""
    clause = "bshd\n  block_sparse { q = 64, kv = 64, lists = given }\n  output { dtype = f32 }"
    own, past, _ = parts(load_spec(SEGMENTS.replace("LAYOUT", clause)))
    assert own.spec.block_sparse is not None and "blocks" in {t.name for t in own.spec.tensors}
    assert past.spec.block_sparse is None and {p.spec.out_dtype for p in (own, past)} == {DType.F32}
    text = BRANCHES.replace("  mask     =", "  block_sparse { q = 64, kv = 64, lists = given }\n  mask =", 1)
    both = parts(load_spec(text))
    assert all(p.spec.block_sparse is not None and "blocks" in {t.name for t in p.spec.tensors} for p in both)


def test_one_kernel_is_itself() -> None:
    spec = load_spec("attn 1\nattention one {\n  head_dim = 64\n}\n")
    assert kernel_spec(spec) is spec and [(p.name, p.spec) for p in parts(spec)] == [("one", spec)]
    assert pick(spec, None).spec is spec and served_parts(spec, "sm_90a", "one")[0].spec is spec


def test_packed_segments_are_slices_in_every_part() -> None:
    spec = load_spec(SEGMENTS.replace("LAYOUT", "packed_qkv"))
    assert {p.spec.layout.value for p in parts(spec)} == {"bshd"} and not why_not(spec, "sm_90a")


def test_asking_for_one_of_several() -> None:
    spec = load_spec(BRANCHES)
    for ask in (plan, plan_backward, lambda s: pick(s, None), attngen.compile):
        with pytest.raises(AttnError, match=r"E0404.*\n(.*\n)*.*O = \(1.0\) O_whole \+ \(-lam\[h\]\) O_near"):
            ask(spec)
    with pytest.raises(AttnError, match=r"E0405.*no part `far`(.*\n)*.*whole, near"):
        attngen.compile(spec, part="far")
    with pytest.raises(AttnError, match=r"E0405(.*\n)*.*one kernel serves it"):
        attngen.compile("attn 1\nattention one {\n  head_dim = 64\n}\n", part="far")
    source = attngen.compile(spec, part="near")
    assert source.meta["name"] == "two_near" and "One branch of two" in source.text
    text = attngen.explain(spec)
    assert text.startswith("two: 2 kernels") and "two_whole for sm_90a" in text and "two_near for sm_90a" in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (SEGMENTS.replace("LAYOUT", "paged"), "layout paged with KV segments"),
        (BRANCHES.replace("v = 128", "v = 264"), "v = 264"),
    ],
)
def test_what_is_refused(changed: str, words: str) -> None:
    with pytest.raises(AttnError, match="E0402") as fault:
        attngen.compile(changed)
    messages = [d.message for d in fault.value.diagnostics]
    assert any(words in m for m in messages) and len(messages) == len({*messages})
