"""All-reduces over the workers of a job, under way on a server."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.interfaces.server_messages import Reduce, Reduced
from paceline.parameter_server.state_machine.members import Members
from paceline.parameter_server.state_machine.replies import Answers
from paceline.parameter_server.state_machine.sums import Sum


@dataclass
class Reduction:
    """One all-reduce under way."""

    operation: str
    like: torch.Tensor
    sum: Sum
    asked: list[Sender] = field(default_factory=list)

    def check(self, reduce: Reduce, payload: torch.Tensor, worker: int) -> None:
        """Raise `UsageError` unless a worker's part fits those that are in."""
        same = payload.numel() == self.like.numel() and payload.dtype == self.like.dtype
        if not same or reduce.operation != self.operation:
            raise UsageError(
                f"all-reduce {reduce.number} of channel {reduce.channel!r}: others sent "
                f"{self.like.numel()} elements of {self.like.dtype} for their "
                f"{self.operation}, worker {worker} sent {payload.numel()} of "
                f"{payload.dtype} for their {reduce.operation}; every rank must issue "
                "the same collectives in the same order"
            )
        if worker in self.sum.ranks:
            raise UsageError(
                f"all-reduce {reduce.number} of channel {reduce.channel!r}: worker "
                f"{worker} has sent its part before"
            )


class Reductions:
    """All take part that are here, or are to come; a reduction has ended, and is answered,
    when everybody's part is in."""

    def __init__(self, members: Members, answers: Answers) -> None:
        self._members = members
        self._answers = answers
        self._open: dict[tuple[str, int], Reduction] = {}
        """By channel and number."""
        self._added = 0

    def add(self, sender: Sender, reduce: Reduce, payload: torch.Tensor | None) -> None:
        """A worker's part has come; it is used up. Raises `UsageError`, with nothing
        changed, where it does not fit."""
        if payload is None:
            raise UsageError("reduce: expected a payload, got none")
        _check_reducible(reduce, payload)
        key = (reduce.channel, reduce.number)
        reduction = self._open.get(key)
        if reduction is None:
            adds = "max" if reduce.operation == "max" else "sum"
            reduction = Reduction(reduce.operation, payload, Sum(adds))
            self._open[key] = reduction
        reduction.check(reduce, payload, sender.worker)
        reduction.asked.append(sender)
        reduction.sum.add(sender.worker, payload, self._members.everybody())
        self.answer_ended()

    def answer_ended(self) -> None:
        """Answer all to which nobody's part is missing by now."""
        everybody = self._members.everybody()
        for key in list(self._open):
            reduction = self._open[key]
            reduction.sum.settle(everybody)
            if not reduction.sum.is_complete(everybody):
                continue
            del self._open[key]
            result = reduction.sum.result()
            if reduction.operation == "mean":
                result.div_(len(reduction.sum.ranks))
            self._added += reduction.sum.added_bytes
            for sender in reduction.asked:
                self._answers.send(sender, Reduced(), result)

    def take_added(self) -> int:
        """Bytes that were added up since this was last called."""
        added, self._added = self._added, 0
        return added


def _check_reducible(reduce: Reduce, payload: torch.Tensor) -> None:
    whole = not (payload.is_floating_point() or payload.is_complex())
    if (reduce.operation == "mean" and whole) or (
        reduce.operation == "max" and payload.is_complex()
    ):
        raise UsageError(f"reduce: {payload.dtype} has no {reduce.operation}")
