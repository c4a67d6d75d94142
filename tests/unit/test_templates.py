"""The rules of templates: Python before rendering, structure only, and a view without dead or missing fields."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from functools import cache
from pathlib import Path

import jinja2.nodes as jn
import pytest

from attngen.emit import score, selfcheck, tables, view, view_backward, view_forward, view_mask
from attngen.emit.env import environment, tidy
from attngen.emit.view import CommonView
from attngen.emit.view_backward import BackwardView
from attngen.emit.view_forward import KernelView

ROOT = Path(__file__).resolve().parents[2] / "templates"
FILES = sorted(ROOT.rglob("*.jinja"))
VIEWS = {
    cls
    for module in (view, view_mask, view_forward, view_backward, score, selfcheck, tables)
    for cls in vars(module).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
}
each_file = pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(ROOT).as_posix())
#: Kernel skeleton -> what it and the macros that only it reaches read.
SKELETONS: dict[str, type] = {"kernel/fwd_sm90.py.jinja": KernelView, "kernel/bwd_sm90.py.jinja": BackwardView}


@cache
def parsed(name: str) -> jn.Template:
    return environment().parse((ROOT / name).read_text())


def called(name: str, macro: str | None) -> set[tuple[str, str]]:
    """(file, macro) of everything that a macro calls; of the file's own body where `macro` is None."""
    tree = parsed(name)
    modules = {i.target: i.template.value for i in tree.find_all(jn.Import)}
    owner = tree if macro is None else next(m for m in tree.find_all(jn.Macro) if m.name == macro)
    found = set()
    for call in owner.find_all(jn.Call):
        if isinstance(call.node, jn.Getattr) and isinstance(call.node.node, jn.Name):
            found.add((modules[call.node.node.name], call.node.attr))
        elif isinstance(call.node, jn.Name):
            found.add((name, call.node.name))
    return found


@cache
def reached(skeleton: str) -> frozenset[tuple[str, str]]:
    """(file, macro) of everything that a skeleton's text is made of."""
    found, todo = set(), called(skeleton, None)
    while todo:
        found |= todo
        todo = set().union(*(called(*m) for m in todo)) - found
    return frozenset(found)


def views_of(file: Path) -> dict[str | None, type]:
    """What each macro of a file reads as `view`, by its name, and under None the file's own body.

    A macro that skeletons of both directions reach reads what both of them have.
    """
    name = file.relative_to(ROOT).as_posix()
    types: dict[str | None, type] = {}
    if name in SKELETONS:
        types[None] = SKELETONS[name]
    for macro in (m.name for m in parsed(name).find_all(jn.Macro)):
        by = [view for skeleton, view in SKELETONS.items() if (name, macro) in reached(skeleton)]
        if by:
            types[macro] = by[0] if len(by) == 1 else CommonView
    return types


def declares(owner: type, field: str) -> type:
    """The class of a view's family that declares a field."""
    return next(c for c in owner.__mro__ if field in vars(c).get("__annotations__", {}))


class Reader:
    """Follows the types of the view through one template; notes what it reads and what breaks a rule."""

    def __init__(self, tree: jn.Template, views: dict[str | None, type]) -> None:
        self.views = views
        self.reads: set[tuple[type, str]] = set()
        self.faults: list[str] = []
        self.deepest = 0
        self.macros = {m.name for m in tree.find_all(jn.Macro)}
        self.imported = {i.target for i in tree.find_all(jn.Import)}
        self.block(tree.body, {"view": views.get(None, object)}, 0)

    def block(self, nodes: list[jn.Node], types: dict[str, object], depth: int) -> None:
        self.deepest = max(self.deepest, depth)
        for node in nodes:
            self.node(node, types, depth)

    def node(self, node: jn.Node, types: dict[str, object], depth: int) -> None:
        if isinstance(node, jn.Output):
            for part in node.nodes:
                if not isinstance(part, jn.TemplateData):
                    self.value(self.inserted(part), types)
        elif isinstance(node, jn.If):
            self.condition(node.test, types)
            if node.elif_:
                self.faults.append(f"line {node.lineno}: elif")
            self.block(node.body, types, depth + 1)
            self.block(node.else_, types, depth + 1)
        elif isinstance(node, jn.For):
            if node.test is not None or node.recursive or node.else_:
                self.faults.append(f"line {node.lineno}: a loop with a condition")
            kind = self.value(node.iter, types)
            args = typing.get_args(kind)
            element = args[0] if len(args) == 2 and args[1] is Ellipsis else object if kind is object else None
            if element is None:
                self.faults.append(f"line {node.lineno}: a loop over {kind}, not over a tuple of the view")
            self.block(node.body, {**types, node.target.name: element}, depth + 1)
        elif isinstance(node, jn.Macro):
            if node.name not in self.views:
                self.faults.append(f"line {node.lineno}: macro {node.name} is in no skeleton")
            named = {a.name: self.views.get(node.name, object) if a.name == "view" else object for a in node.args}
            if node.defaults:
                self.faults.append(f"line {node.lineno}: macro with defaults")
            self.block(node.body, named, depth)
        elif not isinstance(node, jn.Import):
            self.faults.append(f"line {node.lineno}: {type(node).__name__}")

    @staticmethod
    def inserted(e: jn.Expr) -> jn.Expr:
        """What `{{…}}` holds, without the indentation that the environment adds to a line of its own."""
        while isinstance(e, jn.Filter) and e.name in ("trim", "indent"):
            e = e.node
        return e

    def condition(self, e: jn.Expr, types: dict[str, object]) -> None:
        inner = e.node if isinstance(e, jn.Not) else e
        if not isinstance(inner, jn.Getattr):
            self.faults.append(f"line {e.lineno}: a condition is one field of the view, not {type(inner).__name__}")
        kind = self.value(inner, types)
        if kind is not bool:
            self.faults.append(f"line {e.lineno}: a condition on {kind}")

    def value(self, e: jn.Expr, types: dict[str, object]) -> object:
        if isinstance(e, jn.Name):
            if e.name not in types:
                self.faults.append(f"line {e.lineno}: unknown name {e.name}")
            return types.get(e.name, object)
        if isinstance(e, jn.Getattr):
            owner = self.value(e.node, types)
            hints = dict(typing.get_type_hints(owner)) if owner in VIEWS else {}
            computed = vars(owner).get(e.attr) if owner in VIEWS else None
            if isinstance(computed, property):
                return typing.get_type_hints(computed.fget)["return"]
            if e.attr not in hints:
                self.faults.append(f"line {e.lineno}: {getattr(owner, '__name__', owner)} has no field {e.attr}")
                return object
            self.reads.add((declares(owner, e.attr), e.attr))  # type: ignore[arg-type]
            return hints[e.attr]
        if isinstance(e, jn.Call) and not (e.kwargs or e.dyn_args or e.dyn_kwargs):
            name = e.node.node if isinstance(e.node, jn.Getattr) else e.node
            known = self.imported if isinstance(e.node, jn.Getattr) else self.macros
            if not isinstance(name, jn.Name) or name.name not in known:
                self.faults.append(f"line {e.lineno}: a call of something that is no macro")
            for argument in e.args:
                self.value(argument, types)
            return str
        self.faults.append(f"line {e.lineno}: {type(e).__name__} in the place of a field")
        return object


def read(source: str, view_type: type = KernelView) -> Reader:
    return Reader(environment().parse(source), {None: view_type, "part": view_type})


@cache
def read_file(file: Path) -> Reader:
    return Reader(parsed(file.relative_to(ROOT).as_posix()), views_of(file))


@each_file
def test_parses_as_python_unrendered(file: Path) -> None:
    ast.parse(file.read_text())


@each_file
def test_holds_structure_only(file: Path) -> None:
    """Conditions are one field or its negation, loops go over tuples of the view, nothing is computed."""
    found = read_file(file)
    assert found.faults == []
    assert found.deepest <= 3


@each_file
def test_spelling(file: Path) -> None:
    text = file.read_text()
    assert "{%" not in text and "{#" not in text
    assert all("|" not in inside for inside in re.findall(r"\{\{(.*?)\}\}", text)), "a filter"
    assert len(text.splitlines()) <= (450 if file.parent.name == "kernel" else 300)
    assert max(len(line) for line in text.splitlines()) <= 120
    assert text.endswith("\n") and "\t" not in text


def test_every_field_of_the_view_is_read() -> None:
    reads = set().union(*(read_file(f).reads for f in FILES))
    fields = {(cls, name) for cls in VIEWS for name in vars(cls).get("__annotations__", {})}
    dead = {f"{cls.__name__}.{name}" for cls, name in fields - reads}
    assert dead == set()


def test_a_common_field_is_read_for_both_directions() -> None:
    """What one direction alone reads belongs to its own view."""
    for skeleton in SKELETONS:
        names = {skeleton} | {name for name, _ in reached(skeleton)}
        reads = set()
        for name in names:
            macros = {m for n, m in reached(skeleton) if n == name}
            tree, views = parsed(name), views_of(ROOT / name)
            here = jn.Template([n for n in tree.body if not isinstance(n, jn.Macro) or n.name in macros])
            reads |= Reader(here, views).reads
        unread = {f.name for f in dataclasses.fields(CommonView)} - {n for owner, n in reads if owner is CommonView}
        assert unread == set(), skeleton


def test_every_template_is_used() -> None:
    imports = {i.template.value for f in FILES for i in parsed(f.relative_to(ROOT).as_posix()).find_all(jn.Import)}
    parts = {f.relative_to(ROOT).as_posix() for f in FILES if f.parent.name != "kernel"}
    assert imports == parts
    assert {f.relative_to(ROOT).as_posix() for f in FILES if f.parent.name == "kernel"} == set(SKELETONS)


def test_shared_macros_are_known() -> None:
    """Both directions share what these files hold, and each has more of its own."""
    forward, backward = (reached(skeleton) for skeleton in SKELETONS)
    hosts = ("selfcheck", "selfcheck_ragged")
    prims = ("device", "elements", "ragged", "ragged_map", "ragged_tiles", "tables", "tile_boxes", "tile_decide")
    prims += ("tile_map", "tile_walk")
    parts = [f"host/{x}" for x in hosts] + [f"prim/{x}" for x in prims]
    assert {name for name, _ in forward & backward} == {f"{p}.py.jinja" for p in parts}
    assert forward - backward and backward - forward
    assert views_of(ROOT / "prim/tile_walk.py.jinja") == {
        "grid": KernelView,
        "coords": KernelView,
        "bounds": CommonView,
        "intervals": CommonView,
        "walk": KernelView,
    }


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("## if view.pingpong and view.has_sink\nx\n## endif\n", "a condition is one field"),
        ("## if view.head_dim_v > 64\nx\n## endif\n", "a condition is one field"),
        ("## if view.head_dim_v\nx\n## endif\n", "a condition on"),
        ("## set x = 1\n", "Assign"),
        ("y = {{view.head_dim_v + 1}}\n", "Add in the place of a field"),
        ("y = {{view.summary | upper}}\n", "Filter in the place of a field"),
        ("y = {{view.nothing}}\n", "KernelView has no field nothing"),
        ("## for i in range(3)\nx\n## endfor\n", "a call of something that is no macro"),
        ("## for p in view.plans\ny = {{p.tile_m}}\n## endfor\n", "PlanView has no field tile_m"),
        ("## for c in view.summary\nx\n## endfor\n", "not over a tuple"),
        ("y = {{plan}}\n", "unknown name plan"),
        ("## macro other(view)\nx\n## endmacro\n", "macro other is in no skeleton"),
        ("y = {{view.drains}}\n", "KernelView has no field drains"),
    ],
)
def test_the_rules_can_fail(source: str, fault: str) -> None:
    assert any(fault in f for f in read(source).faults), read(source).faults


@pytest.mark.parametrize(
    ("view_type", "field"),
    [(BackwardView, "lowest"), (CommonView, "pingpong"), (CommonView, "deterministic"), (CommonView, "plans")],
)
def test_a_view_of_the_other_direction_is_a_fault(view_type: type, field: str) -> None:
    fault = f"line 1: {view_type.__name__} has no field {field}"
    assert read(f"y = {{{{view.{field}}}}}\n", view_type).faults == [fault]
    inside = read(f"## macro part(view)\ny = {{{{view.{field}}}}}\n## endmacro\n", view_type)
    assert inside.faults == [fault.replace("line 1", "line 2")]


def test_a_line_that_is_one_insertion_keeps_its_indentation() -> None:
    text = environment().from_string("if a:\n    {{view}}\nelse:\n").render(view="x = 1\ny = 2\n")
    assert text == "if a:\n    x = 1\n    y = 2\nelse:\n"


def test_a_slot_is_a_name() -> None:
    text = environment().from_string("## for arg in view\nslot_arg_name: int\n## endfor\n")
    assert text.render(view=[{"name": "cap"}, {"name": "window"}]) == "cap: int\nwindow: int\n"


def test_an_undefined_field_is_an_error() -> None:
    import jinja2

    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{view.nothing}}").render(view=object())


def test_tidy() -> None:
    """Trailing blanks go, two blank lines between definitions, one inside a block, one newline at the end."""
    untidy = "\n\na = 1  \n\n\n\n\ndef f():\n\n\n    return 1\n#~\n\n\n#~\n#~\nb = 2\n\n\n"
    assert tidy(untidy) == "a = 1\n\n\ndef f():\n\n    return 1\n\n\nb = 2\n"
    assert tidy(tidy(untidy)) == tidy(untidy)
