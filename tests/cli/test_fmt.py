"""`attngen fmt`."""

from __future__ import annotations

UGLY = "attn 1\nattention   x{ # why\nhead_dim=64 \n mask=kv_idx<=q_pos }\n"


def test_rewrites_in_place_and_is_idempotent(attngen, tmp_path):
    path = tmp_path / "x.attn"
    path.write_text(UGLY)
    assert attngen("fmt", path).code == 0
    once = path.read_text()
    assert once != UGLY and "# why" in once and "kv_idx <= q_pos" in once
    done = attngen("fmt", path)
    assert done.code == 0 and "formatted" not in done.err and path.read_text() == once


def test_check_writes_nothing(attngen, tmp_path):
    path = tmp_path / "x.attn"
    path.write_text(UGLY)
    done = attngen("fmt", "--check", path)
    assert done.code == 1 and "would change" in done.err and path.read_text() == UGLY


def test_diff_shows_the_change(attngen, tmp_path):
    path = tmp_path / "x.attn"
    path.write_text(UGLY)
    done = attngen("fmt", "--diff", path)
    assert done.code == 1 and "+  head_dim = 64" in done.out and path.read_text() == UGLY


def test_stdin_to_stdout(attngen):
    assert "head_dim = 64" in attngen("fmt", "-", stdin=UGLY).out


def test_a_syntax_fault_leaves_the_file(attngen, tmp_path):
    path = tmp_path / "x.attn"
    path.write_text("attn 1\nattention {")
    assert attngen("fmt", path).code == 1
    assert path.read_text() == "attn 1\nattention {"


def test_several_files(attngen, tmp_path):
    paths = [tmp_path / f"{i}.attn" for i in range(3)]
    for p in paths:
        p.write_text(UGLY)
    assert attngen("fmt", *paths).code == 0
    assert len({p.read_text() for p in paths}) == 1
