"""Which defs and attention blocks a file sees: its own and those of its includes, read only where they may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from attngen import resources
from attngen.diag.diagnostic import AttnError, Label, error
from attngen.diag.span import Source, Span
from attngen.ir.functions import FUNCTIONS
from attngen.syntax import ast, limits
from attngen.syntax.collect import Faults
from attngen.syntax.parser import parse_file
from attngen.syntax.reserved import reason


@dataclass(slots=True)
class Scope:
    """Everything that names can refer to at file level."""

    defs: dict[str, ast.Define] = field(default_factory=dict)
    attentions: dict[str, ast.Attention] = field(default_factory=dict)
    #: Names of the blocks of the file itself, in order; includes add to `attentions` only.
    own: list[str] = field(default_factory=list)


def read_source(path: Path) -> Source:
    """A spec file as a Source. Raises E0110 with the reason."""
    try:
        with path.open("rb") as file:
            data = file.read(limits.FILE_BYTES + 1)  # a device or a pipe may have no end
        if len(data) > limits.FILE_BYTES:
            raise error(
                "E0108",
                f"{path} is larger than {limits.FILE_BYTES >> 20} MiB",
                helps=("a spec is a few lines of mathematics; large data belongs in a captured `tensor`",),
            )
    except OSError as fault:
        help_ = "check the path" if not path.exists() else "give the path of an .attn file that can be read"
        raise error("E0110", f"cannot read {path}: {fault.strerror or fault}", helps=(help_,)) from None
    except ValueError:
        raise error("E0110", "cannot read a path that holds a zero byte", helps=("check the path",)) from None
    try:
        return Source(str(path), data.decode("utf-8-sig"))
    except UnicodeDecodeError as fault:
        raise error("E0110", f"{path} is not UTF-8 (byte {fault.start})", helps=("save the file as UTF-8",)) from None


def build_scope(source: Source, path: Path | None, include_dirs: Sequence[Path], faults: Faults) -> Scope:
    """Parse `source`, the text of `path` if it is a file, and what it includes.

    Syntax faults raise; faults of names are added to `faults`. A name of the shipped library means the shipped file.
    """
    path = path.resolve() if path else None
    folder = path.parent if path else None
    loader = _Loader([*([folder] if folder else []), *(d.resolve() for d in include_dirs)], faults)
    loader.add(parse_file(source), folder, (path,) if path else (), main=True)
    return loader.scope


@cache
def _shipped(path: Path) -> tuple[Source, ast.File]:
    """A file of the shipped library, parsed once; its name in messages is the same on every machine."""
    source = Source(f"<std>/{path.name}", read_source(path).text)
    return source, parse_file(source)


class _Loader:
    def __init__(self, roots: list[Path], faults: Faults) -> None:
        self.roots, self.faults, self.scope = roots, faults, Scope()
        self.library = (resources.root() / "grammar").resolve()
        self.done: set[Path] = set()
        self.total = 0

    def add(self, file: ast.File, folder: Path | None, chain: tuple[Path, ...], main: bool = False) -> None:
        for item in file.items:
            if isinstance(item, ast.Include):
                self.include(item, folder, chain)
            elif isinstance(item, ast.Define):
                self.define(item)
            else:
                self.attention(item, main)

    def include(self, item: ast.Include, folder: Path | None, chain: tuple[Path, ...]) -> None:
        path = self.find(item, folder)
        if path is None:
            return
        if path in chain:
            names = " includes ".join(p.name for p in (*chain[chain.index(path) :], path))
            self.faults.add(
                "E0220",
                "files include each other",
                item.path_span,
                "this closes the circle",
                notes=(names,),
                helps=("move what both need into a third file",),
            )
        elif path not in self.done:
            self.done.add(path)
            if len(self.done) >= limits.FILES:
                raise error(
                    "E0108",
                    f"more than {limits.FILES} files included",
                    at=item.path_span,
                    helps=("merge some of them",),
                )
            shipped = path.parent == self.library
            inner, parsed = _shipped(path) if shipped else (read_source(path), None)
            self.total += len(inner.text)
            if self.total > limits.FILE_BYTES:
                raise error("E0108", f"included files hold more than {limits.FILE_BYTES >> 20} MiB", at=item.path_span)
            self.add(parsed or parse_file(inner), path.parent, (*chain, path))

    def find(self, item: ast.Include, folder: Path | None) -> Path | None:
        """The file meant, if it may be read: below the spec's folder, an include folder, or the shipped library."""
        at = item.path_span
        if (
            not item.path
            or "\\" in item.path
            or "\0" in item.path
            or Path(item.path).is_absolute()
            or not item.path.endswith(".attn")
        ):
            self.faults.add(
                "E0219",
                "an include names an .attn file by a plain relative path",
                at,
                "not such a path",
                helps=('write `include "std.attn"` or `include "shared/masks.attn"`',),
            )
            return None
        shipped = self.library / item.path
        if "/" not in item.path and shipped.is_file():
            return shipped
        seen = False
        for base in ([folder] if folder else []) + self.roots:
            try:
                path = (base / item.path).resolve()
                if not any(path.is_relative_to(r) for r in (*self.roots, self.library)):
                    seen = True
                elif path.is_file():
                    return path
            except (OSError, RuntimeError):
                continue
        if seen:
            self.faults.add(
                "E0219",
                "an include may not leave the spec's folder",
                at,
                "points outside",
                notes=("a spec is untrusted text, so it reads only its own folder and the shipped library",),
                helps=("move the file below the spec's folder, or name its folder as an include folder",),
            )
        else:
            library = ", ".join(sorted(p.name for p in self.library.glob("*.attn")))
            where = "the spec's folder" if self.roots else "the shipped library (a spec given as text has no folder)"
            self.faults.add(
                "E0219",
                f"cannot find `{item.path}`",
                at,
                f"looked in {where}",
                helps=(f"the shipped library has {library}",),
            )
        return None

    def define(self, item: ast.Define) -> None:
        name = item.name
        taken = self.scope.defs.get(name.text)
        why = reason(name.text, inlined=True)
        if why or name.text in FUNCTIONS:
            self.faults.add(
                "E0204",
                f"`{name.text}` is {why or 'a function of the language'}",
                name.span,
                "cannot be defined again",
                helps=(f"choose another name, such as `my_{name.text}`",),
            )
        elif taken is not None:
            self.faults.add(
                "E0203",
                f"`{name.text}` is defined twice",
                name.span,
                "second definition",
                also=(Label(taken.name.span, "first definition"),),
                helps=("rename one of them",),
            )
        else:
            self.scope.defs[name.text] = item
        seen: dict[str, Span] = {}
        for formal in item.formals or ():
            if formal.name.text in seen:
                self.faults.add(
                    "E0203",
                    f"argument `{formal.name.text}` is named twice",
                    formal.name.span,
                    "second",
                    also=(Label(seen[formal.name.text], "first"),),
                    helps=("rename one of them",),
                )
            seen[formal.name.text] = formal.name.span

    def attention(self, item: ast.Attention, main: bool) -> None:
        name = item.name
        taken = self.scope.attentions.get(name.text)
        why = reason(name.text)
        if why:
            self.faults.add(
                "E0204",
                f"`{name.text}` is {why}",
                name.span,
                "cannot name an attention",
                helps=(f"choose another name, such as `{name.text.strip('_')}_attention`",),
            )
        if taken is not None:
            self.faults.add(
                "E0203",
                f"attention `{name.text}` is declared twice",
                name.span,
                "second declaration",
                also=(Label(taken.name.span, "first declaration"),),
                helps=("rename one of them",),
            )
            return
        self.scope.attentions[name.text] = item
        if main:
            self.scope.own.append(name.text)


__all__ = ["AttnError", "Scope", "build_scope", "read_source"]
