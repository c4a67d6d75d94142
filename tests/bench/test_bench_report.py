"""What a benchmark shows: tables, JSON, bars."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from bench_cases import rows

from attngen.bench import report


def test_report() -> None:
    made = rows()
    header, body = report.cells(made)
    assert header == ["cell", "attngen", "fa3", "attngen / best peer", "matmul"]
    assert body[0][1:] == ["700 ±8", "650 ±8", "1.077", "720"] and body[1][3] == "0.750"
    assert report.absences(made) == ["fa4: not installed", "flex: sink (causal d128 2K b32 h16)"]
    document = report.as_json(made, {"gpu": "x"}, {"rounds": 3})
    json.dumps(document)
    assert document["rows"][0]["ratio_to_best_peer"] == pytest.approx(700 / 650)
    assert "| causal d128 1K b32 h16 | 700 ±8 |" in report.markdown(made, {"gpu": "x"})


def test_bars_are_as_high_as_their_values() -> None:
    svg = report.picture(rows(), {"gpu": "H200"}).svg()
    root = ET.fromstring(svg)
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("fill") == "#2a9d8f"]
    heights = sorted(float(e.get("height", 0)) for e in bars)
    assert heights[-1] / heights[-2] == pytest.approx(700 / 300, rel=0.01)


def test_report_of_a_backward() -> None:
    made = rows()
    for r in made:
        r.direction = "backward"
        r.tflops["attngen unordered"] = 2 * r.tflops["attngen"]
        r.spread["attngen unordered"] = (1.0, 2.0)
        r.milliseconds["attngen unordered"] = 1.0
        r.peak_bytes = {"attngen": 5_000_000, "fa3": 7_000_000}
    header, body = report.cells(made)
    assert header[-3:] == ["attngen / best peer", "/ unordered", "matmul"] and body[0][-3:] == ["1.077", "0.500", "720"]
    assert "Attention backward" in report.picture(made, {"gpu": "x"}).svg()
    said = report.summary(made)
    assert said[0].startswith("d128, attngen / best peer: geomean 0.899, worst 0.750 (causal d128 2K")
    assert said[1].startswith("d128, deterministic / unordered: geomean 0.500")
    assert said[2].endswith("attngen 5 MB, fa3 7 MB")
    kernels = report.as_json(made, {}, {})["rows"][0]["kernels"]
    assert kernels["attngen"]["peak_bytes"] == 5_000_000 and kernels["attngen unordered"]["peak_bytes"] is None


def test_report_of_variants() -> None:
    made = rows()
    for r in made:
        r.tflops["flex"] = 200.0
        r.spread["flex"], r.milliseconds["flex"] = (190.0, 210.0), 2.0
    header, body = report.cells(made, "flex")
    assert header == ["cell", "kept", "attngen", "fa3", "flex", "attngen / best peer", "/ flex", "matmul"]
    assert body[0][1] == "0.500" and body[0][-2] == "3.500" and body[1][-2] == "1.500"
    assert report.summary(made, "flex")[0] == (
        f"forward, attngen / flex: geomean {(3.5 * 1.5) ** 0.5:.3f}, worst 1.500 (causal d128 2K b32 h16)"
    )
    assert report.as_json(made, {}, {})["rows"][0]["ratios"] == {"fa3": pytest.approx(700 / 650), "flex": 3.5}
    assert report.line(made[0], "flex").startswith("attngen 700 TFLOP/s (1.000 ms), fa3 650")
    assert "/ flex 3.500, fa4: not installed" in report.line(made[0], "flex")
    del made[1].tflops["flex"]
    assert report.cells(made, "flex")[1][1][-2] == "-" and "geomean 3.500" in report.summary(made, "flex")[0]
