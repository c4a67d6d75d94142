"""How a benchmark measures: interleaved rounds, whole cells and backwards, rehearsals. The CPU stands in for a GPU."""

from __future__ import annotations

import pytest
import torch
from bench_cases import example

from attngen.bench import cells, grid
from attngen.bench.peers import PEERS, Case


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the benchmark itself, on the CPU")
def test_a_cell_is_measured_end_to_end(monkeypatch) -> None:
    """build, agreement of the peers, interleaved rounds, report; the CPU reference stands in for the kernel."""
    from attngen.bench import runner, timing
    from attngen.bench.peers import Peer, _sdpa

    def liar(case: Case):
        return lambda: torch.zeros_like(case.q)

    monkeypatch.setattr(timing, "SLOT_MS", 1.0)
    monkeypatch.setattr(timing, "WARM_MS", 0.1)
    monkeypatch.setitem(PEERS, "math", Peer("math", "", ("torch",), _sdpa("MATH")))
    monkeypatch.setitem(PEERS, "liar", Peer("liar", "", ("torch",), liar))
    monkeypatch.setitem(PEERS, "gone", Peer("gone", "", ("no_such_module_at_all",), liar))
    cell = cells.Cell(example("causal"), 1, 4, 2, 96, 96)
    row = runner.measure(cell, ("math", "liar", "gone"), params={}, rounds=2, device="cpu", ceiling_size=64)
    assert set(row.tflops) == {"attngen", "math"} and all(v > 0 for v in row.tflops.values())
    assert row.best_peer == "math" and row.ratio and row.ceiling > 0
    assert timing.host_us(lambda: None, 10) < 1000
    assert "something else" in row.absent["liar"] and row.absent["gone"] == "not installed"
    assert row.kept_share == pytest.approx(97 / 192)
    assert all(low <= row.tflops[n] <= high for n, (low, high) in row.spread.items())


def test_rounds_are_shuffled_and_every_slot_warms_itself() -> None:
    from attngen.bench import timing

    log: list[str] = []
    slots = []
    for name in "abc":
        slot = object.__new__(timing.Slot)
        slot.name, slot.times, slot.launches, slot.warm = name, [], 2, 3
        slot.call = lambda name=name: log.append(name)
        slots.append(slot)
    timing.interleave(slots, rounds=6, seed=0)
    rounds = [log[i : i + 15] for i in range(0, len(log), 15)]
    assert len(rounds) == 6 and all(len(s.times) == 6 for s in slots)
    orders = [tuple(dict.fromkeys(r)) for r in rounds]
    assert len(set(orders)) > 1
    for r, order in zip(rounds, orders, strict=True):
        assert "".join(r) == "".join(n * 5 for n in order), (
            "three warm-up launches and two timed ones, one slot at a time"
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the benchmark itself, on the CPU")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_backward_is_measured_end_to_end(monkeypatch, layout) -> None:
    """The CPU reference stands in for the kernels; other gradients, or none, do not reach the table."""
    from attngen.bench import runner, timing
    from attngen.bench.peers import Peer, _sdpa

    def liar(case: Case):
        return lambda: _sdpa("MATH")(case)() * 1.5

    def blind(case: Case):
        return lambda: _sdpa("MATH")(case)().detach()

    monkeypatch.setattr(timing, "SLOT_MS", 1.0)
    monkeypatch.setattr(timing, "WARM_MS", 0.1)
    monkeypatch.setitem(PEERS, "math", Peer("math", "", ("torch",), _sdpa("MATH")))
    monkeypatch.setitem(PEERS, "liar", Peer("liar", "", ("torch",), liar))
    monkeypatch.setitem(PEERS, "blind", Peer("blind", "", ("torch",), blind))
    spec = example("causal")
    spec = spec.replace(layout=layout, backward=spec.backward.replace(deterministic=True))
    cell = cells.Cell(spec, 1, 4, 2, 64, 64)
    assert cell.label.endswith("deterministic")
    row = runner.measure(
        cell, ("math", "liar", "blind"), params={}, rounds=2, device="cpu", ceiling_size=64, backward=True
    )
    assert set(row.tflops) == {"attngen", "attngen unordered", "math"} and row.direction == "backward"
    assert row.best_peer == "math" and row.ratio_to_unordered and row.ratio_to_unordered > 0
    assert "something else" in row.absent["liar"] and "not differentiable" in row.absent["blind"]
    assert set(row.peak_bytes) == {*row.tflops, "liar"} and not any(row.peak_bytes.values())
    flops = cell.flops(row.kept_share * 64 * 64, backward=True)
    assert row.tflops["math"] == pytest.approx(flops / row.milliseconds["math"] / 1e9)


def test_backward_of_takes_the_gradient_again_and_again() -> None:
    from attngen.bench.backward import backward_of, leaves

    (x,) = leaves(torch.arange(3.0))
    call = backward_of(lambda: x * x, [x], torch.ones(3))
    assert torch.equal(call()[0], 2 * x) and torch.equal(call()[0], 2 * x)
    with pytest.raises(RuntimeError, match="no gradient"):
        backward_of(lambda: x.detach(), [x], torch.ones(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the benchmark itself, on the CPU")
def test_a_rehearsal_calls_everything_once(monkeypatch) -> None:
    from attngen.bench import runner
    from attngen.bench.peers import Peer

    called: list[Case] = []

    def noted(case: Case):
        return lambda: called.append(case) or case.q

    monkeypatch.setitem(PEERS, "noted", Peer("noted", "", ("torch",), noted))
    cell = cells.Cell(example("alibi"), 1, 2, 2, 40, 40)
    monkeypatch.setitem(PEERS, "gone", Peer("gone", "", ("no_such_module_at_all",), lambda case: lambda: case.q))
    absent = runner.rehearse(cell, ("noted", "gone"), {}, None, 0, False, lambda _: {"slopes": torch.ones(2)}, "cpu")
    assert len(called) == 1 and torch.equal(called[0].tensors["slopes"], torch.ones(2))
    assert absent["gone"] == "not installed" and "attngen" not in absent


def test_what_is_rehearsed(monkeypatch) -> None:
    from attngen.bench import rehearsal

    made = grid.cells("usual", (1024, 4096), {})
    assert rehearsal.kept_by(["fa3", "fa4", "flex"]) == ("flex",)
    alone = rehearsal.distinct(made, lambda c: c, ["fa4", "cudnn"])
    assert len(alone) == 8 and {c.seqlen_q for c in alone} == {1024}
    assert rehearsal.distinct(made, lambda c: c, ["flex"]) == made
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    assert rehearsal.kept_by(["fa4", "cudnn"]) == ("fa4",)


def rehearsed(cell: cells.Cell, what: str) -> dict[str, str]:
    """In a process of its own."""
    import os
    import time

    if what == "dies":
        raise ValueError("planted")
    if what == "hangs":
        time.sleep(60)
    return {"flex": f"failed: in {os.getpid()}"} if what == "absent" else {}


def test_rehearsals_run_beside_and_cost_nothing_when_they_fail() -> None:
    import os
    import time

    from attngen.bench.rehearsal import rehearse_all

    cell, said = cells.usual_cell(example("causal"), 1024), []
    rehearse_all([(cell, (w,)) for w in ("fine", "absent", "dies")], 2, said.append, rehearse=rehearsed)
    assert len(said) == 3 and sum("ValueError: planted" in line for line in said) == 1
    assert sum("flex failed: in" in line for line in said) == 1 and str(os.getpid()) not in "".join(said)
    begun = time.perf_counter()
    rehearse_all([(cell, ("hangs",))], 1, said.append, rehearse=rehearsed, timeout_s=1.0)
    assert "1 cells are still compiling" in said[-1] and time.perf_counter() - begun < 30
