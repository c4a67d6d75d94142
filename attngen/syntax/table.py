"""The LALR table: made from the grammar once, shipped beside it as JSON, because making it takes longer than using it.

`python -m attngen.syntax` writes `grammar/attn.table.json` after a change of the grammar (a test tells when).
A table of another grammar or another Lark is not used: the parser is then built from the grammar text.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import lark

from attngen import resources

FILES = ("grammar/attn.lark", "grammar/expr.lark")
TABLE = "grammar/attn.table.json"
#: Rules that text may start from: a file, or one expression.
STARTS = ["start", "expr"]


def parser(transformer: object) -> lark.Lark:
    """The parser, its rules reduced by `transformer`."""
    try:
        stored = json.loads(resources.read(TABLE))
        if stored["lark"] == _series() and stored["grammar"] == fingerprint():
            blank: Any = lark.Lark.__new__(lark.Lark)
            loaded: lark.Lark = blank._load(_decode(stored["table"]), transformer=transformer)
            return loaded
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # a missing or damaged table, or one that this Lark reads otherwise, costs time and nothing else
    return from_grammar(transformer=transformer)


def from_grammar(**options: Any) -> lark.Lark:
    """The parser built from the grammar text."""
    return lark.Lark.open(str(resources.root() / FILES[0]), parser="lalr", start=STARTS, **options)


def fingerprint() -> str:
    """Hash of the grammar text."""
    return hashlib.sha256("\0".join(resources.read(f) for f in FILES).encode()).hexdigest()


def _series() -> str:
    """`1.3` of 1.3.1: the form of a stored table may change with a minor version."""
    return ".".join(lark.__version__.split(".")[:2])


def to_json() -> str:
    """Text of the table file."""
    data, memo = from_grammar().memo_serialize([lark.lexer.TerminalDef, lark.grammar.Rule])
    # Absolute paths of this machine are of no use to the loader.
    data["options"]["import_paths"], data["options"]["source_path"] = [], None
    table = _encode({"data": data, "memo": memo})
    header = {"lark": _series(), "grammar": fingerprint(), "table": table}
    return json.dumps(header, separators=(",", ":"), sort_keys=True) + "\n"


def _encode(x: Any) -> Any:
    """JSON has string keys and no tuples; the table has int keys and tuples."""
    if isinstance(x, dict):
        if all(isinstance(k, str) for k in x):
            return {k: _encode(v) for k, v in x.items()}
        return {"#": [[k, _encode(v)] for k, v in x.items()]}
    return [_encode(v) for v in x] if isinstance(x, list | tuple) else x


def _decode(x: Any) -> Any:
    if isinstance(x, dict):
        pairs = x.get("#")
        return {k: _decode(v) for k, v in pairs} if pairs is not None else {k: _decode(v) for k, v in x.items()}
    return [_decode(v) for v in x] if isinstance(x, list) else x
