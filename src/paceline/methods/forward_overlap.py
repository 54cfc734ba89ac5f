"""Methods that are exact, and whose messages travel past the end of backward.

- `priority`: what the next forward pass uses first is sent first.
- `dear`: a sum's first half beside backward, the second beside the next forward pass.

Priority order is ByteScheduler's (Peng et al., SOSP 2019) and P3's (Jayarajan et al., MLSys 2019):
gradients are cut into pieces, pieces of the layers that compute first overtake others, and the next
forward pass waits layer by layer instead of for all at once. Where both order pieces while
they run, by a race that all-reduces cannot have, here the order is a plan that all ranks
share (`paceline.bucketing.message_plan`; unequal pieces as in US-Byte, Gao et al., 2023).

DeAR is Zhang, Shi, Chu and Li, "DeAR: Accelerating Distributed Deep Learning with Fine-Grained
All-Reduce Pipelining" (ICDCS 2023): each all-reduce is cut into its two halves, and of these only the
first must follow backward's order. The second halves go in the order in which the next
forward pass uses the tensors, which waits for them layer by layer.

Differs from DeAR's code: every optimizer can be used, with the hyperparameters of
``step()``; an evaluation, a checkpoint and the end see the last step; and a module may be called
twice, not at all, or in another order.

Theory of operation
-------------------
Semantics are bsp's, evaluated late: whatever looks at a parameter, or between
``backward()`` and ``step()`` at a gradient, waits for what it looks at. So a step ends for
the script when ``step()`` was called, and the optimizer is applied bucket by bucket, with
the hyperparameters of then, when a bucket's mean is in and something is about to use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from paceline.interfaces import (
    EVERY_STEP,
    Bucket,
    Clips,
    Consistency,
    GradientSeen,
    Hyperparameters,
    Message,
    MethodSummary,
    Pending,
    Rounds,
    Scattered,
    UpdatesOn,
    UpdatingRun,
)
from paceline.interfaces.buckets import stand_in_for, stands_in

WHOLE = 1 << 62
"""Bytes that no tensor has: pieces are whole tensors, which any optimizer may be given."""


@dataclass(frozen=True, kw_only=True)
class Priority:
    """Average every gradient in every step, and wait for each where it is used."""

    name: ClassVar[str] = "priority"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="every worker, in every step, bucket by bucket before something uses it",
        sends="the whole gradient, while backward and the next forward compute",
        guarantees=(
            "bsp's result, to the bit where sums are added in the same order; whoever "
            "looks at the model, or at a gradient, sees what bsp would show there"
        ),
    )
    rounds: ClassVar[Rounds] = EVERY_STEP
    consistency: ClassVar[Consistency] = "exact"
    updates_on: ClassVar[UpdatesOn] = "method"
    visible_gradient: ClassVar[GradientSeen] = "mean"
    clips: ClassVar[Clips] = "mean"
    waits_in_forward: ClassVar[bool] = True

    def start(self, run: UpdatingRun) -> OverlapWorker:
        return OverlapWorker(run)


@dataclass(frozen=True, kw_only=True)
class DeAR(Priority):
    """Average every gradient in every step, in two halves, and wait for the second where it
    is used."""

    name: ClassVar[str] = "dear"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="every worker, in every step, bucket by bucket before something uses it",
        sends=(
            "the whole gradient, one half of each sum while backward computes, the "
            "other while the next forward does"
        ),
        guarantees=(
            "bsp's result, to the bit that of its `collective=ring` (or of the "
            "collective that is asked for); whoever looks at the model, or at a "
            "gradient, sees what bsp would show there"
        ),
    )
    sends_halves: ClassVar[bool] = True

    def start(self, run: UpdatingRun) -> OverlapWorker:
        return HalvesWorker(run)


@dataclass
class PendingBucket:
    """What of one step is to be done for *bucket*: messages to be waited for, and, once
    ``step()`` was called, an update *how* it was to be done then."""

    bucket: Bucket
    under_way: list[Pending] = field(default_factory=list)
    how: Hyperparameters | None = None


class OverlapWorker:
    """One worker of `priority`."""

    def __init__(self, run: UpdatingRun) -> None:
        self.run = run
        self._updater = run.partition_optimizer(WHOLE)
        self._due: dict[int, PendingBucket] = {}  # by the bucket's number
        self._queue: list[Message] = []  # of this step, not yet sent

    # ---- a step ----

    def bucket_ready(self, bucket: Bucket) -> None:
        """Send what the plan allows: a message goes when its bucket is there and all before
        it in the plan have gone, so that all ranks send in one order."""
        if bucket.index == 0:  # a step that was skipped is forgotten
            self._due.clear()
            self._queue = list(self._messages())
        self._due[bucket.index] = PendingBucket(bucket)
        while self._queue and self._queue[0].bucket in self._due:
            message = self._queue.pop(0)
            due = self._due[message.bucket]
            pending = self._send(due.bucket, message)
            if pending is not None:
                due.under_way.append(pending)

    def _messages(self) -> Iterable[Message]:
        """Those of a step, in the order in which they are sent: the plan; or else one for each
        bucket, in the order in which they become ready."""
        if self.run.messages is not None:
            return self.run.messages
        return [Message(bucket.index) for bucket in self.run.buckets]

    def _send(self, bucket: Bucket, message: Message) -> Pending | None:
        """Start one message of a bucket; returns what is to be waited for."""
        if _is_whole(message):
            return self.run.mean(bucket)
        return self.run.mean(part(bucket, message), of=bucket)

    def backward_ended(self) -> None:
        if self.run.messages is None or not self.run.active:
            self._wait_all()

    def after_update(self) -> None:
        """``step()`` was called, or this worker only keeps the others company."""
        if not self.run.active:
            self._wait_all()
            self._due.clear()
            return
        how = self._updater.hyperparameters()
        for due in self._due.values():
            due.how = how
        if self.run.messages is None:
            self._clip()
            self._settle()

    def before_use(self, bucket: Bucket) -> None:
        due = self._due.get(bucket.index)
        if due is None:
            return
        self._wait(due)
        if due.how is not None:
            self._apply([due])

    def buckets_rebuilt(self) -> None:
        """Gradients have moved into other buckets, and so do means that were under way."""
        before, self._due = self._due, {}
        means: dict[int, tuple[torch.Tensor, bool]] = {}
        for due in before.values():
            self._wait(due)
            old = due.bucket
            for row in zip(old.parameters, old.views, old.used, strict=True):
                means[id(row[0])] = row[1], row[2]
        for bucket in self.run.buckets if means else ():
            for slot, parameter in enumerate(bucket.parameters):
                mean, bucket.used[slot] = means[id(parameter)]
                bucket.views[slot].copy_(mean)
            self._due[bucket.index] = PendingBucket(bucket)

    # ---- the end, and what is shown in between ----

    def finish(self) -> None:
        self._settle()
        source = self.run.participate_until_all_finish()
        if source is not None:
            self.run.broadcast_model(source)

    def consolidate(self) -> Callable[[], None]:
        self._settle()
        return lambda: None

    def save_state(self) -> dict[str, Any]:
        self._settle()
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Nothing is under way between a save and the next step."""

    def redistribute_state(self, parts: Any) -> dict[str, Any]:
        return {}

    # ---- what is due ----

    def _settle(self) -> None:
        """All that was sent is in, and all updates that were asked for are done."""
        self._wait_all()
        due = [one for one in self._due.values() if one.how is not None]
        if due:
            self._apply(due)

    def _wait_all(self) -> None:
        """All means are in."""
        for due in self._due.values():
            self._wait(due)

    def _wait(self, due: PendingBucket) -> None:
        under_way, due.under_way = due.under_way, []
        for pending in under_way:
            pending.wait()

    def _apply(self, some: Sequence[PendingBucket]) -> None:
        """One step of the optimizer on the parameters of *some* buckets."""
        pieces, gradients = [], []
        for due in some:
            del self._due[due.bucket.index]
            for parameter, view in _used(due.bucket):
                (piece,) = self._updater.pieces_of(parameter) or (None,)
                if piece is not None:
                    pieces.append(piece)
                    gradients.append(view)
        how = some[0].how
        assert how is not None
        self._updater.apply(pieces, gradients, how)

    def _clip(self) -> None:
        self.run.clip([v for due in self._due.values() for _, v in _used(due.bucket)])


class HalvesWorker(OverlapWorker):
    """One worker of `dear`."""

    def __init__(self, run: UpdatingRun) -> None:
        super().__init__(run)
        self._scattered: dict[tuple[int, float], Scattered] = {}
        """What of a step is to be gathered still, by bucket and start."""

    def _messages(self) -> Iterable[Message]:
        """The plan; a plan of whole messages as the paper has it, the last bucket gathered first.
        Where all is waited for when backward ends, second halves follow at once."""
        plan = self.run.messages
        if plan is None:
            for bucket in self.run.buckets:
                yield Message(bucket.index, half="scatter")
                yield Message(bucket.index, half="gather")
        elif any(message.half == "all" for message in plan):
            yield from (replace(message, half="scatter") for message in plan)
            yield from (replace(message, half="gather") for message in reversed(plan))
        else:
            yield from plan

    def _send(self, bucket: Bucket, message: Message) -> Pending | None:
        """A first half is nothing to wait for."""
        key = message.bucket, message.start
        if message.half == "gather":
            return self._scattered.pop(key).gather()
        if _is_whole(message):
            self._scattered[key] = self.run.scatter_mean(bucket)
        else:
            self._scattered[key] = self.run.scatter_mean(
                part(bucket, message), of=bucket
            )
        return None


def _is_whole(message: Message) -> bool:
    return (message.start, message.stop) == (0.0, 1.0)


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
