"""A captured tensor of extent 0 in a call with rows and keys: a kernel read its last element, at address 0."""

from __future__ import annotations

import pytest
import torch

from attngen import AttnError, build

pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
HEAD = "attn 1\nattention a {\n  head_dim = 64\n"
BODY = HEAD + "  LAYOUT\n  TENSOR\n  score = s + t[READ]\n  mask = kv_idx <= q_pos\n}\n"


def text(layout: str, declared: str, read: str) -> str:
    body = BODY.replace("LAYOUT", layout).replace("TENSOR", f"tensor t: f32[{declared}]")
    return body.replace("READ", read)


@pytest.mark.parametrize(
    ("layout", "declared", "read", "shape"),
    [
        ("", "n", "kv_idx", (0,)), ("", "heads_q, n", "h, kv_idx", (1, 0)), ("", "batch, n", "b, 0", (0, 3)),
        ("layout = varlen", "n", "kv_idx", (0,)), ("layout = varlen", "batch, seqlen_kv", "b, kv_idx", (2, 0)),
        ("layout = padded", "batch, n", "b, kv_idx", (2, 0)),
    ],
)  # fmt: skip
def test_is_an_error(layout: str, declared: str, read: str, shape: tuple[int, ...]) -> None:
    lead = (9,) if "varlen" in layout else (2, 9)
    q, k, v = (torch.randn(*lead, 2, 64).bfloat16() for _ in range(3))
    named = {"cu_seqlens_q": torch.tensor([0, 4, 9]).int()} if "varlen" in layout else {}
    with pytest.raises(AttnError, match="`t` has no elements along") as fault:
        build(text(layout, declared, read))(q, k, v, t=torch.zeros(shape), **named)
    assert fault.value.code == "E0607"


def test_blocks_of_no_rows() -> None:
    spec = HEAD + "  layout = varlen\n  block_sparse { q = 8, kv = 8, lists = given }\n}\n"
    q, k, v = (torch.randn(9, 2, 64).bfloat16() for _ in range(3))
    starts = torch.tensor([0, 4, 9]).int()
    with pytest.raises(AttnError, match="`blocks` has no elements along blocks_q"):
        build(spec)(q, k, v, blocks=torch.zeros(2, 1, 0, 2, dtype=torch.bool), cu_seqlens_q=starts)


@pytest.mark.parametrize("empty", ["rows", "keys", "batch"])
def test_a_call_without_rows_or_keys_reads_none(empty: str) -> None:
    b, sq, skv = (0 if empty == n else x for n, x in (("batch", 2), ("rows", 9), ("keys", 12)))
    q, k, v = (torch.randn(b, n, 2, 64).bfloat16() for n in (sq, skv, skv))
    o = build(text("", "batch, seqlen_kv", "b, kv_idx"))(q, k, v, t=torch.zeros(b, skv))
    assert o.shape == q.shape and (o == 0).all()
