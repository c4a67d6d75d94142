"""`attngen bench --calls`: how long calls of each kind keep the host busy."""

from __future__ import annotations

import json
from dataclasses import asdict

from attngen.cli import common, files


def calls(rounds: int | None, target: str | None, as_json: bool, save: str | None) -> None:
    """Measure every kind of call and say how long each keeps the host busy."""
    from attngen.bench import machine
    from attngen.bench.calls import measure

    common.need_gpu("a benchmark")
    found = measure(rounds or 7, target=target)
    document = json.dumps({"machine": machine.describe(), "calls": [asdict(x) for x in found]}, indent=1) + "\n"
    if save is not None:
        files.write_text(save, document)
    if as_json:
        files.write_text("-", document)
    for line in () if as_json else (x.line() for x in found):
        common.say(line)
