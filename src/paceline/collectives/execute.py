"""Schedules performed: on real tensors over sends and receives, or worked out at one place.

`perform` is one rank's part: it blocks, and is called in a thread of its own. `worked_out` is
what all ranks end with, to the same bits: what a rank receives in one step is added in the
schedule's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from paceline.collectives.schedules import transfers_of
from paceline.interfaces import ReduceOperation, Schedule, servers_of, switches_of

Combine = Callable[[torch.Tensor, torch.Tensor], object]


class Send(NamedTuple):
    """A part that leaves in a step."""

    to: int
    start: int
    stop: int


class Receipt(NamedTuple):
    """A part that comes in a step, and whether it is added."""

    source: int
    start: int
    stop: int
    adds: bool


class Step(NamedTuple):
    """What one rank does in a step."""

    sends: tuple[Send, ...]
    receipts: tuple[Receipt, ...]

    def touches_what_leaves(self, receipt: Receipt) -> bool:
        """Whether a part that comes lies where one leaves from."""
        return any(
            send.start < receipt.stop and receipt.start < send.stop
            for send in self.sends
        )


@lru_cache(maxsize=256)
def steps_of(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The steps in which *rank* has something to do."""
    found = []
    for number in range(schedule.steps):
        sends, receipts = [], []
        for t in transfers_of(schedule, number, rank):
            if not t.size:
                continue
            if t.source == rank:
                sends.append(Send(t.destination, t.offset, t.offset + t.size))
            if t.destination == rank:
                part = Receipt(t.source, t.offset, t.offset + t.size, t.adds)
                receipts.append(part)
        if sends or receipts:
            found.append(Step(tuple(sends), tuple(receipts)))
    return tuple(found)


def perform(
    steps: Sequence[Step],
    flat: torch.Tensor,
    combine: Combine,
    send: Callable[[torch.Tensor, int], Any],
    receive: Callable[[torch.Tensor, int], Any],
) -> None:
    """One rank's part, on its *flat* buffer, to the end. *send* and *receive* begin to move
    a tensor to or from a rank, and give something with a ``wait()``."""
    for step in steps:
        coming = []
        for receipt in step.receipts:
            part = flat[receipt.start : receipt.stop]
            beside = receipt.adds or step.touches_what_leaves(receipt)
            into = torch.empty_like(part) if beside else part
            coming.append((receive(into, receipt.source), part, into, receipt.adds))
        leaving = [send(flat[start:stop], to) for to, start, stop in step.sends]
        for work, *_ in coming:
            work.wait()
        for work in leaving:
            work.wait()
        for _, part, into, adds in coming:
            if adds:
                combine(part, into)
            elif into is not part:
                part.copy_(into)


def worked_out(
    schedule: Schedule, held: Sequence[torch.Tensor], combine: Combine
) -> None:
    """What all ranks end with, in their flat buffers *held*."""
    others = len(switches_of(schedule)) + len(servers_of(schedule))
    held = [*held, *(torch.zeros_like(held[0]) for _ in range(others))]
    for number in range(schedule.steps):
        moving = [
            (t, held[t.source][t.offset : t.offset + t.size].clone())
            for t in schedule.step(number)
            if t.size
        ]
        for t, values in moving:
            part = held[t.destination][t.offset : t.offset + t.size]
            if t.adds:
                combine(part, values)
            else:
                part.copy_(values)


def combining(operation: ReduceOperation) -> Combine:
    """How a part that comes is added: a mean is a sum, divided at the end."""
    if operation == "max":
        return lambda part, values: torch.maximum(part, values, out=part)
    return torch.Tensor.add_
