"""`attngen bench --masks`: what the metadata of a packed batch's mask costs."""

from __future__ import annotations

import json

from attngen.cli import arguments, common, files


def masks(
    seqlen: str | None, heads: int | None, head_dim: str | None, rounds: int | None, seed: int, target: str | None,
    as_json: bool, save: str | None,
) -> None:  # fmt: skip
    """Measure packed batches of the lengths `seqlen` and say what their metadata costs."""
    from attngen.bench import machine
    from attngen.bench.masks import SEQLEN, measure

    common.need_gpu("a benchmark")
    dim = arguments.overrides(head_dim=head_dim).get("head_dim", 128)
    found = [
        measure(n, heads=heads or 16, head_dim=int(str(dim)), rounds=rounds or 7, seed=seed, target=target)
        for n in (arguments.lengths_of(seqlen) if seqlen is not None else (SEQLEN,))
    ]
    document = json.dumps({"machine": machine.describe(), "masks": [c.as_json() for c in found]}, indent=1) + "\n"
    if save is not None:
        files.write_text(save, document)
    if as_json:
        files.write_text("-", document)
    for line in () if as_json else (x for c in found for x in c.lines()):
        common.say(line)
