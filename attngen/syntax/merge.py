"""`attention b extends a { … }`: a block with what it inherits. Child clauses replace, declarations merge by name."""

from __future__ import annotations

from dataclasses import replace

from attngen.diag.diagnostic import Label
from attngen.syntax import ast
from attngen.syntax.collect import Faults
from attngen.syntax.faults import closest
from attngen.syntax.scope import Scope

Key = tuple[str, ...]


def key(clause: ast.Clause) -> Key:
    """What a clause sets; two clauses of one key cannot stand in one block."""
    if isinstance(clause, ast.Let | ast.Param | ast.Tensor):
        return ("name", clause.name.text)
    if isinstance(clause, ast.Nested):
        return (clause.word.text, clause.name.text)
    return (clause.word.text,)


def merged(block: ast.Attention, scope: Scope, faults: Faults) -> ast.Attention | None:
    """`block` with the clauses of its bases under its own; None where the chain is broken (a fault is recorded)."""
    chain = [block]
    while chain[-1].base is not None:
        name = chain[-1].base
        base = scope.attentions.get(name.text)
        if base is None:
            meant = closest(name.text, scope.attentions)
            help_ = f"did you mean `{meant}`?" if meant else "declare it in this file or include the file that does"
            faults.add("E0218", f"unknown attention `{name.text}`", name.span, "extends nothing", helps=(help_,))
            return None
        if base in chain:
            names = " extends ".join([*(b.name.text for b in chain[chain.index(base) :]), base.name.text])
            first = min(chain[chain.index(base) :], key=lambda b: b.span.start)
            at = first.base or first.name
            faults.add(
                "E0218",
                "attention blocks extend each other",
                at.span,
                "part of a circle",
                notes=(names,),
                helps=("let one of them stand alone",),
            )
            return None
        chain.append(base)
    table: dict[Key, ast.Clause] = {}
    for part in reversed(chain):
        own = single(part, faults)
        for k, clause in own.items():
            old = table.get(k)
            if isinstance(clause, ast.Block) and isinstance(old, ast.Block):
                clause = _blocks(old, clause)
            elif isinstance(clause, ast.Nested) and isinstance(old, ast.Nested):
                settings = {s.word.text: s for s in old.settings} | {s.word.text: s for s in clause.settings}
                clause = replace(clause, settings=tuple(settings.values()))
            table[k] = clause
    doc = next((b.doc for b in chain if b.doc), ())
    return replace(block, clauses=tuple(table.values()), doc=doc)


def single(block: ast.Attention, faults: Faults) -> dict[Key, ast.Clause]:
    """The clauses of one block by key; a second one of a key is a fault."""
    table: dict[Key, ast.Clause] = {}
    for clause in block.clauses:
        k = key(clause)
        old = table.get(k)
        if old is None:
            table[k] = clause
            if isinstance(clause, ast.Nested):
                _once(clause.settings, faults)
            elif isinstance(clause, ast.Block):
                _once(clause.entries, faults)
            continue
        named = isinstance(clause, ast.Let | ast.Param | ast.Tensor | ast.Nested)
        new_word = clause.name if isinstance(clause, ast.Let | ast.Param | ast.Tensor | ast.Nested) else clause.word
        old_word = old.name if isinstance(old, ast.Let | ast.Param | ast.Tensor | ast.Nested) else old.word
        code, verb = ("E0203", "declared") if named else ("E0206", "given")
        help_ = (
            "rename one of them"
            if named
            else "keep one; join conditions with `and`"
            if k == ("mask",)
            else "keep one of them"
        )
        faults.add(
            code,
            f"`{new_word.text}` is {verb} twice",
            new_word.span,
            "second time",
            also=(Label(old_word.span, "first time"),),
            helps=(help_,),
        )
        if isinstance(clause, ast.Nested):  # still a branch, or a segment: nothing is said of how many there are
            table[(*k, str(len(table)))] = clause
    return table


def _once(parts: tuple[ast.Setting, ...] | tuple[ast.Entry, ...], faults: Faults) -> None:
    seen: dict[str, ast.Word] = {}
    for part in parts:
        word = part.word if isinstance(part, ast.Setting) else part.name
        if word.text in seen:
            faults.add(
                "E0206",
                f"`{word.text}` is given twice",
                word.span,
                "second time",
                also=(Label(seen[word.text].span, "first time"),),
                helps=("keep one of them",),
            )
        seen.setdefault(word.text, word)


def _blocks(old: ast.Block, new: ast.Block) -> ast.Block:
    """Entries of both. `tile` is short for its two sides, so that a child may change one of them."""
    kept = {e.name.text: e for entry in old.entries for e in _sides(entry)}
    # Only a base is split: within one block `tile` together with a side of it is a fault that is still to be told.
    hidden = {e.name.text for entry in new.entries for e in _sides(entry)} | {e.name.text for e in new.entries}
    return replace(new, entries=(*(e for name, e in kept.items() if name not in hidden), *new.entries))


def _sides(entry: ast.Entry) -> tuple[ast.Entry, ...]:
    value = entry.value
    if entry.name.text != "tile" or not isinstance(value, ast.Shape):
        return (entry,)
    named = zip(("tile_m", "tile_n"), (value.first, value.second), strict=True)
    return tuple(
        ast.Entry(
            ast.Word(name, entry.name.span),
            ast.Number(int(side.text), side.text, side.span) if side.text.isdigit() and len(side.text) < 10 else side,
            entry.span,
        )
        for name, side in named
    )
