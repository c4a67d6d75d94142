"""`check=True` missed a tensor that is shorter than the rows where a branch weight or the epilogue of several kernels
reads it along a plain axis: it was cut to them, as without the check.
"""

from __future__ import annotations

import pytest
import torch

from attngen import AttnError, build

SPEC = """attn 1
attention a {
  head_dim = 64
  tensor few: f32[n]
  branch one {
    weight = few[q_idx]
  }
  branch two {
    weight = 1.0
  }
}
"""


@pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
def test_a_short_tensor_is_found() -> None:
    attn, x = build(SPEC), torch.zeros(1, 9, 2, 64, dtype=torch.bfloat16)
    attn((x, x), (x, x), x, few=torch.ones(9), check=True)
    attn((x, x), (x, x), x, few=torch.ones(8))
    with pytest.raises(AttnError, match="E0650"):
        attn((x, x), (x, x), x, few=torch.ones(8), check=True)
