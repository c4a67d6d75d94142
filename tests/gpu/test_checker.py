"""Kernels of the gallery on the GPU and in the PTX checker (tests/ptxcheck), from one compilation and on equal inputs.

What is equal bit for bit, and what may differ:

- Everything that is not computed: which elements are written, zeros and -inf of rows that keep no key.
- dV and dK, O and LSE pass through ex2.approx, lg2.approx and rcp.approx, tables of the hardware with errors up to two
  units in the last place of fp32, and through wgmma, whose sums have the hardware's order and widths: the checker has
  NumPy's functions and sums. P and dS are rounded to 16 bits in between, so that a difference of fp32 noise becomes one
  unit in the last place of a 16-bit number now and then. Hence a bound for each element, and one for their share.
- dQ is summed in fp32 over KV tiles in the order in which CTAs come, on the GPU as in the checker: noise of fp32 sums,
  below the rounding to 16 bits. The ordered variant has one order, and must give equal bits in two runs of each.
- A call that saturates nothing: V of ones and equal scores (q = 0) makes P, its sums and O exact in either: equal bits.

With ATTNGEN_CHECKER_FIGURES=FILE the tests add what they saw to FILE, one JSON object a line and compared tensor;
`PYTHONPATH=.:tests python tests/gpu/test_checker.py FILE` sums it up as Markdown.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen import samples
from attngen.ir.types import Layout
from attngen.jit.scale import Scale
from attngen.samples import Shape

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "ptx"))
import backward_calls  # noqa: E402
import test_gallery as gallery  # noqa: E402
from ptxcheck.compile import OPTIONS, _scratch, load_text  # noqa: E402
from ptxcheck.launch import check, map_arguments, table_arguments  # noqa: E402
from ragged_calls import Call  # noqa: E402

BACKWARDS = [
    ("causal", ()), ("gemma2_local", ()), ("gpt_oss_local", ("sinks",)), ("mla_prefill", ()), ("bigbird_lists", ())
]  # fmt: skip
SHAPE = Shape(1, 2, 1, 200, 333)
#: Of the largest element, an element's difference; and the share of elements that may differ at all.
ULP16, SHARE = 2**-7, 0.05


def on_both(function: Any, arguments: list[Any], outputs: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors at `outputs` after a call on the GPU, and after one in the checker."""
    device = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]
    function(*device)
    torch.cuda.synchronize()
    report = check(function, *arguments)
    assert not report.faults
    return [device[n].cpu() for n in outputs], [arguments[n] for n in outputs]


def figures(gpu: torch.Tensor, checker: torch.Tensor) -> dict[str, Any]:
    """What differs, over the elements that are finite in both."""
    finite = gpu.isfinite() & checker.isfinite()
    a, b = gpu.double()[finite], checker.double()[finite]
    return {
        "dtype": str(gpu.dtype).removeprefix("torch."),
        "elements": gpu.numel(),
        "difference": float((a - b).abs().max()) if a.numel() else 0.0,
        "largest": float(b.abs().max()) if b.numel() else 0.0,
        "differing": int(((gpu != checker) & ~(gpu.isnan() & checker.isnan())).sum()),
    }


def record(name: str, gpu: torch.Tensor, checker: torch.Tensor) -> None:
    """Add a line to the file of figures, if there is one: by one write, so that processes may share it."""
    file = os.environ.get("ATTNGEN_CHECKER_FIGURES")
    if file:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1].removesuffix(" (call)")
        with open(file, "a", encoding="utf-8") as out:
            out.write(json.dumps({"test": test, "tensor": name, **figures(gpu, checker)}) + "\n")


def summarize(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row for each test and tensor; below, the worst of each dtype.

    A difference is relative to the tensor's largest element, as the bounds of `close` are.
    """
    rows = ["| test | tensor | dtype | elements | largest difference / largest element | elements that differ |"]
    rows.append("|---|---|---|---|---|---|")
    worst: dict[str, list[tuple[float, float]]] = {}
    for x in lines:
        relative, share = x["difference"] / (x["largest"] or 1.0), x["differing"] / max(1, x["elements"])
        worst.setdefault(x["dtype"], []).append((relative, share))
        shown = f"{relative:.1e}" if x["differing"] else "equal bits"
        rows.append(f"| {x['test']} | {x['tensor']} | {x['dtype']} | {x['elements']} | {shown} | {share:.3%} |")
    rows.append("")
    for dtype, found in sorted(worst.items()):
        equal = sum(share == 0 for _, share in found)
        rows.append(
            f"{dtype}: {len(found)} tensors, {equal} of equal bits, largest difference {max(r for r, _ in found):.1e} "
            f"of the largest element, at most {max(s for _, s in found):.2%} of the elements"
        )
    return "\n".join(rows)


def close(name: str, gpu: torch.Tensor, checker: torch.Tensor) -> None:
    record(name, gpu, checker)
    assert torch.equal(gpu.isnan(), checker.isnan()), f"{name}: other elements are written"
    assert torch.equal(gpu.isinf(), checker.isinf()), f"{name}: other rows are empty"
    a, b = (x.double().masked_fill(~gpu.isfinite(), 0.0) for x in (gpu, checker))
    assert torch.equal(a == 0, b == 0) or float((a - b).abs().max()) < 1e-6 * float(b.abs().max())
    top = float(b.abs().max())
    if gpu.dtype is torch.float32:
        assert float((a - b).abs().max()) <= 2e-4 * max(top, 1.0), name
        return
    assert float((a - b).abs().max()) <= ULP16 * top, name
    assert float((gpu != checker).double().mean()) <= SHARE, f"{name}: {float((gpu != checker).double().mean()):.1%}"


def forward_arguments(spec: Any, shape: Shape, *, equal_scores: bool = False) -> list[Any]:
    """What a compiled forward takes, on the CPU: O and LSE (at 3 and 4) hold NaN."""
    q, k, v = samples.qkv(spec, shape, seed=7)
    if equal_scores:
        q, v = torch.zeros_like(q), torch.ones_like(v)
    given = gallery.SMALL.get(spec.name, {})
    params, tensors = samples.params(spec, given), samples.tensors(spec, shape, seed=7)
    extra = (*params.values(), *tensors.values())
    scale = Scale(spec)
    value = scale.default if scale.default == scale.default else scale.of(extra)
    if spec.layout is Layout.BHSD:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    o = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
    lse = torch.full((shape.batch, shape.heads_q, shape.seqlen_q), math.nan)
    return [q, k, v, o, lse, torch.zeros(1, dtype=torch.int32), value, 5, *extra]


@pytest.mark.parametrize(("file", "plan"), gallery.PLANS, ids=[f"{f.name.split('.')[0]}-{i}" for f, i in gallery.PLANS])
def test_forward(file: Path, plan: int) -> None:
    spec = gallery.spec_of(file)
    module = load_text(file.read_text(encoding="utf-8"), spec.name)
    function = module.compile_plan(plan, f"{OPTIONS} --dump-dir {_scratch().name}")
    if spec.layout.is_ragged:
        call = Call(spec, [(131, 131), (0, 9), (60, 203), (100, 77)], tail=3, given=gallery.SMALL.get(spec.name))
        _, arguments = call.arguments(5, module.ATTN_META)
    else:
        arguments = forward_arguments(spec, SHAPE)
        arguments += map_arguments(module.ATTN_META, plan, *arguments[:2], spec.layout.value)
        arguments += table_arguments(module, *arguments[:2], spec.layout.value)
    gpu, checker = on_both(function, arguments, [3, 4])
    for name, a, b in zip(("o", "lse"), gpu, checker, strict=True):
        close(name, a, b)


@pytest.mark.parametrize("name", ["causal", "full"])
def test_equal_bits_where_nothing_is_rounded(name: str) -> None:
    """Equal scores: P is 1, sums are small integers, and O their quotient, 1 in 16 bits whatever rcp.approx gives."""
    spec, file = gallery.SPECS[name], ROOT / "generated" / f"{name}.sm90.py"
    module = load_text(file.read_text(encoding="utf-8"), name)
    function = module.compile_plan(0, f"{OPTIONS} --dump-dir {_scratch().name}")
    (gpu,), (checker,) = on_both(function, forward_arguments(spec, SHAPE, equal_scores=True), [3])
    record("o", gpu, checker)
    assert torch.equal(gpu, checker)


@pytest.mark.parametrize(("name", "captured"), BACKWARDS, ids=[x[0] for x in BACKWARDS])
def test_backward(name: str, captured: tuple[str, ...]) -> None:
    made = backward_calls.kernels(gallery.SPECS[name], captured=captured)
    wanted = ("q", "k", "v")
    function = made.module.compile_backward(0, f"{OPTIONS} --dump-dir {_scratch().name}", wanted=wanted)
    c = backward_calls.call(gallery.SPECS[name], SHAPE, params=gallery.SMALL.get(name), seed=7)
    found, _ = backward_calls.run(made, c)
    gpu = backward_run(function, made, c)
    for output in backward_calls.OUTPUTS:
        close(output, gpu[output], found[output])


def test_deterministic_backward_has_one_result() -> None:
    from attngen.ir.spec import BackwardHints

    spec = gallery.SPECS["causal"].replace(backward=BackwardHints(deterministic=True))
    made = backward_calls.kernels(spec)
    function = made.module.compile_backward(0, f"{OPTIONS} --dump-dir {_scratch().name}", wanted=("q", "k", "v"))
    c = backward_calls.call(spec, SHAPE, seed=7)
    first, second = (backward_run(function, made, c) for _ in range(2))
    one, other = (backward_calls.run(made, c, seed=s)[0] for s in (1, 2))
    for output in backward_calls.OUTPUTS:
        assert torch.equal(first[output], second[output]) and torch.equal(one[output], other[output])
        close(output, first[output], one[output])


def backward_run(function: Any, made: backward_calls.Kernels, c: backward_calls.Call) -> dict[str, torch.Tensor]:
    """The call of `backward_calls.run` on the GPU: its arguments are taken down on the way to the checker."""
    taken: list[Any] = []

    def take(_: Any, *arguments: Any, **__: Any) -> Any:
        device = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]
        function(*device)
        torch.cuda.synchronize()
        for here, there in zip(arguments, device, strict=True):
            if isinstance(here, torch.Tensor) and 0 not in here.stride():
                here.copy_(there)
        taken.append(arguments)
        return type("Report", (), {"faults": []})()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_calls, "check", take)
        found, _ = backward_calls.run(made, c)
    assert len(taken) == 1
    return found


if __name__ == "__main__":
    print(summarize([json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]))
