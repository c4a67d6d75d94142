"""Tuned: which plans measured best for a class of specs on one chip, as plain data that the search can follow."""

from __future__ import annotations

from typing import Literal

from attngen.ir.base import Node
from attngen.ir.plan import Maxima

Direction = Literal["forward", "backward"]


class Choice(Node):
    """What names one plan: of the forward everything that a `schedule` clause can ask for, and where O lives; of the
    backward its step, with the stages of Q, and CTAs in pairs where operands are split.
    """

    tile_m: int
    tile_n: int
    stages: int
    order: Literal["linear", "lpt"]
    pingpong: bool
    o_in_q: bool
    #: Two CTAs are a cluster.
    pairs: bool = False
    #: None in records from before there was a choice: by rule.
    maxima: Maxima | None = None

    @property
    def text(self) -> str:
        """As a table shows it: `192x128, 2 stages, lpt, ping-pong`."""
        words = [f"{self.tile_m}x{self.tile_n}", f"{self.stages} stage{'s' * (self.stages != 1)}", self.order]
        words += ["ping-pong"] * self.pingpong + ["O in Q"] * self.o_in_q
        words += ["CTAs in pairs"] * self.pairs + ["maxima of ints"] * (self.maxima is Maxima.INTS)
        return ", ".join(words)


class Rate(Node):
    """What one choice measured: TFLOP/s of kept pairs at each of the record's lengths."""

    choice: Choice
    tflops: tuple[float, ...]


class Tuned(Node):
    """The outcome of one tuning run.

    `plans[i]` serves max(seqlen_q, seqlen_kv) <= limits[i], the last one all others, as in a PlanSet: lengths are the
    classes of shapes, those that a row reaches where a mask bounds them.
    """

    chip: str
    #: What was measured, for a reader: FILE/BLOCK of an example where the record ships, and its head dims.
    spec: str
    head_dims: tuple[int, int]
    #: Query heads of a KV head that share a row tile.
    pack: int = 1
    direction: Direction = "forward"
    #: What finds the record: `attngen.tuned.spec_class`.
    spec_class: str
    lengths: tuple[int, ...]
    plans: tuple[Choice, ...]
    limits: tuple[int, ...]
    rates: tuple[Rate, ...]
