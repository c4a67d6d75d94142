"""Emission: the self-check is the dense meaning, the same bytes everywhere, and no spec becomes code."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_exprs import INT_ATOMS, TENSORS

from attngen import samples
from attngen.emit.backward import emit_backward
from attngen.emit.env import environment
from attngen.emit.exprs import KERNEL_WORDS, safe_name
from attngen.emit.module import emit
from attngen.ir.spec import AttentionSpec
from attngen.ref import dense
from attngen.ref.evaluate import evaluate
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.source import is_edited
from attngen.syntax import load_all, load_spec
from attngen.syntax.reserved import reason

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [(f, s.name) for f in sorted((ROOT / "examples").glob("*.attn")) for s in load_all(f)]

# ---- the self-check ----------------------------------------------------------------------------------------------


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
    if spec.normalizer == "softmax":  # no other kernel writes an LSE
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
from attngen.search_backward import plan_backward
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
    spec = load_spec("attn 1  # one: import os\nattention a {  # two\n  head_dim = 64  # tertium {{view}}\n}\n# four\n")
    assert not any(word in emit(plan(spec)).text for word in ("one:", "# two", "tertium", "# four"))


_SOFTCAP = "\n  score = mine_b * tanh(s / mine_b)"


def spec_of(head_dim: int, body: str) -> AttentionSpec:
    return load_spec(f"attn 1\nattention a {{\n  head_dim = {head_dim}\n  {body}\n}}\n")


def taken_words() -> set[str]:
    """Identifiers in every scope of emitted files where names of a spec stand."""
    declared = (
        "param mine_a: int = 5\n  param mine_b: float = 0.5\n  tensor mine_c: i32[batch]\n"
        "  tensor mine_d: f32[heads_q]\n  scale = mine_b\n  "
    )
    mapped = (
        "tensor mine_i: i32[seqlen_kv]\n  mask = kv_idx <= q_pos + mine_a and mine_i[max(q_pos, 0)] == mine_i[kv_idx]\n"
        "  block_sparse { q = 64, kv = 64 }"
    )
    bodies = (
        "mask = kv_idx <= q_pos + mine_a + mine_c[b]",
        "mask = kv_idx <= q_pos + mine_a and (q_pos - kv_idx < mine_c[b] or kv_idx < 4)",
        "layout = bhsd\n  mask = kv_idx <= q_pos + mine_a and q_pos - kv_idx < 9\n  sink = mine_d[h]\n"
        "  score = exp(log(sqrt(tanh(sigmoid(softplus(floor(log2(abs(s)))))))))\n"
        "  epilogue = o * float(d // 3 + d % 2)",
        "mask = (q_idx * kv_idx) % mine_a == 1\n"
        "  score = s * float(batch + heads_q + heads_kv + seqlen_q + h_kv + mine_a)",
        mapped,
        mapped.replace("mask", "layout = varlen\n  mask"),
    )
    learned = (
        "tensor mine_e: f32[batch, heads_q, seqlen_q, seqlen_kv] grad\n  tensor mine_f: f32[seqlen_kv] grad\n"
        "  tensor mine_g: f32[seqlen_q] grad\n  tensor mine_h: f32[heads_q] grad\n  sink = mine_h[h] * mine_b\n"
        "  score = tanh(s * mine_b) + mine_e[b, h, q_idx, kv_idx] * mine_b + mine_f[kv_idx] + mine_g[q_idx]\n"
        "  mask = kv_idx <= q_pos + mine_a and kv_idx >= mine_c[b]"
    )
    texts = [emit(plan(spec_of(64, declared + body))).text for body in bodies]
    for head_dim, body, captured in (
        (64, learned, "efgh"),
        (64, bodies[1], ""),
        (64, mapped, ""),
        (256, bodies[0] + _SOFTCAP, ""),
    ):
        for deterministic in (False, True)[: 1 if captured else 2]:
            spec = spec_of(head_dim, declared + body)
            spec = spec.replace(backward=spec.backward.replace(deterministic=deterministic))
            texts.append(emit_backward(plan_backward(spec, captured=[f"mine_{c}" for c in captured])).text)
    words: set[str] = set()
    for text in texts:
        for scope in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)):
            inner = list(ast.walk(scope))
            names = {n.id for n in inner if isinstance(n, ast.Name)} | {n.arg for n in inner if isinstance(n, ast.arg)}
            names |= {n.name for n in inner[1:] if isinstance(n, ast.FunctionDef | ast.ClassDef)}
            if any(n.startswith("mine_") for n in names):
                calls = [n for n in inner if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "SimpleNamespace"]
                words |= names | {k.arg for c in calls for k in c.keywords if k.arg}
    own = {"cu_seqlens_q", "cu_seqlens_kv"}  # refused by name where a layout has them
    return {w for w in words - own if not w.startswith(("mine_", "d_mine_"))}


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
    assert safe_name("part_1") == "part_1_" and safe_name("d_x_sink") == "d_x_sink_"
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


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp16"])
def test_halves_are_taken_apart_where_there_are_any(dtype: str) -> None:
    """A kernel holds the helper of the 16-bit type that its score reads along the keys, and no other."""
    spec = load_spec(f"""attn 1
attention streamed {{
  head_dim = 64
  tensor slope: {dtype}[heads_q, seqlen_kv]
  score = s + slope[h, kv_idx]
}}
""")
    defined = {n.name for n in ast.walk(ast.parse(emit(plan(spec)).text)) if isinstance(n, ast.FunctionDef)}
    assert {n for n in defined if n.startswith("half_")} == ({f"half_{dtype}"} if dtype != "f32" else set())
