"""Rows of the code table: tools around the compiler (E054x)."""

from __future__ import annotations

from attngen.diag.row import Code

TOOLS: tuple[Code, ...] = (
    Code(
        "E0540",
        "no-matplotlib",
        "a PNG was asked for and matplotlib is not installed",
        """
attngen writes SVG by itself; PNG goes through matplotlib, which is an optional dependency.

Install it with `pip install 'attngen[draw]'`, or write an .svg in place of the .png:

    attngen explain examples/causal.attn --svg mask.svg
""",
    ),
    Code(
        "E0541",
        "no-machine-code-tools",
        "ptxas or nvdisasm is not installed, so machine code cannot be inspected",
        """
Registers, spills and instruction counts of a kernel are read with NVIDIA's command-line tools, which come as pip
packages and are needed for development only. Compiling and running kernels does without them.

Install them with `pip install 'attngen[dev]'`.
""",
    ),
    Code(
        "E0542",
        "ptx-refused",
        "ptxas refuses the PTX of a kernel",
        """
The CuTe DSL compiled a plan to PTX and ptxas does not accept it. The tools must not be older than the DSL: PTX of
version 9.4 needs ptxas 13.4 or newer. With `pip install 'attngen[dev]'` both have the versions that belong together.

If the versions agree, it is a fault of the generated kernel: please report it with the kernel file.
""",
    ),
)
