"""Surface syntax: what was written, with places, before any name is looked up. The formatter prints it back."""

from __future__ import annotations

from dataclasses import dataclass, field

from attngen.diag.span import Span


@dataclass(frozen=True, slots=True)
class Word:
    """A name where it stands."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class Number:
    """A literal. A minus sign written directly before it belongs to it: `-128` is one literal, `-(128)` is not."""

    value: int | float
    text: str
    span: Span
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Bool:
    """`true` or `false`."""

    value: bool
    span: Span
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Name:
    """A bare name: atom, param, let, formal, or a def without arguments."""

    name: str
    span: Span
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    """`exp(x)`, `softcap(s, cap)`."""

    name: Word
    args: tuple[SurfaceExpr, ...]
    span: Span
    depth: int


@dataclass(frozen=True, slots=True)
class Load:
    """`bias[b, h, q_idx, kv_idx]`."""

    name: Word
    indices: tuple[SurfaceExpr, ...]
    span: Span
    depth: int


@dataclass(frozen=True, slots=True)
class Unary:
    """`not x`, `-x`; `op` is the function's name in the table."""

    op: str
    operand: SurfaceExpr
    span: Span
    depth: int


@dataclass(frozen=True, slots=True)
class Binary:
    """`a + b`; `op` is the function's name in the table."""

    op: str
    left: SurfaceExpr
    right: SurfaceExpr
    span: Span
    depth: int


@dataclass(frozen=True, slots=True)
class Compare:
    """`a < b`, or a chain `a <= x < b`, which means `a <= x and x < b`."""

    first: SurfaceExpr
    rest: tuple[tuple[str, SurfaceExpr], ...]
    span: Span
    depth: int


@dataclass(frozen=True, slots=True)
class Conditional:
    """`then if test else other`."""

    test: SurfaceExpr
    then: SurfaceExpr
    other: SurfaceExpr
    span: Span
    depth: int


SurfaceExpr = Number | Bool | Name | Call | Load | Unary | Binary | Compare | Conditional


@dataclass(frozen=True, slots=True)
class Setting:
    """`mask = …`, `score = …`, `scale`, `sink`, `epilogue`, `weight`."""

    word: Word
    value: SurfaceExpr
    span: Span


@dataclass(frozen=True, slots=True)
class HeadDim:
    """`head_dim = 192, v = 128`."""

    word: Word
    qk: Number
    v: Number | None
    span: Span


@dataclass(frozen=True, slots=True)
class VView:
    """`v = k[0:512]`."""

    word: Word
    of: Word
    start: Number
    stop: Number
    span: Span


@dataclass(frozen=True, slots=True)
class Words:
    """`dtype = fp16`, `layout = bhsd`, `normalizer = sigmoid`, `target = sm_90a, sm_100a`."""

    word: Word
    values: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Let:
    """`let distance = q_pos - kv_idx`."""

    word: Word
    name: Word
    value: SurfaceExpr
    span: Span


@dataclass(frozen=True, slots=True)
class Bound:
    """`>= 1`, `<= 8`, `in 1..8`."""

    low: Number | Bool | None
    high: Number | Bool | None
    span: Span


@dataclass(frozen=True, slots=True)
class Param:
    """`param window: int >= 1 = 128`."""

    word: Word
    name: Word
    type: Word
    bounds: tuple[Bound, ...]
    default: Number | Bool | None
    span: Span


@dataclass(frozen=True, slots=True)
class Tensor:
    """`tensor doc: i32[batch, seqlen_kv] sorted`."""

    word: Word
    name: Word
    dtype: Word
    dims: tuple[Word | Number, ...]
    flags: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Shape:
    """`128 x 64`; a side is a number or `auto`."""

    first: Word
    second: Word
    span: Span


@dataclass(frozen=True, slots=True)
class Entry:
    """`order = lpt` inside a block."""

    name: Word
    value: Shape | Bool | Word | Number
    span: Span


@dataclass(frozen=True, slots=True)
class Block:
    """`schedule { … }`, `output { … }`, `block_sparse { … }`, `backward { … }`."""

    word: Word
    entries: tuple[Entry, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Nested:
    """`branch second { … }`, `segment prefix { … }`."""

    word: Word
    name: Word
    settings: tuple[Setting, ...]
    span: Span


Clause = Setting | HeadDim | VView | Words | Let | Param | Tensor | Block | Nested


@dataclass(frozen=True, slots=True)
class Include:
    """`include "std.attn"`."""

    path: str
    path_span: Span
    span: Span


@dataclass(frozen=True, slots=True)
class Formal:
    """An argument of a def, with the bounds that its values must keep: `keys: int >= 1`."""

    name: Word
    type: Word | None
    bounds: tuple[Bound, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Define:
    """`def window(keys: int >= 1) = q_pos - kv_idx < keys`. `formals` is None for a def used without parentheses."""

    name: Word
    formals: tuple[Formal, ...] | None
    body: SurfaceExpr
    span: Span


@dataclass(frozen=True, slots=True)
class Attention:
    """One `attention` block and the doc lines before it."""

    name: Word
    base: Word | None
    doc: tuple[str, ...]
    clauses: tuple[Clause, ...]
    span: Span
    #: Span from `attention` to `{`, for messages about the block as a whole.
    head: Span


Item = Include | Define | Attention


@dataclass(frozen=True, slots=True)
class File:
    """A parsed file."""

    version: Number
    items: tuple[Item, ...] = field(default=())
