"""What can be used, and what a trial of two of them tells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bucketing.message_plan import UNITS, Plan
from paceline.bucketing.trial import Verdict, judge
from paceline.interfaces import Half, Message

Groups = list[list[int]]

HALVES: tuple[Half, ...] = ("all", "scatter", "gather")


@dataclass(frozen=True)
class Agreed:
    """Seconds that ranks have agreed on, in ready order: when gradients are ready, and when
    tensors are first used (nothing, where that is of no interest)."""

    ready: list[float]
    uses: list[float]


@dataclass(frozen=True)
class Side:
    """Buckets, and in which messages they travel past backward, if they do."""

    groups: Groups
    sending: tuple[Message, ...] | None = None

    def __str__(self) -> str:
        buckets = _counted(len(self.groups), "bucket")
        if self.sending is None:
            return buckets
        return f"{buckets} in {_counted(len(self.sending), 'message')}"


class Trial:
    """Rounds in which a plan and what it would replace took turns. *otherwise*: what is done
    if the plan is not used."""

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise
        self._rounds: list[tuple[float, float]] = []
        self._verdict: Verdict | None = None

    @property
    def is_over(self) -> bool:
        """Whether it can be told."""
        return self._verdict is not None

    @property
    def verdict(self) -> Verdict:
        """What it tells, once it is over."""
        assert self._verdict is not None
        return self._verdict

    def add_round(self, new: float, old: float, spread: float) -> None:
        """Seconds of both sides, and the relative *spread* of what they are from."""
        self._rounds.append((new, old))
        ratios = [new / old if old else 1.0 for new, old in self._rounds]
        self._verdict = judge(ratios, spread, self._otherwise)

    @property
    def new(self) -> str:
        """The time of the plan, for people."""
        return _milliseconds([new for new, _ in self._rounds])

    @property
    def old(self) -> str:
        """The time of what it would replace, for people."""
        return _milliseconds([old for _, old in self._rounds])


def to_numbers(plan: Plan) -> list[int]:
    """A plan as whole numbers: the bucket of each position, then four of each message."""
    bucket_of = {p: number for number, group in enumerate(plan.groups) for p in group}
    numbers = [bucket_of[position] for position in range(len(bucket_of))]
    for message in plan.messages:
        parts = round(message.start * UNITS), round(message.stop * UNITS)
        numbers += [message.bucket, *parts, HALVES.index(message.half)]
    return numbers


def from_numbers(numbers: Sequence[int], count: int) -> Plan:
    """The plan of *count* tensors that `to_numbers` wrote."""
    groups: Groups = [[] for _ in range(max(numbers[:count]) + 1)]
    for position, bucket in enumerate(numbers[:count]):
        groups[bucket].append(position)
    messages = []
    for at in range(count, len(numbers), 4):
        bucket, start, stop, half = numbers[at : at + 4]
        messages.append(Message(bucket, start / UNITS, stop / UNITS, HALVES[half]))
    return Plan(groups, tuple(messages))


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.4g} ms"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")
