"""Performs schedules on tensors: one rank's part over sends and receives, or all ranks in one
process.

`perform` is one rank's part. It blocks, so callers run it in a thread of its own. `simulate_values`
computes all ranks' results with the same bits, since additions follow the schedule's order.
`gloo_sum` has the bits of gloo's own all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from paceline.interfaces import ReduceOperation, Schedule

Combine = Callable[[torch.Tensor, torch.Tensor], object]


class Send(NamedTuple):
    """A part of the buffer that a rank sends in a step."""

    to: int
    start: int
    stop: int


class Receipt(NamedTuple):
    """A part that a rank receives in a step; *adds*: it is added to the buffer."""

    source: int
    start: int
    stop: int
    adds: bool


class Step(NamedTuple):
    """The sends and receives of one rank in one step."""

    sends: tuple[Send, ...]
    receipts: tuple[Receipt, ...]

    def touches_what_leaves(self, receipt: Receipt) -> bool:
        """Whether a received part overlaps a part that is sent in the same step."""
        return any(
            send.start < receipt.stop and receipt.start < send.stop
            for send in self.sends
        )


@lru_cache(maxsize=256)
def steps_of(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The steps of *schedule* in which *rank* sends or receives."""
    found = []
    for transfers in schedule.own_steps(rank):
        sends, receipts = [], []
        for t in transfers:
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
    """Perform one rank's part on its *flat* buffer; returns when it is complete.

    *send* and *receive* start a transfer to or from a rank, and return a handle with ``wait()``.
    """
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


def simulate_values(
    schedule: Schedule, held: Sequence[torch.Tensor], combine: Combine
) -> None:
    """Replace the ranks' flat buffers *held* by the results of *schedule*."""
    if not schedule.performable:
        total = held[0].clone()
        for other in held[1:]:
            combine(total, other)
        for one in held:
            one.copy_(total)
        return
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


def reduce_function(operation: ReduceOperation) -> Combine:
    """Return the in-place function that combines a received part. A mean is summed, and divided at
    the end."""
    if operation == "max":
        return lambda part, values: torch.maximum(part, values, out=part)
    return torch.Tensor.add_
