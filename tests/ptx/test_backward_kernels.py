"""Generated backwards executed by the checker, against float64 autograd of the dense meaning.

Outputs and workspace hold NaN before a call; no fault in any schedule; errors at most twice those of torch's autograd
in the same dtype.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_calls import OUTPUTS, call, kernels, run, strided, verify

from attngen import samples
from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape
from attngen.search_backward import plan_backward
from attngen.syntax import load_all, load_spec

pytestmark = pytest.mark.dsl
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {s.name: s for f in sorted((ROOT / "examples").glob("*.attn")) for s in load_all(f)}
CAUSAL = "mask = kv_idx <= q_pos"
#: Values small enough that a mask bites at these lengths.
SMALL: dict[str, dict[str, Any]] = {
    "gemma2_local": {"keys": 50, "cap": 2.0},
    "gpt_oss_local": {"window": 29},
    "longformer": {"half": 16},
    "bd3lm": {"half": 70, "size": 8},
    "swin_shifted": {"across": 2, "down": 2},
    "dinat": {"height": 15, "width": 16},
}
SQUARE, WIDE, TALL = Shape(1, 2, 1, 131, 131), Shape(2, 2, 2, 60, 203), Shape(1, 3, 1, 200, 77)
SMALLER = Shape(1, 2, 1, 90, 131)
ROW, KEY, ONE = Shape(1, 2, 1, 1, 140), Shape(1, 2, 2, 100, 1), Shape(1, 1, 1, 1, 1)


def written(d: int, dv: int = 0, clauses: str = "", name: str = "a") -> AttentionSpec:
    return load_spec(f"attn 1\nattention {name} {{\n  head_dim = {d}, v = {dv or d}\n  {clauses}\n}}\n")


FULL = written(64)


# ---- the gallery -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "captured", "shapes"),
    [
        ("causal", (), (WIDE, TALL, Shape(1, 8, 2, 40, 90), ROW)),  # TALL: rows without a key
        ("gemma2_local", (), (TALL,)),
        ("gpt_oss_local", ("sinks",), (SQUARE, TALL)),
        ("longformer", (), (Shape(1, 1, 1, 300, 300),)),
        ("mla_prefill", (), (SQUARE,)),
        # unions of intervals, rows that see all; terms of a row and of a key; a table by two offsets, windows by batch
        ("bd3lm", (), (Shape(1, 2, 1, 140, 140),)),
        ("bigbird", (), (Shape(1, 1, 1, 400, 400),)),
        ("bigbird_lists", (), (Shape(1, 2, 1, 200, 250),)),
        ("forgetting", ("decay",), (SQUARE,)),
        ("swin_shifted", ("table",), (Shape(4, 2, 2, 49, 49),)),
        ("tree_verify", (), (Shape(2, 2, 1, 40, 140),)),
        ("dinat", (), (Shape(1, 1, 1, 240, 240),)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_examples(name: str, captured: tuple[str, ...], shapes: tuple[Shape, ...]) -> None:
    spec = EXAMPLES[name]
    made = kernels(spec, captured=captured)
    for seed, shape in enumerate(shapes):
        verify(made, call(spec, shape, params=SMALL.get(name), seed=seed), seeds=(seed,), sms=(1, 4, 132)[seed % 3])


# ---- shapes and strides ----------------------------------------------------------------------------------------------


def test_full_attention_of_few_rows_and_keys() -> None:
    made = kernels(FULL)
    for seed, shape in enumerate((ONE, ROW, KEY, Shape(1, 4, 2, 129, 130), Shape(1, 1, 1, 63, 64))):
        verify(made, call(FULL, shape, seed=seed), seeds=(seed,))


def test_several_schedules() -> None:
    verify(kernels(FULL), call(FULL, Shape(1, 2, 1, 150, 140)), seeds=range(3), sms=3)


def test_serpentine_walks() -> None:
    """Several query heads a CTA and few CTAs: waves that descend and waves that ascend, groups of heads."""
    spec = written(64, 0, CAUSAL)
    made = kernels(spec)
    assert made.plans.plans[0].schedule.serpentine
    verify(made, call(spec, Shape(1, 4, 1, 240, 390)), workers=2)
    verify(made, call(spec, Shape(2, 4, 2, 130, 200), seed=1), seeds=(1,), sms=2, workers=3)


@pytest.mark.parametrize(
    ("d", "clauses", "shape", "workers"),
    [
        (64, "", Shape(1, 5, 5, 70, 200), 2),
        (64, CAUSAL, Shape(2, 4, 2, 70, 300), 3),  # three query tiles in three parts, two query heads
        (128, CAUSAL, Shape(1, 4, 4, 90, 140), 1),
    ],
    ids=["64", "grouped heads", "128"],
)
def test_zeroes_of_later_heads(d: int, clauses: str, shape: Shape, workers: int) -> None:
    """More heads than `prepare` zeroes: the workspace is NaN, so sums over words that nobody has zeroed show."""
    spec = written(d, 0, clauses)
    made = kernels(spec)
    n_blocks, heads = -(-shape.seqlen_kv // made.meta["plans"][0]["tile_n"]), shape.batch * shape.heads_kv
    schedule = made.plans.plans[0].schedule
    assert schedule.zeroes_ahead and schedule.zero_lag(heads, n_blocks, workers) < heads
    verify(made, call(spec, shape), seeds=(0, 1), sms=workers, workers=workers)


@pytest.mark.parametrize("clauses", [CAUSAL, ""], ids=["causal", "full"])
def test_lower_steps_of_short_calls(clauses: str) -> None:
    """The first of two plans: dQ by columns and in two slots, where that of long calls has it transposed and in one."""
    spec = written(128, 0, clauses)
    short = plan_backward(spec).plans[0]
    made = kernels(spec, tile=short.name)
    assert not short.compute.dq_transposed and made.plans.plans == (short,) and short.memory.dq_stages == 2
    verify(made, call(spec, Shape(1, 4, 2, 150, 170)), seeds=(0, 1), workers=2)


@pytest.mark.parametrize(
    ("d", "dv", "tile", "shape", "workers"),
    [
        (64, 64, "32x128", Shape(1, 3, 3, 260, 200), 5),  # nine steps; one tile is left over, in two shares
        (128, 128, "32x128", Shape(1, 2, 1, 130, 300), 7),  # three tiles in two shares, two query heads, a short tile
        (40, 24, "64x128", Shape(1, 1, 1, 520, 90), 9),  # one tile in two shares, padded head dims
    ],
    ids=["one tile", "grouped heads", "padded"],
)
def test_shared_walks(d: int, dv: int, tile: str, shape: Shape, workers: int) -> None:
    """KV tiles that leave a wave short are walked by several CTAs; every part is written before it is read."""
    spec = written(d, dv)
    made = kernels(spec, tile=tile)
    n_blocks, steps = -(-shape.seqlen_kv // 128), -(-shape.seqlen_q // made.meta["plans"][0]["tile_m"])
    kv_tiles, steps = n_blocks * shape.batch * shape.heads_kv, steps * shape.heads_q // shape.heads_kv
    assert made.plans.plans[0].schedule.shared(kv_tiles, workers, steps)[1] == 2
    verify(made, call(spec, shape), sms=workers, workers=workers)


def test_strides() -> None:
    """Rows inside wider rows, LSE in another order, a gradient of LSE that is zero throughout, with stride 0."""
    verify(kernels(FULL), strided(call(FULL, Shape(2, 2, 2, 90, 70))))
    verify(kernels(FULL), call(FULL, Shape(2, 2, 1, 90, 70), dlse=False))


def test_window() -> None:
    """Both edges of an interval; query tiles past the first 32; windows of one key and past all keys."""
    spec = written(64, 0, "param window: int >= 1 = 40\n  mask = kv_idx <= q_pos and q_pos - kv_idx < window")
    made = kernels(spec, tile="32x128")
    for seed, (window, shape) in enumerate(((1, SQUARE), (70, Shape(1, 2, 1, 90, 300)))):
        verify(made, call(spec, shape, params={"window": window}, seed=seed))
    verify(made, call(spec, Shape(1, 1, 1, 1060, 1060), params={"window": 3}))


def test_keys_that_nobody_sees_and_rows_that_see_none() -> None:
    """Whole KV tiles and whole batch elements without a pair: zeros, and no wait that never ends. fp16, heads first."""
    clauses = "dtype = fp16\n  layout = bhsd\n  tensor lengths: i32[batch]\n  mask = kv_idx < lengths[b]"
    made = kernels(spec := written(64, 0, clauses))
    c = call(spec, Shape(3, 2, 1, 70, 300), tensors={"lengths": torch.tensor([0, 130, 300], dtype=torch.int32)})
    found = verify(made, c)
    assert all((found[n][0] == 0).all() for n in OUTPUTS)
    assert (found["dk"][1, 130:] == 0).all() and (found["dv"][1, 130:] == 0).all()


@pytest.mark.parametrize(
    ("d", "dv", "clauses"),
    [(8, 8, CAUSAL), (72, 40, CAUSAL), (96, 128, "")],
    ids=str,
)
def test_head_dims(d: int, dv: int, clauses: str) -> None:
    made = kernels(written(d, dv, clauses, "causal"))  # as tests/compile calls them: compiled once
    verify(made, call(made.plans.spec, Shape(1, 2, 1, 90, 150)), seeds=(d,))


# ---- KV tile after KV tile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "dv", "clauses"),
    [(64, 64, CAUSAL), (128, 128, ""), (192, 128, CAUSAL), (256, 256, CAUSAL)],
    ids=["rings of dQ", "full", "parts of dK", "wide heads"],
)
def test_fewer_ctas_than_kv_tiles(d: int, dv: int, clauses: str) -> None:
    """A CTA has several KV tiles one after the other, of several heads, some of which no query sees."""
    made = kernels(written(d, dv, clauses))
    c = call(made.plans.spec, Shape(1, 2, 2, 100, 3 * made.plans.plans[0].compute.tile_n - 20))
    for seed, workers in enumerate((2, 3, 4)):
        verify(made, c, seeds=(seed,), workers=workers)


def test_one_cta_for_all_kv_tiles() -> None:
    spec = written(64, 0, "param window: int >= 1 = 40\n  mask = kv_idx <= q_pos and q_pos - kv_idx < window")
    made = kernels(spec, tile="32x128")
    verify(made, call(spec, Shape(2, 2, 1, 90, 300), params={"window": 70}), seeds=range(2), workers=1)


# ---- scores, masks, captured tensors ---------------------------------------------------------------------------------


def test_a_slope_with_rows_past_the_end_and_lse_near_plus_and_minus_100() -> None:
    """P depends on the difference of score and LSE alone."""
    spec = written(
        64, 0, "param cap: float = 2.0\n  param shift: float = 0.0\n"
        f"  score = cap * tanh(s / cap) + sqrt(abs(s) + 1.0) + shift\n  {CAUSAL}",
    )  # fmt: skip
    for seed, (shape, shift) in enumerate(((SMALLER, 100.0), (TALL, -100.0))):
        c = call(spec, shape, params={"shift": shift}, seed=seed)
        assert (c.lse[c.lse > -math.inf] - shift).abs().max() < 20
        verify(kernels(spec), c)


def test_masks_tested_element_by_element() -> None:
    """Residual tests, a score that is infinite where the mask drops, and a sink."""
    spec = written(
        64, 0, "tensor flag: bool[batch, seqlen_kv]\n  tensor z: f32[heads_q] grad\n  sink = z[h]\n"
        "  score = s * log(float(q_pos - kv_idx + 2))\n"
        "  mask = kv_idx <= q_pos and (flag[b, kv_idx] or q_idx % 3 == 0)",
    )  # fmt: skip
    made = kernels(spec, captured=("z",))
    verify(made, call(spec, WIDE))


def test_captured_gradients() -> None:
    """All kinds at once: of a sink, by head and by key, by row, and gathered by distance, whose elements repeat."""
    spec = written(
        64, 0, "tensor z: f32[heads_q] grad\n  tensor slopes: f32[heads_q] grad\n"
        "  tensor keys: f32[batch, seqlen_kv] grad\n  tensor rows: f32[batch, seqlen_q] grad\n"
        "  tensor table: f32[9] grad\n  sink = z[h]\n"
        "  score = s + keys[b, kv_idx] + rows[b, q_idx] * s - slopes[h] * abs(q_pos - kv_idx)\n"
        f"    + table[min(abs(q_idx - kv_idx), 8)]\n  {CAUSAL}",
    )  # fmt: skip
    made = kernels(spec, captured=("z", "slopes", "keys", "rows", "table"))
    assert {e["kind"] for e in made.meta["gradients"]} == {"sink", "column", "row", "element"}
    for seed, shape in enumerate((SQUARE, TALL)):
        verify(made, call(spec, shape, seed=seed))


def test_gradient_of_a_bias() -> None:
    """One element a pair; and one for all heads, which pairs of different heads add to."""
    spec = EXAMPLES["bias"]
    (name,) = (t.name for t in spec.tensors)
    made = kernels(spec, captured=(name,))
    for seed, heads in enumerate((2, 1)):
        bias = torch.randn(1, heads, 90, 150, generator=torch.Generator().manual_seed(seed))
        kind = samples.tensors(spec, SQUARE)[name].dtype
        verify(made, call(spec, Shape(1, 2, 1, 90, 150), tensors={name: bias.to(kind)}, seed=seed))


# ---- deterministic ---------------------------------------------------------------------------------------------------

SUMS = (
    "tensor z: f32[heads_q] grad\n  tensor x: f32[heads_q] grad\n  sink = z[h]\n  score = s * x[h]\n  "
    "mask = kv_idx <= q_pos"
)
UNION = "mask = kv_idx <= q_pos and (q_pos - kv_idx < 40 or kv_idx < 5 or kv_idx % 128 == 3)"


@pytest.mark.parametrize(
    ("d", "clauses", "shape"),
    [
        (64, CAUSAL, Shape(1, 2, 1, 140, 300)),
        (64, UNION, Shape(1, 1, 1, 140, 300)),
        (256, CAUSAL, Shape(1, 2, 1, 90, 131)),
    ],
    ids=["captured sums", "union", "wide heads"],
)
def test_deterministic(d: int, clauses: str, shape: Shape) -> None:
    """Equal bits in any schedule, on fewer SMs than there are CTAs and on more; sums of captured tensors too."""
    spec = written(d, 0, f"backward {{ deterministic = true }}\n  {clauses}", "turns")
    made = kernels(spec, captured=tuple(t.name for t in spec.tensors))
    assert made.meta["deterministic"]
    c = call(spec, shape)
    first = verify(made, c, seeds=(0,), sms=1)
    for seed, sms in ((1, 3), (2, 200)):
        again, _ = run(made, c, seed=seed, sms=sms)
        assert first.keys() == again.keys() and all(torch.equal(first[n], again[n]) for n in first)


@pytest.mark.parametrize("d", [64, 256])
def test_turns_of_ctas_that_do_not_run_at_once(d: int) -> None:
    """A KV tile that others wait for is never one of a CTA that has no SM yet."""
    spec = written(d, 0, "backward { deterministic = true }")
    made = kernels(spec)
    c = call(spec, Shape(1, 1, 1, 70, 5 * made.plans.plans[0].compute.tile_n - 9))
    first = verify(made, c, seeds=(0,), sms=12)
    for seed, (workers, sms) in enumerate(((2, 2), (4, 2), (5, 3), (132, 2))):
        again, _ = run(made, c, seed=seed, sms=sms, workers=workers)
        assert all(torch.equal(first[n], again[n]) for n in OUTPUTS)


# ---- part of the gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "wanted"), [(64, "q"), (64, "k"), (64, "v"), (192, "kv")])
def test_wanted(d: int, wanted: str) -> None:
    """Only those are written; the rest of the kernel goes on without them."""
    spec = written(d, 64 if d == 64 else 128, CAUSAL)
    made = kernels(spec, wanted)
    for workers in (132, 2):
        verify(made, call(spec, SQUARE), workers=workers)
