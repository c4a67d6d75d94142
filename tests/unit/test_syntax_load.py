"""What loading means: every clause, includes, defs, extends, overrides, make_spec, and what may be read at all."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from attngen import resources
from attngen.diag.diagnostic import AttnError
from attngen.ir.expr import atom, const
from attngen.ir.functions import apply
from attngen.ir.spec import AttentionSpec, BackwardHints, BlockSparse
from attngen.ir.types import DType, Layout, Normalizer, Type
from attngen.syntax import check_text, load_all, load_spec, make_spec, print_expr, print_spec

EVERYTHING = """attn 1
include "std.attn"

def near(keys: int >= 1) = q_pos - kv_idx < keys

"Every clause once."
"A second line of \\"doc\\"."
attention base {
  head_dim   = 192, v = 128
  dtype      = fp16
  layout     = bhsd
  scale      = gain / sqrt(head_dim)
  param  gain: float >= 0.5 <= 2.0 = 1.0
  param  keys: int in 1..4096 = 128
  param  flag: bool = true
  tensor doc: i32[batch, seqlen_kv] sorted
  tensor sinks: f32[heads_q] grad
  tensor gate: bf16[batch, seqlen_q, heads_q, head_dim_v] grad
  let distance = q_pos - kv_idx
  score      = softcap(s, 50.0) - 0.5 * distance if distance > 0 else s
  mask       = causal and near(keys) and document(doc) or 0 <= kv_idx < 4 and flag
  sink       = sinks[h]
  epilogue   = gated(o, gate)
  output { dtype = f32, max_logit = true }
  block_sparse { q = 128, kv = 64, lists = given }
  schedule { tile = 128 x 176, stages = 2, order = lpt, cluster = 2 x 1, persistent = true, split_kv = auto,
    pack_gqa = 1, sm_margin = 4, pingpong = true }
  backward { deterministic = true }
  target     = sm_90a, sm_100a
}
"""


def load(body: str, before: str = "", **options: object) -> AttentionSpec:
    return load_spec(f"attn 1\n{before}attention a {{\n  head_dim = 64\n{body}\n}}\n", overrides=options)


def code(source: str | Path, **options: object) -> str:
    with pytest.raises(AttnError) as caught:
        load_spec(source, **options)  # type: ignore[arg-type]
    assert len(caught.value.diagnostics) == 1
    return caught.value.code


def test_every_clause() -> None:
    spec = load_spec(EVERYTHING)
    assert spec.name == "base" and spec.doc == 'Every clause once.\nA second line of "doc".'
    assert (spec.head_dim_qk, spec.head_dim_v, spec.dtype, spec.layout) == (192, 128, DType.FP16, Layout.BHSD)
    assert print_expr(spec.scale) == "gain / sqrt(192.0)"
    assert [(p.name, p.type, p.default, p.minimum, p.maximum) for p in spec.params] == [
        ("gain", Type.FLOAT, 1.0, 0.5, 2.0),
        ("keys", Type.INT, 128, 1, 4096),
        ("flag", Type.BOOL, True, None, None),
    ]
    assert [(t.name, t.dtype, t.dims, t.grad, t.sorted) for t in spec.tensors] == [
        ("doc", DType.I32, ("batch", "seqlen_kv"), False, True),
        ("sinks", DType.F32, ("heads_q",), True, False),
        ("gate", DType.BF16, ("batch", "seqlen_q", "heads_q", "head_dim_v"), True, False),
        ("blocks", DType.BOOL, ("batch", "heads_q", "blocks_q", "blocks_kv"), False, False),
    ]
    assert print_expr(spec.score) == (
        "50.0 * tanh(s / 50.0) - 0.5 * float(q_pos - kv_idx) if q_pos - kv_idx > 0 else s"
    )
    assert print_expr(spec.mask) == (
        "(kv_idx <= q_pos and q_pos - kv_idx < keys and doc[b, q_pos] == doc[b, kv_idx] "
        "or 0 <= kv_idx and kv_idx < 4 and flag) and blocks[b, h, q_idx // 128, kv_idx // 64]"
    )
    assert spec.sink is not None and print_expr(spec.sink) == "sinks[h]"
    assert print_expr(spec.epilogue) == "o * sigmoid(gate[b, q_idx, h, d])"
    assert spec.out_dtype is DType.F32 and spec.max_logit
    assert spec.block_sparse == BlockSparse(q=128, kv=64, given=True)
    assert spec.backward == BackwardHints(deterministic=True)
    hints = spec.schedule
    assert (hints.tile_m, hints.tile_n, hints.stages, hints.order, hints.cluster) == (128, 176, 2, "lpt", (2, 1))
    assert (hints.persistent, hints.split_kv, hints.pack_gqa, hints.sm_margin) == (True, None, 1, 4)
    assert hints.pingpong is True
    assert [name for name, _ in hints.places][:2] == ["tile", "stages"]
    assert spec.targets == ("sm_90a", "sm_100a")
    assert load_spec(print_spec(spec)) == spec


def test_defaults() -> None:
    spec = load("")
    assert (spec.dtype, spec.layout, spec.normalizer) == (DType.BF16, Layout.BSHD, Normalizer.SOFTMAX)
    assert spec.scale == const(1 / math.sqrt(64))
    assert (spec.score, spec.mask, spec.epilogue, spec.sink) == (atom("s"), const(True), atom("o"), None)
    assert spec.doc is None and spec.head_dim_v == 64


def test_every_node_has_its_place() -> None:
    from attngen.ir.expr import walk

    spec = load_spec(EVERYTHING)
    for e in (spec.mask, spec.score, spec.scale, spec.epilogue):
        assert all(n.span is not None for n in walk(e))
    le = next(n for n in walk(spec.mask) if n.kind == "apply" and n.fn == "le" and n.span.source.name == "<text>")
    assert le.span is not None and EVERYTHING[le.span.start : le.span.end] == "0 <= kv_idx"


@pytest.mark.parametrize(
    "written, meant",
    [
        ("p1 or p2 and p3", "p1 or (p2 and p3)"),
        ("not p1 == p2", "not (p1 == p2)"),
        ("not p1 and p2", "(not p1) and p2"),
        ("1 - 2 - 3", "(1 - 2) - 3"),
        ("1 - 2 * 3", "1 - (2 * 3)"),
        ("-1 // 2", "(-1) // 2"),
        ("-x // 2", "(-x) // 2"),
        ("8 // 4 // 2", "(8 // 4) // 2"),
        ("1 if p1 else 2 if p2 else 3", "1 if p1 else (2 if p2 else 3)"),
        ("1 + 2 < 3 * 4", "(1 + 2) < (3 * 4)"),
        ("1 < x <= 3", "1 < x and x <= 3"),
    ],
)
def test_precedence(written: str, meant: str) -> None:
    before = "  param x: int\n  param y: int\n  let p1 = x > 0\n  let p2 = y > 0\n  let p3 = x > y\n"

    def value(text: str) -> AttentionSpec:
        is_bool = any(w in text for w in ("or", "and", "not", "<")) and "if" not in text
        return load(before + (f"  mask = {text}" if is_bool else f"  score = s + ({text})"))

    assert value(written) == value(meant)


def test_types_convert_only_where_the_table_says() -> None:
    spec = load("  param n: int\n  score = s + n * 2 / 3 + min(n, 1.5)")
    assert print_expr(spec.score) == "s + float(n * 2) / 3.0 + min(float(n), 1.5)"
    assert load("  scale = 1").scale == const(1.0)
    assert load("  scale = 1 / 16").scale == apply("div", const(1.0), const(16.0))
    assert load("  scale = head_dim_v / head_dim").scale == apply("div", const(64.0), const(64.0))


def test_a_literal_minus_is_part_of_the_literal() -> None:
    mask = load("  mask = kv_idx > -2147483648 and -(1) < kv_idx").mask
    assert print_expr(mask) == "kv_idx > -2147483648 and -(1) < kv_idx"


def test_defs_are_hygienic() -> None:
    # The `x` of `f` is not its caller's, and an argument that reads `kv_idx` is not caught by a formal of that name.
    before = "def g(x) = x + 1\ndef f(x, kv_idx) = g(kv_idx) - x\n"
    assert print_expr(load("  param x: int\n  mask = f(kv_idx, x) < 3", before).mask) == "x + 1 - kv_idx < 3"


def test_formals_shadow_atoms_and_take_tensors() -> None:
    before = "def twice(s: float) = 2.0 * s\ndef at(t: tensor, i) = t[i]\ndef both(t, i) = at(t, i) + at(t, i + 1)\n"
    spec = load("  tensor tbl: f32[heads_q]\n  score = twice(s) + both(tbl, h)", before)
    assert print_expr(spec.score) == "2.0 * s + (tbl[h] + tbl[h + 1])"


def test_bounds_of_arguments_reach_the_param() -> None:
    spec = load("  param n: int <= 99 = 5\n  mask = chunk(n) and window(n)", 'include "std.attn"\n')
    assert (spec.params[0].minimum, spec.params[0].maximum) == (1, 99)


def test_names_of_defs_and_params_do_not_meet() -> None:
    spec = load("  param window: int = 3\n  mask = window(window)", 'include "std.attn"\n')
    assert print_expr(spec.mask) == "q_pos - kv_idx < window"


def test_lets_stand_in_any_order() -> None:
    assert print_expr(load("  mask = b2\n  let b2 = a2 < 3\n  let a2 = kv_idx - q_pos").mask) == "kv_idx - q_pos < 3"


EXTENDS = """attn 1
attention kid extends base {
  head_dim = 128
  param w: int = 7
  mask = kv_idx < w
  schedule { tile_n = 64, order = auto }
  branch two { weight = -1.0
  mask = false }
}
"the base"
attention base {
  head_dim = 64
  dtype = fp16
  param w: int = 3
  param g: float = 1.0
  let limit = w + 1
  score = s * g
  mask = kv_idx < limit
  schedule { tile = 64 x 128, order = lpt, stages = 2 }
  branch one { weight = 1.0 }
  branch two { sink = 1.0 }
}
attention grandchild extends kid { mask = kv_idx < limit }
"""


def test_extends() -> None:
    kid, base, grandchild = load_all(EXTENDS)
    assert [s.name for s in (kid, base, grandchild)] == ["kid", "base", "grandchild"]
    assert load_spec(EXTENDS) == grandchild and load_spec(EXTENDS, name="base") == base
    assert kid.doc == "the base" and kid.head_dim_qk == kid.head_dim_v == 128 and kid.dtype is DType.FP16
    assert [p.name for p in kid.params] == ["w", "g"] and kid.param("w").default == 7
    assert print_expr(kid.mask) == "kv_idx < w" and print_expr(grandchild.mask) == "kv_idx < w + 1"
    hints = kid.schedule
    assert (hints.tile_m, hints.tile_n, hints.order, hints.stages) == (64, 64, None, 2)
    one, two = kid.branches
    assert (one.name, print_expr(one.mask), one.sink) == ("one", "kv_idx < w", None)
    assert two.sink == const(1.0) and two.weight == const(-1.0) and two.mask == const(False)


def test_branches_inherit_and_segments_stand_alone() -> None:
    spec = load("  mask = kv_idx <= q_pos\n  score = s * 2.0\n  branch p1 { }\n  branch p2 {\n    score = s\n  }")
    assert [print_expr(b.score) for b in spec.branches] == ["s * 2.0", "s"]
    assert spec.branches[0].weight == const(1.0) and spec.branches[1].mask == spec.mask
    spec = load("  mask = kv_idx <= q_pos\n  segment past { }")
    assert spec.segments[0].mask == const(True) and spec.segments[0].score == atom("s")
    assert load_spec(print_spec(spec)) == spec


def test_v_as_a_view_of_k() -> None:
    spec = load_spec("attn 1\nattention a {\n  head_dim = 576\n  v = k[0:512]\n}\n")
    assert (spec.head_dim_qk, spec.head_dim_v, spec.v_view_start) == (576, 512, 0)
    assert load_spec(print_spec(spec)) == spec


def test_overrides() -> None:
    spec = load_spec(
        EVERYTHING,
        overrides={
            "head_dim": 64,
            "head_dim_v": 32,
            "dtype": "bf16",
            "layout": "bshd",
            "tile_m": 64,
            "tile_n": 96,
            "stages": 3,
            "order": "linear",
            "cluster": (1, 1),
            "out_dtype": "bf16",
            "max_logit": False,
            "deterministic": False,
            "target": ("sm_90a",),
            "persistent": None,
        },
    )
    assert (spec.head_dim_qk, spec.head_dim_v, spec.dtype, spec.layout) == (64, 32, DType.BF16, Layout.BSHD)
    hints = spec.schedule
    assert (hints.tile_m, hints.tile_n, hints.stages, hints.order) == (64, 96, 3, "linear")
    assert hints.cluster == (1, 1) and hints.persistent is True and hints.sm_margin == 4
    assert (spec.out_dtype, spec.max_logit, spec.targets) == (DType.BF16, False, ("sm_90a",))
    assert not spec.backward.deterministic
    assert print_expr(spec.scale) == "gain / sqrt(64.0)" and spec.name == "base" and spec.doc is not None
    assert load_spec(EVERYTHING, overrides={"tile": "64 x 128"}).schedule.tile_n == 128
    assert load_spec(EVERYTHING, overrides={"tile": (64, 128)}).schedule.tile_m == 64
    assert load_spec(EVERYTHING, overrides={"head_dim": 256}).head_dim_v == 128


@pytest.mark.parametrize(
    "overrides, wanted",
    [
        ({"headdim": 64}, "E0223"),
        ({"head_dim": "64, v = 8"}, "E0223"),
        ({"head_dim": -1}, "E0223"),
        ({"head_dim": 1.5}, "E0223"),
        ({"dtype": "fp16\n mask = true"}, "E0223"),
        ({"dtype": "fp16 }"}, "E0223"),
        ({"dtype": "fp17"}, "E0205"),
        ({"stages": 99}, "E0208"),
        ({"tile": 128}, "E0208"),
        ({"head_dim": 0}, "E0210"),
    ],
)
def test_bad_overrides(overrides: dict[str, object], wanted: str) -> None:
    assert code("attn 1\nattention a { head_dim = 64 }\n", overrides=overrides) == wanted


def test_make_spec() -> None:
    spec = make_spec(
        "local",
        head_dim=64,
        head_dim_v=32,
        doc='two\nlines "quoted"',
        mask="causal and window(keys) and near",
        score="softcap(s, cap)",
        params={"keys": {"default": 128, "maximum": 4096}, "cap": {"type": "float", "default": 50}},
        tensors={
            "sinks": {"dtype": "f32", "dims": ["heads_q"], "grad": True},
            "t": {"dtype": "i32", "dims": (4,), "sorted": True},
        },
        lets={"near": "q_pos - kv_idx < 7"},
        sink="sinks[h]",
        scale=0.5,
        dtype="fp16",
        order="lpt",
    )
    assert print_expr(spec.mask) == "kv_idx <= q_pos and q_pos - kv_idx < keys and q_pos - kv_idx < 7"
    assert spec.doc == 'two\nlines "quoted"' and spec.scale == const(0.5) and spec.schedule.order == "lpt"
    assert (spec.params[0].minimum, spec.params[0].maximum, spec.params[1].default) == (1, 4096, 50.0)
    assert spec.tensors[1].sorted and spec.tensors[0].grad
    # An expression cannot close its clause and open another one.
    for bad in ("true\n  score = s", "true }", "true # x\n}\nattention b { head_dim = 8"):
        with pytest.raises(AttnError) as caught:
            make_spec("a", head_dim=64, mask=bad)
        assert caught.value.code.startswith("E01")
    assert (
        make_spec("a", head_dim=64, mask="kv_idx <= q_pos # why").mask
        == make_spec("a", head_dim=64, mask="causal").mask
    )


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path = path.with_name(path.name + ".attn")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"attn 1\n{text}\n", encoding="utf-8")
    return folder


def test_includes(tmp_path: Path) -> None:
    write(tmp_path, a='include "sub/b.attn"\ninclude "c.attn"\nattention a extends base { mask = f and g }')
    write(tmp_path, sub__b='include "../c.attn"\ninclude "d.attn"\ndef f = g and deep', c="def g = true")
    write(tmp_path, sub__d="def deep = kv_idx < 3\nattention base { head_dim = 64 }")
    spec = load_spec(tmp_path / "a.attn")
    assert spec.name == "a" and print_expr(spec.mask) == "true and kv_idx < 3 and true"
    # Blocks of included files are there to extend, not to be chosen.
    assert code(tmp_path / "a.attn", name="base") == "E0222"


def test_include_dirs_and_the_shipped_library_win(tmp_path: Path) -> None:
    write(tmp_path / "lib", masks="def mine = kv_idx < 5")
    write(
        tmp_path / "own",
        std="def causal = true",
        a='include "masks.attn"\ninclude "std.attn"\nattention a {\n head_dim = 64\n mask = causal and mine\n}',
    )
    assert code(tmp_path / "own" / "a.attn") == "E0219"
    spec = load_spec(tmp_path / "own" / "a.attn", include_dirs=[tmp_path / "lib"])
    assert print_expr(spec.mask) == "kv_idx <= q_pos and kv_idx < 5"


@pytest.mark.parametrize(
    "path",
    [
        "../secret.attn",
        "sub/../../secret.attn",
        "{absolute}",
        "link.attn",
        "linked/secret.attn",
        "..\\\\secret.attn",
        "",
        "secret",
        "file://secret.attn",
        "~/secret.attn",
        "sub",
        "%2e%2e/secret.attn",
        "sub/std.attn",
    ],
)
def test_includes_stay_inside(tmp_path: Path, path: str) -> None:
    write(tmp_path, secret="def leak = true")
    home = write(tmp_path / "home", ok="def fine = true")
    (home / "sub").mkdir()
    (home / "link.attn").symlink_to(tmp_path / "secret.attn")
    (home / "linked").symlink_to(tmp_path)
    path = path.replace("{absolute}", str(tmp_path / "secret.attn"))
    write(home, a=f'include "ok.attn"\ninclude "{path}"\nattention a {{\n  head_dim = 64\n}}')
    assert code(home / "a.attn") == "E0219"


def test_circles_of_includes(tmp_path: Path) -> None:
    write(tmp_path, a='include "b.attn"\nattention a { head_dim = 64 }', b='include "a.attn"')
    assert code(tmp_path / "a.attn") == "E0220"
    write(tmp_path, me='include "me.attn"\nattention a { head_dim = 64 }')
    assert code(tmp_path / "me.attn") == "E0220"


def test_unreadable_files(tmp_path: Path) -> None:
    assert code(tmp_path / "none.attn") == "E0110"
    assert code(str(tmp_path)) == "E0110"
    assert code("a\0b") == "E0110"
    (tmp_path / "latin.attn").write_bytes(b"attn 1\n# caf\xe9\n")
    assert code(tmp_path / "latin.attn") == "E0110"
    (tmp_path / "large.attn").write_bytes(b"attn 1\n" + b"#" * (1 << 20))
    assert code(tmp_path / "large.attn") == "E0108"
    assert [d.code for d in check_text(tmp_path / "none.attn")] == ["E0110"]


def test_choosing_a_block() -> None:
    assert code("attn 1\n") == "E0222"
    with pytest.raises(AttnError, match="did you mean `global_layer`"):
        load_spec("attn 1\nattention global_layer { head_dim = 64 }\n", name="globl_layer")


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.attn").write_bytes(
        b"\xef\xbb\xbfattn 1\r\nattention a {\r\n  head_dim = 64\r\n  mask = true\r\n}\r\n"
    )
    assert load_spec(tmp_path / "a.attn").mask == const(True)


def test_names_that_look_like_clause_words_are_free_in_expressions() -> None:
    spec = load("  param tile: int\n  param order: int\n  param grad: int\n  mask = tile < order + grad", "")
    assert print_expr(spec.mask) == "tile < order + grad"
    spec = load("  let mask = kv_idx < 3\n  let score = 2.0\n  mask = mask\n  score = s * score")
    assert print_expr(spec.score) == "s * 2.0" and print_expr(spec.mask) == "kv_idx < 3"


def test_a_word_that_starts_like_a_clause_word_is_not_one() -> None:
    spec = load("  param maskx: int\n  param notx: bool\n  mask = maskx < 3 and notx and not notx")
    assert print_expr(spec.mask) == "maskx < 3 and notx and not notx"


def test_loading_imports_neither_torch_nor_cutlass() -> None:
    script = (
        "import sys; from attngen.syntax import load_spec, format_text, print_spec\n"
        f"spec = load_spec({EVERYTHING!r}); format_text(print_spec(spec))\n"
        "assert not {'torch', 'cutlass', 'numpy', 'jinja2'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=resources.root())


def test_reserved_names_are_all_refused() -> None:
    from attngen.syntax.reserved import RESERVED

    assert {
        "cutlass",
        "cute",
        "torch",
        "self",
        "q",
        "k",
        "v",
        "o",
        "lse",
        "b",
        "h",
        "print",
        "class",
        "exp",
        "match",
    } <= set(RESERVED)
    for name in RESERVED:
        if not name.isidentifier():
            continue
        found = check_text(f"attn 1\nattention a {{\n  head_dim = 64\n  param {name}: int\n}}\n")
        assert [d.code for d in found] == ["E0204"], name
