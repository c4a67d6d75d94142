"""Documents over listed keys: a position in the lists was looked for by a table of positions in the documents, which
nothing filled. The kernel did not trace: no attribute `doc_first`.
"""

from __future__ import annotations

import pytest

import attngen
from attngen.ir.expr import tensors_of
from attngen.ir.tables import Table
from attngen.passes.mask_form import mask_form
from attngen.passes.selected import selected_spec
from attngen.syntax import load_spec

TEXT = """attn 1
include "std.attn"
attention a {
  head_dim = 64
  tensor doc: i32[batch, seqlen_kv] sorted
  tensor marks: bool[batch, seqlen_kv]
  mask = MASK
  block_sparse { q = 1, kv = 64, lists = given }
}
"""
MASKS = (
    "causal and document(doc)",
    "causal and (document(doc) or global_tokens(marks))",
    "doc[b, q_pos] <= doc[b, kv_idx]",
)


@pytest.mark.parametrize("mask", MASKS)
def test_no_table_is_about_a_table(mask: str) -> None:
    spec = load_spec(TEXT.replace("MASK", mask))
    inner = selected_spec(spec)
    given = {t.name for t in inner.tensors}
    for t in mask_form(inner).tables:
        if isinstance(t, Table):
            assert given >= frozenset().union(*(tensors_of(e) for e in (*t.lead, t.value)))


@pytest.mark.parametrize("mask", MASKS)
def test_the_kernel_binds_what_it_reads(mask: str) -> None:
    text = attngen.compile(TEXT.replace("MASK", mask), only="forward").text
    read = {line.split("p.")[1] for line in text.splitlines() if line.strip().startswith("doc_first = p.")}
    assert all(f"{name}={name}," in text for name in read)
