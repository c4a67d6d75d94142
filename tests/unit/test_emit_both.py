"""Forward and backward in one file: both texts are there, every name means one thing, and refusals are said."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from large import TOO_LARGE, large
from test_emit import reference_of, statements

from attngen import api, samples
from attngen.diag.diagnostic import AttnError
from attngen.directions import plan_gradients
from attngen.emit import both
from attngen.emit.backward import emit_backward
from attngen.emit.both import emit_both
from attngen.emit.module import emit
from attngen.ref import dense
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.source import is_edited
from attngen.syntax import load_all, load_spec
from attngen.syntax.reserved import reason
from attngen.verify.source import SourceError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [(f, s.name) for f in sorted((ROOT / "examples").glob("*.attn")) for s in load_all(f)]
TURNS = [(f, n) for f, n in EXAMPLES if n in ("causal", "gemma2_local", "prefix_lm")]
CAUSAL = "attn 1\nattention causal {\n  head_dim = 64\n  mask = kv_idx <= q_pos\n}\n"


def defined(text: str) -> dict[str, str]:
    """Every function and class of module level without comments, docstrings and layout."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:] or [ast.Pass()]
            found[node.name] = ast.unparse(node)
    return found


def body(text: str, end: str) -> str:
    """From the line behind ATTN_META to the section `end`."""
    return text[text.index("\n}\n", text.index("ATTN_META = {")) : text.index(f"# ---- {end} ")].strip()


def constants(text: str) -> dict[str, str]:
    """Assignments of module level by name."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            names = [n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)]
            found |= dict.fromkeys(names, ast.unparse(node.value))
    return found


@pytest.mark.parametrize(
    ("file", "name", "deterministic"),
    [*((f, n, False) for f, n in EXAMPLES), *((f, n, True) for f, n in TURNS)],
    ids=[*(n for _, n in EXAMPLES), *(f"{n}, turns" for _, n in TURNS)],
)
def test_both_texts_are_there(file: Path, name: str, deterministic: bool) -> None:
    spec = load_spec(file, name=name, overrides={"deterministic": deterministic})
    gradients = plan_gradients(spec, "sm_90a")
    if gradients.plans is None:  # tests/examples says of which blocks
        assert gradients.refused and "There is no backward in this file" in api.compile(spec).text
        return
    plans = plan(spec)
    forward, backward = emit(plans), emit_backward(gradients.plans)
    source = emit_both(plans, gradients.plans, gradients.notes)
    text, front, back = source.text, forward.text, backward.text
    assert body(text, "backward: constants") == body(front, "self-check"), "the forward, word for word"
    assert not is_edited(text) and max(map(len, text.splitlines())) <= 120
    known, own, merged = defined(front), defined(back), defined(text)
    clashes = {n for n in own if n in known and known[n] != own[n]} - {"main", "reference"}
    ours, theirs, all_ = constants(front), constants(back), constants(text)
    clashes |= {n for n in ours.keys() & theirs.keys() if ours[n] != theirs[n]} - {"ATTN_META"}
    words = {n: both._prefixed(n) for n in {*clashes, "PLANS", "LIMITS", "TilePlan"}}
    assert set(words.values()) <= merged.keys() | all_.keys()
    assert all_.keys() == ours.keys() | {words.get(n, n) for n in theirs}
    assert all(all_[n] == ours[n] for n in ours.keys() - {"ATTN_META"})
    for n, code in own.items():
        if n == "main":
            continue
        for old, new in words.items():
            code = re.sub(rf"(?<![\w.]){old}(?=\()" if old[0].islower() else rf"(?<![\w.]){old}\b", new, code)
        code = code.replace("ATTN_META['kernel_id']", "ATTN_META['backward']['kernel_id']")
        assert merged[words.get(n, n)] == code, n
    for n, code in known.items():
        assert n in ("main", "reference") or merged[n] == code, n
    assert {"PLANS", "LIMITS", "BACKWARD_PLANS", "BACKWARD_LIMITS"} <= all_.keys()
    assert {"TilePlan", "BackwardTilePlan", "compile_plan", "compile_backward", "backward_check"} <= merged.keys()
    meta = source.meta
    assert meta["direction"] == "both" and meta["plans"] == forward.meta["plans"]
    assert meta["backward"]["plans"] == backward.meta["backward"]["plans"]


def test_the_self_check_goes_through_both() -> None:
    source = api.compile(CAUSAL)
    main = defined(source.text)["main"]
    loops = re.findall(r"for index, plan in enumerate\((\w+)\)", main)
    assert loops == ["PLANS", "BACKWARD_PLANS"]
    assert main.count("import torch") == main.count("sys.exit(0 if ok") == main.count("manual_seed") == 1
    assert "backward_check(torch, f, index, shape)" in main and re.search(r" check\(torch, f, shape\)", main)


@pytest.mark.parametrize("name", ["causal", "gpt_oss", "gemma2"])
def test_one_reference_serves_both_checks(name: str) -> None:
    """O and LSE of the dense meaning, and gradients where rows keep no key."""
    spec = load_all(ROOT / "examples" / f"{name}.attn")[-1].replace(head_dim_qk=16, head_dim_v=16)
    shape = samples.Shape(2, 4, 2, 9, 5)  # causal: the first rows see nothing
    params, tensors = samples.params(spec), samples.tensors(spec, shape)
    q, k, v = (x.double().requires_grad_() for x in samples.qkv(spec, shape))
    values = [*(params[p.name] for p in spec.params), *(tensors[t.name] for t in spec.tensors)]
    o, lse, _ = reference_of(api.compile(spec).text).reference(torch, q, k, v, 0.25, *values)
    exact = dense.attention(spec, q.detach(), k.detach(), v.detach(), params=params, tensors=tensors, scale=0.25)
    assert float((o - exact.o).detach().abs().max()) < 1e-12
    assert torch.equal(lse.isinf(), exact.lse.isinf())
    dq, dk, dv = torch.autograd.grad(o.sum() + lse.masked_fill(lse.isinf(), 0.0).sum(), (q, k, v))
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv)) and float(dk.abs().max()) > 0


def test_the_same_bytes_and_an_id_that_follows_both() -> None:
    first, again = api.compile(CAUSAL), api.compile(CAUSAL)
    assert first == again and re.fullmatch(r"causal_sm_90_[0-9a-f]{8}", first.kernel_id)
    turns = api.compile(CAUSAL, deterministic=True)
    assert turns.kernel_id != first.kernel_id and turns.meta["backward"]["deterministic"]
    assert first.meta["backward"]["kernel_id"] == api.compile(CAUSAL, only="backward").kernel_id


def test_only_one_direction() -> None:
    spec = load_spec(CAUSAL)
    assert api.compile(spec, only="forward") == emit(plan(spec))
    assert api.compile(spec, only="backward") == emit_backward(plan_backward(spec))
    with pytest.raises(AttnError, match="only") as refused:
        api.compile(spec, only="sideways")
    assert refused.value.diagnostics[0].code == "E0503"


def test_names_of_a_spec_that_the_join_gives_to_others() -> None:
    words = ["arguments", "ring", "plans", "main", "backward_check", "Ring", "TilePlan", "TOLERANCE", "BARRIER_STORE"]
    assert reason("check") and reason("PLANS"), "these no spec can declare"
    params = "".join(f"  param {w}: int = {i}\n" for i, w in enumerate(words))
    spec = load_spec(
        f"attn 1\nattention x {{\n  head_dim = 64\n{params}  mask = kv_idx <= q_pos + {' + '.join(words)}\n}}\n"
    )
    text = api.compile(spec).text
    shape = samples.Shape(1, 2, 1, 9, 12)
    q, k, v = (x.double() for x in samples.qkv(spec, shape))
    values = samples.params(spec)
    o, _, _ = reference_of(text).reference(torch, q, k, v, 0.125, *(values[w] for w in words))
    assert float((o - dense.attention(spec, q, k, v, params=values, scale=0.125).o).abs().max()) < 1e-12


# ---- what is left out ------------------------------------------------------------------------------------------------


def test_without_a_backward_the_forward_says_why() -> None:
    spec = load_spec(large())
    source = api.compile(spec)
    plain = emit(plan(spec))
    assert statements(source.text) == statements(plain.text) and source.kernel_id != plain.kernel_id
    assert source.meta["direction"] == "forward" and not is_edited(source.text)
    note = " ".join(source.meta["notes"][0])
    assert note == f"There is no backward in this file: {TOO_LARGE}."
    assert note in " ".join(str(ast.get_docstring(ast.parse(source.text))).split())
    with pytest.raises(AttnError) as refused:
        api.compile(spec, only="backward")
    assert refused.value.diagnostics[0].code == "E0402"


def test_a_gradient_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen import directions

    def some(spec: object, target: str, *, captured: object = ()) -> object:
        if "table" in captured:  # type: ignore[operator]
            return plan_backward(load_spec(large()), target)  # refused
        return plan_backward(spec, target, captured=captured)  # type: ignore[arg-type]

    monkeypatch.setattr(directions, "plan_backward", some)
    spec = load_spec(
        "attn 1\nattention two {\n  head_dim = 64\n  tensor table: f32[heads_q] grad\n"
        "  tensor sinks: f32[heads_q] grad\n  score = s + table[h]\n  sink = sinks[h]\n}\n"
    )
    source = api.compile(spec)
    assert [g["tensor"] for g in source.meta["backward"]["gradients"]] == ["sinks"]
    note = " ".join(source.meta["notes"][0])
    assert note.startswith("The backward leaves a gradient out: ") and source.meta["direction"] == "both"
    assert note in " ".join(str(ast.get_docstring(ast.parse(source.text))).split())
    with pytest.raises(AttnError):
        api.compile(spec, only="backward")


# ---- faults of templates ---------------------------------------------------------------------------------------------


def test_a_name_that_would_mean_the_forward_is_a_fault() -> None:
    (chunk,) = both._chunks("def f(x):\n    g = check\n    return g(x)\n")
    with pytest.raises(SourceError, match="check"):
        both._renamed(chunk, ["check"])
    (chunk,) = both._chunks("def f(check):\n    return check + 1\n")
    assert both._renamed(chunk, ["check"]).body == chunk.body


def test_lines_that_a_longer_name_made_too_long() -> None:
    code = "    x = time_ms(torch, BACKWARD_PLANS[index], " + ", ".join(f"argument_{i + 10}" for i in range(6)) + ")"
    assert len(code) > 120
    fitted = both._fitted(code)
    assert len(fitted) == 3 and max(map(len, fitted)) <= 120
    joined = "def f():\n" + "\n".join(fitted)
    assert ast.unparse(ast.parse(joined)) == ast.unparse(ast.parse(f"def f():\n{code}"))
    remark = "LIMITS = (1,)  # " + "word " * 25
    assert both._fitted(remark) == ["# " + "word " * 25, "LIMITS = (1,)"]
