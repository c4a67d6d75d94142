"""Expressions as CuTe-DSL text for the kernel (`check_exprs` spells them for its self-check). No other place does."""

from __future__ import annotations

import hashlib
import keyword
import math
import re
from collections.abc import Iterable

from attngen.ir.expr import Apply, Atom, Const, Expr, Load, Param, const, walk
from attngen.ir.functions import FUNCTIONS, STEPS, apply
from attngen.ir.score import SCALE
from attngen.ir.types import Type

_WORDS = """
COLUMNS_QK COLUMNS_V STEPS_QK mma_rows mma_rows_q mma_rows_do thr_rows thr_rows_q thr_rows_do
ELEMENT ELEMENT_BYTES HEAD_DIM_QK HEAD_DIM_V LOWEST NEG_INF Ring SharedStorage SimpleNamespace SmemAllocator a absolute
arith as_tensor at atom b bars bars_kv batch bounds c columns copy cpasync cuda cute cutlass d device dim dims e
epilogue exp exp2 extent floor floor_div floor_mod fma full_min gemm group_heads h h_kv heads heads_kv heads_q hint i
index indices inside j k k_major keep kernel kv_0 kv_head_bytes kv_heads kv_idx layout layout_k layout_o layout_q
layout_v limits load log log2 low lower_max lower_min lse mK mLSE mO mQ mV m_block m_blocks main math mbarriers mma_pv
mma_qk mn_major n_block n_blocks n_min mailbox num_mbarriers num_tiles o op options p pack phase plan q q_empty
q_full q_hi q_idx q_lo q_pos qhead_per_kvhead r ref ring rings row rows s sK sO sQ sV score select self seqlen_kv
seqlen_q share share_only sigmoid sink slice_o slices slot sm90 softmax_scale softplus sqrt stages state storage store
stream sys t take tanh tensor threads tile tile_counter tile_m tile_n tma tma_k tma_mK tma_mO tma_mQ tma_mV tma_o tma_q
tma_v torch trailing turn upper_max upper_min v w warp warpgroup warps wg wide_k wide_v workers x
exponent mantissa
DS_STAGES LOG2E P_STAGES ROW_THREADS acc add_if atoms batch_idx by_columns by_rows column d_sink delta delta_at dk
dlse do dq dq_tiles dv dz element element_of empty finish frag_do frag_o head head_batch k_full kv_tiles lanes
layout_do layout_ds lse_at lse_log2 major_a major_b majors mdK mdLSE mdO mdQ mdV mma mma_dk mma_dq mma_dv mma_s n name
prepare products q_tiles rmem row_0 sD sLSE sP sdO sdQ sdS shift slope smem source steps tma_dk tma_do tma_dv tma_mdK
tma_mdO tma_mdV v_full walk_full words workspace zeros
block gD gLSE groups keeps last_column last_row pairs passes r_0 total
COUNTER_WORDS WALK_STAGES counters heads_dkv heads_per_cta layout_dk layout_dv mma_dp wg_dk wg_dv sdK sdV walks
boxes layout_boxes layout_peer_k rank sPeerK ticket zero_lag zeroed_tiles
add_parts add_rows items part parts parts_dk parts_dv rest share shares whole_tiles tma_parts_dk tma_parts_dv
TABLE_THREADS above build_tables counts extremes fill fill_extremes fill_tables middle positions table_words tables
wanted windows
raw scale has_bit word sink_weight
raw scale has_bit word loads start address row_of read_pairs read_wide read_apart fetch_score load_word
half_bf16 half_fp16 distance distances instruction kind count frag width first place pair x_0
grad factors gained gained_row frag_pre there at_column at_row mdO_pre do_pre o_pre saves_o write_o row_top top
before_epilogue
FEW_ELEMENTS MAP_ROWS MAP_WARPS RANGE_ELEMENTS all_kept any_kept exists scan_boxes undecided at_word bit bits
box_element count cta drops dropped ends every extents first found high inside kept keeps kv_hi kv_lo known last
least_and_most listed lowest_bit map_name map_row map_tiles map_words maps nan number outer outermost owner own_words
past_end place place_0 places scan_box smaller some larger tile_map
transpose_map turned whole word word_0 build_map
DEALT IN_FLIGHT INFINITE LEAST_INT MAP_CTAS MAP_LINES MOST_INT across decide every in_order lane map_ctas map_rows
near rows_of_cta turn_warps
FAR ORDER_WARPS TOLD WRAP first_row_tile is_there key_tiles last_there mdO_rows order order_words parts begins
place row_tiles rows rows_apart rows_in rows_kv rows_q seq_order sequence
sequences shape start_kv start_q strides total_kv total_q
"""
#: Words that the generated file defines or that Python and the DSL give a meaning; a name of a spec that is one of them
#: gets a trailing underscore in the kernel.
KERNEL_WORDS = frozenset(_WORDS.split())

#: Binding strengths of Python's operators, for parentheses.
_OR, _AND, _COMPARE, _BITOR, _BITAND, _SUM, _PRODUCT, _UNARY, _CALL = 1, 2, 4, 5, 7, 9, 10, 11, 13
_INFIX = {
    "or": ("|", _BITOR), "and": ("&", _BITAND),
    "lt": ("<", _COMPARE), "le": ("<=", _COMPARE), "gt": (">", _COMPARE), "ge": (">=", _COMPARE),
    "eq": ("==", _COMPARE), "ne": ("!=", _COMPARE),
    "add": ("+", _SUM), "sub": ("-", _SUM), "mul": ("*", _PRODUCT), "div": ("/", _PRODUCT),
}  # fmt: skip

_CUTE_CALLS: dict[str, str] = {
    "floordiv": "floor_div", "mod": "floor_mod", "exp": "exp", "log": "log", "log2": "log2", "sqrt": "sqrt",
    "tanh": "tanh", "sigmoid": "sigmoid", "softplus": "softplus", "floor": "floor", "where": "select",
    "int": "Int32", "float": "Float32", "abs": "absolute", "bit": "has_bit",
}  # fmt: skip


_DSL_TYPES = {Type.BOOL: "Boolean", Type.INT: "Int32", Type.FLOAT: "Float32"}

#: Longer names are cut, so that `name=name` fits a line.
NAME_LENGTH = 40

#: Names of the buffers that a backward fills for captured tensors, and of the parts of a score.
_BUFFER = re.compile(r"d_\w+_(sink|column|row|element|output|output_row)(_\d+)?|(factor|term|load)_\d+")

#: First character of the name of a part of an expression (see straight.py); no spec can write it.
PART = "%"


def part_name(name: str) -> str:
    """The word in the kernel of part `%3`, or of what a score form reads beside the spec's (`%column`)."""
    word = name.removeprefix(PART)
    return f"part_{word}" if word.isdigit() else word


def safe_name(name: str) -> str:
    """The name that a param or tensor of a spec has in the kernel.

    A spec cannot declare a name that ends in an underscore, so what is changed meets no other name.
    """
    if len(name) > NAME_LENGTH:
        return f"{name[:24]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}_"
    if (
        _BUFFER.fullmatch(name)
        or name.startswith(("part_", "gain_", "gained_", "least_", "most_", "known_"))
        or keyword.iskeyword(name)
        or name in KERNEL_WORDS
        or name.endswith("_")
    ):
        return f"{name}_"
    return name


def dim_name(name: str) -> str:
    """The name that a free axis of a captured tensor has in the kernel."""
    return f"dim_{safe_name(name)}" if len(name) > NAME_LENGTH else f"dim_{name}"


class CutePrinter:
    """CuTe-DSL text of an expression; collects the helpers it calls in `used`."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def text(self, e: Expr) -> str:
        """The whole expression, lowered."""
        return self.plain(self.lowered(e))

    def lowered(self, e: Expr) -> Expr:
        """What `text` prints."""
        return lower(e)

    def plain(self, e: Expr) -> str:
        """An expression that is lowered already."""
        return self._print(e)[0]

    def _print(self, e: Expr) -> tuple[str, int]:
        if isinstance(e, Const):
            return _literal(e), _UNARY if e.value < 0 else _CALL
        if isinstance(e, Atom):
            return e.name, _CALL
        if isinstance(e, Param):
            return part_name(e.name) if e.name.startswith(PART) else safe_name(e.name), _CALL
        if isinstance(e, Load):
            self.used.add("at")
            indices = ", ".join(self._print(i)[0] for i in e.indices) or "0"
            loaded = f"at({safe_name(e.tensor)}, {indices})"
            return (f"Float32({loaded})", _CALL) if e.type is Type.FLOAT else (loaded, _CALL)
        return self._apply(e)

    def _apply(self, e: Apply) -> tuple[str, int]:
        args = [self._print(a) for a in e.args]
        if e.fn in _INFIX:
            return _infix(e.fn, args)
        if e.fn == "neg":
            return f"-{_wrap(args[0], _UNARY)}", _UNARY
        if e.fn == "not":
            if is_literal(e.args[0]):  # a Python bool, and `~True` is -2
                return f"{_wrap(args[0], _SUM)} == False", _COMPARE
            return f"~{_wrap(args[0], _UNARY)}", _UNARY
        texts = [a[0] for a in args]
        if e.fn in ("min", "max"):
            return f"{self._minmax(e.fn, e.type)}({', '.join(texts)})", _CALL
        if e.fn == "clamp":
            return (
                f"{self._minmax('min', e.type)}({self._minmax('max', e.type)}({texts[0]}, {texts[1]}), {texts[2]})",
                _CALL,
            )
        call = _CUTE_CALLS[e.fn]
        self.used.add(call)
        if e.fn == "where" and is_literal(*e.args[1:]):
            # two Python numbers have no type of the DSL that `select` could take over
            texts[1] = f"{_DSL_TYPES[e.type]}({texts[1]})"
        return f"{call}({', '.join(texts)})", _CALL

    @staticmethod
    def _minmax(which: str, kind: Type) -> str:
        return f"cute.arch.f{which}" if kind is Type.FLOAT else f"cutlass.{which}"


def is_literal(*exprs: Expr) -> bool:
    """Whether nothing but constants is read: Python computes the value while the kernel is traced."""
    return all(isinstance(n, Const | Apply) for e in exprs for n in walk(e))


def _literal(e: Const) -> str:
    if isinstance(e.value, float):
        if e.value in (float("inf"), -float("inf")):
            return "-NEG_INF" if e.value > 0 else "NEG_INF"
        return repr(e.value)
    if e.value == 2**30:  # what stands for "no limit" in the bounds of a mask: sums with it stay within 32 bits
        return "2**30"
    return repr(e.value)


def _wrap(part: tuple[str, int], least: int) -> str:
    text, strength = part
    return text if strength >= least else f"({text})"


def _infix(fn: str, args: list[tuple[str, int]]) -> tuple[str, int]:
    operator, strength = _INFIX[fn]
    # comparisons do not chain, and `a - (b + c)` keeps its parentheses: the right side must bind tighter
    left = _wrap(args[0], strength + (strength == _COMPARE))
    return f"{left} {operator} {_wrap(args[1], strength + 1)}", strength


def lower(e: Expr) -> Expr:
    """Rewrites that make a kernel's expression cheaper and keep its value to within fp32 rounding.

    `float(a ± b)` becomes `float(a) ± float(b)`, so that the part that does not move with the column is converted once
    a row (I2F runs at the rate of MUFU). Exact while positions stay below 2**24, where fp32 holds every integer.
    `x / y` becomes `x * (1 / y)`, so that a divisor that does not move with the column costs one reciprocal a row, not
    one division an element; but not where a step follows (`STEPS`): 41 * (1 / 41) is below 1, and `int` of it is 0.
    """
    return _lower(e, stepped=False)


def _lower(e: Expr, stepped: bool) -> Expr:
    if isinstance(e, Load):
        return _with(e, "indices", tuple(_lower(i, stepped) for i in e.indices))
    if not isinstance(e, Apply):
        return e
    below = stepped or e.fn in STEPS
    return _lowered(_with(e, "args", tuple(_lower(a, below) for a in e.args)), stepped)


def _with(e: Apply | Load, field: str, operands: tuple[Expr, ...]) -> Apply | Load:
    return e if operands == getattr(e, field) else e.replace(**{field: operands})


def _lowered(e: Apply | Load, stepped: bool) -> Expr:
    if not isinstance(e, Apply):
        return e
    if e.fn == "float" and isinstance(e.args[0], Apply):
        inner = e.args[0]
        if inner.fn in ("add", "sub", "neg"):
            return apply(inner.fn, *(_float(a) for a in inner.args))
    if e.fn == "div" and not _is_one(e.args[0]):
        top, bottom = e.args
        if isinstance(bottom, Const) and bottom.value and (not stepped or _is_power_of_two(float(bottom.value))):
            return apply("mul", top, const(1.0 / float(bottom.value)))
        if not stepped:
            return apply("mul", top, apply("div", const(1.0), bottom))
    return e


def _float(e: Expr) -> Expr:
    converted = apply("float", e)
    return _lowered(converted, stepped=False) if isinstance(converted, Apply) else converted


def _is_power_of_two(value: float) -> bool:
    return abs(math.frexp(value)[0]) == 0.5


def _is_one(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 1


def bindings(exprs: Iterable[Expr], given: frozenset[str]) -> tuple[str, ...]:
    """Lines `name = value` for every atom, param and tensor that `exprs` read and no argument of the method gives."""
    atoms: set[str] = set()
    names: set[str] = set()
    for e in exprs:
        for n in walk(e):
            if isinstance(n, Atom):
                atoms.add(n.name)
            elif isinstance(n, Param) and (n == SCALE or not n.name.startswith(PART)):
                names.add(part_name(n.name) if n == SCALE else safe_name(n.name))
            elif isinstance(n, Load):
                names.add(safe_name(n.tensor))
    lines = [f"{a} = {first} + column" for a, first in (("kv_idx", "kv_0"), ("q_idx", "q_0")) if a in atoms - given]
    if "q_pos" in atoms and "q_idx" not in given | atoms:
        lines.append("q_idx = q_0 + column")
    lines += [f"{a} = p.{a}" for a in ("seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "batch") if a in atoms - given]
    if "h_kv" in atoms - given:
        lines.append("h_kv = h // p.qhead_per_kvhead")
    if "q_pos" in atoms - given:
        lines.append("q_pos = q_idx + p.seqlen_kv - p.seqlen_q")
    return (*lines, *(f"{n} = p.{n}" for n in sorted(names)))


assert set(_CUTE_CALLS) | set(_INFIX) | {"neg", "not", "min", "max", "clamp"} == set(FUNCTIONS)
