"""A server's discipline, together with the shard that it sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import UsageError
from paceline.interfaces import (
    Coordinated,
    Discipline,
    HeldPush,
    Informed,
    InParts,
    Shard,
    Sparing,
    Timed,
)
from paceline.server.clipping import ClippedSteps


class BoundDiscipline:
    """What `Discipline` and its extensions ask, about *shard*. Where a server only reduces
    there is no discipline: nothing changes then, and all begin with step 0. What steps are
    clipped with stands between both, where they are."""

    def __init__(self, shard: Shard, discipline: Discipline | None) -> None:
        self._plain = self._shard = shard
        self.clipped: ClippedSteps | None = None
        self.bind(discipline)

    def bind(
        self,
        discipline: Discipline | None,
        clip: Callable[[], ClippedSteps | None] = lambda: None,
    ) -> None:
        """Begin with this one; *clip* makes what steps are clipped with."""
        self._unused, self._clip = copy.deepcopy(discipline), clip
        self._begin(discipline)

    def renew(self) -> None:
        """Drop all that is held and known, and begin again as at the start."""
        self._begin(copy.deepcopy(self._unused))

    def _begin(self, discipline: Discipline | None) -> None:
        self.discipline = discipline
        self.clipped = clipped = self._clip()
        self._shard = self._plain if clipped is None else clipped
        # Looked up once: to ask whether an object fits a protocol takes 16 us.
        self._timed = discipline if isinstance(discipline, Timed) else None
        self._in_parts = discipline if isinstance(discipline, InParts) else None
        self._informed = discipline if isinstance(discipline, Informed) else None
        self.spares = isinstance(discipline, Sparing) and discipline.spares

    @property
    def _present(self) -> Discipline:
        assert self.discipline is not None
        return self.discipline

    # ---- the `Discipline` ----

    def pushed(self, push: HeldPush) -> None:
        self._present.pushed(self._shard, push)
        self._settle()

    def changed(self) -> None:
        if self.discipline is not None:
            self.discipline.changed(self._shard)
            self._settle()

    def first_step(self) -> int:
        return 0 if self.discipline is None else self.discipline.first_step(self._shard)

    def may_pull(self, step: int, bucket: int) -> bool:
        if self.clipped is not None and self.clipped.holds(bucket):
            return False
        return self._present.may_pull(self._shard, step, bucket)

    def ended(self) -> int | None:
        if self.clipped is not None and not self.clipped.is_between_steps():
            return None
        return self._present.ended(self._shard)

    def resume(self, step: int) -> None:
        self._present.resume(self._shard, step)
        if self.clipped is not None:
            self.clipped.resume(step)

    # ---- what only some can ----

    def next_deadline(self) -> float | None:
        return None if self._timed is None else self._timed.next_deadline()

    def timer(self, now: float) -> None:
        """Call the discipline's, if its deadline is reached."""
        deadline = self.next_deadline()
        if self._timed is not None and deadline is not None and now >= deadline:
            self._timed.timer(self._shard)
            self._settle()

    def decided(self, step: int, workers: Sequence[int]) -> None:
        if not isinstance(self.discipline, Coordinated):
            raise UsageError("decide: nothing is decided under this method")
        self.discipline.decided(self._shard, step, workers)
        self._settle()

    def waits_for_norm(self) -> bool:
        """Whether workers are to tell what lets pushes go."""
        return self.clipped is not None and not self.clipped.is_between_steps()

    def _settle(self) -> None:
        if self.clipped is not None:
            self.clipped.settle()

    @property
    def takes_parts(self) -> bool:
        """Whether pushes may be of some units, and of late ones."""
        return self._in_parts is not None

    def has(self, step: int, bucket: int, units: Sequence[int]) -> bool:
        in_parts = self._in_parts
        return in_parts is None or in_parts.has(self._shard, step, bucket, units)

    def read_report(self, report: bytes) -> Any:
        if self._informed is None:
            raise UsageError("push: this method takes no reports")
        return self._informed.read_report(self._shard, report)

    def tells(self, bucket: int) -> bytes:
        return b"" if self._informed is None else self._informed.tells(bucket)
