"""Query heads of a KV head as rows of one tile: what packs, the plan, its execution, and which calls take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attngen import api
from attngen.diag.diagnostic import AttnError
from attngen.ir.plan import PlanSet
from attngen.ir.spec import AttentionSpec
from attngen.jit import launch
from attngen.options import Options
from attngen.passes.few import Beside, Pace, cycles
from attngen.passes.packing import unpackable
from attngen.ref import dense, interp
from attngen.search import plan
from attngen.syntax import load_all
from attngen.verify.plan import faults

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMS = 132


def resolved(name: str, **changes: Any) -> AttentionSpec:
    return api.resolve((EXAMPLES / f"{name}.attn").read_text(), None, Options.parse(changes))


def planned(name: str, **changes: Any) -> PlanSet:
    return plan(resolved(name, **changes))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("causal", ""),
        ("mistral", ""),
        ("off_by_one", ""),
        ("packing", "a mask that reads captured tensors or heads"),
        ("alibi", "a score that reads captured tensors or heads"),
        ("bigbird", "block_sparse"),
    ],
)
def test_what_packs(name: str, why: str) -> None:
    assert unpackable(load_all(EXAMPLES / f"{name}.attn")[-1]) == why


def test_a_plan_that_packs_and_its_verifier() -> None:
    (p,) = planned("causal", tile="128x128", pack_gqa=8).plans
    assert p.schedule.pack == 8 and not faults(p)
    three = p.replace(schedule=p.schedule.replace(pack=3))
    assert "schedule: 3 heads share a row tile" in faults(three)
    with pytest.raises(AttnError, match="do not serve this pack_gqa"):
        planned("causal", pack_gqa=3)
    with pytest.raises(AttnError, match="pack_gqa with a mask that reads captured tensors"):
        planned("packing", pack_gqa=8)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 130), (17, 200), (40, 33), (130, 130)])
@pytest.mark.parametrize("pack", [2, 8])
@pytest.mark.parametrize("name", ["causal", "mistral"])
def test_the_plan_executed(name: str, pack: int, seqlen_q: int, seqlen_kv: int) -> None:
    spec = resolved(name, head_dim=16, tile="128x32", pack_gqa=pack)
    g = torch.Generator().manual_seed(seqlen_q)
    q = torch.randn(2, seqlen_q, 2 * pack, 16, generator=g)
    k, v = (torch.randn(2, seqlen_kv, 2, 16, generator=g) for _ in range(2))
    values = {"window": 21} if name == "mistral" else {}
    o, lse, trace = interp.run(plan(spec), spec, q, k, v, values)
    exact = dense.attention(spec, q, k, v, values)
    torch.testing.assert_close(o, exact.o, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, exact.lse, rtol=1e-9, atol=1e-9)
    assert all(v.q_hi - v.q_lo < 128 // pack for v in trace.visits), "tiles of a group's rows have fewer queries"


TALL = Pace(192, 80, 2070, 5250, True)


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "gain"),
    [
        (8, 1, True),  # 256 row tiles in two rounds, 32 of groups in one
        (8, 16, True),
        (1, 1, False),  # 32 row tiles or 4, at once either way
        (8, 192, True),  # as many row tiles, that reach fewer keys past their diagonals
        (4, 3840, True),
    ],
)
def test_which_calls_take_packed_tiles(batch: int, seqlen_q: int, gain: bool) -> None:
    sibling = Beside(packs=True).sibling
    assert sibling((TALL,), 0, 32 * batch, 8, seqlen_q, 4096, SMS) == ((8, None) if gain else None)
    full = TALL._replace(grows=False)
    found = sibling((full,), 0, 32 * batch, 8, seqlen_q, 4096, SMS)
    assert (found is not None) is (gain and seqlen_q < 192), "full tiles stay"
    assert not sibling((TALL,), 0, 32 * batch, 5, seqlen_q, 4096, SMS), "groups of 5 divide no tile"
    assert not sibling((TALL._replace(pack=8),), 0, 32 * batch, 8, seqlen_q, 4096, SMS)
    assert not sibling((), 0, 32 * batch, 8, seqlen_q, 4096, SMS)
    assert not Beside().sibling((TALL,), 0, 32 * batch, 8, seqlen_q, 4096, SMS)


def test_row_tiles_of_groups() -> None:
    packed = TALL._replace(pack=8)
    assert [packed.row_tiles(32, n) for n in (1, 24, 25)] == [4, 4, 8] and TALL.row_tiles(32, 25) == 32
    assert cycles(packed, 32, 24, 4096, SMS) == cycles(TALL, 4, 24, 4096, SMS)


def test_a_launch_finds_the_kernel_that_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    attn, made = api.build(str(EXAMPLES / "causal.attn")), []

    def rebuilt(spec: AttentionSpec) -> Any:
        made.append(spec.schedule.pack_gqa)
        twin = api.build(spec)
        twin.launcher.functions = tuple(f"packed {p.tile_m}" for p in twin.launcher.paces)
        twin.launcher.sibling = None
        return twin

    monkeypatch.setattr(attn.relatives, "rebuild", rebuilt)
    launcher = attn.launcher
    launcher.functions = tuple(str(p.tile_m) for p in launcher.paces)
    monkeypatch.setattr(launch, "_capturing", lambda: True)
    assert launcher.choose((8, 32, 4, 1, 4096, SMS)) == "128" and not made, "nothing is compiled in a graph"
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    assert launcher.choose((8, 32, 4, 1, 4096, SMS)).startswith("packed")  # type: ignore[attr-defined]
    assert launcher.choose((8, 32, 4, 9, 4096, SMS)).startswith("packed") and made == [8]  # type: ignore[attr-defined]
    assert launcher.choose((8, 32, 32, 1, 4096, SMS)) in ("128", "192")
    assert not api.build(resolved("causal", pack_gqa=1)).launcher.beside.packs
    assert not api.build(str(EXAMPLES / "packing.attn")).launcher.beside.packs


def test_a_kernel_that_packs_takes_its_own_group_only() -> None:
    attn = api.build(str(EXAMPLES / "causal.attn"), pack_gqa=4)
    q, k = torch.randn(1, 3, 8, 128).bfloat16(), torch.randn(1, 9, 2, 128).bfloat16()
    assert attn(q, k, k).shape == q.shape
    with pytest.raises(AttnError, match="4 query heads a KV head"):
        attn(q[:, :, :4], k, k)


def test_compile_makes_what_calls_of_a_group_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed heads, small tiles, and small tiles of packed heads; then no call of any length makes another."""
    made: list[tuple[int | None, int | None]] = []

    def stands_in(attn: Any) -> Any:
        def rebuilt(spec: AttentionSpec) -> Any:
            made.append((spec.schedule.pack_gqa, spec.schedule.tile_m))
            return stands_in(api.build(spec))

        monkeypatch.setattr(attn.relatives, "rebuild", rebuilt)
        monkeypatch.setattr(attn, "_loaded", object())
        attn.launcher.functions = tuple(str(p) for p in attn.launcher.paces)
        return attn

    attn = stands_in(api.build(str(EXAMPLES / "causal.attn")))
    assert attn.compile() is attn and not made
    attn.compile(group=8)
    assert made == [(8, None), (8, 64), (1, 64)]
    for batch, rows, keys in ((1, 1, 64), (1, 512, 512), (8, 1, 4096), (2, 900, 900), (16, 4096, 4096)):
        for heads_kv in (4, 32):
            attn.launcher.choose((batch, 32, heads_kv, rows, keys, SMS))
    assert len(made) == 3
    alone = stands_in(api.build(str(EXAMPLES / "causal.attn"))).alone()
    alone.compile(group=8)
    ragged = stands_in(api.build(str(EXAMPLES / "causal.attn"), layout="varlen"))
    ragged.compile(group=8)
    assert len(made) == 3
