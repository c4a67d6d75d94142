"""Pictures: a mask with its tile classes and loop segments, a benchmark's bars. SVG by hand, PNG through matplotlib.

`tiles` computes what the kernel's loop does, `mask` draws it, `chart` draws bars, `canvas` writes SVG or PNG.
"""

from attngen.draw.canvas import Canvas
from attngen.draw.mask import draw_mask

__all__ = ["Canvas", "draw_mask"]
