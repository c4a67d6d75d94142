"""Rows of the code table: targets and feasibility (E04xx)."""

from __future__ import annotations

from attngen.diag.row import Code

TARGET: tuple[Code, ...] = (
    Code(
        "E0401",
        "unknown-target",
        "no kernels are generated for this architecture",
        """
A target is a GPU architecture by NVIDIA's name, such as `sm_90a` (Hopper). It comes from `--target` or `target=`, else
from ATTNGEN_TARGET, else from the spec's `target` clause, else it is sm_90a.

The message lists the targets that this version of attngen generates kernels for.
""",
    ),
    Code(
        "E0402",
        "not-served-yet",
        "the spec is valid, but no kernel of this target serves something that it uses",
        """
Everything in the language has its meaning from the first version on: it parses, is checked, and `attngen run`
computes it on the CPU by its dense meaning, as `attngen.ref.dense.attention` does on torch tensors.
Kernels follow part by part. What no kernel serves yet is refused here, with the clause at fault; it is never ignored.

    attention x {
      head_dim = 64
      layout   = paged                # refused for sm_90a: its kernels take no page table
    }

Take the mend that the message gives. `compile` needs a kernel, and so does `build` where there is a GPU; elsewhere
`build` warns with the reasons and gives a callable that runs the reference on CPU tensors.
""",
    ),
    Code(
        "E0403",
        "no-plan-fits",
        "no candidate tile fits the target with these head dims and this schedule",
        """
The planner tries tiles, K/V stages and register splits; each candidate was rejected by a pass, and the message gives
the three that came nearest with the number that decided, such as `smem 244 KB of 227 KB: tile 128x176`.

A `schedule` clause (or tile=, stages=) that asks for more than fits is the usual cause: leave those entries to the
planner, or ask for a smaller tile. `attngen explain SPEC --all` lists every candidate of a spec that fits.
""",
    ),
    Code(
        "E0404",
        "several-kernels",
        "one kernel is asked for, and the spec takes several",
        """
Branches and KV segments are kernels of their own: each part gives O and LSE, which are put together outside, O(N).
`build` does that. A file, a plan or a picture is of one part: name it, with `part="past"` or `--part past`.

    attention cache {
      head_dim = 64
      segment past {                 # kernels: main (the call's own k and v), past
      }
    }

`attngen compile SPEC -o FILE.py` without --part writes a file for each.
""",
    ),
    Code(
        "E0405",
        "no-such-part",
        "the spec has no part of this name",
        """
The parts of a spec are its branches; or `main`, the call's own keys, and its segments. A spec without either is one
kernel, and takes no part.
""",
    ),
    Code(
        "W0401",
        "element-wise-term",
        "a term of the mask is no interval of keys, and is tested element by element",
        """
A mask is read as intervals of keys, one or a few a row: their ends say which tiles are skipped, which run without a
mask, and where a masked tile is cut. A term that is no interval stays a test of every element in the tiles that the
other terms leave, and empties none of them:

    mask = kv_idx <= q_pos and present[b, kv_idx]          # causal skips tiles, `present` does not

The spec is good and its kernel right; `attngen check` says it as a note, `attngen explain` with the whole mask form.
Where the term can be said as an interval, the note says how.
""",
    ),
)
