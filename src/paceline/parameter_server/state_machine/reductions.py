"""All-reduces on a server, in an order that does not depend on the speed of workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.interfaces.buckets import stand_alike, wire_bytes
from paceline.interfaces.server_messages import Reduce, Reduced
from paceline.parameter_server.state_machine.members import Members
from paceline.parameter_server.state_machine.replies import ReplyQueue


class Reductions:
    """The open all-reduces.

    Workers that are here, or are to come, take part. A reduction ends, and workers get its result,
    when the parts of all of them have arrived.
    """

    def __init__(self, members: Members, replies: ReplyQueue) -> None:
        self._members = members
        self._replies = replies
        self._open: dict[tuple[str, int], _Reduction] = {}
        """By channel and number."""
        self._added = 0

    def add(self, sender: Sender, reduce: Reduce, payload: torch.Tensor | None) -> None:
        """Add a worker's part, whose memory is reused.

        Raises `UsageError`, with nothing changed, if it does not fit.
        """
        if payload is None:
            raise UsageError("reduce: expected a payload, got none")
        _check_reducible(reduce, payload)
        key = (reduce.channel, reduce.number)
        reduction = self._open.get(key)
        if reduction is None:
            reduction = self._open[key] = _Reduction(reduce.operation, payload)
        reduction.check(reduce, payload, sender.worker)
        reduction.senders.append(sender)
        reduction.add(sender.worker, payload, self._members.everybody())
        self.finish_complete()

    def finish_complete(self) -> None:
        """End the reductions that have all parts by now, and answer their workers."""
        if not self._open:
            return
        everybody = self._members.everybody()
        for key in list(self._open):
            reduction = self._open[key]
            reduction.add_ready_parts(everybody)
            if not all(rank in reduction.ranks for rank in everybody):
                continue
            del self._open[key]
            result = reduction.result()
            self._added += reduction.added_bytes
            for sender in reduction.senders:
                self._replies.reply(sender, Reduced(), result)

    def take_added(self) -> int:
        """Return the bytes that were added since the last call."""
        added, self._added = self._added, 0
        return added


class _Reduction:
    """One open all-reduce: adds one tensor per worker in the order of ranks.

    So the bits are the same in all runtimes. A tensor that is early is held until those before it
    have arrived.
    """

    def __init__(self, operation: str, like: torch.Tensor) -> None:
        self.operation = operation
        self.senders: list[Sender] = []
        self.ranks: list[int] = []
        """Ranks whose tensors have arrived."""
        self.added_bytes = 0
        self._like = like.numel(), like.dtype
        self._early: dict[int, torch.Tensor] = {}
        self._total: torch.Tensor | None = None

    def check(self, reduce: Reduce, payload: torch.Tensor, worker: int) -> None:
        """Raise `UsageError` unless a worker's part fits the parts before."""
        elements, dtype = self._like
        same = (payload.numel(), payload.dtype) == self._like
        if not same or reduce.operation != self.operation:
            raise UsageError(
                f"all-reduce {reduce.number} of channel {reduce.channel!r}: others sent "
                f"{elements} elements of {dtype} for their "
                f"{self.operation}, worker {worker} sent {payload.numel()} of "
                f"{payload.dtype} for their {reduce.operation}; every rank must issue "
                "the same collectives in the same order"
            )
        if worker in self.ranks:
            raise UsageError(
                f"all-reduce {reduce.number} of channel {reduce.channel!r}: worker "
                f"{worker} has sent its part before"
            )

    def add(self, rank: int, tensor: torch.Tensor, expected: Sequence[int]) -> None:
        """Add a worker's *tensor*, whose memory is reused.

        *expected* are all workers that must still send parts, or have done so, in rank order.
        """
        self.ranks.append(rank)
        self._early[rank] = tensor
        self.add_ready_parts(expected)

    def add_ready_parts(self, expected: Sequence[int]) -> None:
        """Add all parts that can be added, with these workers *expected*."""
        first = min((r for r in expected if r not in self.ranks), default=None)
        for rank in sorted(self._early):
            if first is not None and rank > first:
                return
            self._put(self._early.pop(rank))

    def result(self) -> torch.Tensor:
        """Return the result, once all parts have arrived; it is the first rank's tensor."""
        assert self._total is not None, "nothing was added"
        assert not self._early, "parts are missing"
        if self.operation == "mean":
            self._total.div_(len(self.ranks))
        return self._total

    def _put(self, tensor: torch.Tensor) -> None:
        if self._total is None:
            self._total = tensor
            return
        self.added_bytes += wire_bytes(tensor)
        if self.operation == "max":
            torch.maximum(self._total, tensor, out=self._total)
        else:
            self._total.add_(tensor)
        stand_alike(self._total, tensor)


def _check_reducible(reduce: Reduce, payload: torch.Tensor) -> None:
    whole = not (payload.is_floating_point() or payload.is_complex())
    if (reduce.operation == "mean" and whole) or (
        reduce.operation == "max" and payload.is_complex()
    ):
        raise UsageError(f"reduce: {payload.dtype} has no {reduce.operation}")
