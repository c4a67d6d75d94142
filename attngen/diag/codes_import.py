"""Rows of the code table: E07 functions and options of other libraries."""

from __future__ import annotations

from attngen.diag.row import Code

IMPORT: tuple[Code, ...] = (
    Code(
        "E0701",
        "untraceable-operation",
        "a traced function uses an operation that the language does not have",
        "from_flex runs the function once on stand-ins and writes down what torch computes on them. A spec has "
        "arithmetic, comparisons, where, exp, log, sqrt, tanh, sigmoid, floor, abs, minimum, maximum, and loads "
        "from captured tensors.\n"
        "\n"
        "    def score_mod(score, b, h, q_idx, kv_idx):\n"
        "        return score + torch.sin(q_idx - kv_idx)       # no sine in a spec\n"
        "\n"
        "Compute such a thing into a tensor before the call, and index it: `score + wave[q_idx - kv_idx + n]`.",
    ),
    Code(
        "E0702",
        "python-on-traced-value",
        "a traced function asks Python for the value of a traced tensor",
        "The function runs once for all pairs, so a score or an index has no value while it runs: `if`, `and`, `or`, "
        "`not`, min, max, int(), .item(), range and print cannot have one.\n"
        "\n"
        "    return score if q_idx >= kv_idx else 0.0           # torch.where(q_idx >= kv_idx, score, 0.0)\n"
        "    return q_idx >= kv_idx and q_idx < 100             # (q_idx >= kv_idx) & (q_idx < 100)\n"
        "\n"
        "Write torch.where for if, `&`, `|`, `~` for and, or, not, torch.minimum for min. Branches on captured Python "
        "numbers are fine: they are taken once.",
    ),
    Code(
        "E0703",
        "in-place-in-trace",
        "a traced function changes a tensor in place",
        "    score += bias[h]                                   # score = score + bias[h]\n"
        "\n"
        "A spec's expressions have no state. Make a new value, and change captured tensors outside the function.",
    ),
    Code(
        "E0704",
        "bad-mod",
        "a function to be traced has the wrong signature, raises, or returns what is no score or condition",
        "score_mod(score, b, h, q_idx, kv_idx) returns a number, mask_mod(b, h, q_idx, kv_idx) a condition. What "
        "else a function needs is captured, or bound with functools.partial.\n"
        "\n"
        "    def mask_mod(b, h, q_idx, kv_idx):\n"
        "        return q_idx - kv_idx                          # an int: write `q_idx >= kv_idx`",
    ),
    Code(
        "E0705",
        "bad-capture",
        "a captured tensor has no declaration, or is not indexed down to one element",
        "A spec's tensors are bf16, fp16, f32, i32 and bool, and an expression reads one element, with an int index on "
        "each axis.\n"
        "\n"
        "    return score + bias[h]                             # bias has 3 axes: bias[h, q_idx, kv_idx]\n"
        "\n"
        "Index every axis; slice, convert and flatten tensors before the function captures them.",
    ),
    Code(
        "E0706",
        "bad-import-option",
        "an option of another library has no spec, or contradicts another option",
        '    attngen.from_flash(head_dim=64, window_size=(-3, 0))   # -1 is "no bound", -3 is nothing\n'
        "\n"
        "The message says what the option may be. Dropout has no spec.",
    ),
)
