"""FlashAttention-4's own kernels, which are known to be right on hardware, executed by the checker.

Forward and backward on sm_90a and sm_100a, by one and by two CTAs; the numbers by the rule that all numeric tests use,
and no fault but those below, which are upstream's own and harmless there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from ptxcheck import fa4, launch
from ptxcheck.compile import Code
from ptxcheck.report import Fault

from attngen.ir.spec import AttentionSpec
from attngen.ref import dense
from attngen.ref.compare import assert_close
from attngen.syntax import make_spec

pytestmark = [pytest.mark.dsl, pytest.mark.skipif(bool(fa4.missing()), reason=fa4.missing() or "never")]

# What FlashAttention-4 does that the manual does not allow, by stage: kind of fault and where.
FINDINGS = {
    "forward": [
        # Persistent loops of sm_100a end with stages acquired, or expected, that no one fills any more.
        ("barrier-unfinished", ""),
        # Lanes read which tile is next, and one gives the place back for all, without a bar.warp.sync between.
        ("race", "tile_scheduler.py:115"),
    ],
    "backward": [
        # sm_100a: the last store (or sum) of dK and dV is not waited for: the CTA may end while it reads shared memory.
        ("async-in-flight", "flash_bwd_sm100.py:4883"),
        ("async-in-flight", "flash_bwd_sm100.py:659"),
        # The leader's last commits signal barriers of the peer, which does not wait for them before it ends.
        ("exited-peer", "flash_bwd_sm100.py:2925"),
        ("exited-peer", "flash_bwd_sm100.py:2926"),
    ],
}
# The forward of sm_100a uses loaded tensor memory without tcgen05.wait::ld; rows past the end are computed from
# registers that were never loaded, and not stored.
RELAXED = ("tcgen05.wait::ld", "uninitialised-register")


class Case(NamedTuple):
    arch: str
    d: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    causal: bool
    pairs: str = ""  # stages that two CTAs compute together
    seed: int = 0

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.arch}-d{self.d}-{mask}-h{self.heads[0]}:{self.heads[1]}-{self.lengths[0]}x{self.lengths[1]}"


CASES = [
    Case("sm_90a", 64, (2, 1), (150, 150), True),
    Case("sm_90a", 128, (1, 1), (97, 203), False, seed=1),
    Case("sm_100a", 64, (2, 1), (150, 150), True),
    Case("sm_100a", 128, (2, 1), (133, 133), False, "forward backward", seed=1),
    Case("sm_100a", 128, (1, 1), (130, 257), True, "backward", seed=2),
]


class Runner:
    """Checks every launch; keeps what each stage's code was and which faults it had."""

    def __init__(self, seed: int) -> None:
        self.seed, self.codes, self.stages = seed, {}, []  # type: ignore[var-annotated]

    def __call__(self, stage: str, code: Code, arguments: tuple[Any, ...]) -> None:
        report = launch.check(code, *arguments, seed=self.seed, sms=2, collect=50, relaxed=RELAXED)
        unexpected = [f for f in report.faults if not known(stage, f)]
        assert not unexpected, f"{stage}\n" + "\n".join(map(str, unexpected))
        self.codes[stage] = code
        self.stages.append(stage)


def known(stage: str, fault: Fault) -> bool:
    return any(fault.kind == kind and where in fault.where for kind, where in FINDINGS.get(stage, []))


def spec(d: int, causal: bool) -> AttentionSpec:
    return make_spec("fa4", head_dim=d, **({"mask": "kv_idx <= q_pos"} if causal else {}))


def tensors(d: int, heads: tuple[int, int], lengths: tuple[int, int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, n, h, d) for n, h in zip((*lengths, lengths[1]), (*heads, heads[1]), strict=True)]
    return [torch.randn(s).bfloat16() for s in shapes]


def gradients(attention: Any, dtype: torch.dtype, meaning: Any, operands: list[torch.Tensor], do: torch.Tensor) -> Any:
    inputs = [x.to(dtype).requires_grad_() for x in operands]
    return torch.autograd.grad(attention(meaning, *inputs).o, inputs, do.to(dtype))


def assert_gradients(
    found: tuple[torch.Tensor, ...], meaning: Any, operands: list[torch.Tensor], do: torch.Tensor
) -> None:
    """At most twice the error of plain torch code in the same dtype, and 2 ulps."""
    exact = gradients(dense.attention, torch.float64, meaning, operands, do)
    plain = gradients(dense.same_dtype, torch.bfloat16, meaning, operands, do)
    for name, got, reference, yardstick in zip("qkv", found, exact, plain, strict=True):
        ulp = float(torch.finfo(got.dtype).eps * reference.abs().max())
        allowed = 2 * float((yardstick.double() - reference).abs().max()) + 2 * ulp
        assert float((got.double() - reference).abs().max()) <= allowed, f"d{name}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(case: Case) -> None:
    operands = tensors(case.d, case.heads, case.lengths)
    meaning = spec(case.d, case.causal)
    for seed in (case.seed, case.seed + 100):
        run = Runner(seed)
        o, lse = fa4.forward(case.arch, run, *operands, causal=case.causal, sms=2)
        assert_close(o, meaning, *operands, lse=lse)
        do = torch.randn(o.shape).bfloat16()
        found = fa4.backward(case.arch, run, *operands, o, do, lse, causal=case.causal, sms=2)
        assert_gradients(found, meaning, operands, do)
        gathered = 3 if case.heads[0] > case.heads[1] else 1  # dK and dV of shared heads are summed up in fp32 first
        assert run.stages == ["forward", "preprocess", "backward"] + ["postprocess"] * gathered
        assert [s for s, code in run.codes.items() if "cta_group::2" in code.ptx] == case.pairs.split()


@pytest.mark.parametrize(("arch", "causal"), [("sm_90a", True), ("sm_100a", False)])
def test_ragged(arch: str, causal: bool) -> None:
    """Sequences of several lengths packed into one batch."""
    lengths = [70, 7, 131]
    operands = [x[0] for x in tensors(64, (2, 1), (sum(lengths), sum(lengths)))]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    meaning, run = spec(64, causal), Runner(3)
    o, lse = fa4.forward(arch, run, *operands, causal=causal, lengths=ends, sms=2)
    do = torch.randn(o.shape).bfloat16()
    found = fa4.backward(arch, run, *operands, o, do, lse, causal=causal, lengths=ends, sms=2)
    for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        one = [x[None, a:b] for x in operands]
        assert_close(o[None, a:b], meaning, *one, lse=lse[None, :, a:b])
        assert_gradients(tuple(g[None, a:b] for g in found), meaning, one, do[None, a:b])


def test_tiles_by_cluster_launch_control() -> None:
    """More tiles than CTAs run at a time: running clusters take over those that have not started."""
    operands = tensors(64, (4, 2), (140, 140))
    run = Runner(0)
    o, lse = fa4.forward("sm_100a", run, *operands, causal=True, clc=True, sms=2)
    assert "clusterlaunchcontrol.try_cancel" in run.codes["forward"].ptx
    assert_close(o, spec(64, True), *operands, lse=lse)
