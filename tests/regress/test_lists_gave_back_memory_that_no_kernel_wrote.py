"""O of a call by lists was taken from memory meant for the kernel, also where it had been executed without it."""

from __future__ import annotations

import torch

from attngen.jit.gathered import gathered
from attngen.syntax import load_spec

SPEC = load_spec("""
attn 1
attention listed {
  head_dim = 64
  block_sparse { q = 1, kv = 16, lists = given }
}
""")


def test_lists_gave_back_memory_that_no_kernel_wrote() -> None:
    q, k = torch.randn(1, 2, 3, 64).bfloat16(), torch.randn(1, 90, 1, 64).bfloat16()
    call = gathered(SPEC, q, k, k, torch.zeros(1, 1, 2, 4, dtype=torch.int32), {})
    o = torch.randn(call.q.shape).bfloat16()
    assert call.out is None and call.o(o).flatten().sort().values.equal(o.flatten().sort().values)
