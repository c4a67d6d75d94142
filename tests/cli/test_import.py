"""`attngen import`."""

from __future__ import annotations

import pytest

from attngen.syntax import load_spec

MODULE = """
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask

WINDOW = 128
DOC = torch.zeros(2, 64, dtype=torch.int64)
TABLE = torch.zeros(9)

def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < WINDOW

def document(b, h, q_idx, kv_idx):
    return DOC[b, q_idx] == DOC[b, kv_idx]

def near(score, b, h, q_idx, kv_idx):
    return score + TABLE[q_idx - kv_idx]

def branch(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else 0

def three(a, b, c):
    return a

mask = and_masks(causal, window, document)
blocks = create_block_mask(causal, None, None, 64, 64, device="cpu")
"""


@pytest.fixture
def masks(tmp_path):
    path = tmp_path / "masks.py"
    path.write_text(MODULE)
    return path


def test_writes_a_spec(attngen, masks, tmp_path):
    out = tmp_path / "x.attn"
    done = attngen(
        "import", f"{masks}:near", f"{masks}:mask", "--head-dim", "192x128", "-o", out, "--param", "WINDOW", "--sorted",
        "DOC", "--name", "packed", "--scale", "0.5", "--dtype", "fp16", "--layout", "bshd",
    )  # fmt: skip
    assert done.code == 0 and done.out == ""
    spec = load_spec(out)
    assert (spec.name, spec.head_dim_qk, spec.head_dim_v, spec.dtype, spec.layout) == (
        "packed",
        192,
        128,
        "fp16",
        "bshd",
    )
    assert spec.param("WINDOW").default == 128 and spec.tensor("DOC").sorted and spec.scale.value == 0.5
    assert "note: a call takes DOC: i32[batch, seqlen_kv]" in done.err
    assert "`q_idx - kv_idx` of `TABLE` may be negative" in done.err


def test_stdout_and_block_masks(attngen, masks):
    done = attngen("import", f"{masks}:blocks", "--head-dim", 64)
    assert done.code == 0 and done.err == ""
    body = "  head_dim = 64\n  layout   = bhsd\n  mask     = q_idx >= kv_idx\n"
    assert done.out == f"attn 1\n\nattention causal {{\n{body}}}\n"


def test_modules_by_name(process, masks):
    done = process("import", "masks:causal", "--head-dim", "64", cwd=masks.parent)
    assert done.code == 0 and "mask     = q_idx >= kv_idx" in done.out


def test_what_cannot_be_traced_is_the_functions_fault(attngen, masks):
    done = attngen("import", f"{masks}:branch", "--head-dim", 64)
    assert done.code == 1 and "error[E0702]" in done.err and "return score if q_idx > kv_idx else 0" in done.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["causal"], "no FILE:FUNCTION"),
        (["{}:nothing"], "has no `nothing`"),
        (["{}:WINDOW"], "is no function"),
        (["{}:three"], "takes 3 arguments"),
        (["{}:causal", "{}:window"], "one more mask_mod"),
        (["{}:causal", "{}:blocks"], "one more block_mask"),
        (["nowhere.py:causal"], "no such file"),
        (["no_such_module:causal"], "cannot be imported"),
        (["{}:causal", "--head-dim", "x"], "--head-dim takes a number"),
    ],
)
def test_usage(attngen, masks, arguments, message):
    done = attngen("import", "--head-dim", 64, *(a.format(masks) for a in arguments))
    assert done.code == 2 and message in done.err


def test_a_file_that_raises(attngen, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_thing\n")
    done = attngen("import", f"{path}:x", "--head-dim", 64)
    assert done.code == 2 and "ModuleNotFoundError" in done.err
