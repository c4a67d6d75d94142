"""The public functions: build, compile, check, format, explain; options, settings, writing kernels, doctor."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attngen
from attngen import generate, specs
from attngen.diag.diagnostic import AttnError
from attngen.ir.types import DType, Layout
from attngen.jit import device
from attngen.options import Options, table
from attngen.settings import VARIABLES, read
from attngen.source import KernelSource, body_sha256, is_edited, read_meta, write_atomic

CAUSAL = """attn 1

attention causal {
  head_dim = 64
  mask     = kv_idx <= q_pos
}
"""
WINDOWED = """attn 1

attention first {
  head_dim = 64
}

attention windowed {
  head_dim = 64
  param window: int >= 1 = 128
  mask = kv_idx <= q_pos and q_pos - kv_idx < window
  schedule { tile = 128 x 64 }
}
"""
ENVIRONMENT = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from attngen.settings import settings

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    path = tmp_path / "causal.attn"
    path.write_text(CAUSAL)
    return path


def code_of(call: Any) -> str:
    with pytest.raises(AttnError) as caught:
        call()
    assert "help:" in str(caught.value), str(caught.value)
    return caught.value.code


def test_import_is_light() -> None:
    script = (
        "import sys, attngen\n"
        "assert attngen.__version__ and set(attngen.__all__) <= set(dir(attngen))\n"
        "heavy = {'torch', 'cutlass', 'lark', 'jinja2', 'pydantic', 'tvm_ffi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "attngen.compile(sys.argv[1])\n"
        "heavy = {'torch', 'cutlass', 'tvm_ffi', 'numpy', 'filelock'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script, CAUSAL], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def test_every_public_name_loads() -> None:
    for name in attngen.__all__:
        assert getattr(attngen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'biuld'"):
        attngen.biuld  # noqa: B018


def test_a_spec_is_a_path_a_text_or_a_value(causal: Path) -> None:
    from attngen.syntax import load_spec

    sources = [attngen.compile(x) for x in (causal, str(causal), CAUSAL, load_spec(CAUSAL))]
    assert len({s.text for s in sources}) == 1
    assert sources[0].kernel_id == sources[0].meta["kernel_id"] and sources[0].meta["name"] == "causal"
    assert specs.is_text("a {") and specs.is_text("a\n") and not specs.is_text("dir/causal.attn")


def test_a_missing_file_is_named(causal: Path, tmp_path: Path) -> None:
    for bad in ("causl.attn", "nowhere/x.attn", "", str(tmp_path), "x" * 5000, "a\0b"):
        assert code_of(lambda bad=bad: attngen.compile(tmp_path / bad if bad and "\0" not in bad else bad)) == "E0504"
    with pytest.raises(AttnError, match=r"did you mean `.*causal\.attn`"):
        attngen.compile(str(tmp_path / "causl.attn"))
    assert code_of(lambda: attngen.build(3)) == "E0504"  # type: ignore[arg-type]


def test_name_picks_a_block() -> None:
    assert attngen.compile(WINDOWED).meta["name"] == "windowed"
    assert attngen.compile(WINDOWED, name="first").meta["name"] == "first"
    with pytest.raises(AttnError):
        attngen.compile(WINDOWED, name="third")


def test_overrides_reach_spec_and_schedule() -> None:
    options = Options.parse({"head_dim": 128, "dtype": "fp16", "layout": "bhsd", "tile": "192x128", "sm_margin": 4})
    spec = specs.resolve(CAUSAL, None, options)
    assert (spec.head_dim_qk, spec.head_dim_v, spec.dtype, spec.layout) == (128, 128, DType.FP16, Layout.BHSD)
    assert (spec.schedule.tile_m, spec.schedule.tile_n, spec.schedule.sm_margin) == (192, 128, 4)
    again = specs.resolve(specs.resolve(CAUSAL, None, Options()), None, options)
    assert again == spec, "an override means the same for a spec that is already resolved"
    mla = CAUSAL.replace("head_dim = 64", "head_dim = 192, v = 128\n  scale = 0.5")
    for given in ({"head_dim": 64}, {"head_dim": 64, "head_dim_v": 32}, {"head_dim_v": 64}, {}):
        wanted = specs.resolve(mla, None, Options.parse(given))
        assert specs.resolve(specs.resolve(mla, None, Options()), None, Options.parse(given)) == wanted, given
    hinted = specs.resolve(WINDOWED, None, Options.parse({"tile": "auto"}))
    assert hinted.schedule.tile_m is None and specs.resolve(WINDOWED, None, Options()).schedule.tile_m == 128
    source = attngen.compile(CAUSAL, head_dim=128, dtype="fp16")
    assert source.meta["head_dim_qk"] == 128 and source.meta["dtype"] == "fp16"


def test_options_are_checked_together() -> None:
    import torch

    with pytest.raises(AttnError) as caught:
        attngen.build(CAUSAL, head_dmi=64, stages=99, dtype="int8")
    codes = [d.code for d in caught.value.diagnostics]
    assert codes == ["E0502", "E0503", "E0503"] and "did you mean `head_dim`" in str(caught.value)
    for name, bad in {
        "head_dim": (4097, "64", 0, True),
        "head_dim_v": (-8,),
        "dtype": ("fp8", 3),
        "layout": ("sbhd",),
        "tile": ("128", "128x", (128,), (0, 64), 128),
        "stages": (0, "two"),
        "order": ("random",),
        "sm_margin": (-1,),
        "cluster": ("2x0",),
    }.items():
        for value in bad:
            assert code_of(lambda n=name, v=value: Options.parse({n: v})) == "E0503", (name, value)
    assert (
        Options.parse({"dtype": torch.float16}).dtype == "fp16" and Options.parse({"dtype": "bfloat16"}).dtype == "bf16"
    )
    assert Options.parse({"tile": "128x64"}).tile == Options.parse({"tile": (128, 64)}).tile == (128, 64)
    assert Options.parse({"tile": [128, 64]}).tile == (128, 64)


def test_every_option_is_described() -> None:
    rows = table()
    assert {name for name, _ in rows} == set(Options.model_fields) and all(len(text) > 15 for _, text in rows)


def test_settings() -> None:
    assert read({"ATTNGEN_CACHE_DIR": "~/x"}).cache_dir == Path.home() / "x"
    full = read(
        {"ATTNGEN_TARGET": " sm_90a ", "ATTNGEN_LOG": "DEBUG", "ATTNGEN_DUMP_DIR": "d", "ATTNGEN_NO_CACHE": "1"}
    )
    assert (full.target, full.log, full.use_cache) == ("sm_90a", "debug", False)
    assert full.dump_dir is not None and full.dump_dir.is_absolute()
    assert read({}).use_cache and read({"ATTNGEN_NO_CACHE": "0"}).use_cache and read({}).cache_dir.name == "attngen"
    assert code_of(lambda: read({"ATTNGEN_LOG": "loud"})) == "E0501"
    assert code_of(lambda: read({"ATTNGEN_NO_CACHE": "maybe"})) == "E0501"


def test_the_target_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.settings import settings

    monkeypatch.setenv("ATTNGEN_TARGET", "sm_75")
    settings.cache_clear()
    with pytest.raises(AttnError, match="sm_75"):
        attngen.compile(CAUSAL)
    assert attngen.compile(CAUSAL, target="sm_90a").meta["target"] == "sm_90a"


def test_a_spec_with_several_targets_takes_the_one_of_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs.resolve(CAUSAL, None, Options()).replace(targets=("sm_90a", "sm_100a"))
    for has, want in (("sm_100a", "sm_100a"), ("sm_90a", "sm_90a"), ("sm_80", "sm_90a")):
        monkeypatch.setattr(device, "has_gpu", lambda target, has=has: target == has)
        assert specs.target_of(spec, Options(), here=True) == want
        assert specs.target_of(spec, Options()) == "sm_90a", "compile does not look at this machine"
    assert specs.target_of(spec, Options(target="sm_100a"), here=True) == "sm_100a"


def test_dump_dir_receives_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.settings import settings

    monkeypatch.setenv("ATTNGEN_DUMP_DIR", str(tmp_path / "dump"))
    settings.cache_clear()
    source = attngen.compile(CAUSAL)
    assert (tmp_path / "dump" / f"{source.kernel_id}.py").read_text() == source.text
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNGEN_DUMP_DIR", str(tmp_path / "file" / "below"))
    settings.cache_clear()
    assert attngen.compile(CAUSAL).text == source.text, "a dump that fails costs nothing but a log line"


def test_write_keeps_edits(tmp_path: Path) -> None:
    source, path = attngen.compile(CAUSAL), tmp_path / "kernel.py"
    assert not is_edited(source.text) and source.write(path) == path and path.read_text() == source.text
    source.write(path)  # untouched: replaced without a question
    path.write_text(source.text.replace("tile_n=", "tile_n = ", 1))
    assert is_edited(path.read_text()) and code_of(lambda: source.write(path)) == "E0530"
    source.write(path, force=True)
    assert path.read_text() == source.text
    path.write_text("print('mine')\n")
    assert code_of(lambda: source.write(path)) == "E0531"
    path.write_text("ATTN_META = {\n  'body_sha256': \n")
    assert code_of(lambda: source.write(path)) == "E0530"
    path.write_bytes(b"\xff\xfe\x00")
    assert code_of(lambda: source.write(path)) == "E0532"
    path.write_text("")
    source.write(path)
    assert code_of(lambda: source.write(tmp_path / "no" / "folder.py")) == "E0532"
    assert code_of(lambda: source.write(tmp_path)) == "E0532"
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_write_follows_links_and_spares_devices(tmp_path: Path) -> None:
    source = attngen.compile(CAUSAL)
    (tmp_path / "link.py").symlink_to(tmp_path / "real.py")
    source.write(tmp_path / "link.py")
    assert (tmp_path / "link.py").is_symlink() and (tmp_path / "real.py").read_text() == source.text
    source.write("/dev/null")
    assert Path("/dev/null").is_char_device()


def test_metadata_is_read_without_importing() -> None:
    assert read_meta("x = 1") == {} and read_meta("ATTN_META = f()") == {} and read_meta("ATTN_META = [1]") == {}
    assert read_meta("def f(:") == {} and read_meta("ATTN_META = {'a': 1}\n") == {"a": 1}
    assert read_meta("ATTN_META: dict = {'a': 1}\n") == {"a": 1}
    assert read_meta("import x\nATTN_META = {\n  'a': 1,\n}\nrest = (") == {"a": 1}
    first, second = (body_sha256(f"ATTN_META = {{'a': {i}}}\nbody = 1\n") for i in (1, 2))
    assert first == second != body_sha256("ATTN_META = {'a': 1}\nbody = 2\n")


def test_check_and_format_and_explain() -> None:
    assert attngen.check(CAUSAL) == []
    faults = attngen.check(CAUSAL.replace("kv_idx <=", "kv_idx -"))
    assert faults and all(d.code.startswith("E0") for d in faults)
    assert attngen.check("no/such/file.attn")[0].code == "E0504"
    assert attngen.format(attngen.format(WINDOWED)) == attngen.format(WINDOWED)
    assert "causal" in attngen.explain(CAUSAL) and "smem" in attngen.explain(CAUSAL).lower()


def test_an_impossible_schedule_lists_its_reasons() -> None:
    with pytest.raises(AttnError) as caught:
        attngen.build(CAUSAL, head_dim=256, tile="256x256")
    assert caught.value.code.startswith("E04")


def test_build_runs_on_a_laptop(causal: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the kernel runs instead")
    attn = attngen.build(causal)
    q, k, v = (torch.randn(1, s, 2, 64).bfloat16() for s in (5, 9, 9))
    with torch.no_grad():
        o, lse = attn(q, k, v, return_lse=True)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).float() for x in (q, k, v)), attn_mask=torch.ones(5, 9, dtype=torch.bool).tril(4)
    ).transpose(1, 2)
    assert (o.float() - want).abs().max() < 2e-2 and lse.shape == (1, 2, 5)
    assert attn.path is None and len(attn.plans) >= 1 and "causal" in attn.explain() and attn.spec.name == "causal"
    again = pickle.loads(pickle.dumps(attn))
    assert copy.deepcopy(attn) is attn
    assert torch.equal(again(q, k, v), o) and again.source == attn.source and again.handle == attn.handle


def test_a_warm_build_neither_plans_nor_renders(causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.jit import sources

    first = attngen.build(causal)

    def never(*_: Any) -> Any:
        raise AssertionError("planned again")

    with monkeypatch.context() as patch:
        patch.setattr(generate, "plan", never)
        patch.setattr(generate, "emit", never)
        assert attngen.build(causal).source == first.source
        with pytest.raises(AssertionError):
            attngen.build(causal, head_dim=128)
        with pytest.raises(AssertionError):
            attngen.build(causal, cache_dir=tmp_path / "elsewhere")
        patch.setattr(sources, "generator", lambda: "another release")
        with pytest.raises(AssertionError):
            attngen.build(causal)
    (remembered,) = (tmp_path / "cache" / "v1").glob("*/.source-*.json")
    remembered.write_text(remembered.read_text().replace("TILE", "TIL").replace("tile", "til"))
    assert attngen.build(causal).source == first.source, "a damaged text is generated again"
    remembered.write_text("{")
    assert attngen.build(causal).source == first.source
    assert attngen.build(causal).plans == first.plans


def test_no_cache_leaves_nothing_behind(causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.settings import settings

    monkeypatch.setenv("ATTNGEN_NO_CACHE", "1")
    settings.cache_clear()
    attngen.build(causal)
    assert not (tmp_path / "cache").exists()


def test_the_key_of_a_text_covers_the_generator() -> None:
    from attngen.jit.sources import generator

    assert len(generator()) == 64


@pytest.mark.dsl
def test_the_emitted_kernel_compiles_through_the_cache(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    attn = attngen.build(CAUSAL, cache_dir=tmp_path, progress=lambda *a: steps.append(a))
    attn.compile()
    count = len(attn.plans)
    assert attn.path is not None and attn.path.read_text() == attn.source.text
    assert len(attn.launcher.functions) == count and attn.launcher._limits == attn.plan_set.limits
    assert attn.launcher.functions[0] is attn.compile().launcher.functions[0]
    if steps:  # a GPU machine compiled inside build()
        assert steps[-1] == ("compile", count, count)


@pytest.mark.dsl
def test_extra_arguments_have_the_order_of_the_call(tmp_path: Path) -> None:
    """The entry point names its signature when it refuses: params, then tensors, in the order of the spec."""
    import torch

    text = """attn 1
    attention extras {
      head_dim = 64
      param window: int >= 1 = 8
      tensor bias: f32[batch, heads_q]
      param gain: float = 1.0
      param flip: bool = false
      score = s * gain + bias[b, h]
      mask  = q_pos - kv_idx < window or flip
    }"""
    attn = attngen.build(text, cache_dir=tmp_path).compile()
    q, bias = torch.zeros(1, 8, 2, 64).bfloat16(), torch.zeros(1, 2)
    tail = attn.binder.bind({"bias": bias, "flip": True}, q, q)
    assert tail[:3] == (8, 1.0, True) and tail[3] is bias
    with pytest.raises(Exception, match="workers: int32, window: int32, gain: float32, flip: bool, bias: Tensor"):
        attn.launcher.functions[0](q, q, q, q, torch.zeros(1, 2, 8), torch.zeros(1, dtype=torch.int32), 1.0, 1, *tail)


def test_doctor_reports_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from attngen.jit import doctor

    facts = doctor.report()
    json.dumps(facts)
    assert facts["cache"]["folder"] == str(tmp_path / "cache") and facts["cache"]["writable"] is True
    assert any(n.startswith("nvidia-cutlass-dsl") for n in facts["toolchain"]) and facts["runtime_library"]
    monkeypatch.setattr(doctor, "dsl_root", lambda: None)
    monkeypatch.setattr(doctor.worker, "linker", lambda: None)
    monkeypatch.setattr(doctor, "distributions", lambda: ())
    (tmp_path / "cache").write_text("in the way")
    missing = {row["what"].split(":")[0]: row["mend"] for row in doctor.report()["missing"]}
    assert {"the CuTe DSL", "apache-tvm-ffi", "a C linker", "a cache folder that can be written"} <= set(missing)
    assert all(missing.values())


def test_write_atomic_leaves_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(*_: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir() if p.is_file()] == ["file"]


def test_kernel_source_is_a_value() -> None:
    a, b = KernelSource("t", "k", "s"), KernelSource("t", "k", "s")
    assert a == b and hash(a) == hash(b)


def test_every_code_of_this_part_is_explained() -> None:
    import re

    from attngen.diag.codes import CODES

    package = Path(attngen.__file__).parent
    text = "\n".join(p.read_text() for p in [*package.glob("jit/*.py"), *package.glob("*.py")])
    raised = set(re.findall(r'"(E0[56]\d\d)"', text))
    assert raised and raised <= set(CODES), raised - set(CODES)
    ours = {c for c in CODES if "E0501" <= c <= "E0539" or "E0601" <= c <= "E0619"}
    assert ours <= raised, ours - raised


@pytest.mark.parametrize("example", ["gpt_oss", "t5", "packing", "whisper"])
def test_examples_run_eagerly_and_compiled_on_a_laptop(example: str) -> None:
    """Params, captured tensors, sinks, sorted promises and layouts, through the checks and through torch.compile."""
    import torch

    from attngen import resources, samples

    attn = attngen.build(resources.root() / "examples" / f"{example}.attn")
    spec = attn.spec
    g = torch.Generator().manual_seed(0)

    def tensor(heads: int, seqlen: int, head_dim: int) -> Any:
        x = torch.randn(2, seqlen, heads, head_dim, generator=g).bfloat16()
        return x.transpose(1, 2) if spec.layout is Layout.BHSD else x

    q, k, v = tensor(4, 40, spec.head_dim_qk), tensor(2, 56, spec.head_dim_qk), tensor(2, 56, spec.head_dim_v)
    named = {**samples.params(spec), **samples.tensors(spec, samples.Shape(2, 4, 2, 40, 56))}
    torch._dynamo.reset()
    with torch.no_grad():
        o = attn(q, k, v, **named, check=True)
        compiled = torch.compile(lambda q, k, v: attn(q, k, v, **named), fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(o, compiled) and bool(o.isfinite().all()) and float(o.float().std()) > 0.01
