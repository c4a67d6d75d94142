"""emit: forward and backward of one spec as one file, joined from the texts of the two directions.

What both say in the same words (imports, constants, device helpers, most of the self-check) is said once. The forward's
part is the forward's own file, word for word. A name that the two use for different things keeps its meaning in the
forward and gets a prefix in the backward: `BACKWARD_PLANS`, `BackwardTilePlan`, `backward_check`. The check's reference
is the backward's, which autograd can go through; it computes the same numbers.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attngen.emit.backward import emit_backward
from attngen.emit.backward import meta_of as backward_meta
from attngen.emit.env import tidy
from attngen.emit.header import escaped
from attngen.emit.literal import literal
from attngen.emit.module import emit, meta_of, sealed
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.plan import PlanSet
from attngen.source import KernelSource, parse_python
from attngen.stages import staged
from attngen.verify.source import LINE_LENGTH, SourceError, general_faults

#: Names that the backward never shares, so that what a file offers does not depend on its spec.
_APART = frozenset({"TilePlan", "PLANS", "LIMITS"})
_SELF_CHECK = "self-check"
_HEADER = re.compile(r"# ---- (.*?) -+$")
_WIDTH = 116
_USAGE = (
    "python this_file.py [seqlen]   on a Hopper GPU: errors of each plan against a float64 reference and its",
    "                               autograd, time and TFLOP/s of kept pairs at seqlen (4096)",
)


@dataclass(frozen=True)
class Chunk:
    """A statement of module level: the names it defines, the title of its section, and its lines."""

    names: tuple[str, ...]
    section: str
    #: Blank lines and comments above it, with and without the section's header.
    gap: str
    lead: str
    body: str
    node: ast.stmt


@staged("emit")
def emit_both(plan_set: PlanSet, backward: BackwardPlanSet, notes: Sequence[str] = ()) -> KernelSource:
    """One file with both directions. `notes`, sentences, are said in its docstring, and in its ATTN_META line by line.

    Same input, same bytes. Raises: verify.source.SourceError where the texts do not join (a bug in a template).
    """
    front, back = emit(plan_set), emit_backward(backward)
    digest = hashlib.sha256(f"{front.kernel_id} {back.kernel_id}".encode()).hexdigest()[:8]
    kernel_id = f"{plan_set.spec.name}_{plan_set.target.removesuffix('a')}_{digest}"
    meta: dict[str, object] = {
        **meta_of(plan_set, kernel_id),
        "direction": "both",
        "backward": {"kernel_id": back.kernel_id, **backward_meta(backward, back.kernel_id)["backward"]},
        **({"notes": _lines(notes)} if notes else {}),
    }
    text = tidy(_joined(front.text, back.text, literal(meta), notes))
    tree = parse_python(text)
    text = sealed(text, tree)
    faults = [*general_faults(text, tree), *_defined_twice(tree)]
    if faults:
        raise SourceError(f"{plan_set.spec.name}: " + "; ".join(faults))
    return _source(text, kernel_id)


@staged("emit")
def emit_without_backward(plan_set: PlanSet, notes: Sequence[str]) -> KernelSource:
    """The forward's file, which says why it has no backward: `notes`, a sentence for each reason, at least one."""
    plain = emit(plan_set)
    digest = hashlib.sha256("\n".join((plain.kernel_id, *notes)).encode()).hexdigest()[:8]
    kernel_id = f"{plan_set.spec.name}_{plan_set.target.removesuffix('a')}_{digest}"
    meta = {**meta_of(plan_set, kernel_id), "notes": _lines(notes)}
    first, *rest = _chunks(plain.text)
    paragraphs = _split(first.body)
    paragraphs.insert(-2, _noted(notes))
    table = f"ATTN_META = {literal(meta)}"
    body = [c.gap + (table if c.names == ("ATTN_META",) else c.body) for c in rest]
    text = tidy("\n".join([_docstring(paragraphs), *body]))
    text = sealed(text, parse_python(text))
    return _source(text, kernel_id)


def _source(text: str, kernel_id: str) -> KernelSource:
    return KernelSource(text=text, kernel_id=kernel_id, sha256=hashlib.sha256(text.encode()).hexdigest())


# -- joining ----------------------------------------------------------------------------------------------------------


def _joined(front: str, back: str, meta: str, notes: Sequence[str]) -> str:
    ours, theirs = list(_chunks(front)), list(_chunks(back))
    known, others = _by_name(ours), _by_name(theirs)
    said = {c.body for c in ours if not _APART & {*c.names}}
    own = [c for c in theirs[1:] if c.body not in said and not {"ATTN_META", "reference"} & {*c.names}]
    clashes = sorted(n for c in own for n in c.names if n in known and n != "main")
    own = [_renamed(c, clashes) for c in own]
    check = [c for c in own if c.section == _SELF_CHECK and c.names != ("main",)]
    imports = [c for c in own if isinstance(c.node, ast.Import | ast.ImportFrom)]
    kernels = [c for c in own if c.section != _SELF_CHECK and c not in imports]
    instead = {
        "ATTN_META": f"ATTN_META = {meta}",
        "reference": _reference(known["reference"], others["reference"]),
        "main": _merged(known["main"], _by_name(own)["main"]),
    }
    out = [_docstring(_paragraphs(ours[0].body, theirs[0].body, notes))]
    for c in ours[1:]:
        if c.names == ("ATTN_META",):
            out += [x.body for x in imports]
        elif c.section == _SELF_CHECK and kernels:
            out += _titled(kernels)
            kernels = []
        elif c.names == ("main",):
            out += [x.lead + x.body for x in check]
        out.append(c.gap + next((instead[n] for n in c.names if n in instead), c.body))
    return "\n".join(out) + "\n"


def _chunks(text: str) -> Iterator[Chunk]:
    lines, last, section = text.split("\n"), 0, ""
    for node in parse_python(text).body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
        end = node.end_lineno or node.lineno
        titles = [m[1] for m in map(_HEADER.match, lines[last:start]) if m]
        section = titles[-1] if titles else section
        gap = lines[last:start]
        lead = [line for line in gap if not _HEADER.match(line)]
        above, body = ("".join(f"{line}\n" for line in part) for part in (gap, lead))
        yield Chunk(_names(node), section, above, body, "\n".join(lines[start:end]), node)
        last = end


def _names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        return tuple(n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name))
    return ()


def _by_name(chunks: Sequence[Chunk]) -> dict[str, Chunk]:
    return {n: c for c in chunks for n in c.names}


def _titled(chunks: Sequence[Chunk]) -> Iterator[str]:
    """The backward's own statements, each section of them under its title."""
    title = None
    for c in chunks:
        if c.section != title:
            head = f"# ---- backward: {c.section or 'constants'} "
            yield f"\n\n{head:-<{LINE_LENGTH - 2}}\n"
        yield c.lead + c.body
        title = c.section


def _reference(ours: Chunk, theirs: Chunk) -> str:
    """The backward's reference: the forward's numbers, in a form that autograd can go through."""
    a, b = ours.node, theirs.node
    assert isinstance(a, ast.FunctionDef) and isinstance(b, ast.FunctionDef)
    if ast.dump(a.args) != ast.dump(b.args):
        raise SourceError("the references of the two directions take different arguments")
    return theirs.body


def _merged(ours: Chunk, theirs: Chunk) -> str:
    """`main`: the forward's statements, and behind their counterparts those that only the backward's has."""
    head, a = _statements(ours)
    _, b = _statements(theirs)
    out = [head]
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        out += a[i:j] if tag != "insert" else []
        out += b[k:m] if tag in ("replace", "insert") else []
    return "\n".join(out)


def _statements(c: Chunk) -> tuple[str, list[str]]:
    """A function's `def` line, and its statements with the blank lines and comments above them."""
    function = parse_python(c.body).body[0]
    assert isinstance(function, ast.FunctionDef)
    lines = c.body.split("\n")
    ends = [n.end_lineno or n.lineno for n in function.body]
    return lines[0], ["\n".join(lines[i:j]) for i, j in zip([1, *ends], ends, strict=False)]


# -- names ------------------------------------------------------------------------------------------------------------


def _renamed(c: Chunk, names: Sequence[str]) -> Chunk:
    """The backward's statement with its own names for what the forward calls by the same."""
    body, lead = c.body.replace('ATTN_META["kernel_id"]', 'ATTN_META["backward"]["kernel_id"]'), c.lead
    for name in names:
        if name[0].isupper():  # such words mean nothing else, in comments neither
            body, lead = (re.sub(rf"(?<![\w.]){name}\b", _prefixed(name), x) for x in (body, lead))
        else:
            body = re.sub(rf"(?<![\w.]){name}(?=\()", _prefixed(name), body)
    body, lead = ("\n".join(x for line in text.split("\n") for x in _fitted(line)) for text in (body, lead))
    node = parse_python(body).body[0]
    nodes = list(ast.walk(node))
    named = [n for n in nodes if isinstance(n, ast.Name)]
    bound = {n.id for n in named if isinstance(n.ctx, ast.Store)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
    left = {n.id for n in named} & {*names} - bound
    if left:
        raise SourceError(f"the backward's {', '.join(sorted(left))} would be the forward's")
    return replace(c, names=_names(node), lead=lead, body=body, node=node)


def _prefixed(name: str) -> str:
    if not name[0].isupper():
        return f"backward_{name}"
    return f"BACKWARD_{name}" if name.isupper() else f"Backward{name}"


def _fitted(line: str) -> list[str]:
    """A line that a longer name made too long: its comment goes above it, or its last call's arguments below; a comment
    goes on in the next line.
    """
    if len(line) <= LINE_LENGTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    if line.lstrip().startswith("# "):
        return textwrap.wrap(line.strip(), LINE_LENGTH, initial_indent=indent, subsequent_indent=f"{indent}# ")
    code, mark, comment = line.partition("  # ")
    if mark:
        return [f"{indent}# {comment}", code]
    depth = 0
    for i in range(len(line) - 1, -1, -1):
        depth += (line[i] == ")") - (line[i] == "(")
        if depth == 0:
            return [line[: i + 1], f"{indent}    {line[i + 1 : -1]}", f"{indent})"] if line.endswith(")") else [line]
    return [line]


def _defined_twice(tree: ast.Module) -> Iterator[str]:
    names = [n for node in tree.body for n in _names(node)]
    yield from (f"{n} is defined twice" for n in sorted({*names}) if names.count(n) > 1)


# -- the docstring ----------------------------------------------------------------------------------------------------


def _paragraphs(front: str, back: str, notes: Sequence[str]) -> list[str]:
    """Title, what the spec says, formula, gradients, tensors, plans, legend, usage: of the two files' docstrings."""
    title, *said, _, plans, legend, _ = _split(front)
    *_, gradients, tensors, back_plans, back_legend, _ = _split(back)
    title = " ".join(title.split()).replace(": attention forward for ", ": attention forward and backward for ", 1)
    back_loop = back_legend[back_legend.index("\nloop   ") :]
    return [
        "\n".join(textwrap.wrap(title, _WIDTH)),
        *said,
        gradients,
        tensors,
        f"forward: compile_plan(index) of PLANS\n{plans}",
        f"backward: compile_backward(index) of BACKWARD_PLANS\n{back_plans}",
        *([_noted(notes)] if notes else []),
        legend.replace("\nloop   ", "\nfwd    ") + back_loop.replace("\nloop   ", "\nbwd    "),
        "\n".join(_USAGE),
    ]


def _split(docstring: str) -> list[str]:
    return docstring.strip('"\n').split("\n\n")


def _docstring(paragraphs: Sequence[str]) -> str:
    return '"""' + "\n\n".join(paragraphs) + '\n"""'


def _lines(notes: Sequence[str]) -> list[list[str]]:
    return [textwrap.wrap(escaped(n), _WIDTH - 16) for n in notes]


def _noted(notes: Sequence[str]) -> str:
    return "\n".join(line for n in notes for line in textwrap.wrap(escaped(n), _WIDTH, subsequent_indent="    "))
