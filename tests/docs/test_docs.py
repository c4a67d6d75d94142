"""Documentation stays in step: every code that is raised is in the table, every pass has a page, links work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attngen.cli import reference
from attngen.cli.regen import GALLERY
from attngen.diag.codes import CODES
from attngen.ir.functions import FUNCTIONS
from attngen.options import Options
from attngen.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, DOCS = ROOT / "attngen", ROOT / "attngen" / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
SOURCES = sorted(PACKAGE.rglob("*.py"))
#: Planning passes and the page of each.
PASSES = {
    "epilogue": "epilogue",
    "gradient": "gradient",
    "mask_form": "mask-form",
    "score_form": "score-form",
    "compute": "compute",
    "mask_plan": "mask",
    "tile_test": "tile-map",
    "memory": "memory",
    "schedule": "schedule",
    "launch": "launch",
}
#: What the page of a pass says.
PARTS = ("**Problem.**", "**Reads**", "**Writes**", "**Rewrite.**", "**Keeps.**", "**Rejects**")
#: Planners of the backward, one page for all.
BACKWARD = {"choose", "compute", "cost", "memory", "order", "schedule", "serves"}


def test_reference_is_current() -> None:
    assert (DOCS / "reference.md").read_text() == reference.render(), "run `attngen regen`"


def test_reference_has_every_row() -> None:
    text = reference.render()
    for name in (*Options.model_fields, *VARIABLES):
        assert f"| `{name}` |" in text, name
    for code in CODES:
        assert f"| {code} |" in text, code
    for f in FUNCTIONS.values():
        assert f.doc.replace("|", "\\|") in text, f.name


def test_every_code_that_is_raised_is_in_the_table_and_the_other_way_round() -> None:
    raised: dict[str, str] = {}
    for path in SOURCES:
        if path.name.startswith("codes"):
            continue
        for code in re.findall(r'"([EW]0\d{3})"', path.read_text()):
            raised.setdefault(code, str(path.relative_to(ROOT)))
    assert {c: p for c, p in raised.items() if c not in CODES} == {}
    assert sorted(set(CODES) - set(raised)) == []


def test_every_explanation_says_the_mend() -> None:
    for row in CODES.values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.slug), row.slug
        assert row.summary and not row.summary.endswith("."), row.code
        assert len(row.explanation.split()) >= 5, f"{row.code} explains too little"


def test_every_pass_has_a_page() -> None:
    pages = {p.stem for p in (DOCS / "passes").glob("*.md")}
    assert pages == {*PASSES.values(), "backward"}
    for module, page in PASSES.items():
        assert (PACKAGE / "passes" / f"{module}.py").is_file()
        text = (DOCS / "passes" / f"{page}.md").read_text()
        assert f"`passes/{module}.py`" in text, page
        for part in PARTS:
            assert part in text, f"{page}: {part}"
    text = (DOCS / "passes" / "backward.md").read_text()
    for part in ("`passes/backward/`", *PARTS, *(f"`plan_{n}`" for n in ("compute", "memory", "schedule"))):
        assert part in text, part
    assert {p.stem for p in (PACKAGE / "passes" / "backward").glob("*.py")} == {*BACKWARD, "__init__"}
    planners = {
        p.stem for p in (PACKAGE / "passes").glob("*.py") if re.search(r"^def plan_", p.read_text(), re.MULTILINE)
    }
    assert planners <= set(PASSES), "a new pass needs a page"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_folders_and_modules_that_are_named_exist(page: Path) -> None:
    """Paths in code font exist, except in the table of rooms that are only drawn."""
    text = page.read_text().split("## Rooms that are drawn")[0]
    for path in re.findall(r"`((?:attngen|examples|templates|grammar|generated|tests)/[\w./-]*)`", text):
        if "*" not in path and "x." not in path and "XY" not in path:
            assert (ROOT / path).exists(), path


def test_glossary_is_the_vocabulary_of_the_ir() -> None:
    text = (DOCS / "glossary.md").read_text()
    for word in (
        "tile_m",
        "tile_n",
        "kv_stages",
        "head_dim_qk",
        "head_dim_v",
        "seqlen_kv",
        "q_pos",
        "warpgroup",
        "walk",
        "lse",
        "workspace",
        "turn",
        "slope",
    ):
        assert re.search(rf"`{word}`|\| {word}", text), word


def test_gallery_is_small_and_every_entry_differs() -> None:
    assert len({e.shows for e in GALLERY}) == len(GALLERY)
    for direction, most in (("forward", 13), ("backward", 7)):
        assert 0 < sum(e.direction == direction for e in GALLERY) <= most


def test_ledger_of_the_page_of_the_backward() -> None:
    """Pipelines, stages and arrivals of the table are those of the plans."""
    from attngen.search_backward import plan_backward
    from attngen.syntax import load_spec

    text = (DOCS / "passes" / "backward.md").read_text()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    table = {name: row for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    for head_dim, splits in ((64, False), (128, False), (256, True)):
        spec = load_spec(f"attn 1\nattention a {{\n  head_dim = {head_dim}\n  mask = kv_idx <= q_pos\n}}\n")
        plan = plan_backward(spec).long_plan
        assert plan.compute.splits_operands is splits
        for q in plan.schedule.pipelines:
            _, stages, _, full, empty = table[q.name]
            assert str(q.stages) in re.findall(r"\d+", stages), q.name
            counts = re.findall(r"\d+", full)
            assert str(q.full_arrivals) == (counts[-1] if splits else counts[0]), q.name
            counts = re.findall(r"\d+", empty)
            assert str(q.empty_arrivals) == (counts[-1] if splits else counts[0]), q.name


def test_module_sizes() -> None:
    """Aim at 150 lines, review at 300, never past 500."""
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 500}
    assert not long


def test_no_heavy_import_at_module_level() -> None:
    """torch and the DSL load only in jit, ref and importers: `attngen compile` starts without them."""
    for path in SOURCES:
        if path.relative_to(PACKAGE).parts[0] not in ("jit", "ref", "importers"):
            assert not re.search(r"^(import|from) (torch|cutlass|matplotlib|rich)\b", path.read_text(), re.MULTILINE), (
                path
            )
