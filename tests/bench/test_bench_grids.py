"""The cells that a benchmark measures: grids of the forward and the backward, variants, documents."""

from __future__ import annotations

import pytest
import torch
from bench_cases import EXAMPLES

from attngen import samples
from attngen.bench import cells, flex, grid
from attngen.bench.kept import kept
from attngen.bench.peers import PEERS, Case
from attngen.bench.recognize import features
from attngen.ref import dense


def test_the_grid_of_the_backward() -> None:
    labels = [c.label for c in grid.cells(None, (1024, 4096), {}, backward=True)]
    assert "causal d192/128 4K b8 h16" in labels and "full d256 1K b32 h8" in labels
    assert "causal d128 4K b8 h16/2" in labels and "causal d128 16K b2 h16 deterministic" in labels
    assert len(set(labels)) == len(labels) == 2 * 2 * 4 + 2 + 3
    assert {c.seqlen_q for c in grid.cells("usual", None, {}, backward=True)} == {1024, 4096, 16384, 32768}


def test_the_grid_of_the_forward() -> None:
    """Every cell that a release is judged by, once."""
    from typer.testing import CliRunner

    from attngen.cli.main import app

    made = grid.cells(None, None, {})
    labels = [c.label for c in made]
    assert len(set(labels)) == len(labels) == 4 * 2 * 6 + 2 * 2 * 3 + 3 + 2 * 4 + 2 * 3 + 7 + 2
    assert {"full d64 128 b256 h32", "causal d128 16K b2 h16/2", "full d128 2K b1 h8", "causal d128 1x16K b8 h32/4",
            "causal d104 4K b8 h19", "causal rising d128 4K b8 h16"} <= set(labels)  # fmt: skip
    assert not any(c.spec.backward.deterministic for c in made)
    assert [p.name for p in grid.chosen("sh,gr", backward=False, quick=False)] == ["short", "grouped"]
    assert {c.seqlen_q for c in grid.cells(None, None, {}, quick=True)} == {1024, 4096, 16384}
    done = CliRunner().invoke(app, ["bench", "--grid", "--only", "turns"])
    assert done.exit_code == 2 and "usual, short, grouped, few, rows, dims, rising" in " ".join(done.stderr.split())
    done = CliRunner().invoke(app, ["bench", str(EXAMPLES / "causal.attn"), "--only", "short"])
    assert done.exit_code == 2 and "--only picks parts of --grid" in " ".join(done.stderr.split())


def test_rising_scores_rescale_at_every_tile() -> None:
    q, k = samples.rising(*(torch.randn(1, 512, 2, 128) for _ in range(2)))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 128**0.5
    tops = s.unflatten(-1, (8, 64)).amax(-1).flip(-1)
    assert float((tops[..., 1:] - tops[..., :-1]).median()) * 1.44 > 8


#: Kept share of all pairs of each row, from its definition (i query, j key, N = 16384).
SHARES = {
    "full": 1.0, "causal": 0.5, "window 1024": 0.0606, "documents 1500": 0.0455, "prefix 4096": 0.5313,
    "ALiBi causal": 0.5, "softcap causal": 0.5, "relative": 1.0, "window 128, sinks": 0.0078,
}  # fmt: skip


def test_the_grid_of_variants() -> None:
    from attngen.bench.variants import VARIANTS

    assert [v.title for v in VARIANTS] == [*(t for t in SHARES if "sinks" not in t), "full", "window 128, sinks"]
    assert [v.head_dim for v in VARIANTS] == [128] * 8 + [64, 64], "each head dim has an unmasked row to compare with"
    found = {v.title: v.cell({}) for v in VARIANTS if v.title != "full"}
    for title, cell in found.items():
        wide = title != "window 128, sinks"
        assert (cell.batch, cell.heads_q, cell.heads_kv) == (2, 16 if wide else 32, 16 if wide else 32)
        assert (cell.seqlen_q, cell.seqlen_kv, cell.spec.head_dim_qk) == (16384, 16384, 128 if wide else 64)
        assert cell.label.startswith(f"{title} d{128 if wide else 64} 16K b2")


@pytest.mark.parametrize("title", SHARES)
def test_variants_mean_what_they_say(title) -> None:
    """The mask of each row against its definition, at 4500 rows, and the values of its score."""
    from attngen.bench.variants import VARIANTS

    row = next(v for v in VARIANTS if v.title == title)
    n = 4500
    cell = cells.with_shape(row.cell({}), batch=1, seqlen_q=n, seqlen_kv=n)
    shape = samples.Shape(1, cell.heads_q, cell.heads_kv, n, n)
    params = samples.params(cell.spec, row.params)
    tensors = samples.tensors(cell.spec, shape) | (row.captured(shape) if row.captured else {})
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    keep = {
        "window 1024": (i - j >= 0) & (i - j <= 1024),
        "documents 1500": (j <= i) & (i // 1500 == j // 1500),
        "prefix 4096": (j <= i) | (j < 4096),
        "relative": torch.ones(n, n, dtype=torch.bool),
        "full": torch.ones(n, n, dtype=torch.bool),
        "window 128, sinks": (i - j >= 0) & (i - j < 128),
    }.get(title, j <= i)
    assert kept(cell, params, tensors).pairs == float(keep.sum())
    if title == "ALiBi causal":
        assert tensors["slopes"][0] == 2.0**-0.5 and tensors["slopes"][15] == 2.0**-8
    mask_mod, score_mod = flex.mods(Case(cell, features(cell.spec, params), i, j, i, params, tensors))
    s, b, h = torch.tensor(7.0), torch.tensor(0), torch.tensor(3)
    near, far = torch.tensor(1000), torch.tensor(900)
    assert bool(mask_mod(b, h, near, far)) is bool(keep[1000, 900]) if mask_mod else title in ("relative", "full")
    value = {
        "ALiBi causal": 7.0 - 2.0**-2 * 100, "softcap causal": 30 * torch.tanh(torch.tensor(7 / 30)).item(),
        "relative": 7.0 - 0.1,
    }.get(title)  # fmt: skip
    assert (score_mod is None) == (value is None)
    assert value is None or float(score_mod(s, b, h, near, far)) == pytest.approx(value)


def test_rows_of_the_variants_are_picked() -> None:
    from attngen.bench.variants import VARIANTS, chosen

    assert chosen(None) == VARIANTS
    assert [v.title for v in chosen("window, Soft")] == ["window 1024", "softcap causal", "window 128, sinks"]
    with pytest.raises(KeyError):
        chosen("causal,banana")


@pytest.mark.parametrize("title", ["window 1024", "documents 1500", "window 128, sinks"])
def test_the_flex_call_of_a_variant(monkeypatch, title) -> None:
    """Block mask, mods, scale, grouped heads, sink, layout: the call itself, its graph run by torch's own operators."""
    import functools

    from attngen.bench import variants

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(variants, "DOCUMENT", 100)
    (row,) = (v for v in variants.VARIANTS if v.title == title)
    n = 300
    shape = samples.Shape(2, 4, 2, n, n)
    cell = cells.with_shape(row.cell({}), batch=2, heads_q=4, heads_kv=2, seqlen_q=n, seqlen_kv=n)
    params = samples.params(cell.spec, {"window": 33} if row.params else {})
    tensors = samples.tensors(cell.spec, shape) | (row.captured(shape) if row.captured else {})
    q, k, v = samples.qkv(cell.spec, shape, dtype=torch.float32)
    case = Case(cell, features(cell.spec, params), q, k, v, params, tensors)
    got = PEERS["flex"].prepare(case)()
    exact = dense.attention(cell.spec, q, k, v, params=params, tensors=tensors).o
    assert got.shape == exact.shape and float((got - exact).abs().max()) < 2e-5
    blocks = flex.block_mask(case, flex.mods(case)[0])
    assert blocks.shape == (2 if title == "documents 1500" else 1, 1, n, n) and blocks.sparsity() > 0


def test_documents_of_the_packed_batch() -> None:
    from attngen.bench.masks import Cost, document_ids

    doc = document_ids(5000, 100, 1)
    assert doc.dtype is torch.int32 and doc.shape == (1, 5000) and doc[0, 0] == 0
    steps = doc[0, 1:] - doc[0, :-1]
    assert set(steps.unique().tolist()) == {0, 1} and 30 < int(doc.max()) < 75
    lines = Cost(5000, 50, 16, 128, 1.0, 0.9, 0.009, 20000, 3.0, 10**8, None, None).lines()
    assert "9.0 us (its kernel), 1.00 % of the attention" in lines[2] and "333.33 %" in lines[3] and len(lines) == 4
