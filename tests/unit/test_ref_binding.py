"""Arguments of the reference executions: defaults, broadcast, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from builders import CAUSAL, H, S, load, param, spec
from cases import F32, qkv

from attngen.diag.diagnostic import AttnError
from attngen.ir.spec import ParamDecl
from attngen.ir.types import Type
from attngen.ref import blockwise, dense
from attngen.ref.binding import bind
from attngen.ref.walk import Tile, tiles_of


def fault(call, *arguments, **named) -> AttnError:  # type: ignore[no-untyped-def]
    with pytest.raises(AttnError) as found:
        call(*arguments, **named)
    return found.value


def test_missing_and_surplus() -> None:
    s = spec(CAUSAL, S + load("sinks", H, dtype=F32), tensors=("sinks",))
    q, k, v = qkv(s, 1, 3, 4, 2, 1)
    assert fault(dense.attention, s, q, k, v).code == "E0651"
    assert "no param `windows`" in fault(dense.attention, s, q, k, v, {"windows": 3}).diagnostics[0].message
    both = {"sinks": torch.zeros(2), "other": torch.zeros(2)}
    assert "no tensor `other`" in fault(dense.attention, s, q, k, v, tensors=both).diagnostics[0].message
    needs = spec(CAUSAL).replace(params=(ParamDecl(name="cap", type=Type.FLOAT),))
    assert "`cap`" in fault(dense.attention, needs, q, k, v).diagnostics[0].message
    assert "takes v" in fault(dense.attention, spec(CAUSAL), q, k, None).diagnostics[0].message
    assert "1 q" in fault(dense.attention, spec(CAUSAL), (q, q), (k, k), v).diagnostics[0].message


@pytest.mark.parametrize("wrong", [("q", (1, 3, 2, 7)), ("k", (1, 4, 1, 9)), ("v", (1, 5, 1, 8)), ("q", (1, 3, 3, 8))])
def test_shapes(wrong: tuple[str, tuple[int, ...]]) -> None:
    s = spec(CAUSAL)
    given = dict(zip("qkv", qkv(s, 1, 3, 4, 2, 1), strict=True))
    if wrong == ("q", (1, 3, 3, 8)):
        given["k"], given["v"] = (x.expand(-1, -1, 2, -1) for x in (given["k"], given["v"]))
    given[wrong[0]] = torch.zeros(wrong[1])
    for run in (dense.attention, blockwise.attention):
        assert fault(run, s, *given.values()).code == "E0652"


def test_tensor_shapes() -> None:
    s = spec(CAUSAL, S + load("sinks", H, dtype=F32), tensors=("sinks",))
    q, k, v = qkv(s, 1, 3, 4, 2, 1)
    found = fault(dense.attention, s, q, k, v, tensors={"sinks": torch.zeros(3)})
    assert found.code == "E0652" and "declared [heads_q]" in found.diagnostics[0].message
    one = dense.attention(s, q, k, v, tensors={"sinks": torch.tensor([0.5])})
    two = dense.attention(s, q, k, v, tensors={"sinks": torch.tensor([0.5, 0.5])})
    assert torch.equal(one.o, two.o)


def test_params_and_scale() -> None:
    """Defaults fill in, floats keep double precision, `scale` replaces the spec's."""
    s = spec(CAUSAL, scale=param("cap", Type.FLOAT))
    q, k, v = qkv(s, 1, 3, 4, 2, 1)
    assert float(bind(s, q, k, v).scale) == 5.0
    assert float(bind(s, q, k, v, {"cap": 0.3}).scale) == 0.3
    assert float(bind(s, q, k, v, scale=0.1).scale) == 0.1
    a, b = dense.attention(s, q, k, v, {"cap": 0.3}), dense.attention(s, q, k, v, scale=0.3)
    assert torch.equal(a.o, b.o)


def test_strides_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded and transposed inputs; a chunked evaluation is the same."""
    s = spec(CAUSAL)
    q, k, v = qkv(s, 3, 9, 7, 4, 2)
    expanded = k[:1].expand(3, -1, -1, -1)
    strided = v.transpose(1, 2).contiguous().transpose(1, 2)
    want = dense.attention(s, q, expanded.contiguous(), v)
    assert torch.equal(dense.attention(s, q, expanded, strided).o, want.o)
    monkeypatch.setattr(dense, "CHUNK_ELEMENTS", 60)
    got = dense.attention(s, q, expanded, v)
    torch.testing.assert_close(got.o, want.o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-12, atol=1e-12)


def test_walk() -> None:
    """Masked right of the full range, unmasked in it, masked left of it; gaps are skipped; never no tile."""
    assert list(tiles_of([(5, 7, 33, 43)], 10)) == [
        Tile(4, True),
        Tile(3, True),
        Tile(2, False),
        Tile(1, False),
        Tile(0, True),
    ]
    assert list(tiles_of([(0, 0, 10, 12), (40, 40, 60, 60)], 10)) == [
        Tile(5, False), Tile(4, False), Tile(1, True), Tile(0, False),
    ]  # fmt: skip
    assert list(tiles_of([(9, 9, 4, 4)], 10)) == list(tiles_of([], 10)) == [Tile(0, True)]
