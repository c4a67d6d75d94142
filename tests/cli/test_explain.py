"""`attngen explain`: a spec, a code, pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from attngen.diag.codes import CODES

SVG = "{http://www.w3.org/2000/svg}"


def test_a_spec_in_text(attngen, causal):
    done = attngen("explain", causal)
    assert done.code == 0, done.err
    for word in (
        "mask form",
        "plans by max",
        "smem",
        "registers",
        "pipeline",
        "barriers",
        "rooflines",
        "MMA",
        "HBM",
        "rejected",
    ):
        assert word in done.out, word


def test_a_spec_in_json(attngen, causal):
    found = json.loads(attngen("explain", causal, "--json", "--seqlen", "1000,64", "--batch", "2", "--heads", "4").out)
    assert found["schema"] == 1 and found["mask"]["exact"]
    assert [r["shape"] for r in found["rooflines"]] == [
        "batch 2, heads 4/4, seqlen 1000x1000",
        "batch 2, heads 4/4, seqlen 64x64",
    ]
    plan = found["plans"][0]
    assert plan["memory"]["smem_bytes"] <= plan["memory"]["smem_limit"]
    assert found["rejected"] and all(r["why"] for r in found["rejected"])


def test_causal_visits_about_half_of_the_tiles(attngen, causal):
    r = json.loads(attngen("explain", causal, "--json", "--seqlen", "8192").out)["rooflines"][0]
    assert 0.5 <= r["visited"] / r["tiles"] < 0.53
    # 2 * B * H * S^2 * (d + dv) / 2 FLOP, at 4096 FLOP a cycle, 132 SMs, 1.65 GHz
    assert r["mma_us"] == pytest.approx(4 * 4 * 16 * 8192**2 * 128 / 2 / (4096 * 132 * 1.65e9) * 1e6, rel=0.05)


def test_element_wise_terms_say_why(attngen, tmp_path):
    spec = tmp_path / "x.attn"
    spec.write_text(
        "attn 1\nattention x {\n  head_dim = 64\n  tensor m: bool[batch, seqlen_kv]\n"
        "  mask = kv_idx <= q_pos and m[b, kv_idx]\n}\n"
    )
    done = attngen("explain", spec)
    assert done.code == 0 and "element-wise term `m[b, kv_idx]`" in done.out and "instead:" in done.out


def test_every_code_is_explained(attngen):
    for code, row in CODES.items():
        done = attngen("explain", code.lower())
        assert done.code == 0 and row.summary in done.out and len(done.out) > len(row.summary) + 40, code


def test_an_unknown_code_is_usage(attngen):
    done = attngen("explain", "E9999")
    assert done.code == 2 and "no diagnostic" in done.err


def _fills(svg: str) -> set[str]:
    return {e.get("fill", "") for e in ET.fromstring(svg).iter() if e.get("fill")}


def test_a_picture_shows_all_tile_classes(attngen, causal, tmp_path):
    from attngen.draw.mask import COLORS

    path = tmp_path / "mask.svg"
    done = attngen("explain", causal, "--svg", path, "--seqlen", "1024")
    assert done.code == 0 and "mask.svg" in done.err
    assert set(COLORS.values()) <= _fills(path.read_text())


def test_a_picture_on_stdout_is_only_a_picture(attngen, causal):
    ET.fromstring(attngen("explain", causal, "--svg", "-", "--seqlen", "100").out)


def test_a_picture_escapes_what_the_spec_says(attngen, causal):
    texts = [
        e.text for e in ET.fromstring(attngen("explain", causal, "--svg", "-", "--seqlen", "64").out).iter(f"{SVG}text")
    ]
    assert "mask = kv_idx <= q_pos" in texts


def test_png(attngen, causal, tmp_path):
    pytest.importorskip("matplotlib")
    assert attngen("explain", causal, "--png", tmp_path / "m.png", "--seqlen", "300", "--seqlen-kv", "500").code == 0
    assert (tmp_path / "m.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_picture_limits(attngen, causal, tmp_path):
    assert attngen("explain", causal, "--svg", tmp_path / "x.svg", "--seqlen", "100000").code == 2
    assert attngen("explain", causal, "--svg", tmp_path / "x.svg", "--at-head", "99").code == 2
    assert attngen("explain", causal, "--heads", "6", "--heads-kv", "4").code == 2
    assert attngen("explain", causal, "--seqlen", "long").code == 2
