"""A small drawing surface: rectangles, lines, arrows, text; written as SVG text or, with matplotlib, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from attngen.diag.diagnostic import error

#: Stack of faces: the first one found is used.
FONT = "Helvetica, Arial, sans-serif"


@dataclass
class Canvas:
    """`width` x `height` pixels, origin top left. Shapes are drawn in the order of the calls."""

    width: float
    height: float
    title: str = ""
    shapes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, *, stroke: str = "none", line: float = 0.0
    ) -> None:
        """A filled rectangle."""
        self.shapes.append(("rect", {"x": x, "y": y, "w": w, "h": h, "fill": fill, "stroke": stroke, "line": line}))

    def rects(self, boxes: Sequence[tuple[float, float, float, float]], fill: str) -> None:
        """Many rectangles (x, y, w, h) of one colour, as one path."""
        if boxes:
            self.shapes.append(("rects", {"boxes": tuple(boxes), "fill": fill}))

    def line(
        self, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.0, *, dash: bool = False
    ) -> None:
        """A straight line."""
        self.shapes.append(
            ("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "color": color, "width": width, "dash": dash})
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.0, head: float = 5.0
    ) -> None:
        """A line with a filled head at its end."""
        length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-6)
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        bx, by = x2 - ux * head, y2 - uy * head
        self.line(x1, y1, bx, by, color, width)
        half = head * 0.55
        points = ((x2, y2), (bx - uy * half, by + ux * half), (bx + uy * half, by - ux * half))
        self.shapes.append(("polygon", {"points": points, "fill": color}))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        color: str = "#212529",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Text with its baseline at y; anchor `start`, `middle` or `end`."""
        self.shapes.append(
            ("text", {"x": x, "y": y, "words": words, "size": size, "color": color, "anchor": anchor, "bold": bold})
        )

    def svg(self) -> str:
        """The picture as a standalone SVG document. Text is escaped; nothing in it can be markup."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(self.width)}" height="{_n(self.height)}" '
            f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" font-family="{FONT}" role="img">'
        )
        body = [head, f"<title>{escape(_clean(self.title))}</title>"]
        body += [_svg_shape(kind, s) for kind, s in self.shapes]
        return "\n".join([*body, "</svg>", ""])

    def png(self, scale: float = 2.0) -> bytes:
        """The picture as PNG, `scale` pixels a unit. Raises AttnError E0540 where matplotlib is missing."""
        try:
            import matplotlib
        except ImportError:
            raise error(
                "E0540", "PNG needs matplotlib, which is not installed",
                helps=("pip install 'attngen[draw]', or write an .svg, which needs nothing",),
            ) from None  # fmt: skip
        matplotlib.use("Agg")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width / 72, self.height / 72), dpi=72 * scale)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.axis("off")
        for kind, s in self.shapes:
            _plot_shape(axes, kind, s)
        out = BytesIO()
        figure.savefig(out, format="png", facecolor="white")
        return out.getvalue()


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))


def _clean(words: str) -> str:
    # XML 1.0 has no place for control characters, not even escaped.
    return "".join(c if c.isprintable() else " " for c in words)


def _svg_shape(kind: str, s: dict[str, Any]) -> str:
    if kind == "rect":
        stroke = f' stroke="{s["stroke"]}" stroke-width="{_n(s["line"])}"' if s["line"] else ""
        x, y, w, h = (_n(s[k]) for k in "xywh")
        return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{s["fill"]}"{stroke}/>'
    if kind == "rects":
        path = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in s["boxes"])
        return f'<path d="{path}" fill="{s["fill"]}"/>'
    if kind == "line":
        dash = ' stroke-dasharray="4 3"' if s["dash"] else ""
        return (
            f'<line x1="{_n(s["x1"])}" y1="{_n(s["y1"])}" x2="{_n(s["x2"])}" y2="{_n(s["y2"])}" '
            f'stroke="{s["color"]}" stroke-width="{_n(s["width"])}"{dash}/>'
        )
    if kind == "polygon":
        return f'<polygon points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in s["points"])}" fill="{s["fill"]}"/>'
    weight = ' font-weight="bold"' if s["bold"] else ""
    return (
        f'<text x="{_n(s["x"])}" y="{_n(s["y"])}" font-size="{_n(s["size"])}" fill={quoteattr(s["color"])} '
        f'text-anchor="{s["anchor"]}"{weight}>{escape(_clean(s["words"]))}</text>'
    )


def _plot_shape(axes: Any, kind: str, s: dict[str, Any]) -> list[Any]:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Polygon, Rectangle

    if kind == "rect":
        edge = s["stroke"] if s["line"] else "none"
        box = Rectangle((s["x"], s["y"]), s["w"], s["h"], facecolor=s["fill"], edgecolor=edge, linewidth=s["line"])
        return [axes.add_patch(box)]
    if kind == "rects":
        corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in s["boxes"]]
        return [axes.add_collection(PolyCollection(corners, facecolors=s["fill"], edgecolors="none"))]
    if kind == "line":
        style = (0, (4, 3)) if s["dash"] else "solid"
        drawn: list[Any] = axes.plot(
            [s["x1"], s["x2"]],
            [s["y1"], s["y2"]],
            color=s["color"],
            linewidth=s["width"],
            linestyle=style,
            solid_capstyle="butt",
        )
        return drawn
    if kind == "polygon":
        return [axes.add_patch(Polygon(s["points"], closed=True, facecolor=s["fill"], edgecolor="none"))]
    align = {"start": "left", "middle": "center", "end": "right"}[s["anchor"]]
    words = _clean(s["words"]).replace("$", r"\$")
    weight = "bold" if s["bold"] else "normal"
    font: dict[str, Any] = {"fontsize": s["size"], "color": s["color"], "weight": weight}
    return [axes.text(s["x"], s["y"], words, ha=align, va="baseline", **font)]
