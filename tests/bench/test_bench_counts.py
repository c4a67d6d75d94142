"""What a benchmark counts: kept pairs, FLOP, tiles, bytes of a step."""

from __future__ import annotations

import pytest
import torch
from bench_cases import example, rows

from attngen import samples
from attngen.bench import cells, report
from attngen.bench.kept import kept
from attngen.bench.runner import Row


@pytest.mark.parametrize(
    ("name", "params", "count"),
    [
        ("causal", {}, 500500),
        ("mistral", {"window": 128}, 119872),
        ("modernbert", {"half": 64}, 124840),
        ("llama4", {"chunk": 256}, 125716),
        ("block_causal", {"block": 32}, 515904),
        ("full", {}, 1000000),
    ],
)
def test_kept_pairs(name, params, count) -> None:
    spec = example(name)
    assert kept(cells.Cell(spec, 1, 1, 1, 1000, 1000), samples.params(spec, params), {}).pairs == count


def test_flops_count_kept_pairs_only() -> None:
    cell = cells.usual_cell(example("causal"), 1024)
    assert (cell.batch, cell.heads_q, cell.heads_kv) == (32, 16, 16)
    assert cell.flops(1024 * 1025 / 2) == pytest.approx(4 * 32 * 16 * 128 * 1024 * 1025 / 2)


def test_flops_of_the_backward() -> None:
    cell = cells.usual_cell(example("causal"), 1024)
    assert cell.flops(1000.0, backward=True) == pytest.approx(10 * 32 * 16 * 1000.0 * 128)
    wide = cells.usual_cell(example("mla"), 1024)
    assert wide.flops(1.0, backward=True) / (wide.batch * wide.heads_q) == 2 * (3 * 192 + 2 * 128)


def test_memory_from_shapes() -> None:
    """What the issue names: S 32K, d 128, 32 heads, bf16."""
    from attngen.bench.memory import expected, megabytes

    cell = cells.Cell(example("causal"), 1, 32, 32, 32768, 32768)
    m = expected(cell, {"t": torch.zeros(5, dtype=torch.int32)})
    tensor = 32768 * 32 * 128 * 2
    assert (m.inputs, m.output, m.gradients) == (4 * tensor + 20, tensor, 3 * tensor)
    assert (m.dq_fp32, m.statistics) == (2 * tensor, 3 * 4 * 32 * 32768)
    assert m.made == 6 * tensor + m.statistics == m.as_json()["made"] and m.square == 2 * 32 * 32768**2
    assert megabytes(m.square) == "68.7 GB" and megabytes(m.made) == "1623 MB"
    grouped = expected(cells.Cell(example("mla"), 2, 8, 2, 100, 300), {})
    assert grouped.gradients == 2 * 2 * (8 * 100 * 192 + 2 * 300 * (192 + 128))
    assert grouped.output == 2 * 2 * 8 * 100 * 128 and grouped.square == 2 * 2 * 8 * 100 * 300


def test_memory_agrees_with_what_the_launcher_allocates() -> None:
    """The workspace is fp32 dQ and two statistics for each row, rounded up to tiles: see Backward._launch."""
    from attngen.bench.memory import expected
    from attngen.search_backward import plan_backward

    for name in ("causal", "gpt_oss", "mla"):
        spec = example(name)
        cell = cells.usual_cell(spec, 4096)
        m = expected(cell, {})
        for plan in plan_backward(spec).plans:
            tiles = -(-cell.seqlen_q // plan.compute.tile_m)
            workspace = 4 * cell.batch * cell.heads_q * tiles * plan.memory.workspace_per_tile
            needed = m.dq_fp32 + m.statistics * 2 // 3
            assert needed <= workspace <= 1.02 * needed, (name, plan.name)


def test_memory_is_shown() -> None:
    from attngen.bench.memory import expected

    made = rows()
    assert report.memory_cells(made)[1] == [] and "Memory" not in report.markdown(made, {})
    made[1].memory = expected(cells.Cell(example("causal"), 1, 32, 32, 32768, 32768), {})
    made[1].peak_bytes = {"attngen": 1_650_000_000, "fa4": 2_100_000_000}
    header, body = report.memory_cells(made)
    assert header[-4:] == ["their sum", "attngen", "fa4", "N x N"]
    assert len(body) == 1 and body[0][-4:] == ["1623 MB", "1650 MB", "2100 MB", "68.7 GB"]
    assert "| memory | inputs | O |" in report.markdown(made, {})
    said = report.summary(made)
    assert said[-2].endswith("attngen 1650 MB, fa4 2100 MB") and "one N x N matrix would be 68.7 GB" in said[-1]
    assert report.as_json(made, {}, {})["rows"][1]["memory"]["made"] == made[1].memory.made


@pytest.mark.parametrize(
    ("tile", "tiles"),
    [((100, 100), 55), ((100, 300), 1 + 1 + 1 + 2 + 2 + 2 + 3 + 3 + 3 + 4), ((999, 1000), 2), ((1, 1), 500500)],
)
def test_tiles_with_a_kept_pair(tile, tiles) -> None:
    """Causal, 1000 x 1000: lower triangles of blocks, counted by hand."""
    cell = cells.Cell(example("causal"), 1, 1, 1, 1000, 1000)
    found = kept(cell, {}, {}, tile)
    assert found.pairs == 500500
    assert found.tile_share * -(-1000 // tile[0]) * -(-1000 // tile[1]) == pytest.approx(tiles)


def test_time_over_the_share_of_tiles() -> None:
    """Half of the tiles in 0.55 of the time: 10 % over; head dims and shapes are compared with their like only."""

    def row(label: str, spec: str, ms: float, share: float, batch: int = 1) -> Row:
        r = Row(label, spec, {"batch": batch}, share, tile_share=share)
        r.milliseconds["attngen"], r.tflops["attngen"], r.spread["attngen"] = ms, 1.0, (1.0, 1.0)
        return r

    full, wide = row("full d64 1K", "full", 10.0, 1.0), row("full d128 1K", "full", 20.0, 1.0)
    half, other = row("causal d128 1K", "causal", 11.0, 0.5), row("causal d64 1K", "causal", 11.0, 0.5, batch=2)
    rows = [full, wide, half, other]
    assert [report.over_tiles(r, rows) for r in rows] == [None, None, pytest.approx(1.1), None]
    header, body = report.cells(rows, "flex")
    assert [line[header.index("/ tiles")] for line in body] == ["-", "-", "1.100", "-"]
    assert "/ tiles" not in report.cells([half, other])[0]
