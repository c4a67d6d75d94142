"""Bounds on what a spec may hold. A spec is untrusted text; past a bound there is an error, never a hang or a crash."""

FILE_BYTES = 1 << 20
#: Files that one spec may include, itself counted.
FILES = 64
#: Depth of an expression: parentheses, calls and operators, after inlining too.
DEPTH = 128
#: Parentheses and brackets open at once in the text.
NESTING = 64
#: Nodes of one expression after `def` and `let` are inlined.
NODES = 20_000
#: Surface nodes visited while one spec is resolved (a def that ignores its argument costs visits, not nodes).
VISITS = 200_000
#: Diagnostics reported for one spec.
FAULTS = 20
NAME_CHARS = 64
STRING_CHARS = 4096
TENSOR_RANK = 8
#: Declarations of one kind in one attention block.
DECLARATIONS = 256
#: Attention blocks, defs and includes in one file.
ITEMS = 4096
HEAD_DIM = 4096
INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
FLOAT32_MAX = 3.4028234663852886e38
