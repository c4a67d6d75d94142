"""`attngen regen`: write the gallery in generated/ and what else follows from the source, or check that it does."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli import common, files

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec


@dataclass(frozen=True)
class Entry:
    """One kernel of the gallery: an example, the attention block, overrides, and what it shows."""

    example: str
    shows: str
    name: str | None = None
    target: str = "sm_90a"
    overrides: dict[str, object] = field(default_factory=dict)
    direction: str = "forward"

    def file(self, spec_name: str) -> str:
        """Its file name: `causal.sm90.py`, of a backward `causal.sm90.bwd.py`."""
        kind = "" if self.direction == "forward" else ".bwd"
        kind += "".join(f"_{name}" for name, value in self.overrides.items() if value is True)
        return f"{spec_name}.{self.target.removesuffix('a').replace('_', '')}{kind}.py"


#: Each entry shows something that none before it shows; few, so that a reviewer reads every difference.
GALLERY: tuple[Entry, ...] = (
    Entry("full", "no mask: one loop, linear order"),
    Entry("causal", "one edge: masked diagonal, unmasked interior, LPT order"),
    Entry("gemma2", "head dim 256, score element by element, two edges"),
    Entry("gpt_oss", "a window and a sink for each head, head dim 64"),
    Entry("packing", "bounds that come from a captured tensor"),
    Entry("packing", "bounds that a kernel of its own finds first, in a sorted tensor", name="packing_ids"),
    Entry("prefix_lm", "a union of two intervals"),
    Entry("t5", "a score gathered from a table, no mask"),
    Entry("mla", "head dims 192 and 128"),
    Entry("longformer", "a mask tested element by element"),
    Entry("whisper", "fp16, layout bhsd"),
    Entry("calls/unpadded", "packed sequences: ends that TMA sees, longest first", name="modernbert_unpadded"),
    Entry("bigbird", "a map of the tiles, made by a launch before", name="bigbird_lists"),
    Entry("causal", "backward: 64 keys a warpgroup, dQ one step behind", direction="backward"),
    Entry("gpt_oss", "backward: gradient of the sinks, a window", direction="backward"),
    Entry("gemma2", "backward: the slope of a softcap, head dim 256 with split operands", direction="backward"),
    Entry("mla", "backward: head dims 192 and 128", direction="backward"),
    Entry("causal", "backward: dQ by turns", direction="backward", overrides={"deterministic": True}),
    Entry("calls/unpadded", "backward: packed sequences", name="modernbert_unpadded", direction="backward"),
    Entry("bigbird", "backward: a map of the tiles of each head", name="bigbird_lists", direction="backward"),
)


def regen(
    folder: Annotated[str, typer.Option("--folder", help="The gallery (default: generated/ of the checkout).")] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 with the differences if a file is out of date.")
    ] = False,
) -> None:
    """Regenerate the gallery of kernels that is kept under review."""
    place = Path(folder) if folder else _checkout() / "generated"
    if check and folder and not place.is_dir():
        raise common.Usage(
            f"--folder {common.printable(folder)}: there is no such folder to check; leave --check out to write it"
        )
    wanted = {place / name: text for name, text in render().items()}
    if not folder:
        from attngen.cli import reference

        wanted[_checkout() / "attngen" / "docs" / "reference.md"] = reference.render()
        readme = _checkout() / "README.md"
        wanted[readme] = with_kernel_head(readme.read_text(encoding="utf-8"))
        wanted |= shipped_records()
    stale: list[str] = []
    for path, text in wanted.items():
        name = path.name
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if old == text:
            continue
        stale.append(name)
        if check:
            lines = list(
                difflib.unified_diff(
                    old.splitlines(), text.splitlines(), f"{name} (committed)", f"{name} (now)", lineterm="", n=1
                )
            )
            print("\n".join(lines[:24]))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(str(path), text)
            common.say(f"wrote {path}")
    extra = sorted(p.name for p in place.glob("*.py") if p not in wanted) if place.is_dir() else []
    if check and (stale or extra):
        for name in extra:
            common.say(f"{name} is no kernel of the gallery: remove it")
        common.say(f"out of date: {', '.join([*stale, *extra])}; run `attngen regen` and commit the difference")
        raise typer.Exit(common.SPEC)
    if not check:
        for name in extra:
            (place / name).unlink()
            common.say(f"removed {place / name}")
    common.say(f"{len(wanted)} files, {'all up to date' if not stale else f'{len(stale)} written'}")


def render() -> dict[str, str]:
    """Text of every file of the gallery by name."""
    from attngen import api, resources, specs
    from attngen.options import Options

    texts: dict[str, str] = {}
    rows = []
    for entry in GALLERY:
        path = resources.root() / "examples" / f"{entry.example}.attn"
        spec = specs.resolve(path, entry.name, Options.parse(entry.overrides))
        source = api.compile(spec, target=entry.target, only=entry.direction)
        name = entry.file(spec.name)
        texts[name] = source.text
        texts[name.removesuffix(".py") + ".plan.txt"] = _described(spec, entry) + "\n"
        tiles = ", ".join(str(p["name"]) for p in source.meta["plans"])
        rows.append(f"| [{name}]({name}) | examples/{entry.example}.attn | {tiles} | {entry.shows} |")
    texts["README.md"] = _INDEX + "\n".join(rows) + "\n"
    return texts


def _described(spec: AttentionSpec, entry: Entry) -> str:
    from attngen.directions import plan_gradients
    from attngen.plan_text import describe
    from attngen.plan_text_backward import describe_backward
    from attngen.search import plan

    if entry.direction == "forward":
        return describe(plan(spec, entry.target), everything=True)
    gradients = plan_gradients(spec, entry.target)
    return describe_backward(gradients.plans, gradients.refused, everything=True)


def shipped_records() -> dict[Path, str]:
    """The tuned records that ship, each found by the class that its spec has today."""
    from attngen import tuned
    from attngen.bench.tune_grid import spec_of
    from attngen.settings import DEFAULT_TARGET

    records = [
        r.replace(spec_class=tuned.spec_class(spec_of(r.spec, r.head_dims, r.pack), r.direction))
        for r in tuned.shipped(DEFAULT_TARGET)
    ]
    return {tuned.shipped_path(DEFAULT_TARGET): tuned.as_text(records)}


def with_kernel_head(readme: str) -> str:
    """README.md with the head of today's causal kernels between its markers, down to the plans."""
    from attngen import api, resources

    text = api.compile(resources.read("examples/causal.attn"), target="sm_90a").text
    head = text[: text.index("\nforward: ")].rstrip()
    before, _, rest = readme.partition("<!-- kernel-head -->\n")
    _, _, after = rest.partition("<!-- /kernel-head -->")
    return f"{before}<!-- kernel-head -->\n```python\n{head}\n...\n```\n<!-- /kernel-head -->{after}"


_INDEX = """# Gallery

Kernels that attngen wrote, kept under review: the difference of these files is what a change of the compiler does to
its output. Written by `attngen regen`, compared byte for byte in CI, never edited. Beside each kernel stands the plan
behind it.

One direction a file, as the callable compiles them: `.sm90.py` is a forward, `.sm90.bwd.py` a backward. What
`attngen compile` writes, both in one file, is joined from the same texts.

Run one on a Hopper GPU: `python generated/causal.sm90.py` checks it against a float64 reference and prints error and
time.

| kernel | spec | plans | shows |
|---|---|---|---|
"""


def _checkout() -> Path:
    from attngen import resources

    root = resources.root()
    if not (root / "pyproject.toml").is_file():
        raise common.Usage("the gallery lives in a checkout; name a folder with --folder")
    return root
