"""Emission: printed text has the value of the expression, the self-check is the dense meaning, no spec becomes code."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from random_exprs import INT_ATOMS, PARAMS, TENSORS, exprs

from attngen import samples
from attngen.emit.check_exprs import ScalarPrinter, TorchPrinter
from attngen.emit.env import environment
from attngen.emit.exprs import KERNEL_WORDS, CutePrinter, lower, safe_name
from attngen.emit.module import emit
from attngen.emit.straight import WIDTH, fold, straight_line
from attngen.ir.expr import Expr, Param, atom, const
from attngen.ir.functions import FUNCTIONS, apply
from attngen.ir.types import Type
from attngen.ref import dense
from attngen.ref.evaluate import evaluate
from attngen.search import plan
from attngen.source import is_edited
from attngen.syntax import load_all, load_spec
from attngen.syntax.reserved import reason

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [(f, s.name) for f in sorted((ROOT / "examples").glob("*.attn")) for s in load_all(f)]
KINDS = st.sampled_from((Type.BOOL, Type.INT, Type.FLOAT))

# ---- values at one point: what the kernel's text computes there ------------------------------------------------------

POINT: dict[str, Any] = {
    "b": 1, "h": 2, "h_kv": 1, "q_idx": 5, "kv_idx": 3, "q_pos": 9, "seqlen_q": 11, "seqlen_kv": 15, "heads_q": 4,
    "heads_kv": 2, "batch": 2, "s": 1.375,
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(1)
CAPTURED = {
    "doc": torch.randint(0, 4, (2, 15), generator=GENERATOR),
    "slopes": torch.rand(4, generator=GENERATOR, dtype=torch.float64),
    "bias": torch.randn(2, 4, 11, 15, generator=GENERATOR, dtype=torch.float64),
    "flag": torch.rand(2, 15, generator=GENERATOR) < 0.5,
}


def scalar(value: Any) -> Any:
    """A number whose comparisons give bools that `~` inverts, as those of the DSL do."""
    return (
        np.bool_(value) if isinstance(value, bool) else np.int64(value) if isinstance(value, int) else np.float64(value)
    )


def _at(tensor: torch.Tensor, *index: Any) -> Any:
    inside = tuple(max(min(int(i), n - 1), 0) for i, n in zip(index, tensor.shape, strict=True))
    return scalar(tensor[inside].item())


def _typed(kind: type) -> Any:
    def convert(x: Any) -> Any:
        return scalar(kind(float(x)) if kind is float else kind(int(x)))

    return convert


def _select(condition: Any, a: Any, b: Any) -> Any:
    """As the kernel's: the type is that of a numeric operand; two Python numbers would become fp32."""
    typed = next((x for x in (a, b) if isinstance(x, np.generic)), np.float64(0))
    return type(typed)(a if condition else b)


def _unary(f: Any) -> Any:
    return lambda x: scalar(f(torch.tensor(float(x), dtype=torch.float64)).item())


DSL: dict[str, Any] = {
    "cutlass": SimpleNamespace(
        min=lambda a, b: scalar(min(int(a), int(b))), max=lambda a, b: scalar(max(int(a), int(b)))
    ),
    "cute": SimpleNamespace(
        arch=SimpleNamespace(
            fmin=lambda a, b: scalar(min(float(a), float(b))), fmax=lambda a, b: scalar(max(float(a), float(b)))
        )
    ),
    "floor_div": lambda a, b: scalar(int(a) // int(b)),
    "floor_mod": lambda a, b: scalar(int(a) - (int(a) // int(b)) * int(b)),
    "select": _select,
    "absolute": lambda x: abs(x),
    "Int32": _typed(int),
    "Float32": _typed(float),
    "Boolean": _typed(bool),
    "at": _at,
    "NEG_INF": -math.inf,
    **{
        name: _unary(f)
        for name, f in {
            "exp": torch.exp, "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt, "tanh": torch.tanh,
            "sigmoid": torch.sigmoid, "floor": torch.floor,
            "softplus": lambda x: torch.nn.functional.softplus(x, threshold=700.0),
        }.items()
    },
}  # fmt: skip


def at_point(e: Expr) -> Any:
    """The dense value of `e` at POINT."""
    env = {n: torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for n, v in POINT.items()}
    env |= {n: torch.tensor(v, dtype=torch.float64 if t is Type.FLOAT else None) for n, (t, v) in PARAMS.items()}
    return evaluate(e, env, CAPTURED).item()


def kernel_names() -> dict[str, Any]:
    return {
        **DSL,
        **{n: scalar(v) for n, v in POINT.items()},
        **{n: scalar(v) for n, (_, v) in PARAMS.items()},
        **CAPTURED,
    }


def same(found: Any, expected: Any) -> bool:
    found = found.item() if isinstance(found, np.generic) else found
    if isinstance(expected, float):
        return isinstance(found, float) and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    return type(found) is type(expected) and found == expected


def finite(*values: Any) -> bool:
    return all(math.isfinite(v) and abs(v) < 2**53 for v in values)


# ---- the CuTe printer ------------------------------------------------------------------------------------------------


@given(KINDS.flatmap(lambda kind: exprs(kind)))
def test_kernel_text_has_the_value_of_the_expression(e: Expr) -> None:
    """Parentheses, operators and calls: Python reads the text as the tree that was printed."""
    expected = at_point(e)
    assume(finite(expected))
    found = eval(CutePrinter().text(e), {"__builtins__": {}}, kernel_names())
    assert same(found, expected)


@given(st.lists(KINDS.flatmap(lambda kind: exprs(kind, 5)), min_size=1, max_size=3))
def test_straight_line_keeps_values_and_lines_short(many: list[Expr]) -> None:
    given_ = frozenset(("b", "h", "q_idx", "kv_idx", "s"))
    expected = [at_point(e) for e in many]
    assume(finite(*expected))
    printer = CutePrinter()
    lines, texts = straight_line(printer, many, given_)
    names = {n: v for n, v in kernel_names().items() if n in DSL or n in given_}
    problem = {n: scalar(POINT[n]) for n in ("seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "batch")}
    problem |= {n: scalar(v) for n, (_, v) in PARAMS.items()} | CAPTURED
    names["p"] = SimpleNamespace(**problem, qhead_per_kvhead=np.int64(2))
    exec("\n".join(lines), {"__builtins__": {}}, names)
    for text, value in zip(texts, expected, strict=True):
        found = eval(text, {"__builtins__": {}}, names)
        assert same(found, value)
    assert all(len(x) <= WIDTH + 32 for text in (*lines, *texts) for x in text.split("\n"))
    assert printer.used <= set(DSL)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_prints(name: str) -> None:
    """One call of each row and signature, evaluated at the point."""
    values = {Type.BOOL: Param(type=Type.BOOL, name="on"), Type.INT: atom("q_idx"), Type.FLOAT: atom("s")}
    for args, _ in FUNCTIONS[name].signatures:
        e = apply(name, *(values[a] for a in args))
        assert same(eval(CutePrinter().text(e), {"__builtins__": {}}, kernel_names()), at_point(e))


def test_spelling() -> None:
    q, kv, s, on = atom("q_idx"), atom("kv_idx"), atom("s"), Param(type=Type.BOOL, name="on")
    printed = {
        CutePrinter().text(e)
        for e in (
            apply("sub", q, apply("sub", kv, q)),
            apply("sub", apply("sub", q, kv), q),
            apply("mul", apply("add", q, kv), q),
            apply("and", apply("lt", q, kv), apply("or", on, apply("eq", q, kv))),
            apply("not", apply("le", q, kv)),
            apply("neg", apply("add", q, kv)),
            apply("min", q, kv),
            apply("max", s, const(0.0)),
            apply("div", s, const(3.0)),
            apply("div", const(1.0), s),
            apply("float", apply("sub", q, kv)),
            apply("where", on, const(16), const(0)),
            apply("not", const(True)),
        )
    }
    assert printed == {
        "q_idx - (kv_idx - q_idx)",
        "q_idx - kv_idx - q_idx",
        "(q_idx + kv_idx) * q_idx",
        "(q_idx < kv_idx) & (on | (q_idx == kv_idx))",
        "~(q_idx <= kv_idx)",
        "-(q_idx + kv_idx)",
        "cutlass.min(q_idx, kv_idx)",
        "cute.arch.fmax(s, 0.0)",
        "s * 0.3333333333333333",
        "1.0 / s",
        "Float32(q_idx) - Float32(kv_idx)",
        "select(on, Int32(16), 0)",
        "True == False",
    }


def test_a_division_before_a_step_stays_a_division() -> None:
    """int(q / 41) at q = 41 is 1; 41 * fp32(1 / 41) is below 1 and would be table row 0."""
    assert np.float32(41) * np.float32(1 / 41) < 1
    quotient = apply("div", atom("s"), const(41.0))
    assert CutePrinter().text(apply("int", quotient)) == "Int32(s / 41.0)"
    assert CutePrinter().text(apply("floor", quotient)) == "floor(s / 41.0)"
    assert CutePrinter().text(apply("ge", apply("mul", quotient, atom("s")), const(1.0))) == "s / 41.0 * s >= 1.0"
    assert CutePrinter().text(apply("int", apply("div", atom("s"), const(8.0)))) == "Int32(s * 0.125)"
    assert lower(quotient) == apply("mul", atom("s"), const(1 / 41.0))


def test_fold_breaks_what_nothing_shortens() -> None:
    text = "at(t, " + ", ".join(f"argument_number_{i}_of_many" for i in range(12)) + ")"
    folded = fold(text)
    assert max(len(x) for x in folded.split("\n")) <= WIDTH + 1
    assert ast.dump(ast.parse(folded)) == ast.dump(ast.parse(text))
    assert fold("short") == "short"


# ---- the printers of the self-check ----------------------------------------------------------------------------------


def _take(tensor: torch.Tensor, *indices: Any) -> torch.Tensor:
    inside = [torch.as_tensor(i).clamp(0, n - 1) for i, n in zip(indices, tensor.shape, strict=True)]
    return tensor[tuple(inside)]


TORCH_NAMES: dict[str, Any] = {
    "torch": torch,
    "take": _take,
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float64 if isinstance(x, float) else None),
    "floor_div": lambda a, b: torch.div(torch.as_tensor(a), torch.as_tensor(b), rounding_mode="floor"),
    "log2": torch.log2,
    "NEG_INF": -math.inf,
}


@given(KINDS.flatmap(lambda kind: exprs(kind, 4)))
def test_torch_text_has_the_value_of_the_expression(e: Expr) -> None:
    """On a grid of positions, sizes and params being Python numbers as in the self-check."""
    shape = {"b": (-1, 1, 1, 1), "h": (-1, 1, 1), "q_idx": (-1, 1), "kv_idx": (-1,)}
    extent = {"b": 2, "h": 4, "q_idx": 11, "kv_idx": 15}
    grid = {n: torch.arange(extent[n]).reshape(shape[n]) for n in shape}
    grid |= {"h_kv": grid["h"] // 2, "q_pos": grid["q_idx"] + 4}
    grid["s"] = torch.randn(2, 4, 11, 15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sizes = {n: v for n, v in POINT.items() if n not in grid}
    numbers = {n: v for n, (_, v) in PARAMS.items()}
    env = {
        n: torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for n, v in (sizes | numbers).items()
    }
    expected = evaluate(e, {**grid, **env}, CAPTURED)
    lines, (text,) = straight_line(TorchPrinter(), [e], frozenset(POINT), from_problem=False)
    names = {**TORCH_NAMES, **grid, **sizes, **numbers, **CAPTURED}
    exec("\n".join(lines), names)
    found = torch.as_tensor(eval(text, names))
    found, expected = torch.broadcast_tensors(found, expected)
    if e.type is Type.FLOAT:
        torch.testing.assert_close(found.double(), expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    else:
        assert torch.equal(found, expected.to(found.dtype)) and (e.type is not Type.BOOL or found.dtype is torch.bool)


@given(exprs(Type.FLOAT, 4, score=False))
def test_scale_text_is_plain_python(e: Expr) -> None:
    """The default scale reads params only: replace the rest by constants."""
    from attngen.ir.expr import Atom, Load, rewrite

    plain = {Type.BOOL: const(True), Type.INT: const(3), Type.FLOAT: const(0.5)}
    e = rewrite(e, lambda n: plain[n.type] if isinstance(n, Load | Atom) else n)
    expected = at_point(e)
    assume(finite(expected))
    text = ScalarPrinter().text(e)
    names = {"math": math, **{n: v for n, (_, v) in PARAMS.items()}}
    assert same(eval(text, names), expected)


def reference_of(text: str) -> SimpleNamespace:
    """`reference` and `default_scale` of an emitted file, executed without the rest of it."""
    body = [
        n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name in ("reference", "default_scale")
    ]
    names: dict[str, Any] = {"math": math, "NEG_INF": -math.inf}
    exec(compile(ast.Module(body=body, type_ignores=[]), "<self-check>", "exec"), names)
    return SimpleNamespace(**names)


def agrees(spec: Any, text: str, params: dict[str, Any], shape: samples.Shape, seed: int = 0) -> None:
    """The self-check's reference equals the dense meaning on random inputs."""
    q, k, v = samples.qkv(spec, shape, dtype=torch.float64, seed=seed)
    tensors = samples.tensors(spec, shape, seed=seed)
    check = reference_of(text)
    ordered = [params[p.name] for p in spec.params] + [tensors[t.name] for t in spec.tensors]
    scale = check.default_scale(*ordered[: len(spec.params)]) if hasattr(check, "default_scale") else None
    if scale is None:
        scale = evaluate(spec.scale, {}, {}).item()
    expected = dense.attention(spec, q, k, v, params=params, tensors=tensors)
    swap = (lambda x: x.transpose(1, 2)) if spec.layout == "bhsd" else (lambda x: x)
    o, lse, kept = check.reference(torch, swap(q), swap(k), swap(v), scale, *ordered)
    torch.testing.assert_close(swap(o), expected.o, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-6, atol=1e-7)
    assert 0 <= kept <= 1


SMALL = {
    "mistral": {"window": 9}, "gemma2_local": {"keys": 11, "cap": 2.0}, "gpt_oss_local": {"window": 7},
    "block_causal": {"block": 6}, "llama4_local": {"chunk": 10}, "modernbert_local": {"half": 5},
    "longformer": {"half": 4}, "ring_step": {"q_offset": 20, "kv_offset": 13},
}  # fmt: skip


@pytest.mark.parametrize(("file", "name"), EXAMPLES, ids=[n for _, n in EXAMPLES])
def test_self_check_is_the_dense_meaning(file: Path, name: str) -> None:
    spec = load_spec(file, name=name)
    text = emit(plan(spec)).text
    agrees(spec, text, samples.params(spec, SMALL.get(name, {})), samples.Shape(2, 4, 2, 19, 31))


@pytest.mark.parametrize(
    "clauses",
    [
        "epilogue = tanh(o) * tanh(o) + (o * float(d % 3) + 1.0) * (o * float(d % 3) + 1.0)",
        "tensor gate: f32[batch, seqlen_q, heads_q, head_dim_v]\n  epilogue = o * sigmoid(gate[b, q_idx, h, d])",
        "layout = bhsd\n  epilogue = o * float(h + q_idx + d)",
        "param w: float = 2.0\n  score = s * exp(w) * log(float(seqlen_kv)) + min(w, 1.0) * (w if w > 1.0 else 2.0)",
        "param on: bool = true\n  mask = not on or kv_idx <= q_pos\n  score = s if not on else -s",
        "score = 0.5",
        "epilogue = 2.0",
        "mask = false",
        "mask = not (1 < 2) or kv_idx <= q_pos",
        "param n: int = 3\n  mask = kv_idx < min(n, seqlen_q) or (n if n > 2 else 1) % 2 == kv_idx // max(n, 1)",
        "param w: float = 3.0\n  param n: int = 2\n  scale = (w / 7.0 + sqrt(float(n))) if n > 1 else max(w, 1.0)",
        "param w: float = 3.0\n  scale = 1.0 / (1.0 + exp(-w)) + softplus(w) + floor(w / 2.0) + abs(-w) * tanh(w)",
        "tensor sinks: f32[heads_q]\n  sink = sinks[h] * float(q_idx % 4) if h > 1 else 0.0",
        "tensor t: f32[axis, heads_kv]\n  score = s + t[min(abs(q_idx - kv_idx), 63), h_kv]",
    ],
    ids=lambda c: c.replace("\n  ", "; ")[:50],
)
def test_self_check_of_unusual_clauses(clauses: str) -> None:
    """Shared parts of an epilogue, values that are Python numbers, scales computed from params."""
    spec = load_spec(f"attn 1\nattention odd {{\n  head_dim = 16, v = 24\n  {clauses}\n}}\n")
    agrees(spec, emit(plan(spec)).text, samples.params(spec), samples.Shape(2, 4, 2, 9, 12))


# ---- determinism -----------------------------------------------------------------------------------------------------

_EMIT = """
import hashlib, sys
from pathlib import Path
from attngen.emit.module import emit
from attngen.search import plan
from attngen.syntax import load_all
for name in ("gemma2", "longformer", "t5", "mla", "packing"):
    for spec in load_all(Path(sys.argv[1]) / f"{name}.attn"):
        source = emit(plan(spec))
        print(spec.name, source.kernel_id, source.sha256)
"""


def test_the_same_bytes_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _EMIT, str(ROOT / "examples")],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1 and len(outputs.pop().splitlines()) >= 5


def test_the_id_follows_what_the_text_depends_on() -> None:
    def source(dim: int, doc: str = "a", mask: str = "kv_idx <= q_pos") -> Any:
        return emit(plan(load_spec(f'attn 1\n"{doc}"\nattention same {{\n  head_dim = {dim}\n  mask = {mask}\n}}\n')))

    first = source(64)
    assert first.kernel_id.startswith("same_fwd_sm_90_") and first.kernel_id == source(64).kernel_id
    assert len({first.kernel_id, source(128).kernel_id, source(64, mask="kv_idx < q_pos").kernel_id}) == 3
    assert not is_edited(first.text) and is_edited(first.text.replace("LOG2E = ", "LOG2E = 2 * "))


# ---- hostile specs ---------------------------------------------------------------------------------------------------

DOCS = {
    "quotes": "it's \\\"quoted\\\" and '''tripled'''",
    "triple": '\\"\\"\\" import os; os.system(1)',
    "newlines": "first\\nimport os\\n\\ndef f():\\n    pass",
    "backslashes": "\\\\N{DASH} \\\\x41 \\\\",
    "jinja": "{{view.meta}} {% if %} ## if view.pingpong #! remark {# note #}",
    "marks": "#~\\n#~\\n## endif\\nslot_arg_name",
    "code": "ELEMENT = 1\\nLIMITS = ()\\nATTN_META = {}",
    "zeros": '"body_sha256": "' + "0" * 64 + '"',
    "long word": "x" * 1000,
    "unicode": "ψ → ∞ ‮ reversed   \\u2028 line",
}


def statements(text: str) -> str:
    """Everything of a file but docstrings and comments, with the kernel's name and hashes taken out."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ATTN_META":
            node.value = ast.Constant(None)
    return ast.unparse(tree)


@pytest.mark.parametrize("name", DOCS)
def test_a_doc_string_stays_in_the_docstring(name: str) -> None:
    body = "attention quiet {\n  head_dim = 64\n  mask = kv_idx <= q_pos\n}\n"
    plain = emit(plan(load_spec(f"attn 1\n{body}"))).text
    try:
        spec = load_spec(f'attn 1\n"{DOCS[name]}"\n{body}')
    except Exception as refused:
        assert getattr(refused, "code", "").startswith("E01")  # the language has no such escape
        spec = load_spec(f"attn 1\n{body}").replace(doc=DOCS[name].replace("\\n", "\n").replace('\\"', '"'))
    source = emit(plan(spec))
    assert statements(source.text) == statements(plain)
    assert not is_edited(source.text), "the hash of the body went into the docstring"
    assert ast.get_docstring(ast.parse(source.text)).startswith("quiet: attention forward for sm_90a")


def test_comments_do_not_reach_the_file() -> None:
    spec = load_spec("attn 1  # one: import os\nattention a {  # two\n  head_dim = 64  # three {{view}}\n}\n# four\n")
    assert not any(word in emit(plan(spec)).text for word in ("one:", "# two", "three", "# four"))


def taken_words() -> set[str]:
    """Identifiers in every scope of emitted files where names of a spec stand."""
    declared = (
        "param mine_a: int = 5\n  param mine_b: float = 0.5\n  tensor mine_c: i32[batch]\n"
        "  tensor mine_d: f32[heads_q]\n  scale = mine_b\n  "
    )
    bodies = (
        "mask = kv_idx <= q_pos + mine_a + mine_c[b]",
        "mask = kv_idx <= q_pos + mine_a and (q_pos - kv_idx < mine_c[b] or kv_idx < 4)",
        "layout = bhsd\n  mask = kv_idx <= q_pos + mine_a and q_pos - kv_idx < 9\n  sink = mine_d[h]\n"
        "  score = exp(log(sqrt(tanh(sigmoid(softplus(floor(log2(abs(s)))))))))\n"
        "  epilogue = o * float(d // 3 + d % 2)",
        "mask = (q_idx * kv_idx) % mine_a == 1\n"
        "  score = s * float(batch + heads_q + heads_kv + seqlen_q + h_kv + mine_a)",
    )
    words: set[str] = set()
    for body in bodies:
        text = emit(plan(load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  {declared}{body}\n}}\n"))).text
        for scope in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)):
            inner = list(ast.walk(scope))
            names = {n.id for n in inner if isinstance(n, ast.Name)} | {n.arg for n in inner if isinstance(n, ast.arg)}
            names |= {n.name for n in inner[1:] if isinstance(n, ast.FunctionDef | ast.ClassDef)}
            if any(n.startswith("mine_") for n in names):
                calls = [n for n in inner if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "SimpleNamespace"]
                words |= names | {k.arg for c in calls for k in c.keywords if k.arg}
    return {w for w in words if not w.startswith("mine_")}


def test_no_name_of_a_spec_meets_one_of_the_kernel() -> None:
    free = sorted(w for w in taken_words() if reason(w) is None and safe_name(w) == w)
    assert free == [], "add these to KERNEL_WORDS"


def test_names_that_are_words_of_the_kernel() -> None:
    """A spec whose params are called like the kernel's own things computes what it says."""
    words = [w for w in sorted(KERNEL_WORDS) if reason(w) is None]
    assert len(words) > 60
    for start in range(0, len(words), 40):
        batch = words[start : start + 40]
        groups = [" + ".join(batch[i : i + 8]) for i in range(0, len(batch), 8)]
        params = "".join(f"  param {w}: int = {i}\n" for i, w in enumerate(batch))
        mask = f"kv_idx < ({' + '.join(f'({g})' for g in groups)}) % 7 + q_idx"
        spec = load_spec(f"attn 1\nattention words {{\n  head_dim = 16\n{params}  mask = {mask}\n}}\n")
        agrees(spec, emit(plan(spec)).text, samples.params(spec), samples.Shape(1, 2, 1, 9, 12), seed=start)


def test_changed_names_meet_no_other() -> None:
    assert safe_name("tile") == "tile_" and safe_name("lambda") == "lambda_" and safe_name("window") == "window"
    assert safe_name("part_1") == "part_1_"
    long = ["n" * 60 + c for c in "abc"]
    short = [safe_name(n) for n in long]
    assert len(set(short)) == 3 and all(len(n) <= 40 and n.endswith("_") for n in short)


def test_the_longest_names_and_ranks() -> None:
    """64 characters a name, 8 axes, 8 params: every line stays within 120 and the reference still agrees."""
    params = [f"p{i}" + "y" * 62 for i in range(8)]
    dims = [f"d{i}" + "x" * 62 for i in range(8)]
    tensor = "t" * 64
    declared = "".join(f"  param {p}: int = 0\n" for p in params) + f"  tensor {tensor}: f32[{', '.join(dims)}]\n"
    scale = f"1.0 + float({' + '.join(params[:4])}) * float({' + '.join(params[:4])})"
    score = f"s + float({' + '.join(params)})"
    mask = " and ".join(f"kv_idx >= {p}" for p in params)
    spec = load_spec(
        f"attn 1\nattention {'a' * 64} {{\n  head_dim = 16\n{declared}  scale = {scale}\n  score = {score}\n"
        f"  mask = {mask}\n}}\n"
    )
    text = emit(plan(spec)).text
    assert max(len(line) for line in text.splitlines()) <= 120
    assert f"{tensor}" in ast.literal_eval(ast.parse(text).body[_meta_at(text)].value)["tensors"][0]["name"]
    read = load_spec(
        f"attn 1\nattention a {{\n  head_dim = 16\n{declared}  score = s + {tensor}[{', '.join(params)}]\n}}\n"
    )
    assert max(len(line) for line in emit(plan(read)).text.splitlines()) <= 120


def _meta_at(text: str) -> int:
    body = ast.parse(text).body
    return next(i for i, n in enumerate(body) if isinstance(n, ast.Assign) and n.targets[0].id == "ATTN_META")


def test_two_hundred_terms() -> None:
    groups = [" + ".join(f"{i * 20 + j}.5 * s" for j in range(20)) for i in range(10)]
    spec = load_spec(
        f"attn 1\nattention big {{\n  head_dim = 16\n  score = {' + '.join(f'({g})' for g in groups)}\n}}\n"
    )
    text = emit(plan(spec)).text
    assert max(len(line) for line in text.splitlines()) <= 120
    agrees(spec, text, {}, samples.Shape(1, 2, 1, 3, 5))


def test_the_environment_is_strict() -> None:
    assert environment().undefined.__name__ == "StrictUndefined" and INT_ATOMS and TENSORS
