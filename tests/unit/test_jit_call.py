"""The launch path: what reaches a kernel's entry point, with that entry point replaced by a recorder on CPU tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jit_standin as standin
import pytest
import torch

from attngen.diag.diagnostic import AttnError
from attngen.ir.expr import const
from attngen.ir.functions import apply
from attngen.ir.types import DType, Layout
from attngen.jit import launch, ops
from attngen.jit.cache import KernelCache
from attngen.jit.device import DeviceState, capability_of, require_target
from attngen.jit.kernel import Attention

BF16 = torch.bfloat16


class Recorder:
    """Stands for a compiled function; `refuse` maps call numbers to the exception that the entry point raises."""

    def __init__(self, refuse: dict[int, Exception] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse = refuse or {}

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        if failure := self.refuse.get(len(self.calls)):
            raise failure


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Make an Attention whose launches go to recorders."""
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)

    def make(spec: Any, *functions: Any, limits: tuple[int, ...] = (), **keywords: Any) -> Attention:
        source = standin.source(spec, plans=len(functions), limits=limits)
        attention = Attention(spec, source, "sm_90a", KernelCache(tmp_path), **keywords)
        attention.launcher.functions = functions
        attention.launcher.ready[-1] = (DeviceState(-1, 132), 132 - (spec.schedule.sm_margin or 0))
        return attention

    return make


def qkv(
    b: int = 2, sq: int = 16, hq: int = 4, skv: int = 24, hkv: int = 2, d: int = 64, dv: int = 64, dtype: Any = BF16
) -> Any:
    return (
        torch.randn(b, sq, hq, d).to(dtype),
        torch.randn(b, skv, hkv, d).to(dtype),
        torch.randn(b, skv, hkv, dv).to(dtype),
    )


def test_arguments_reach_the_kernel_in_its_order(attach: Any) -> None:
    seen = Recorder()
    attn = attach(standin.rich(), seen)
    q, k, v = qkv()
    bias = torch.randn(2, 4)
    o, lse = attn(q, k, v, bias=bias, window=5, flip=True, return_lse=True)
    (call,) = seen.calls
    assert call[0] is q and call[1] is k and call[2] is v and call[3] is o and call[4] is lse
    assert call[5].shape == (1,) and call[5].dtype is torch.int32 and int(call[5]) == 0
    assert call[6] == pytest.approx(1 / 8) and call[7] == 132
    assert call[8:11] == (5, 1.0, True) and call[11] is bias
    assert o.shape == (2, 16, 4, 64) and o.dtype is BF16 and o.is_contiguous()
    assert lse.shape == (2, 4, 16) and lse.dtype is torch.float32


def test_outputs_follow_layout_head_dim_and_dtype(attach: Any) -> None:
    spec = standin.plain(64, 128, layout=Layout.BHSD, out_dtype=DType.F32)
    attn = attach(spec, Recorder())
    q, k, v = (x.transpose(1, 2) for x in qkv(dv=128))
    o, lse = attn(q, k, v, return_lse=True)
    assert o.shape == (2, 4, 16, 128) and o.dtype is torch.float32 and o.is_contiguous() and lse.shape == (2, 4, 16)


def test_outputs_are_contiguous_whatever_the_strides_of_q(attach: Any) -> None:
    attn = attach(standin.plain(), Recorder())
    q, k, v = qkv()
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert attn(q, k, v).is_contiguous()
    assert attn(q[:1].expand(2, -1, -1, -1), k, v).is_contiguous()


def test_given_outputs_are_used(attach: Any) -> None:
    seen = Recorder()
    attn = attach(standin.plain(), seen)
    q, k, v = qkv()
    out, lse = torch.empty_like(q), torch.empty(2, 4, 16)
    before = out._version
    assert attn(q, k, v, out=out) is out and out._version > before
    assert attn(q, k, v, out=out, lse=lse, return_lse=True) == (out, lse)
    assert seen.calls[1][4] is lse


@pytest.mark.parametrize(
    ("sq", "skv", "plan"), [(16, 24, 0), (32, 8, 0), (33, 8, 1), (8, 64, 1), (8, 65, 2), (65, 1, 2)]
)
def test_the_longest_length_picks_the_plan(attach: Any, sq: int, skv: int, plan: int) -> None:
    functions = (Recorder(), Recorder(), Recorder())
    attach(standin.plain(), *functions, limits=(32, 64))(*qkv(sq=sq, skv=skv))
    assert [len(f.calls) for f in functions] == [int(i == plan) for i in range(3)]


def test_one_counter_a_stream_and_one_a_captured_call(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder()
    attn = attach(standin.plain(), seen)
    q, k, v = qkv()
    attn(q, k, v), attn(q, k, v)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 8)
    attn(q, k, v)
    monkeypatch.setattr(launch, "_capturing", lambda: True)
    attn(q, k, v), attn(q, k, v)
    counters = [c[5] for c in seen.calls]
    places = [c.data_ptr() for c in counters]
    assert places[0] == places[1] and len(set(places)) == 4
    assert min(abs(a - b) for a in places for b in places if a != b) >= 128
    scratch = [c[4].data_ptr() for c in seen.calls]
    assert scratch[0] == scratch[1] and len(set(scratch)) == 4, (
        "an unwanted LSE is shared by a stream, never by a graph"
    )


def test_captured_calls_never_run_out_of_counters(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.jit import device

    monkeypatch.setattr(device, "COUNTERS", 2)
    monkeypatch.setattr(launch, "_capturing", lambda: True)
    seen = Recorder()
    attn = attach(standin.plain(), seen)
    attn.launcher.ready[-1][0].prepare()
    for _ in range(5):
        attn(*qkv())
    kept = [c[5] for c in seen.calls]
    assert len({c.data_ptr() for c in kept}) == 5 and all(int(c) == 0 for c in kept)


def test_counters_are_taken_once_by_racing_threads() -> None:
    import threading

    state, taken = DeviceState(-1, 132), []

    def work(first: int) -> None:
        for stream in range(first, first + 100):
            taken.append(state.counter(stream).data_ptr())

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(taken)) == 800


def test_scale(attach: Any) -> None:
    from attngen.ir.expr import Param
    from attngen.ir.types import Type

    seen = Recorder()
    spec = standin.rich(tensor=False).replace(scale=apply("div", const(2.0), Param(type=Type.FLOAT, name="gain")))
    attn = attach(spec, seen)
    q, k, v = qkv()
    (
        attn(q, k, v),
        attn(q, k, v, gain=4.0),
        attn(q, k, v, scale=0.25),
        attn(q, k, v, scale=torch.tensor(3)),
        attn(q, k, v, scale=1),
    )
    assert [c[6] for c in seen.calls] == [2.0, 0.5, 0.25, 3.0, 1.0]
    assert all(type(c[6]) is float for c in seen.calls)
    for bad in ("x", math.nan, math.inf, torch.ones(2)):
        with pytest.raises(AttnError) as caught:
            attn(q, k, v, scale=bad)
        assert caught.value.code == "E0603"
    with pytest.raises(AttnError, match="scale of `rich` is inf"):
        attach(spec.replace(scale=apply("div", const(2.0), const(0.0))), seen)


def test_params_are_converted_and_bounded(attach: Any) -> None:
    import numpy

    seen = Recorder()
    attn = attach(standin.rich(tensor=False), seen)
    q, k, v = qkv()
    attn(q, k, v, window=numpy.int64(3), gain=2), attn(q, k, v, window=torch.tensor(9), gain=numpy.float32(0.5))
    assert seen.calls[0][8:] == (3, 2.0, False) and seen.calls[1][8:] == (9, 0.5, False)
    assert type(seen.calls[0][9]) is float
    for name, value, word in (
        ("window", 0, "outside [1"),
        ("window", 2**31, "outside"),
        ("window", 2.0, "an int"),
        ("window", True, "an int"),
        ("window", torch.tensor([1, 2]), "a tensor with axes"),
        ("gain", "loud", "a float"),
        ("gain", math.nan, "NaN"),
        ("flip", 1, "a bool"),
    ):
        with pytest.raises(AttnError) as caught:
            attn(q, k, v, **{name: value})
        assert caught.value.code == "E0603" and word in str(caught.value), str(caught.value)
    with pytest.raises(AttnError, match="did you mean `window`") as caught:
        attn(q, k, v, windwo=3)
    assert caught.value.code == "E0601"
    with pytest.raises(AttnError) as caught:
        attach(standin.plain(), seen)(q, k, v, window=3)
    assert caught.value.code == "E0601"


def test_missing_params_and_tensors(attach: Any) -> None:
    seen = Recorder()
    q, k, v = qkv()
    for name, spec in {
        "bias": standin.rich(),
        "window": standin.rich().replace(params=(standin.WINDOW.replace(default=None), standin.GAIN, standin.FLIP)),
    }.items():
        with pytest.raises(AttnError, match=f"needs the (tensor|param) `{name}`") as caught:
            attach(spec, seen)(q, k, v)
        assert caught.value.code == "E0602"
    with pytest.raises(AttnError) as caught:
        attach(standin.rich(), seen)(q, k, v, bias=3.0)
    assert caught.value.code == "E0604"
    assert not seen.calls


def test_captured_tensors_broadcast_without_a_copy(attach: Any) -> None:
    seen = Recorder()
    bias = torch.randn(1, 4)
    attach(standin.rich(), seen)(*qkv(), bias=bias)
    given = seen.calls[0][-1]
    assert given.shape == (2, 4) and given.stride(0) == 0 and given.data_ptr() == bias.data_ptr()


REFUSED = ValueError("Mismatched Tensor on argument #0\nexpected something else")


def _long(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


BAD: dict[str, tuple[Any, str, str]] = {
    "rank": (lambda q, k, v: (q[0], k, v), "E0607", "has 3 axes"),
    "rank of v": (lambda q, k, v: (q, k, v[0, 0]), "E0607", "`v` has 2 axes"),
    "dtype": (lambda q, k, v: (q.float(), k, v), "E0606", "`q` is torch.float32"),
    "mixed dtypes": (lambda q, k, v: (q, k.half(), v), "E0606", "`k` is torch.float16"),
    "head_dim": (lambda q, k, v: (q[..., :32], k, v), "E0607", "head dimension 32"),
    "batch": (lambda q, k, v: (q, k[:1], v), "E0607", "`k` has batch 1, q has 2"),
    "seqlen of v": (lambda q, k, v: (q, k, v[:, :8]), "E0607", "`v` has seqlen 8, k has 24"),
    "heads of v": (lambda q, k, v: (q, k, v[:, :, :1]), "E0607", "`v` has heads 1, k has 2"),
    "head counts": (lambda q, k, v: (q[:, :, :3], k, v), "E0608", "3 query heads do not divide into 2"),
    "device": (lambda q, k, v: (q, k.to("meta"), v), "E0605", "`k` is on meta"),
    "head_dim stride": (
        lambda q, k, v: (q.transpose(1, 3).contiguous().transpose(1, 3), k, v),
        "E0609",
        "along head_dim",
    ),
    "odd stride": (lambda q, k, v: (torch.randn(2, 16, 4, 65).to(BF16)[..., :64], k, v), "E0609", "multiple of 8"),
    "alignment": (lambda q, k, v: (_long(q), k, v), "E0610", "2 bytes past"),
    "not a tensor": (lambda q, k, v: (q, [1, 2], v), "E0604", "`k` must be a torch tensor, found list"),
    "none": (lambda q, k, v: (None, k, v), "E0604", "`q` must be a torch tensor, found NoneType"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("prepared", [True, False], ids=["kernel", "cpu"])
def test_bad_tensors_are_explained(attach: Any, case: str, prepared: bool) -> None:
    """The same message whether a kernel's entry point refused the call or the CPU path checked it."""
    change, code, words = BAD[case]
    attn = attach(standin.plain(), Recorder({1: REFUSED}))
    if not prepared:
        attn.launcher.ready.clear()
    with pytest.raises(AttnError) as caught:
        attn(*change(*qkv()))
    assert caught.value.code == code and words in str(caught.value), str(caught.value)
    assert "help:" in str(caught.value)


@pytest.mark.parametrize(
    ("bias", "code", "words"),
    [
        (torch.zeros(2, 4, dtype=torch.float64), "E0606", "torch.float64"),
        (torch.zeros(2, 5), "E0607", "extent 5 along heads_q"),
        (torch.zeros(4), "E0607", "has 1 axes"),
        (torch.zeros(2, 4, device="meta"), "E0605", "on meta"),
    ],
)
@pytest.mark.parametrize("prepared", [True, False], ids=["kernel", "cpu"])
def test_bad_captured_tensors_are_explained(attach: Any, bias: Any, code: str, words: str, prepared: bool) -> None:
    attn = attach(standin.rich(), Recorder({1: REFUSED}))
    if not prepared:
        attn.launcher.ready.clear()
    with pytest.raises(AttnError) as caught:
        attn(*qkv(), bias=bias)
    assert caught.value.code == code and words in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["out", "lse"])
@pytest.mark.parametrize("prepared", [True, False], ids=["kernel", "cpu"])
def test_bad_outputs_are_explained(attach: Any, name: str, prepared: bool) -> None:
    good = {"out": torch.empty(2, 16, 4, 64, dtype=BF16), "lse": torch.empty(2, 4, 16)}[name]
    for bad in (good[:1], good.double(), good[:1].expand_as(good), "x"):
        attn = attach(standin.plain(), Recorder({1: REFUSED}))
        if not prepared:
            attn.launcher.ready.clear()
        with pytest.raises(AttnError) as caught:
            attn(*qkv(), **{name: bad})
        assert caught.value.code == "E0616" and f"`{name}`" in str(caught.value)


def test_odd_strides_of_extent_one_axes_are_tidied(attach: Any) -> None:
    seen = Recorder({1: REFUSED})
    attn = attach(standin.plain(), seen)
    q, k, v = qkv(b=1, sq=1)
    q = q.as_strided(q.shape, (3, 5, 64, 1))
    attn(q, k, v)
    first, second = seen.calls
    assert first[0] is q
    assert second[0].stride() == (256, 256, 64, 1) and second[0].data_ptr() == q.data_ptr()


def test_a_second_refusal_is_reported(attach: Any) -> None:
    attn = attach(standin.plain(), Recorder({1: REFUSED, 2: ValueError("still no")}))
    q, k, v = qkv(b=1, sq=1)
    with pytest.raises(AttnError, match="still no") as caught:
        attn(q.as_strided(q.shape, (3, 5, 64, 1)), k, v)
    assert caught.value.code == "E0618"


def test_a_refusal_that_nothing_explains_is_reported(attach: Any) -> None:
    attn = attach(standin.plain(), Recorder({1: RuntimeError("CUDA error 700")}))
    with pytest.raises(AttnError, match="CUDA error 700") as caught:
        attn(*qkv())
    assert caught.value.code == "E0618"


@pytest.mark.parametrize("empty", [{"sq": 0}, {"b": 0}, {"skv": 0}, {"hq": 0}])
def test_empty_shapes_do_not_launch(attach: Any, empty: dict[str, int]) -> None:
    seen = Recorder()
    o, lse = attach(standin.plain(), seen)(*qkv(**empty), return_lse=True)
    assert not seen.calls
    assert not o.float().any() and (lse == -math.inf).all()
    assert o.shape == (empty.get("b", 2), empty.get("sq", 16), empty.get("hq", 4), 64)


def test_no_keys_gives_the_sink(attach: Any) -> None:
    seen = Recorder()
    q, k, v = qkv(skv=0)
    out = torch.full_like(q, 3.0)
    o, lse = attach(standin.plain(sink=const(0.5)), seen)(q, k, v, return_lse=True, out=out)
    assert o is out and not out.float().any() and (lse == 0.5).all() and not seen.calls


def test_given_outputs_and_gradients(attach: Any) -> None:
    """As torch's own out= functions: refused while a gradient is needed, fine without."""
    attn = attach(standin.rich().replace(tensors=(standin.BIAS.replace(grad=True),)), Recorder())
    q, k, v = qkv()
    bias = torch.zeros(2, 4)
    outputs = {"out": torch.empty_like(q), "lse": torch.empty(2, 4, 16)}
    for grad in ("q", "v", "bias"):
        given = {"q": q, "k": k, "v": v, "bias": bias}
        given[grad] = given[grad].clone().requires_grad_()
        for name, x in outputs.items():
            with pytest.raises(AttnError, match=r"torch\.no_grad") as caught:
                attn(**given, **{name: x})
            assert caught.value.code == "E0619"
        with torch.no_grad():
            assert attn(**given, **outputs) is outputs["out"]


def test_the_other_16_bit_dtype_builds_a_twin_once(attach: Any) -> None:
    made = []

    def rebuild(spec: Any) -> Attention:
        made.append(spec)
        return attach(spec, Recorder())

    attn = attach(standin.plain(), Recorder(), rebuild=rebuild)
    q, k, v = qkv(dtype=torch.float16)
    assert attn(q, k, v).dtype is torch.float16 and attn(q, k, v).dtype is torch.float16
    assert [s.dtype for s in made] == [DType.FP16]


def test_autocast_converts_as_torch_does(attach: Any) -> None:
    seen = Recorder()
    attn = attach(standin.plain(), seen)
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=BF16):
        o = attn(q, k, v)
    assert o.dtype is BF16
    with torch.autocast("cpu", dtype=BF16), pytest.raises(AttnError):
        attn(q.long(), k, v)


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        capability_of("sm_90a") == (9, 0)
        and capability_of("sm_100a") == (10, 0)
        and capability_of("sm_103a") == (10, 3)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "L4")
    with pytest.raises(AttnError, match=r"sm_90a; cuda:0 \(L4\) is sm_89") as caught:
        require_target(0, "sm_90a", "causal")
    assert caught.value.code == "E0516" and "help:" in str(caught.value)


def test_functorch_is_refused(attach: Any) -> None:
    attn = attach(standin.plain(), Recorder())
    q, k, v = (x[None] for x in qkv())
    with pytest.raises(AttnError, match="vmap") as caught:
        torch.vmap(attn)(q, k, v)
    assert caught.value.code == "E0612"


def test_handles_depend_on_content_alone(attach: Any) -> None:
    a, b = attach(standin.plain(), Recorder()), attach(standin.plain(), Recorder())
    other = attach(standin.plain(scale=const(2.0)), Recorder())
    assert a.handle == b.handle != other.handle
    assert ops._find(a.handle).spec == a.spec
    with pytest.raises(AttnError) as caught:
        ops._find("nowhere")
    assert caught.value.code == "E0617"


def test_repr_is_one_line(attach: Any) -> None:
    assert repr(attach(standin.plain(), Recorder())) == "<attngen.Attention plain bf16 bshd head_dim 64/64 sm_90a>"


@pytest.mark.parametrize(("margin", "workers"), [(None, 132), (12, 120), (500, 1)])
def test_sm_margin_leaves_sms_free(
    attach: Any, monkeypatch: pytest.MonkeyPatch, margin: int | None, workers: int
) -> None:
    monkeypatch.setattr(launch, "require_target", lambda *a: None)
    monkeypatch.setattr(launch, "state_of", lambda index: DeviceState(index, 132))
    seen = Recorder()
    spec = standin.plain()
    attn = attach(spec.replace(schedule=spec.schedule.replace(sm_margin=margin)), seen)
    attn.launcher.ready.clear()
    attn.launcher.prepare(-1, "sm_90a")
    attn(*qkv())
    assert seen.calls[0][7] == workers


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_a_scale_that_is_not_positive_is_refused_without_a_score_expression(scale: float) -> None:
    """The kernel takes row maxima of raw products: a negative factor would turn them around, zero gives 0 * -inf."""
    import attngen

    text = "attn 1\nattention a {{\n  head_dim = 64\n{}}}\n"
    q = torch.randn(1, 5, 2, 64).bfloat16()
    with pytest.raises(attngen.AttnError, match="must be positive"):
        attngen.build(text.format(""))(q, q, q, scale=scale)
    with pytest.raises(attngen.AttnError, match="must be positive"):
        attngen.build(text.format(f"  scale = {scale}\n"))(q, q, q)
    assert attngen.build(text.format("  score = -s\n"))(q, q, q, scale=scale).isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_a_scale_that_is_not_positive_is_refused_for_a_line(scale: float) -> None:
    """`s + slope * position`: the kernel divides the slope by the scale, and scales after the row maxima."""
    import attngen

    text = "attn 1\nattention a {{\n  head_dim = 64\n{}}}\n"
    q = torch.randn(1, 5, 2, 64).bfloat16()
    line = "  score = s - 0.1 * (q_pos - kv_idx)\n"
    with pytest.raises(attngen.AttnError, match="must be positive"):
        attngen.build(text.format(line))(q, q, q, scale=scale)
    for other in (f"  scale = {scale}\n{line}", "  score = 0.5 * s - 0.1 * (q_pos - kv_idx)\n"):
        assert attngen.build(text.format(other))(q, q, q, scale=scale).isfinite().all()
