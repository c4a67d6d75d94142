"""Rows of the code table: E03, what mask, score, softmax and the other clauses mean."""

from __future__ import annotations

from attngen.diag.row import Code

MEANING: tuple[Code, ...] = (
    Code(
        "E0301",
        "operand-types",
        "an operator, function or def does not take the types given",
        """Types are bool, int (32-bit positions) and float. An int that meets a float becomes one; nothing else
converts by itself. `/` gives a float, `//` and `%` take ints.

    score = s + (kv_idx > q_pos)     # a bool is no number: s + (1.0 if kv_idx > q_pos else 0.0)
    mask = kv_idx and q_pos          # a number is no bool: kv_idx != 0 and q_pos != 0""",
    ),
    Code(
        "E0302",
        "mask-not-boolean",
        "a mask must be true or false for each pair of query and key",
        """A mask keeps a score where it is true and sets it to -inf elsewhere.

    mask = q_pos - kv_idx            # an int
    mask = kv_idx <= q_pos           # compare the two positions""",
    ),
    Code(
        "E0303",
        "not-a-number",
        "score, scale, sink, weight and epilogue are numbers",
        """    score = kv_idx <= q_pos          # a condition belongs into mask""",
    ),
    Code(
        "E0304",
        "clause-reads",
        "a clause reads what does not exist where it is evaluated",
        """The order is scale, score, mask, normalise, epilogue. A mask sees positions but no score; a sink and a
branch's weight are one value a row and see no key; the epilogue sees the output `o` and its column `d`, and no key or
score.

    sink = s                         # a value for each row: sinks[h]
    mask = s > 0.0                   # change scores in score""",
    ),
    Code(
        "E0305",
        "scale-not-constant",
        "scale reads something that varies inside a launch",
        """scale is one number for the whole call: constants, params and head_dim.

    scale = temperature[h]           # multiply in score instead: score = s * temperature[h]""",
    ),
    Code(
        "E0306",
        "bad-branches",
        "branches are not a difference or sum of several score sets",
        """O = sum over branches of weight * softmax(score) V takes two branches or more, and they share one set of
keys, so they do not meet segments.

    branch first  { weight = 1.0 }
    branch second { weight = -lam[h] }           # (each clause on its own line)""",
    ),
    Code(
        "E0307",
        "sink-without-softmax",
        "a sink needs the softmax normalizer",
        """A sink is one more logit in the sum that softmax divides by; sigmoid and relu have no such sum.

    normalizer = sigmoid
    sink = 0.0                       # remove one of the two""",
    ),
    Code(
        "E0309",
        "bad-v-view",
        "a view of K cannot serve as V",
        """`v = k[a:b]` makes V columns a to b - 1 of K; the slice lies inside K's head dim and agrees with V's where
that is given.

    head_dim = 576
    v        = k[0:512]""",
    ),
    Code(
        "E0310",
        "argument-range",
        "an argument of a def is outside of the bounds that the def asks for",
        """    mask = causal and window(0)      # window(keys: int >= 1)

No bound is said by leaving the term out; there is no -1. A param given to a bounded argument takes over its bounds,
and every call checks them.""",
    ),
    Code(
        "E0311",
        "bad-scale",
        "a constant scale is not finite, or not positive without a score expression",
        """scale multiplies every score. Without a score expression row maxima are taken before it, so it is positive.

    scale = log(-1.0)                # nan
    scale = -0.125                   # scale = 0.125 and score = -s

A scale that reads params is checked by every call (E0603).""",
    ),
    Code(
        "E0312",
        "division-by-zero",
        "a divisor is the literal zero",
        """`/`, `//` and `%` by a literal zero have no value.

    mask = kv_idx // 0 == 0          # divide by the length of a block, say
    score = s / 0.0                  # to drop keys, write a mask

What `//` and `%` give for a param or tensor element that happens to be zero at run time is unspecified: bound the
param, `param block: int >= 1`.""",
    ),
)
