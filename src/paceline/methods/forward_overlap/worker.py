"""One worker of a method that is exact and goes past backward.

Its semantics are bsp's, evaluated late: whatever looks at a parameter, or between
``backward()`` and ``step()`` at a gradient, waits for what it looks at. So a step ends for
the script when ``step()`` was called, and the optimizer is applied bucket by bucket, with
the hyperparameters of then, when a bucket's mean is in and something is about to use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.interfaces import Hyperparameters, Message, Pending, UpdatingRun
from paceline.interfaces.buckets import Bucket, stand_in_for, stands_in

WHOLE = 1 << 62
"""Bytes that no tensor has: pieces are whole tensors, which any optimizer may be given."""


@dataclass
class Due:
    """What of one step is to be done for *bucket*: messages to be waited for, and, once
    ``step()`` was called, an update *how* it was to be done then."""

    bucket: Bucket
    under_way: list[Pending] = field(default_factory=list)
    how: Hyperparameters | None = None


def everything(run: UpdatingRun) -> Iterable[Message]:
    """The plan; or else a message for each bucket, in the order in which they become ready."""
    if run.sending is not None:
        return run.sending
    return [Message(bucket.index) for bucket in run.buckets]


class LateWorker:
    """Its state. *send* starts one message of a bucket, and returns what is to be waited for;
    *messages*: those of a step, in the order in which they are sent."""

    def __init__(
        self,
        run: UpdatingRun,
        send: Callable[[UpdatingRun, Bucket, Message], Pending | None],
        messages: Callable[[UpdatingRun], Iterable[Message]] = everything,
    ) -> None:
        self._updater = run.partition_optimizer(WHOLE)
        self._send, self._messages = send, messages
        self._due: dict[int, Due] = {}  # by the bucket's number
        self._queue: list[Message] = []  # of this step, not yet sent

    # ---- a step ----

    def bucket_ready(self, run: UpdatingRun, bucket: Bucket) -> None:
        """Send what the plan allows: a message goes when its bucket is there and all before
        it in the plan have gone, so that all ranks send in one order."""
        if bucket.index == 0:  # a step that was skipped is forgotten
            self._due.clear()
            self._queue = list(self._messages(run))
        self._due[bucket.index] = Due(bucket)
        while self._queue and self._queue[0].bucket in self._due:
            message = self._queue.pop(0)
            due = self._due[message.bucket]
            pending = self._send(run, due.bucket, message)
            if pending is not None:
                due.under_way.append(pending)

    def backward_ended(self, run: UpdatingRun) -> None:
        if run.sending is None or not run.active:
            self.wait()

    def after_update(self, run: UpdatingRun) -> None:
        """``step()`` was called, or this worker only keeps the others company."""
        if not run.active:
            self.wait()
            self._due.clear()
            return
        how = self._updater.hyperparameters()
        for due in self._due.values():
            due.how = how
        if run.sending is None:
            self._clip(run)
            self.settle()

    def before_use(self, run: UpdatingRun, bucket: Bucket) -> None:
        due = self._due.get(bucket.index)
        if due is not None:
            self._settle(due)

    def buckets_rebuilt(self, run: UpdatingRun) -> None:
        """Gradients have moved into other buckets, and so do means that were under way."""
        before, self._due = self._due, {}
        means: dict[int, tuple[torch.Tensor, bool]] = {}
        for due in before.values():
            self._wait(due)
            old = due.bucket
            for row in zip(old.parameters, old.views, old.used, strict=True):
                means[id(row[0])] = row[1], row[2]
        for bucket in run.buckets if means else ():
            for slot, parameter in enumerate(bucket.parameters):
                mean, bucket.used[slot] = means[id(parameter)]
                bucket.views[slot].copy_(mean)
            self._due[bucket.index] = Due(bucket)

    # ---- all that is due ----

    def wait(self) -> None:
        """All means are in."""
        for due in self._due.values():
            self._wait(due)

    def settle(self) -> None:
        """All that was sent is in, and all updates that were asked for are done."""
        self.wait()
        due = [one for one in self._due.values() if one.how is not None]
        if due:
            self._apply(due)

    def finish(self, run: UpdatingRun) -> None:
        self.settle()
        source = run.participate_until_all_finish()
        if source is not None:
            run.broadcast_model(source)

    def _settle(self, due: Due) -> None:
        self._wait(due)
        if due.how is not None:
            self._apply([due])

    def _wait(self, due: Due) -> None:
        under_way, due.under_way = due.under_way, []
        for pending in under_way:
            pending.wait()

    def _apply(self, some: Sequence[Due]) -> None:
        """One step of the optimizer on the parameters of *some* buckets."""
        pieces, gradients = [], []
        for due in some:
            del self._due[due.bucket.index]
            for parameter, view in self._used(due.bucket):
                (piece,) = self._updater.pieces_of(parameter) or (None,)
                if piece is not None:
                    pieces.append(piece)
                    gradients.append(view)
        how = some[0].how
        assert how is not None
        self._updater.apply(pieces, gradients, how)

    def _clip(self, run: UpdatingRun) -> None:
        views = [v for due in self._due.values() for _, v in self._used(due.bucket)]
        run.clip(views)

    @staticmethod
    def _used(bucket: Bucket) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters that took part in the step on any worker, and their mean gradients."""
        rows = zip(bucket.parameters, bucket.views, bucket.used, strict=True)
        return ((parameter, view) for parameter, view, used in rows if used)


def part(bucket: Bucket, message: Message) -> torch.Tensor:
    """The elements of a bucket's buffer that *message* sends: cuts are at whole elements,
    the same on all ranks."""
    buffer, count = bucket.buffer, bucket.buffer.numel()
    flat = buffer[round(message.start * count) : round(message.stop * count)]
    if stands_in(buffer):  # few elements, and they may be fewer than its messages
        flat = flat if flat.numel() else buffer.new_zeros(1)
        stand_in_for(round((message.stop - message.start) * bucket.bytes), flat)
    return flat
