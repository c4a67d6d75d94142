"""The backward's launch: what reaches an entry point, Python functions in place of compiled ones, on CPU tensors."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import backward_standin as standin
import jit_standin
import pytest
import torch
from backward_standin import TILE_M, WORKSPACE
from test_jit_captured import agree, inputs, losses

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import launch, load
from attngen.jit.cache import KernelCache
from attngen.jit.kernel import Attention
from attngen.jit.key import fingerprint
from attngen.syntax import load_spec

BF16 = torch.bfloat16
PLAIN, RICH = jit_standin.plain(), jit_standin.rich().replace(tensors=(jit_standin.BIAS.replace(grad=True),))


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return lambda spec=PLAIN, **keywords: standin.attached(spec, monkeypatch, tmp_path, **keywords)


def test_arguments_reach_the_kernel_in_its_order(attach: Any) -> None:
    attn, kernels = attach(RICH)
    (q, k, v), named = inputs(RICH)
    o, lse = attn(q, k, v, **named, window=7, gain=0.5, return_lse=True)
    do, dlse = torch.randn(o.shape).to(BF16), torch.randn(lse.shape)
    torch.autograd.backward((o, lse), (do, dlse))
    (kernel,) = kernels.made
    (call,) = kernel.calls
    for got, given in zip(call[:7], (q, k, v, o, do, lse, dlse), strict=True):
        assert got.data_ptr() == given.data_ptr() and got.shape == given.shape
    for got, given in zip(call[7:10], (q, k, v), strict=True):
        heads = q.shape[2]  # of dK and dV too: KV tiles are fewer than SMs, so they come in parts
        assert got.shape == (*given.shape[:2], heads, given.shape[3]) and got.dtype is BF16
    assert call[10].dtype is torch.float32 and call[10].shape == (2 * 4 * 2 * WORKSPACE,)
    assert call[10].data_ptr() % 16 == 0
    assert call[11] == 0.125 and call[12] == 132 and call[13:16] == (7, 0.5, False)
    assert call[16].data_ptr() == named["bias"].data_ptr() and call[17].shape == (2, 4, 33)
    assert len(call) == 18


def test_gradients_are_not_copied(attach: Any) -> None:
    """What a kernel wrote becomes `.grad` itself, where dK and dV do not come in parts."""
    attn, kernels = attach()
    attn.launcher.ready[-1] = (attn.launcher.ready[-1][0], 1)  # SMs
    qkv, _ = inputs(PLAIN)
    o = attn(*qkv)
    kernels.made[0].keep = False
    o.sum().backward()
    assert kernels.made[0].outputs == [x.grad.data_ptr() for x in qkv]


def test_gradients_are_right(attach: Any) -> None:
    for spec in (PLAIN, jit_standin.plain(64, 128), jit_standin.plain(layout=Layout.BHSD)):
        attn, _ = attach(spec)
        (q, k, v), _ = inputs(jit_standin.plain(layout=spec.layout))
        if spec.head_dim_v == 128:
            v = torch.randn(*v.shape[:3], 128).to(BF16).requires_grad_()
        losses(*attn(q, k, v, return_lse=True)).backward()
        agree(spec, (q, k, v), {})


@pytest.mark.parametrize(("sq", "skv", "plan"), [(16, 24, 0), (33, 8, 1), (8, 64, 1), (8, 65, 2), (65, 1, 2)])
def test_the_longest_length_picks_the_plan(attach: Any, sq: int, skv: int, plan: int) -> None:
    attn, kernels = attach(plans=3, limits=(32, 64))
    (q, k, v), _ = inputs(PLAIN, sq=sq, skv=skv)
    attn(q, k, v).sum().backward()
    assert [len(f.calls) for f in kernels.made] == [int(i == plan) for i in range(3)]
    tiles = -(-sq // (TILE_M * (plan + 1)))
    assert kernels.made[plan].calls[0][10].numel() == 2 * 4 * tiles * (WORKSPACE + plan)


def test_a_window_takes_the_plan_of_sequences_as_long(attach: Any) -> None:
    """A row that keeps 22 keys walks as in a sequence of 22 + 128 tokens; the length counts where it is shorter."""
    clauses = "param window: int >= 1 = 64\n  mask = kv_idx <= q_pos and q_pos - kv_idx < window"
    attn, kernels = attach(
        load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  {clauses}\n}}\n"), plans=2, limits=(150,)
    )
    q, k, v = (torch.randn(1, 151, 2, 64).to(BF16).requires_grad_() for _ in range(3))
    for rows, window, plan in ((151, 22, 0), (151, 23, 1), (151, 1000, 1), (151, 22, 0), (150, 1000, 0)):
        attn(*(x[:, :rows] for x in (q, k, v)), window=window).sum().backward()
        assert [len(f.calls) for f in kernels.made] == [int(i == plan) for i in (0, 1)]
        tiles = -(-rows // (TILE_M * (plan + 1)))
        assert kernels.made[plan].calls.pop()[10].numel() == 2 * tiles * (WORKSPACE + plan)


@pytest.mark.parametrize(
    ("workers", "rows", "cycles", "plan"),
    [
        (132, 64, (100, 130), 1),  # eight KV tiles, one to an SM: four steps of 100 cycles, or two of 130
        (132, 64, (100, 210), 0),
        (132, 70, (100, 160), 1),  # five steps or three
        (132, 70, (100, 170), 0),
        (7, 64, (100, 130), 0),  # more tiles than SMs: the length decides
    ],
)
def test_few_kv_tiles_end_with_the_longest_walk(
    attach: Any, workers: int, rows: int, cycles: tuple[int, int], plan: int
) -> None:
    attn, kernels = attach(plans=2, limits=(1000,), step_cycles=cycles)
    attn.launcher.ready[-1] = (attn.launcher.ready[-1][0], workers)
    (q, k, v), _ = inputs(PLAIN, sq=rows, skv=64)
    attn(q, k, v).sum().backward()
    assert [len(f.calls) for f in kernels.made] == [int(i == plan) for i in (0, 1)]


def test_only_what_is_wanted_is_computed(attach: Any) -> None:
    attn, kernels = attach(RICH)
    attn.launcher.ready[-1] = (attn.launcher.ready[-1][0], 1)  # SMs: dK and dV do not come in parts
    wholes = []
    for names in ("q", "k", "qv", "bias", "qkv"):
        qkv, named = inputs(RICH)
        given = {**dict(zip("qkv", qkv, strict=True)), **named}
        for name, x in given.items():
            x.requires_grad_(name in names)
        attn(**given).sum().backward()
        kernel = kernels.made[-1]
        assert kernel.wanted == (("bias",) if names == "bias" else tuple(names))
        assert {n for n, x in given.items() if x.grad is not None} == set(kernel.wanted)
        for name, out in zip("qkv", kernel.calls[0][7:10], strict=True):
            if name not in names:  # the right shape and dtype, and never written
                assert out.data_ptr() == given[name].data_ptr() and out.shape == given[name].shape
        wholes.append(len(kernels.made))
    assert wholes == [1, 2, 3, 4, 5]
    attn(**{**given, "q": given["q"].detach()})
    assert len(kernels.made) == 6, "the set is prepared before the forward runs"
    attn(**given).sum().backward()
    assert len(kernels.made) == 6


def test_forward_users_pay_nothing(attach: Any) -> None:
    attn, kernels = attach(RICH)
    qkv, named = inputs(RICH)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not attn(*qkv, **named).requires_grad
    assert not attn(*(x.detach() for x in qkv), bias=named["bias"].detach()).requires_grad
    assert not kernels.made and not attn.backward._sources


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_takes_the_same_path(attach: Any, mode: Any) -> None:
    """Parameters of a model in evaluation require gradients: nothing of the backward may be touched."""
    attn, _ = attach()
    (q, k, v), _ = inputs(PLAIN)
    attn.backward = None
    with mode():
        assert attn(q, k, v).shape == q.shape


def test_forward_mode_is_refused_on_the_short_path(attach: Any) -> None:
    import torch.autograd.forward_ad as forward_ad

    attn, _ = attach()
    q, k, v = (t.detach() for t in inputs(PLAIN)[0])
    with forward_ad.dual_level():
        assert attn(q, k, v).shape == q.shape
        with pytest.raises(AttnError) as caught:
            attn(q, forward_ad.make_dual(k, torch.ones_like(k)), v)
    assert caught.value.code == "E0612"


def test_gradients_of_odd_strides(attach: Any) -> None:
    """What kernels cannot read is made contiguous; what they can is not copied."""
    attn, kernels = attach()
    (q, k, v), _ = inputs(PLAIN)
    attn(q, k, v).sum().backward()  # expanded
    do = kernels.made[0].calls[0][4]
    assert do.is_contiguous() and (do == 1).all()
    cases = {
        "head_dim": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        "alignment": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
        "odd rows": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :64],
    }
    want = torch.randn(q.shape).to(BF16)
    for change in cases.values():
        attn(q, k, v).backward(change(want))
        do = kernels.made[0].calls[-1][4]
        assert torch.equal(do, want) and do.is_contiguous() and do.data_ptr() % 16 == 0
    for change in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x[:1].expand_as(x)):
        given = change(want)
        attn(q, k, v).backward(given)
        assert kernels.made[0].calls[-1][4].data_ptr() == given.data_ptr()


def test_an_lse_that_nobody_uses_has_a_zero_gradient_without_memory(attach: Any) -> None:
    attn, kernels = attach()
    (q, k, v), _ = inputs(PLAIN)
    for return_lse in (False, True):
        got = attn(q, k, v, return_lse=return_lse)
        (got[0] if return_lse else got).sum().backward()
        dlse = kernels.made[0].calls[-1][6]
        assert dlse.shape == (2, 4, 20) and not dlse.any() and dlse.stride() == (0, 0, 0)
    _, lse = attn(q, k, v, return_lse=True)
    q.grad = k.grad = v.grad = None
    lse.exp().sum().backward()
    assert not kernels.made[0].calls[-1][4].any() and v.grad is not None and not v.grad.any() and q.grad.any()


def test_the_lse_of_a_saved_call_is_its_own(attach: Any) -> None:
    """Launches that want no LSE share scratch memory; one that a backward reads is not to be overwritten."""
    attn, _ = attach()
    (q, k, v), _ = inputs(PLAIN)
    first = attn(q, k, v)
    with torch.no_grad():
        attn(q * 3, k, v), attn(q * 2, k, v)
    second = attn(q * 4, k, v)
    first.sum().backward()
    want, q.grad = q.grad, None
    attn(q, k, v).sum().backward()
    assert torch.equal(q.grad, want)
    second.sum().backward()


def test_gradients_have_the_strides_of_dense_inputs(attach: Any) -> None:
    attn, _ = attach()
    (q, k, v), _ = inputs(PLAIN)
    swapped = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    packed = torch.cat([k.detach(), v.detach()], 2).requires_grad_()
    k_, v_ = packed.split(2, 2)
    k_.retain_grad()
    wide = k.detach()[:, :, :1].requires_grad_()
    attn(swapped, k_, v_).sum().backward()
    assert swapped.grad.stride() == swapped.stride() and k_.grad.is_contiguous()
    attn(q, wide.expand(-1, -1, 2, -1), v).sum().backward()
    attn(q, k2 := wide.detach().expand(-1, -1, 2, -1).clone().requires_grad_(), v).sum().backward()
    assert torch.allclose(wide.grad.float(), k2.grad.float().sum(2, keepdim=True), atol=2e-2)


def test_odd_strides_of_extent_one_axes_are_tidied(attach: Any) -> None:
    attn, kernels = attach()
    q = torch.randn(1, 1, 4, 64).to(BF16).as_strided((1, 1, 4, 64), (3, 5, 64, 1)).requires_grad_()
    k = torch.randn(1, 9, 2, 64).to(BF16)
    o = attn(q, k, k)
    kernels.made[0].refuse[1] = ValueError("Mismatched strides")
    o.sum().backward()
    first, second = kernels.made[0].calls
    assert first[0].stride() == (3, 5, 64, 1) and second[0].stride() == (256, 256, 64, 1)
    assert second[7].stride() == (256, 256, 64, 1) and q.grad.any()
    kernels.made[0].refuse.update({3: ValueError("no"), 4: ValueError("still no")})
    with pytest.raises(AttnError, match="backward kernel of `plain` refused to launch: still no") as caught:
        attn(q, k, k).sum().backward()
    assert caught.value.code == "E0618"


@pytest.mark.parametrize("empty", [{"sq": 0}, {"b": 0}, {"skv": 0}, {"hq": 0, "hkv": 0}])
def test_empty_shapes_do_not_launch(attach: Any, empty: dict[str, int]) -> None:
    attn, kernels = attach(RICH)
    qkv, named = inputs(RICH, **empty)
    o, lse = attn(*qkv, **named, return_lse=True)
    (o.float().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()).backward()
    assert all(x.grad is not None and x.grad.shape == x.shape and not x.grad.any() for x in (*qkv, named["bias"]))
    assert not any(k.calls for k in kernels.made)


def test_no_keys_and_a_sink(attach: Any) -> None:
    """LSE is the sink then: its gradient goes to the sink whole."""
    from test_jit_captured import CASES, make

    tensors, score, sink, _ = CASES["sinks"]
    spec = make(tensors, score, sink)
    attn, kernels = attach(spec)
    qkv, named = inputs(spec, skv=0)
    o, lse = attn(*qkv, **named, return_lse=True)
    (o.sum() + (lse * 3).sum()).backward()
    assert torch.allclose(named["x"].grad, torch.full((4,), 3.0 * 2 * 20)) and not any(k.calls for k in kernels.made)
    assert not qkv[0].grad.any()


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_spec_that_no_backward_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attach: Any) -> None:
    attn, _ = attach()

    def refuse(captured: tuple[str, ...]) -> Any:
        raise error("E0402", "sm_90a kernels do not serve this yet", helps=("use softmax",))

    attn.backward._make = refuse
    (q, k, v), _ = inputs(PLAIN)
    for _ in range(2):
        with pytest.raises(AttnError, match="do not serve this yet") as caught:
            attn(q, k, v)
        assert caught.value.code == "E0402" and "use softmax" in str(caught.value)
        assert "torch.no_grad()" in str(caught.value)
    with torch.no_grad():
        attn(q, k, v)
    attn.backward._make = None
    with pytest.raises(AttnError, match="which has no backward") as caught:
        attn(q, k, v)
    assert caught.value.code == "E0505"


def test_compile_ahead(attach: Any) -> None:
    attn, kernels = attach(RICH)
    attn._loaded = object()  # the forward's
    assert attn.compile(backward=True) is attn
    assert [k.wanted for k in kernels.made] == [("q", "k", "v", "bias")]
    attn.compile(backward=["v", "q"]), attn.compile(backward="k"), attn.compile()
    assert [k.wanted for k in kernels.made][1:] == [("q", "v"), ("k",)]
    qkv, named = inputs(RICH)
    attn(*qkv, **named).sum().backward()
    assert len(kernels.made) == 3 and len(kernels.made[0].calls) == 1
    with pytest.raises(AttnError, match=r"no gradient of 'window'") as caught:
        attn.compile(backward=("q", "window"))
    assert caught.value.code == "E0601"


def test_each_wanted_set_has_a_key_of_its_own() -> None:
    keys = {fingerprint("text", "sm_90a", wanted=w) for w in ((), ("q",), ("k",), ("q", "k", "v"))}
    assert len(keys) == 4 and fingerprint("text", "sm_90a") in keys


def test_a_graph_does_not_capture_a_compilation(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attn, kernels = attach()
    (q, k, v), _ = inputs(PLAIN)
    monkeypatch.setattr(launch, "_capturing", lambda: True)
    with pytest.raises(AttnError, match=r"for q, k, v is not compiled, and a CUDA graph") as caught:
        attn(q, k, v)
    assert caught.value.code == "E0621" and "attn.compile(backward=True)" in str(caught.value)
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    attn(q, k, v).sum().backward()
    want, q.grad = q.grad, None
    monkeypatch.setattr(launch, "_capturing", lambda: True)
    attn(q, k, v).sum().backward()
    assert torch.equal(q.grad, want) and len(kernels.made) == 1


@pytest.fixture
def deterministic() -> Any:
    yield lambda **how: torch.use_deterministic_algorithms(True, **how)
    torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms(attach: Any, deterministic: Any) -> None:
    attn, _ = attach()
    (q, k, v), _ = inputs(PLAIN)
    deterministic()
    o = attn(q, k, v)
    with pytest.raises(AttnError, match="differs from run to run") as caught:
        o.sum().backward()
    assert caught.value.code == "E0622" and "backward { deterministic = true }" in str(caught.value)
    attn(q.detach(), k, v).sum().backward()  # no atomic additions there
    deterministic(warn_only=True)
    with pytest.warns(UserWarning, match=r"E0622"):
        attn(q, k, v).sum().backward()
    assert q.grad.any()
    ordered, _ = attach(deterministic=True)
    deterministic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ordered(q, k, v).sum().backward()


def test_deterministic_algorithms_and_captured_tensors(attach: Any, deterministic: Any) -> None:
    from test_jit_captured import CASES, make

    deterministic()
    for case, varies in (("bias", True), ("row bias", True), ("column bias", False), ("sinks", False)):
        tensors, score, sink, _ = CASES[case]
        spec = make(tensors, score, sink)
        attn, _ = attach(spec)
        qkv, named = inputs(spec)
        o = attn(*(x.detach() for x in qkv), **named)
        if varies:
            with pytest.raises(AttnError, match="E0622"):
                o.sum().backward()
        else:
            o.sum().backward()


def test_the_generated_file_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned and emitted once; a later process takes the text from the cache, in an entry of its own."""
    import attngen

    text = "attn 1\nattention remembered {\n  head_dim = 64\n}\n"
    planned: list[AttentionSpec] = []

    def plan_backward(spec: AttentionSpec, target: str, *, captured: tuple[str, ...], tuned: object) -> AttentionSpec:
        assert tuned is None, "no GPU here, no record"
        planned.append(spec)
        return spec

    monkeypatch.setattr("attngen.search_backward.plan_backward", plan_backward)
    monkeypatch.setattr("attngen.emit.backward.emit_backward", standin.source)
    dump = tmp_path / "dump"
    monkeypatch.setenv("ATTNGEN_DUMP_DIR", str(dump))
    from attngen.settings import settings

    settings.cache_clear()
    try:
        first = attngen.build(text, cache_dir=tmp_path / "cache")
        assert not planned
        made = first.backward.source
        assert made.meta["direction"] == "backward" and made.text != first.source.text
        again = attngen.build(text, cache_dir=tmp_path / "cache", backward=True)
        assert again.backward.source.text == made.text and again.source.text == first.source.text
        assert len(planned) == 1
        assert {json.loads(p.read_text())["kernel_id"] for p in (tmp_path / "cache").rglob(".source-*.json")} == {
            first.source.kernel_id,
            made.kernel_id,
        }
        assert (dump / f"{made.kernel_id}.py").read_text() == made.text
    finally:
        monkeypatch.undo()
        settings.cache_clear()


@pytest.mark.dsl
def test_compile_load_and_hit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The real compiler, in worker processes: an entry for each wanted set, a hit without compiling."""
    steps: list[tuple[str, int, int]] = []

    def attention() -> Attention:
        return Attention(
            PLAIN,
            jit_standin.source(PLAIN),
            "sm_90a",
            KernelCache(tmp_path),
            backward=lambda captured: standin.source(PLAIN, captured, plans=2, limits=(64,)),
            progress=lambda *step: steps.append(step),
        )

    attn = attention()
    with caplog.at_level(logging.INFO, logger="attngen"):
        variant = attn.backward.prepare((True, True, True))
    assert steps == [("compile", 0, 2), ("compile", 1, 2), ("compile", 2, 2)] and "load done" in caplog.text
    assert len(variant.functions) == 2 and variant.loaded is not None
    entry = variant.loaded.entry
    assert sorted(p.name for p in entry.folder.iterdir()) == ["kernel.py", "meta.json", "plan_0.so", "plan_1.so"]
    q = torch.zeros(1, 8, 2, 64, dtype=BF16)
    rows, rest = torch.zeros(1, 2, 8), (torch.zeros(4), 1.0, 1)
    for function in variant.functions:
        with pytest.raises(Exception, match="device_type=cuda"):
            function(q, q, q, q, q, rows, rows, q, q, q, *rest)
    assert attn.backward.prepare((True, True, True)) is variant
    other = attn.backward.prepare((True, False, False))
    assert other.loaded is not None and other.loaded.entry.folder != entry.folder and len(steps) == 6
    again = attention().backward.prepare((True, True, True))
    assert again.functions == variant.functions and len(steps) == 6
    assert len(KernelCache(tmp_path).entries()) == 2


@pytest.mark.dsl
@pytest.mark.parametrize("learned", [True, False])
def test_a_generated_file_takes_these_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learned: bool) -> None:
    """The real thing as far as it goes without a GPU: planned, emitted, compiled, called; the first tensor's device is
    all that its entry point finds wrong.
    """
    import attngen

    attn = attngen.build(Path(__file__).resolve().parents[2] / "examples" / "gpt_oss.attn", cache_dir=tmp_path).alone()
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    attn.launcher.functions, attn.launcher.ready[-1] = (
        (standin.forward(attn.spec),) * len(attn.plans),
        (standin.DeviceState(-1, 132), 132),
    )
    q, k, v = (torch.randn(1, 40, h, 64).to(BF16).requires_grad_() for h in (4, 2, 2))
    o = attn(q, k, v, sinks=torch.zeros(4, requires_grad=learned), window=9)
    with pytest.raises(AttnError) as caught:
        o.sum().backward()
    assert (
        caught.value.code == "E0618" and "argument #0" in str(caught.value) and "device_type=cuda" in str(caught.value)
    )


@pytest.mark.dsl
def test_compile_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "use_workers", False)
    source = standin.source(PLAIN, body="HERE = True")
    found = load.load(source, "sm_90a", KernelCache(tmp_path), wanted=("q",), progress=None)
    assert len(found.functions) == 1


@pytest.mark.dsl
def test_a_backward_that_the_dsl_refuses(tmp_path: Path) -> None:
    source = standin.source(PLAIN, body="raise ValueError('edited badly')")
    with pytest.raises(AttnError, match="edited badly") as caught:
        load.load(source, "sm_90a", KernelCache(tmp_path), wanted=("q",), progress=None)
    assert caught.value.code == "E0512"


def test_deterministic_sums_of_many_pairs_come_from_the_reference(attach: Any, deterministic: Any) -> None:
    """A kernel would add to a bias or a table in any order; equal bits are asked for."""
    from test_jit_captured import CASES, make

    from attngen.ir.spec import BackwardHints

    deterministic()
    for case in ("bias", "table", "row bias", "column bias"):
        tensors, score, sink, kind = CASES[case]
        spec = make(tensors, score, sink).replace(backward=BackwardHints(deterministic=True))
        attn, kernels = attach(spec, deterministic=True)
        qkv, named = inputs(spec)
        losses(*attn(*qkv, **named, return_lse=True)).backward()
        agree(spec, qkv, named)
        (kernel,) = kernels.made
        assert ("x" in kernel.wanted) == (kind == "column") and set("qkv") <= set(kernel.wanted)
