"""Reports said `1 consumer warpgroups`, and of a cache with nothing but generated texts `0 kernels, 122 MB`."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen import generate, plan_text
from attngen.cli.doctor import _machine
from attngen.diag.words import counted
from attngen.jit import doctor
from attngen.jit.cache import SOURCE_PREFIX, KernelCache
from attngen.search import plan
from attngen.syntax import load_spec

SMALL = load_spec("attn 1\nattention small {\n  head_dim = 64\n  schedule { tile_m = 64, tile_n = 64 }\n}\n")


def test_counted() -> None:
    assert [counted(n, "kernel") for n in range(3)] == ["0 kernels", "1 kernel", "2 kernels"]


def test_one_warpgroup() -> None:
    plans = plan(SMALL)
    assert plans.plans[0].compute.warpgroups == 1
    for text in (plan_text.describe(plans), generate.emit(plans).text):
        assert "1 warpgroups" not in text and "1 consumer warpgroups" not in text


def test_a_cache_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "v1" / "toolchain"
    folder.mkdir(parents=True)
    (folder / f"{SOURCE_PREFIX}a.json").write_text("x" * 2_000_000)
    held = doctor._cache(KernelCache(tmp_path), True)
    assert (held["entries"], held["sources"]) == (0, 1)
    (found,) = (f for f in _machine({"torch": "2", "toolchain": {}, "gpus": [], "cache": held, "missing": []})
                if f.what == "kernel cache")  # fmt: skip
    assert found.detail.endswith("0 compiled kernels and 1 generated text, 2.0 MB")
