"""Pictures: the tiles that are drawn are the tiles that the plan runs; SVG is well-formed whatever the words."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from attngen import samples
from attngen.draw.canvas import Canvas
from attngen.draw.mask import COLORS, draw_mask
from attngen.draw.tiles import Segment, _walk, tiling
from attngen.ref import interp
from attngen.search import plan
from attngen.syntax import load_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SVG = "{http://www.w3.org/2000/svg}"
CASES = [
    ("causal", {}, 300, 400),
    ("causal", {}, 200, 90),
    ("mistral", {"window": 70}, 400, 400),
    ("full", {}, 150, 210),
    ("llama4", {"chunk": 90}, 330, 330),
    ("prefix_lm", {}, 200, 200),
    ("packing", {}, 260, 260),
    ("ring", {"q_offset": 40}, 200, 200),
    ("bigbird:bigbird_lists", {}, 300, 500),
]


@pytest.mark.parametrize(("name", "given", "rows", "keys"), CASES)
def test_tiles_are_those_of_the_plan_execution(name, given, rows, keys) -> None:
    file, _, block = name.partition(":")
    spec = load_spec(EXAMPLES / f"{file}.attn", name=block or None)
    shape = samples.Shape(1, 1, 1, rows, keys)
    params, tensors = samples.params(spec, given), samples.tensors(spec, shape)
    q, k, v = samples.qkv(spec, shape)
    for p in plan(spec, "sm_90a").plans:
        loop = tiling(p, shape, params=params, tensors=tensors)
        drawn = {
            (row.start, n, s.masked)
            for row in loop.rows
            for s in row.segments
            for n in range(s.last, s.first + 1)
        }  # fmt: skip
        _, _, trace = interp.run(p, spec, q, k, v, params, tensors)
        ran = {(visit.q_lo, visit.tile.n_block, visit.tile.masked) for visit in trace.visits}
        empty = {row.start for row in loop.rows if not row.segments}
        # Rows that keep nothing run one masked tile; a picture shows them skipped.
        assert {t for t in ran if t[0] not in empty} == drawn, p.name


def test_segments_descend() -> None:
    assert _walk([(0, 100, 300, 400)], 100) == (
        Segment(3, 3, True),
        Segment(2, 1, False),
        Segment(0, 0, True),
    )
    assert _walk([(0, 0, 0, 400)], 100) == (Segment(3, 0, True),)
    assert _walk([(200, 200, 200, 200)], 100) == ()
    assert _walk([(0, 0, 100, 120), (300, 310, 400, 400)], 100) == (
        Segment(3, 3, True), Segment(1, 1, True), Segment(0, 0, False),
    )  # fmt: skip
    assert _walk([(0, 0, 100, 120), (200, 200, 400, 400)], 100) == (  # a tile that is full for any clause is unmasked
        Segment(3, 2, False), Segment(1, 1, True), Segment(0, 0, False),
    )  # fmt: skip


def test_shares_in_the_legend_are_right() -> None:
    spec = load_spec(EXAMPLES / "causal.attn")
    shape = samples.Shape(1, 1, 1, 512, 512)
    texts = [e.text or "" for e in ET.fromstring(picture(spec, shape).svg()).iter(f"{SVG}text")]
    assert any(t.startswith(f"kept elements {100 * 513 / 1024:.1f} %") for t in texts), texts


def picture(spec, shape) -> Canvas:
    found = plan(spec, "sm_90a").plans[0]
    return draw_mask(spec, found, shape, params=samples.params(spec), tensors=samples.tensors(spec, shape))


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 5000), (3000, 2), (17, 40)])
def test_extreme_shapes_draw(rows, keys) -> None:
    canvas = picture(load_spec(EXAMPLES / "causal.attn"), samples.Shape(1, 1, 1, rows, keys))
    root = ET.fromstring(canvas.svg())
    assert float(root.get("width", 0)) < 1200 and float(root.get("height", 0)) < 1200
    assert COLORS["skipped"] in canvas.svg()


def test_text_cannot_become_markup() -> None:
    canvas = Canvas(10, 10, title="</title><script>")
    canvas.text(0, 0, "<b>&\"'\x00\x1b[0m</text><script>")
    root = ET.fromstring(canvas.svg())
    assert {e.tag for e in root.iter()} == {f"{SVG}svg", f"{SVG}title", f"{SVG}text"}


def test_png_without_matplotlib_says_what_to_install(monkeypatch) -> None:
    import sys

    from attngen.diag.diagnostic import AttnError

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AttnError) as fault:
        Canvas(10, 10).png()
    assert fault.value.code == "E0540" and "attngen[draw]" in str(fault.value)
