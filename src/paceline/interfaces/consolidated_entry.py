"""Agreement of ranks on the step after which they enter a collective ``optimizer.consolidated()``.

Ranks exchange a `ConsolidatedEntry`; if they are at different steps, each raises an error that names two of them.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal

import msgspec

from paceline.errors import UsageError


class ConsolidatedEntry(msgspec.Struct, frozen=True):
    """Position of a rank relative to a collective `consolidated` that another rank enters.

    - *training*, *count*: it is the *count*-th `consolidated` of this training.
    - *half*: twice the rank's completed steps, plus one between ``backward()`` and ``step()``.
    - *how*: the rank is "inside", on its way "beyond", or has "left".
    """

    training: int
    count: int
    half: int
    how: Literal["inside", "beyond", "left"]


class ConsolidatedEntries:
    """Ensures that all ranks enter a collective `consolidated` after the same step.

    A rank that enters tells all others. A rank that has begun a later step, or is out of data, replies
    with its entry. Messages go through *send*, beside the collectives, so steps do not wait for them.
    With *waits* an entering rank waits until all others have entered: otherwise its collectives could be
    matched with those of the others' steps.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._send: Callable[[ConsolidatedEntry], None] = lambda entry: None
        self._waits = False
        self._present = math.inf
        self._changed = threading.Condition()
        self._received: dict[tuple[int, int], dict[int, ConsolidatedEntry]] = {}
        self._counts: Counter[int] = Counter()
        self._begun: dict[int, int] = {}
        self._left: set[int] = set()
        self._trainings = 0

    def add(self) -> int:
        """Register one more training, on all ranks; returns its number."""
        self._trainings += 1
        return self._trainings

    def take_back(self, training: int) -> None:
        """Unregister the last training: a rank that failed to make it must not have its number."""
        assert training == self._trainings, "another training has begun since"
        self._trainings -= 1

    def connect(
        self, rank: int, send: Callable[[ConsolidatedEntry], None], *, waits: bool
    ) -> None:
        """Connect to the other ranks."""
        self._rank, self._send, self._waits = rank, send, waits

    def disconnect(self) -> None:
        """Receive no more messages."""
        with self._changed:
            self._waits = False
            self._changed.notify_all()

    def begins_anew(self, training: int) -> None:
        """A checkpoint was loaded, so the training's steps count from another number."""
        with self._changed:
            self._begun.pop(training, None)

    def goes_on(self, training: int, half: int) -> None:
        """This rank continues to *half* half steps.

        Raises:
            UsageError: Other ranks are inside after fewer.
        """
        self._begun[training] = half
        if self._received:
            with self._changed:
                inside = self._inside(training, half)
                if inside:
                    mine = self._answer(training)
                    raise _differ(*next(iter(inside.items())), self._rank, mine)

    def leaves(self, training: int) -> None:
        """This rank is out of data."""
        with self._changed:
            self._left.add(training)
            if self._inside(training):
                self._answer(training)

    def enter(self, training: int, half: int, *, without_left: bool) -> None:
        """Enter after *half* half steps; returns when all have entered.

        With *without_left*, ranks without data need not enter.

        Raises:
            UsageError: Another rank is at another step.
        """
        with self._changed:
            self._counts[training] += 1
            mine = ConsolidatedEntry(training, self._counts[training], half, "inside")
            received = self._received.setdefault((training, mine.count), {})
        self._send(mine)
        with self._changed:
            while True:
                for rank, entry in received.items():
                    fits = entry.how == "inside" and entry.half == half
                    if not fits and not (entry.how == "left" and without_left):
                        raise _differ(self._rank, mine, rank, entry)
                if not self._waits or len(received) >= self._present - 1:
                    break
                self._changed.wait()
            del self._received[training, mine.count]

    def receive(self, rank: int, entry: ConsolidatedEntry, present: int) -> None:
        """Handle a message of another *rank*; *present* ranks exist, with this one."""
        with self._changed:
            self._present = present
            self._changed.notify_all()
            if rank == self._rank:
                return  # this rank's own message, which returns with the number of ranks
            key = entry.training, entry.count
            is_next = entry.count == self._counts[entry.training] + 1
            if not is_next and key not in self._received:
                return  # this rank has already been inside
            self._received.setdefault(key, {})[rank] = entry
            beyond = self._begun.get(entry.training, 0) > entry.half
            elsewhere = beyond or entry.training in self._left
            if is_next and entry.how == "inside" and elsewhere:
                self._answer(entry.training)

    def _inside(
        self, training: int, before: float = math.inf
    ) -> dict[int, ConsolidatedEntry]:
        """The ranks that are inside after fewer half steps than *before*, while this rank is not."""
        received = self._received.get((training, self._counts[training] + 1), {})
        return {
            r: p for r, p in received.items() if p.how == "inside" and p.half < before
        }

    def _answer(self, training: int) -> ConsolidatedEntry:
        how: Literal["beyond", "left"] = "left" if training in self._left else "beyond"
        half = self._begun.get(training, 0) - (how == "beyond")
        mine = ConsolidatedEntry(training, self._counts[training] + 1, half, how)
        self._send(mine)
        return mine


def _differ(
    first: int, mine: ConsolidatedEntry, second: int, entry: ConsolidatedEntry
) -> UsageError:
    where = {
        "inside": f"rank {second} {_after(entry.half)}",
        "beyond": f"rank {second} goes on {_after(entry.half)}",
        "left": f"rank {second} is out of data {_after(entry.half)}",
    }
    return UsageError(
        f"consolidated() was entered by rank {first} {_after(mine.half)}; "
        f"{where[entry.how]}. Under this method its result is formed by all workers: enter it "
        "on all of them after the same step"
    )


def _after(half: int) -> str:
    step, inside = divmod(half, 2)
    return (
        f"between backward() and step() {step + 1}" if inside else f"after step {step}"
    )
