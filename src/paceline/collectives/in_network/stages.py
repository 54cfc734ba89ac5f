"""One worker's part of a sum around a ring of racks: its chunks and their order. No I/O.

After Rina (ICNP 2024: the idea; what follows is this project's own design). All workers of a rack
with an aggregator are one *group*, and every other worker is a group by itself. The sum is that of
a ring of G groups: in stage s, group p works on part (p - s) mod G.

================ ==================== ============================ =========================
stage            comes from the       what the group does          goes to
                 previous group
================ ==================== ============================ =========================
0                -                    sums its own                 the next group
1 to G - 2       a partial sum        adds its own                 the next group
G - 1            sum of all others    adds its own: the part is    all of its own, and the
                                      complete                     next group
G to 2 G - 3     a complete part      distributes it               all of its own, and the
                                                                   next group
2 G - 2          a complete part      distributes it               all of its own
================ ==================== ============================ =========================

With one group there is only stage 0, and its sum goes to all (SwitchML, ATP). A group of one worker
sends its own sums, and nothing in the last stage.

Chunks of all stages are one stream. Stages take turns in it, each a little behind the one before
(`STAGGER`). Summed parts load the link to the aggregator, distributed parts the link from it. So
both directions are busy at once.

A group's workers receive the previous group's chunks in turn. The worker whose turn it is, the
chunk's *agent*, adds the chunk to its own numbers. If parts are only distributed, the agent sends
the chunk for all. So all workers' links carry the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from paceline.collectives.in_network.wire import Integers, Mode

PIECES = 48
"""The number of chunks of a part, within the limits of a chunk's size: a smaller sum has smaller
chunks."""
FEWEST_BYTES = 12 << 10
"""Bytes of a chunk, at least, unless the whole part is smaller. A frame's fixed cost exceeds the
cost of these bytes."""
STAGGER = 4
"""Distance between the first stage and the last, in chunks of the stream: half a window."""


def chunk_elements(elements: int, groups: int, most_bytes: int) -> int:
    """The numbers in a chunk, the same on all ranks."""
    fair = -(-4 * elements // (groups * PIECES))
    size = min(max(fair, FEWEST_BYTES), most_bytes)
    return max(1, size // 4)


@lru_cache(maxsize=64)
def _in_order(stages: int, chunks: int, behind: int) -> list[int]:
    """The order of the stream: chunks of all stages, counted stage by stage.

    Each stage is *behind* chunks behind the one before.
    """
    stage = np.repeat(np.arange(stages), chunks)
    within = np.tile(np.arange(chunks), stages)
    found: list[int] = np.lexsort((stage, within + behind * stage)).tolist()
    return found


@dataclass(frozen=True)
class Stages:
    """The stages of group *position* of *groups*, in parts of *chunks* chunks.

    *alone*: the group is one worker without an aggregator. A *step* is a chunk of a stage, counted
    stage by stage.
    """

    groups: int
    position: int
    chunks: int
    alone: bool

    @property
    def steps(self) -> list[int]:
        """The step of each chunk of the group's stream."""
        stages = 2 * self.groups - 1
        # The distance is the same in all groups, so that no cycle of waits can form.
        behind = max(1, STAGGER // stages)
        return _in_order(stages - self.alone, self.chunks, behind)

    def row(self, step: int) -> int:
        """The chunk of the values that a step is about."""
        stage, within = divmod(step, self.chunks)
        return (self.position - stage) % self.groups * self.chunks + within

    def is_spread(self, step: int) -> bool:
        """Whether the step only distributes complete numbers."""
        return step >= self.groups * self.chunks

    def mode(self, step: int) -> Mode:
        """Where the step's sum goes."""
        stage = step // self.chunks
        if self.alone or stage < self.groups - 1:
            return Mode.FORWARD
        return Mode.LOCAL if stage == 2 * self.groups - 2 else Mode.ONWARD


class RingSum:
    """One worker's part of a sum around the ring: its *values*, int32 and flat, become the sums.

    *agent*: this worker's number among its group's agents, and how many there are. *first_before*:
    the number of the previous group's first chunk, in that group's stream.
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
        """For each chunk of the previous group: the step that waits for it."""
        self._is_mine = bytearray((2 * stages.groups - 1) * stages.chunks)
        """For each step: whether this worker is its agent."""
        self.awaited = 0
        """Chunks that are still to come from the previous group."""
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
        """Chunks of this worker's stream."""
        return len(self._steps)

    @property
    def chunks_before(self) -> int:
        """Chunks of the previous group's stream."""
        return len(self._coming)

    def is_ready(self, chunk: int) -> bool:
        """Whether this worker can send *chunk* now."""
        return bool(self._is_here[self._steps[chunk]])

    def is_silent(self, chunk: int) -> bool:
        """Whether another worker of the group sends *chunk* for all."""
        step = self._steps[chunk]
        return self._stages.is_spread(step) and not self._is_mine[step]

    def outgoing(self, chunk: int) -> tuple[Mode, Integers, int]:
        """Where *chunk*'s sum goes, this worker's numbers, and for how many workers they count."""
        step = self._steps[chunk]
        members = self._agents if self._stages.is_spread(step) else 1
        return self._stages.mode(step), self._numbers(step), members

    def sums(self, chunk: int) -> Integers:
        """Where the sum of this worker's group is stored."""
        return self._numbers(self._steps[chunk])

    def coming(self, chunk: int) -> tuple[Integers, bool]:
        """Where a chunk of the previous group is stored, and whether it is added there."""
        step = self._coming[chunk]
        return self._numbers(step), not self._stages.is_spread(step)

    def arrived(self, chunk: int) -> None:
        """Note that a chunk of the previous group has arrived; once for each."""
        self._is_here[self._coming[chunk]] = True
        self.awaited -= 1

    def _numbers(self, step: int) -> Integers:
        first = self._stages.row(step) * self._elements
        return self._values[first : first + self._elements]
