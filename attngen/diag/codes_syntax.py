"""Rows of the code table: E01, text that does not read as a spec."""

from __future__ import annotations

from attngen.diag.row import Code

SYNTAX: tuple[Code, ...] = (
    Code(
        "E0101",
        "unexpected-token",
        "a word or sign stands where the grammar allows others",
        """The message lists what may stand there. A clause ends where its expression ends, so a missing operator
shows at the next word, and a missing bracket shows at the next clause or brace.

    mask = kv_idx q_pos              # expected an operator

Write the missing part:

    mask = kv_idx <= q_pos""",
    ),
    Code(
        "E0102",
        "unexpected-character",
        "a character that no part of the language starts with",
        """Names, numbers and operators are ASCII. Other letters may stand in comments and doc texts; control and
direction characters may stand nowhere, because they could hide what a spec says.

    mask = kv_idx <= q_pos && true   # write `and`
    score = s * .5                   # write `0.5`""",
    ),
    Code(
        "E0103",
        "unknown-word",
        "a clause, or an item of the file, starts with an unknown word",
        """    maks = kv_idx <= q_pos           # did you mean `mask`?

Clause words: head_dim v dtype layout scale param tensor let score mask sink normalizer epilogue output branch segment
block_sparse schedule backward target. A file holds include, def and attention; a branch or segment holds mask, score,
sink and weight.""",
    ),
    Code(
        "E0104",
        "unclosed-text",
        "a text in double quotes is not closed, or holds an unknown escape",
        r"""A text ends on its own line; inside, `\"` is a quote and `\\` a backslash, and there are no other escapes.

    "Causal attention                # add the closing quote

Several texts in a row make a doc of several lines:

    "Causal attention."
    "Query heads share KV heads."
    attention causal { … }""",
    ),
    Code(
        "E0105",
        "no-language-line",
        "the file does not start with `attn 1`",
        """Only comments may stand before it. The line says which version of the language the file is written in, so
that old files keep their meaning when the language grows.

    attn 1

    attention full { head_dim = 128 }""",
    ),
    Code(
        "E0106",
        "unknown-version",
        "the file is written in a language version that this attngen does not know",
        """This attngen reads version 1: write `attn 1`, or install an attngen that knows the version named.""",
    ),
    Code(
        "E0107",
        "file-ends-early",
        "the file ends inside an expression, a clause or a block",
        """    attention causal {
      head_dim = 128
      mask = kv_idx <= q_pos         # the `}` that closes the block is missing

The second place in the message is the bracket that was never closed.""",
    ),
    Code(
        "E0108",
        "too-large",
        "a bound on the size of a spec is passed",
        """A spec is untrusted text, so everything in it is bounded: 1 MiB a file, 64 files, 64 brackets open at once,
expressions of 20 000 operations and 128 deep after `def` and `let` are inlined, names of 64 characters, doc lines of
4096, 256 declarations in a block.

A long chain is as deep as it is long, `a or b or c or …`; grouped, `(a or b) or (c or d)`, it is not. Data (tables of
slopes, block patterns) belongs in a captured tensor:

    tensor slopes: f32[heads_q]
    score = s - slopes[h] * (q_pos - kv_idx)""",
    ),
    Code(
        "E0109",
        "two-on-one-line",
        "two clauses stand on one line",
        """    mask = kv_idx <= q_pos score = s     # put a new line before `score`

A new line separates clauses; a comma or a new line separates the entries of a block:

    schedule { tile = 128 x 128, order = lpt }""",
    ),
    Code(
        "E0110",
        "unreadable-file",
        "a spec file cannot be read",
        """The message gives the system's reason. Give the path of a UTF-8 text file, or the text itself: a Python str
with a line break or a brace in it is taken as text.""",
    ),
    Code(
        "E0111",
        "number-out-of-range",
        "a number does not fit 32 bits",
        """Positions and lengths are 32-bit ints, from -2147483648 to 2147483647; floats are 32-bit too, up to about
3.4e38.

    score = s * 10000000000          # an int; write 1.0e10 for a float""",
    ),
    Code(
        "E0112",
        "no-spec-text",
        "a Python value given to make_spec cannot be written in a spec",
        """Names and words are ASCII words, numbers are finite, expressions are strings in spec spelling.

    make_spec("my spec", head_dim=64)            # write "my_spec"
    make_spec("local", head_dim=64, mask=True)   # fine: true is a mask""",
    ),
)
