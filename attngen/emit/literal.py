"""Plain values as Python text."""

from __future__ import annotations

import json


def literal(meta: dict[str, object]) -> str:
    """A dict of plain values as Python text, one entry a line, lists of dicts one item a line, nothing past 120."""

    def inline(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)}: {inline(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(inline(v) for v in value) + "]"
        return json.dumps(value) if isinstance(value, str) else repr(value)

    def entry(value: object, room: int, indent: str) -> str:
        text = inline(value)
        tables = isinstance(value, list) and value and isinstance(value[0], dict)
        if not isinstance(value, dict | list) or (len(text) <= room and not tables):
            return text
        deeper, room = indent + "    ", 118 - len(indent) - 4
        if isinstance(value, list):
            items = [f"{deeper}{entry(v, room, deeper)},\n" for v in value]
            return "[\n" + "".join(items) + f"{indent}]"
        fields = [f"{deeper}{json.dumps(k)}: {entry(v, room - len(k) - 4, deeper)},\n" for k, v in value.items()]
        return "{\n" + "".join(fields) + f"{indent}}}"

    return entry(meta, 0, "")
