"""Spell a tile map for the templates."""

from __future__ import annotations

from dataclasses import replace
from textwrap import indent
from typing import Any

from attngen.emit.exprs import CutePrinter, bindings, part_name, safe_name
from attngen.emit.header import clipped, spelled
from attngen.emit.straight import WIDTH, straight_line
from attngen.emit.view import Argument
from attngen.emit.view_mask import MapView
from attngen.ir.expr import Expr
from attngen.ir.simplify import TRUE
from attngen.ir.spec import AttentionSpec
from attngen.ir.tile_map import FOUND, LoadRange, TileMap, inner_loads
from attngen.ir.types import Layout

#: A tile that reads more elements of a captured tensor is decided pair by pair: about as many as it has rows and keys.
RANGE_ELEMENTS = 1024
_TILE = frozenset({"b", "h", "q_lo", "q_hi", "kv_lo", "kv_hi"})
_PAIR = frozenset({"b", "h", "q_idx", "kv_idx"})
MAP_ARGUMENT = Argument("tile_map", "cute.Tensor", 'plain_tensor(Int32, cute.sym_int(symbol="map_words"))')
NO_MAP = MapView("", 0, *("",) * 14, (), "", False, (), "", (), "", "", (), "")


def map_view(printer: CutePrinter, tile_map: TileMap, spec: AttentionSpec, *, by_rows: bool) -> MapView:
    """The map of a spec's mask, with a row of bits for each query tile or for each KV tile."""
    mask = spec.mask
    test = tile_map.test
    inner = inner_loads(test, by_rows=by_rows)
    rest = tuple(x for x in test.loads if x not in inner)
    inner_names = ", ".join(name for x in inner for name in _names(x))
    inner_lines, lines = _load_lines(printer, inner), _load_lines(printer, rest, test.every, test.some)
    own, (every, some) = straight_line(printer, [test.every, test.some], _TILE, from_problem=False)
    near_lines, (near,) = straight_line(printer, [test.near], _TILE)
    keep_lines, (keep,) = straight_line(printer, [mask], _PAIR)
    outer, across = ("m_blocks", "n_blocks") if by_rows else ("n_blocks", "m_blocks")
    read = (tile_map.per_batch, tile_map.per_head)
    number = {(True, True): "(b * p.heads_q + h)", (True, False): "b", (False, True): "h"}.get(read)
    extents = [e for e, on in zip(("cute.size(mQ, mode=[3])", "cute.size(mQ, mode=[2])"), read, strict=True) if on]
    sizes = [e for e, on in zip(("p.batch", "p.heads_q"), read, strict=True) if on]
    by_row, by_key = "2 * m_blocks * -(-n_blocks // 32)", "2 * n_blocks * -(-m_blocks // 32)"
    view = MapView(
        title=clipped(spelled(mask)),
        range_elements=RANGE_ELEMENTS,
        whose="query" if by_rows else "KV",
        outer=outer,
        inner=across,
        tiles=f"p.{outer}",
        places=f"p.{across}",
        maps=" * ".join(extents) or "1",
        plans='ATTN_META["plans"]' if by_rows else 'ATTN_META["backward"]["plans"]',
        counted=" * ".join(e.removeprefix("p.") for e in sizes) or "1",
        halves=by_row if by_rows else f"{by_key} + {by_row.removeprefix('2 * ')}",
        rows=" * ".join([*sizes, f"p.{outer}"]),
        transposed_row=f"{number} * p.m_blocks + m_block" if number else "m_block",
        row=f"{number} * p.{outer} + outer" if number else "outer",
        batch={(True, True): "number // p.heads_q", (True, False): "number"}.get(read, "Int32(0)"),
        head={(True, True): "number - b * p.heads_q", (False, True): "number"}.get(read, "Int32(0)"),
        near_bindings=near_lines,
        near=near,
        has_near=bool(test.loads) and test.near != TRUE,
        inner_bindings=inner_lines,
        inner_names=inner_names,
        bindings=tuple(dict.fromkeys((*([f"{inner_names} = boxes"] if inner else []), *lines, *own))),
        every=every,
        some=some,
        keep_bindings=keep_lines,
        keep=keep,
    )
    return replace(view, **_ragged(tile_map, spec, by_rows)) if spec.layout.is_ragged else view


def _ragged(tile_map: TileMap, spec: AttentionSpec, by_rows: bool) -> dict[str, Any]:
    """The fields of a map that has a part for each sequence: its outer tiles are counted over all of them."""
    own, varlen = tile_map.per_head, spec.layout is Layout.VARLEN
    sides = [("q", "m"), ("kv", "n")] if by_rows else [("kv", "n"), ("q", "m")]
    (outer, outer_block), (inner, inner_block) = sides
    first = f"start_{outer}" if varlen else f"total_{outer}"
    of_head = "h * self.map_tiles_of(p) + " if own else ""
    by_row, by_key = "2 * q_tiles * -(-n_blocks // 32)", "2 * kv_tiles * -(-m_blocks // 32)"
    return {
        "maps": "cute.size(mQ, mode=[2])" if own else "1",
        "sized": "heads_q" if own else "1",
        "counted": "heads_q" if own else "1",
        "halves": by_row if by_rows else f"{by_key} + {by_row.removeprefix('2 * ')}",
        "outer": "row_tiles" if by_rows else "key_tiles",
        "inner": "",
        "outer_total": f"p.total_{outer}",
        "outer_tile": f"self.tile_{outer_block}",
        "outer_there": f"own.{outer_block}_blocks",
        "inner_total": f"total_{inner}",
        "inner_tile": f"self.tile_{inner_block}",
        "inner_there": f"own.{inner_block}_blocks",
        "starts": f"p.cu_seqlens_{outer}",
        "places": f"p.total_{inner}",
        "rows": f"{'p.heads_q * ' if own else ''}self.map_tiles_of(p)",
        "row": f"{of_head}self.tiles_before(p.{first}, self.tile_{outer_block}, b) + outer",
        "first_of": f"own.{first}",
        "head": "number" if own else "Int32(0)",
        "transposed_row": f"{'h * p.row_tiles + ' if own else ''}p.first_row_tile + m_block",
    }


def _load_lines(printer: CutePrinter, loads: tuple[LoadRange, ...], *read: Expr) -> tuple[str, ...]:
    """Look through the elements that a tile reads; bind what that takes, and what `read` takes."""
    exprs = [printer.lowered(e) for e in (*(e for load in loads for e in load.ends), *read)]
    lines = [*bindings(exprs, _TILE)]
    lines += [f"{safe_name(n)} = p.{safe_name(n)}" for n in sorted({load.tensor for load in loads})]
    for load in loads:
        lines += _load(printer, load)
    return tuple(dict.fromkeys(lines))


def _names(load: LoadRange) -> list[str]:
    return [part_name(f"{kind}{load.number}") for kind in FOUND]


def _load(printer: CutePrinter, load: LoadRange) -> list[str]:
    """Look through the elements that a tile reads of a tensor."""
    lines, texts = straight_line(printer, load.ends, _TILE, from_problem=False)
    pairs = zip(texts[::2], texts[1::2], strict=True)
    index = [first if first == last else _ends(first, last) for first, last in pairs]
    names = ", ".join(_names(load))
    call = f"{names} = least_and_most({', '.join([safe_name(load.tensor), 'lane', *index])})"
    if len(call) > WIDTH:
        rows = [f"{safe_name(load.tensor)}, lane,", *(f"{x}," for x in index)]
        call = "\n".join([f"{names} = least_and_most(", indent("\n".join(rows), "    "), ")"])
    return [*lines, call]


def _ends(first: str, last: str) -> str:
    """Both ends of an index, in a line or each in one of its own."""
    line = f"({first}, {last})"
    return line if len(line) <= WIDTH else "\n".join(["(", indent(f"{first},\n{last},", "    "), ")"])
