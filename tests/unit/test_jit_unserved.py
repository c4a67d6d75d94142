"""Specs that no kernel serves: `build` gives a callable for CPU tensors, and refuses whatever needs a kernel."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

import attngen
from attngen import samples
from attngen.diag.diagnostic import AttnError
from attngen.jit import device
from attngen.jit.notice import AttngenNotice
from attngen.jit.unserved import ReferenceAttention
from attngen.ref import dense
from attngen.syntax import load_spec

DIMS = "head_dim = 264, v = 24"  # past every kernel
BODIES = {
    "wide": f"{DIMS}\n  mask = kv_idx <= q_pos",
    "wide bhsd": f"{DIMS}\n  layout = bhsd\n  sink = 0.5",
    "wide view": "head_dim = 264\n  v = k[8:40]\n  mask = kv_idx <= q_pos",
    "wide packed": "head_dim = 264\n  layout = packed_qkv",
    "tensors": f"""{DIMS}
  param far: float = 0.5
  tensor bias: f32[heads_q, seqlen_kv] grad
  tensor gate: bf16[batch, seqlen_q, heads_q, head_dim_v] grad
  score    = s + far * bias[h, kv_idx]
  epilogue = o * sigmoid(gate[b, q_idx, h, d])""",
    "branches": f"""{DIMS}
  tensor lam: f32[heads_q] grad
  mask = kv_idx <= q_pos
  branch first {{
    weight = 1.0
  }}
  branch second {{
    weight = -lam[h]
  }}""",
    "segments": f"{DIMS}\n  mask = kv_idx <= q_pos\n  segment past {{\n    mask = kv_idx > 3\n  }}",
    "f32": "head_dim = 16\n  dtype = f32\n  mask = kv_idx <= q_pos",
}


def text(body: str) -> str:
    return f"attn 1\nattention a {{\n  {body}\n}}\n"


def make(body: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttngenNotice)
        return attngen.build(text(body))


@pytest.mark.parametrize("kind", BODIES)
def test_cpu_tensors_give_the_dense_meaning_and_its_gradients(kind: str) -> None:
    attn = make(BODIES[kind])
    spec = attn.spec
    assert isinstance(attn, ReferenceAttention) and attn.reasons
    shape = samples.Shape(2, 4, 2, 33, 33 if kind == "wide packed" else 47)
    q, k, v = samples.qkv(spec, shape)
    tensors, parts = samples.tensors(spec, shape), samples.segments(spec, shape)
    leaves = [
        x for x in (*(q if isinstance(q, tuple) else [q]), *(k if isinstance(k, tuple) else [k]), v) if x is not None
    ]
    leaves += [tensors[t.name] for t in spec.tensors] + [x for pair in parts.values() for x in pair]
    for x in leaves:
        x.requires_grad_()
    given, more = ((q, k, v), {}) if spec.branches or spec.segments else samples.call_arguments(spec, q, k, v)
    o, lse = attn(*given, return_lse=True, **more, **tensors, **({"segments": parts} if parts else {}))
    assert o.dtype == leaves[0].dtype and lse.dtype == torch.float32 and o.is_contiguous()
    bshd = o.transpose(1, 2) if spec.layout == "bhsd" else o
    want = dense.attention(spec, q, k, v, tensors=tensors, segments=parts or None)
    assert float((bshd - want.o).detach().abs().max()) < 2e-2
    assert float((lse - want.lse).detach().abs().max()) < 1e-4
    got = torch.autograd.grad(o.float().square().sum(), leaves)
    ideal = torch.autograd.grad(want.o.square().sum(), leaves)
    for a, b in zip(got, ideal, strict=True):
        assert a.shape == b.shape and float((a - b).abs().max()) < 0.05 * max(1.0, float(b.abs().max()))
    assert any(bool(g.any()) for g in got)


def test_a_paged_cache_is_read_by_its_table() -> None:
    attn = make("head_dim = 576\n  v = k[0:512]\n  layout = paged\n  scale = 0.1\n  mask = kv_idx <= q_pos")
    pages, q = torch.randn(7, 16, 1, 576).bfloat16(), torch.randn(2, 1, 4, 576).bfloat16()
    table = torch.tensor([[3, 0, 5], [6, 1, 2]], dtype=torch.int32)
    k = torch.stack([torch.cat([pages[i] for i in row]) for row in table.tolist()])
    want = dense.attention(attn.spec, q, k, None).o
    assert float((attn(q, pages, page_table=table) - want).abs().max()) < 1e-2
    assert float((attn(q, pages, page_table=table.flip(0)) - want).abs().max()) > 1e-2
    with pytest.raises(AttnError, match=r"E0650.*names pages 0 to 7, the cache has 7"):
        attn(q, pages, page_table=table + 1 - (table == 0).int())
    with pytest.raises(AttnError, match=r"E0604.*`page_table` must be an int32 tensor"):
        attn(q, pages)


def test_the_notice_says_what_the_refusal_says() -> None:
    with pytest.warns(
        AttngenNotice, match="`a` runs on CPU tensors only: sm_90a kernels do not serve head_dim = 264 yet"
    ):
        attn = attngen.build(text(BODIES["wide"]))
    q, k, v = (x.to("meta") for x in samples.qkv(attn.spec, samples.Shape(1, 1, 1, 8, 8)))
    uses: list[Any] = [lambda: attn(q, k, v), attn.compile, lambda: attn.plans, lambda: attn.source, attn.refuse]
    for use in uses:
        with pytest.raises(AttnError) as caught:
            use()
        assert caught.value.diagnostics == attn.reasons and {d.code for d in attn.reasons} == {"E0402"}
    assert not hasattr(attn, "nonsense")


def test_a_gpu_of_the_target_is_refused_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda target: True)
    with pytest.raises(AttnError, match=r"E0402"):
        attngen.build(text(BODIES["wide"]))


def test_a_wish_of_the_schedule_is_an_error_everywhere() -> None:
    with pytest.raises(AttnError, match=r"E0402.*a cluster of 4 x 1"):
        attngen.build(text("head_dim = 64\n  schedule { cluster = 4 x 1 }"))
    with pytest.raises(AttnError, match=r"E0401"):
        attngen.build(text("head_dim = 64"), target="sm_77")


def test_it_travels() -> None:
    attn = make(BODIES["wide"])
    assert copy.deepcopy(attn) is attn
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttngenNotice)
        again = pickle.loads(pickle.dumps(attn))
    q, k, v = samples.qkv(attn.spec, samples.Shape(1, 2, 2, 9, 9))
    assert torch.equal(again(q, k, v), attn(q, k, v)) and "on the CPU" in repr(again)


def test_arguments_are_checked() -> None:
    attn = make(BODIES["tensors"])
    shape = samples.Shape(1, 2, 1, 5, 6)
    q, k, v = samples.qkv(attn.spec, shape)
    tensors = samples.tensors(attn.spec, shape)
    for code, call in {
        "E0602": lambda: attn(q, k, v),
        "E0601": lambda: attn(q, k, v, near=1, **tensors),
        "E0603": lambda: attn(q, k, v, far="much", **tensors),
        "E0604": lambda: attn(q, k, **tensors),
        "E0606": lambda: attn(q.float(), k, v, **tensors),
        "E0607": lambda: attn(q, k[..., :8], v, **tensors),
        "E0613": lambda: attn(q * float("nan"), k, v, check=True, **tensors),
    }.items():
        with pytest.raises(AttnError) as caught:
            call()
        assert caught.value.diagnostics[0].code == code
    lost = load_spec(text(BODIES["tensors"].replace(" grad", "", 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttngenNotice)
        silent = attngen.build(lost)
    with pytest.raises(AttnError, match=r"E0611"):
        silent(q, k, v, **{**tensors, "bias": tensors["bias"].requires_grad_()})
    branches = make(BODIES["branches"])
    with pytest.raises(AttnError, match=r"E0604.*each of its 2 branches"):
        branches(q, k, v, lam=torch.ones(2))
