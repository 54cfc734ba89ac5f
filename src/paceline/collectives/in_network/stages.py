"""One worker's part of a sum around a ring of racks: which chunks it sends, takes and adds, and in
which order. No I/O.

After Rina (ICNP 2024: the idea; what follows is this project's own design). All workers of a rack
that has an aggregator are one *group*, every other worker is one by himself. The sum is that of a
ring of G groups: group p of them deals in its stage s with part (p - s) mod G.

================ ==================== ============================ =========================
stage            comes from the       what the group does          goes to
                 group before
================ ==================== ============================ =========================
0                -                    sums its own                 the next group
1 to G - 2       sum of those before  adds its own                 the next group
G - 1            sum of all others    adds its own: the part is    all of its own, and the
                                      whole                        next group
G to 2 G - 3     a whole part         spreads it                   all of its own, and the
                                                                   next group
2 G - 2          a whole part         spreads it                   all of its own
================ ==================== ============================ =========================

With one group stage 0 is all there is, and its sum goes to all (SwitchML, ATP). A group of one
worker sends its own sums, and no more in the last stage.

Chunks of all stages are one stream. Stages take turns in it, each a little behind the one before
(`STAGGER`): parts that are summed load the way to the aggregator, parts that are spread
the way from it, and so both ways are busy at once.

What comes for a group its workers take in turn, chunk by chunk; the one whose turn it is, the
chunk's *agent*, adds it to its own, and brings it where it is spread, for all. So no worker's link
carries more than another's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from paceline.collectives.in_network.wire import Integers, Mode

PIECES = 48
"""Of a part: chunks are smaller where a sum is."""
FEWEST_BYTES = 12 << 10
"""Of a chunk that is not the whole part: a frame costs more than these."""
STAGGER = 4
"""Chunks of the stream that all stages together are apart: half a window."""


def chunk_elements(elements: int, groups: int, most_bytes: int) -> int:
    """How many numbers a chunk has, the same on all ranks."""
    fair = -(-4 * elements // (groups * PIECES))
    size = min(max(fair, FEWEST_BYTES), most_bytes)
    return max(1, size // 4)


@lru_cache(maxsize=64)
def _in_order(stages: int, chunks: int, behind: int) -> list[int]:
    """Which chunk of all stages, counted stage by stage, comes when in the stream, where each
    stage is so many *behind* the one before."""
    stage = np.repeat(np.arange(stages), chunks)
    within = np.tile(np.arange(chunks), stages)
    found: list[int] = np.lexsort((stage, within + behind * stage)).tolist()
    return found


@dataclass(frozen=True)
class Stages:
    """What group *position* of *groups* does, in parts of so many *chunks*; *alone*: it is
    one worker without an aggregator. A *step* is a chunk of a stage, counted stage by stage."""

    groups: int
    position: int
    chunks: int
    alone: bool

    @property
    def steps(self) -> list[int]:
        """The step of each chunk of the group's stream."""
        stages = 2 * self.groups - 1
        behind = max(1, STAGGER // stages)  # the same in all groups: no circle
        return _in_order(stages - self.alone, self.chunks, behind)

    def row(self, step: int) -> int:
        """Which chunk of the values a step is about."""
        stage, within = divmod(step, self.chunks)
        return (self.position - stage) % self.groups * self.chunks + within

    def is_spread(self, step: int) -> bool:
        """Whether its numbers are whole already, and only spread."""
        return step >= self.groups * self.chunks

    def mode(self, step: int) -> Mode:
        """Where its sum goes."""
        stage = step // self.chunks
        if self.alone or stage < self.groups - 1:
            return Mode.FORWARD
        return Mode.LOCAL if stage == 2 * self.groups - 2 else Mode.ONWARD


class RingSum:
    """One worker's *values*, int32 and flat, become the sums over all workers of the ring.

    *agent*: which of how many agents of its group this worker is. *first_before*: the number of
    the first chunk that comes from the group before, in that one's stream.
    """

    def __init__(
        self,
        values: Integers,
        elements: int,
        stages: Stages,
        before: Stages | None,
        agent: tuple[int, int] = (0, 1),
        first_before: int = 0,
    ) -> None:
        self._values, self._elements = values, elements
        self._stages, self._agents = stages, agent[1]
        self._steps = stages.steps
        self._coming: list[int] = []
        """Of each chunk of the group before: the step that waits for it."""
        self._is_mine = bytearray((2 * stages.groups - 1) * stages.chunks)
        """Of each step: whether this worker is its agent."""
        self.awaited = 0
        """Chunks that are to come from the group before."""
        if before is not None:
            number, count = agent
            self._coming = [step + stages.chunks for step in before.steps]
            for k, step in enumerate(before.steps):
                mine = (first_before + k) % count == number
                if mine and before.mode(step) != Mode.LOCAL:
                    self._is_mine[step + stages.chunks] = True
                    self.awaited += 1
        self._is_here = bytearray(1 - mine for mine in self._is_mine)

    @property
    def chunks(self) -> int:
        """Of this worker's stream."""
        return len(self._steps)

    @property
    def chunks_before(self) -> int:
        """Of the stream of the group before."""
        return len(self._coming)

    def is_ready(self, chunk: int) -> bool:
        """Whether this worker can send it."""
        return bool(self._is_here[self._steps[chunk]])

    def is_silent(self, chunk: int) -> bool:
        """Whether another worker of the group brings it for all."""
        step = self._steps[chunk]
        return self._stages.is_spread(step) and not self._is_mine[step]

    def outgoing(self, chunk: int) -> tuple[Mode, Integers, int]:
        """Where its sum goes, what this worker contributes, and for how many."""
        step = self._steps[chunk]
        members = self._agents if self._stages.is_spread(step) else 1
        return self._stages.mode(step), self._numbers(step), members

    def sums(self, chunk: int) -> Integers:
        """Where the sum of this worker's group belongs."""
        return self._numbers(self._steps[chunk])

    def coming(self, chunk: int) -> tuple[Integers, bool]:
        """Where what comes from the group before belongs, and whether it is to be added to
        what is there."""
        step = self._coming[chunk]
        return self._numbers(step), not self._stages.is_spread(step)

    def arrived(self, chunk: int) -> None:
        """It is there: once for each."""
        self._is_here[self._coming[chunk]] = True
        self.awaited -= 1

    def _numbers(self, step: int) -> Integers:
        first = self._stages.row(step) * self._elements
        return self._values[first : first + self._elements]
