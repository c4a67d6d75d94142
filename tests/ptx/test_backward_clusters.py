"""Backwards of wide heads executed by the checker: two CTAs, a cluster, share a KV tile and exchange dS.

Results against float64 autograd as in `test_backward_kernels`; and what the checker says where a wait or a signal
between the two CTAs is missing.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from backward_calls import OUTPUTS, Kernels, call, kernels, run, verify
from ptxcheck.compile import compile_backward, load_text
from ptxcheck.report import FaultFound

from attngen.emit.backward import emit_backward
from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
CAUSAL = "mask = kv_idx <= q_pos"


def written(d: int, clauses: str = "", dv: int = 0) -> AttentionSpec:
    return load_spec(f"attn 1\nattention wide {{\n  head_dim = {d}, v = {dv or d}\n  {clauses}\n}}\n")


@pytest.mark.parametrize("d", [152, 192, 224, 256])
def test_head_dims(d: int) -> None:
    """A quarter of the columns of dQ: 40, 48, 56, 64. The second CTA of the last KV tile has no key."""
    made = kernels(written(d, CAUSAL))
    assert made.plans.plans[0].launch.cluster == (2, 1, 1)
    verify(made, call(made.plans.spec, Shape(1, 2, 1, 90, 190)), seeds=(d,))


def test_shapes_and_schedules() -> None:
    """Clusters one at a time, and more at a time than there are; one key, one row, several query heads."""
    made = kernels(written(256, CAUSAL))
    for seed, (shape, sms) in enumerate(
        (
            (Shape(2, 4, 2, 70, 200), 2),
            (Shape(1, 1, 1, 150, 330), 132),
            (Shape(1, 2, 1, 100, 1), 4),
            (Shape(1, 2, 2, 1, 140), 4),
            (Shape(1, 1, 1, 200, 77), 4),  # rows without a key
        )
    ):
        verify(made, call(made.plans.spec, shape, seed=seed), seeds=(seed,), sms=sms)


def test_few_clusters_take_many_tiles() -> None:
    """Two SMs are one cluster: it takes the tiles one after the other, and both CTAs hear of each."""
    made = kernels(written(192))
    c = call(made.plans.spec, Shape(1, 2, 1, 65, 520))
    first, _ = run(made, c, workers=2)
    again, _ = run(made, c, workers=7, sms=6, seed=3)
    assert all(torch.equal(first[n], again[n]) for n in ("dk", "dv"))
    verify(made, c, seeds=(1,), workers=3)


def test_tiles_that_nobody_sees() -> None:
    clauses = "tensor lengths: i32[batch]\n  mask = kv_idx < lengths[b]"
    made = kernels(spec := written(256, clauses))
    c = call(spec, Shape(3, 1, 1, 70, 200), tensors={"lengths": torch.tensor([0, 60, 200], dtype=torch.int32)})
    found = verify(made, c)
    assert all((found[n][0] == 0).all() for n in OUTPUTS) and (found["dk"][1, 60:] == 0).all()


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_part_of_the_gradients(wanted: str) -> None:
    """Without dQ there is nothing to exchange."""
    made = kernels(written(256, CAUSAL), wanted)
    verify(made, call(made.plans.spec, Shape(1, 2, 1, 90, 200)))


def test_captured_sums() -> None:
    """P goes to the other warpgroup in fp32, in one stage."""
    spec = written(256, f"tensor keys: f32[batch, seqlen_kv] grad\n  score = s + keys[b, kv_idx]\n  {CAUSAL}")
    made = kernels(spec, captured=("keys",))
    verify(made, call(spec, Shape(1, 2, 1, 90, 131)))


@pytest.mark.parametrize(
    ("d", "clauses"),
    [
        (160, "tensor t: f32[batch, seqlen_q] grad\n  score = s * t[b, q_idx]"),
        (200, "tensor t: f32[batch, seqlen_kv] grad\n  score = s * t[b, kv_idx] + 0.1 * s * s"),
        (256, "tensor t: f32[heads_q] grad\n  score = t[h] * tanh(s / t[h])"),
    ],
)
def test_captured_sums_that_read_the_score(d: int, clauses: str) -> None:
    """The warpgroup of dK computes S once more."""
    made = kernels(spec := written(d, f"{clauses}\n  {CAUSAL}"), captured=("t",))
    assert made.plans.plans[0].compute.splits_operands
    verify(made, call(spec, Shape(1, 2, 1, 70, 150)))


# ---- what is missing is found ----------------------------------------------------------------------------------------

EDITS = {
    "dS given back to one CTA": (
        "arrive_at(w.ds_empty + stage_of(i, DS_STAGES), w.lane < 2)",
        "arrive_at(w.ds_empty + stage_of(i, DS_STAGES), w.lane == 0)",
        {"deadlock", "barrier-over-arrival", "race"},
    ),
    "dS overwritten while it is read": ("            rings.ds.wait_free(i)\n", "", {"race", "barrier-over-arrival"}),
    "K of the other CTA not waited for": (
        "            rings.peer_k.wait(j)\n", "            pass\n", {"race", "uninitialised-read"},
    ),
    "the other CTA has ended": (
        "        cute.arch.cluster_arrive()  # the other CTA still signals barriers of this one\n"
        "        cute.arch.cluster_wait()\n", "", {"exited-peer"},
    ),
}  # fmt: skip


@cache
def _text() -> str:
    return emit_backward(plan_backward(written(160))).text


@pytest.mark.parametrize("name", EDITS)
def test_what_is_missing_is_found(name: str) -> None:
    old, new, kinds = EDITS[name]
    text = _text()
    assert text.count(old) == 1, "the edit names text that stands otherwise"
    plans = plan_backward(written(160))
    module = load_text(text.replace(old, new), "wide_bwd")
    code = compile_backward(module)
    c = call(plans.spec, Shape(1, 1, 1, 330, 200))
    with pytest.raises(FaultFound) as found:
        for seed in range(6):
            run(Kernels(plans, module, code, "qkv"), c, seed=seed)
    assert {f.kind for f in found.value.faults} <= kinds
