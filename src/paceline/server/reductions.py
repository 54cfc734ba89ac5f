"""All-reduces under way on a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.messages import Reduce
from paceline.server.sums import Order, Sum


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
    """By channel and number. A reduction has ended when everybody's part is in."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], Reduction] = {}

    def add(
        self,
        sender: Sender,
        reduce: Reduce,
        payload: torch.Tensor | None,
        everybody: Sequence[int],
        order: Order,
    ) -> None:
        """A worker's part has come; it is used up. Raises `UsageError`, with nothing
        changed, where it does not fit."""
        if payload is None:
            raise UsageError("reduce: expected a payload, got none")
        _check_reducible(reduce, payload)
        key = (reduce.channel, reduce.number)
        reduction = self._open.get(key)
        if reduction is None:
            adds = "max" if reduce.operation == "max" else "sum"
            reduction = Reduction(reduce.operation, payload, Sum(order, adds))
            self._open[key] = reduction
        reduction.check(reduce, payload, sender.worker)
        reduction.asked.append(sender)
        reduction.sum.add(sender.worker, payload, everybody)

    def ended(
        self, everybody: Sequence[int]
    ) -> Iterator[tuple[list[Sender], torch.Tensor, int]]:
        """Those that have ended, each once: who asked, the result, bytes added up."""
        for key in list(self._open):
            reduction = self._open[key]
            reduction.sum.settle(everybody)
            if reduction.sum.is_complete(everybody):
                del self._open[key]
                result = reduction.sum.result()
                if reduction.operation == "mean":
                    result.div_(len(reduction.sum.ranks))
                yield reduction.asked, result, reduction.sum.added_bytes


def _check_reducible(reduce: Reduce, payload: torch.Tensor) -> None:
    whole = not (payload.is_floating_point() or payload.is_complex())
    if (reduce.operation == "mean" and whole) or (
        reduce.operation == "max" and payload.is_complex()
    ):
        raise UsageError(f"reduce: {payload.dtype} has no {reduce.operation}")
