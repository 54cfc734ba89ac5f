"""Exact methods whose messages overlap with the next forward pass: `priority` and `dear`.

- `priority`: sends gradients in the order in which the next forward pass uses the parameters.
- `dear`: sends each sum's first half during backward, the second during the next forward pass.

Priority order is ByteScheduler's (Peng et al., SOSP 2019) and P3's (Jayarajan et al., MLSys 2019):
gradients are cut into parts, parts of the layers that compute first overtake others, and the next
forward pass waits layer by layer instead of for all at once. Both order parts while they run, which
all-reduces cannot do: ranks must send in one order. Here the order is a plan that all ranks
share (`paceline.bucketing.message_search`; unequal parts as in US-Byte, Gao et al., 2023).

DeAR is Zhang, Shi, Chu and Li, "DeAR: Accelerating Distributed Deep Learning with Fine-Grained
All-Reduce Pipelining" (ICDCS 2023): each all-reduce is cut into its two halves, and of these only the
first must follow backward's order. The second halves go in the order in which the next
forward pass uses the tensors, which waits for them layer by layer.

Differs from DeAR's code: every optimizer can be used, with the hyperparameters of
``step()``; an evaluation, a checkpoint and the end see the last step; and a module may be called
twice, not at all, or in another order.

Theory of operation
-------------------
Semantics are bsp's, evaluated late. A use of a parameter waits for its bucket; so does a use of a
gradient between ``backward()`` and ``step()``. A step ends for the script when ``step()`` returns.
Each bucket is updated when something is about to use it, with the hyperparameters of its ``step()``.
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
    ReduceScatter,
    Rounds,
    UpdatesOn,
    UpdatingRun,
)
from paceline.interfaces.buckets import stand_in_for, stands_in

WHOLE = 1 << 62
"""Bytes that no tensor has: partitions are whole tensors, which any optimizer accepts."""


@dataclass(frozen=True, kw_only=True)
class Priority:
    """Average every gradient in every step, and wait for each bucket at its first use.

    Example:
        ::

            optimizer = paceline.distribute(model, optimizer, method="priority")
    """

    name: ClassVar[str] = "priority"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages as bsp, but waits for a layer only when the next forward pass uses it.",
        source="Peng et al., ByteScheduler (SOSP 2019); Jayarajan et al., P3 (MLSys 2019)",
        use_when="steps wait for gradients after backward, and the result must be exact",
        waits_for="every worker, in every step, bucket by bucket before its parameters are used",
        sends="the whole gradient, during backward and the next forward pass",
        guarantees=(
            "The result is bsp's, and bit-equal if sums are added in the same order. A script that "
            "reads the model or a gradient gets bsp's values."
        ),
        limits=(
            "It gains nothing if backward already hides all communication.",
            "Reading all gradients in every step removes the gain.",
        ),
    )
    rounds: ClassVar[Rounds] = EVERY_STEP
    consistency: ClassVar[Consistency] = "exact"
    updates_on: ClassVar[UpdatesOn] = "method"
    visible_gradient: ClassVar[GradientSeen] = "mean"
    clips: ClassVar[Clips] = "mean"
    symmetric: ClassVar[bool] = True
    waits_in_forward: ClassVar[bool] = True

    def start(self, run: UpdatingRun) -> OverlapWorker:
        """Make a worker that waits late."""
        return OverlapWorker(run)


@dataclass(frozen=True, kw_only=True)
class DeAR(Priority):
    """Average every gradient in every step in two halves, and wait for the second half at its first use.

    Example:
        ::

            optimizer = paceline.distribute(model, optimizer, method="dear")
    """

    name: ClassVar[str] = "dear"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages as bsp, but runs the all-gather halves during the next forward pass.",
        source="Zhang, Shi, Chu and Li, DeAR (ICDCS 2023)",
        use_when=(
            "steps wait for gradients after backward, and the result must be exact; compare it with "
            "`priority`"
        ),
        waits_for="every worker, in every step, bucket by bucket before its parameters are used",
        sends=(
            "the whole gradient, one half of each all-reduce during backward, the other during the "
            "next forward pass"
        ),
        guarantees=(
            "The result is bit-equal to that of bsp with `collective=ring`, or with the collective "
            "that you set. A script that reads the model or a gradient gets bsp's values."
        ),
        limits=(
            "It gains nothing if backward already hides all communication.",
            "Tensors on CUDA need NCCL, with `collective=native` or `auto`.",
        ),
    )
    sends_halves: ClassVar[bool] = True

    def start(self, run: UpdatingRun) -> OverlapWorker:
        """Make a worker that sends halves."""
        return HalvesWorker(run)


@dataclass
class PendingBucket:
    """A bucket of one step that is not finished.

    Attributes:
        bucket: The bucket.
        under_way: Messages to wait for.
        how: The optimizer's hyperparameters when ``step()`` was called; None before.
    """

    bucket: Bucket
    under_way: list[Pending] = field(default_factory=list)
    how: Hyperparameters | None = None


class OverlapWorker:
    """Runs one worker of `priority`: sends by the plan, and updates buckets where they are used."""

    def __init__(self, run: UpdatingRun) -> None:
        self.run = run
        self._updater = run.partition_optimizer(WHOLE)
        self._due: dict[int, PendingBucket] = {}  # by the bucket's number
        self._queue: list[Message] = []  # of this step, not yet sent

    # ---- a step ----

    def bucket_ready(self, bucket: Bucket) -> None:
        """Send the messages that the plan allows, so that all ranks send in one order.

        A message goes when its bucket is ready and all messages before it have gone.
        """
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
        """Return a step's messages in the order of sending: the plan, or each bucket when it is ready."""
        if self.run.messages is not None:
            return self.run.messages
        return [Message(bucket.index) for bucket in self.run.buckets]

    def _send(self, bucket: Bucket, message: Message) -> Pending | None:
        """Start one message of a bucket; returns its handle, if it has one."""
        if _is_whole(message):
            return self.run.mean(bucket)
        return self.run.mean(part(bucket, message), of=bucket)

    def backward_ended(self) -> None:
        """Wait here if there is no plan, or if this worker is out of data."""
        if self.run.messages is None or not self.run.active:
            self._wait_all()

    def after_update(self) -> None:
        """Note how ``step()`` updates; without data, only wait for the others' messages."""
        if not self.run.active:
            self._wait_all()
            self._due.clear()
            return
        how = self._updater.hyperparameters()
        for due in self._due.values():
            due.how = how
        if self.run.messages is None:
            self._clip()
            self._finish_updates()

    def before_use(self, bucket: Bucket) -> None:
        """Wait for the bucket's mean, and update it if ``step()`` was called."""
        due = self._due.get(bucket.index)
        if due is None:
            return
        self._wait(due)
        if due.how is not None:
            self._apply([due])

    def buckets_rebuilt(self) -> None:
        """Move means in flight into the new buckets."""
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

    # ---- the end, evaluations and checkpoints ----

    def finish(self) -> None:
        """Finish pending updates, then take the model of the worker that trained longest."""
        self._finish_updates()
        source = self.run.participate_until_all_finish()
        if source is not None:
            self.run.broadcast_model(source)

    def consolidate(self) -> Callable[[], None]:
        """Finish pending updates: the model is then that of `bsp`."""
        self._finish_updates()
        return lambda: None

    def save_state(self) -> dict[str, Any]:
        """Finish pending updates; nothing else needs saving."""
        self._finish_updates()
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Load nothing: no message is under way between a save and the next step."""

    def redistribute_state(self, parts: Any) -> dict[str, Any]:
        """Keep no state, for any number of workers."""
        return {}

    # ---- waits and updates ----

    def _finish_updates(self) -> None:
        """Wait for all means, and do all updates that ``step()`` asked for."""
        self._wait_all()
        due = [one for one in self._due.values() if one.how is not None]
        if due:
            self._apply(due)

    def _wait_all(self) -> None:
        """Wait for all means."""
        for due in self._due.values():
            self._wait(due)

    def _wait(self, due: PendingBucket) -> None:
        under_way, due.under_way = due.under_way, []
        for pending in under_way:
            pending.wait()

    def _apply(self, some: Sequence[PendingBucket]) -> None:
        """Take one step of the optimizer on the parameters of *some* buckets."""
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
    """Runs one worker of `dear`: each message is a reduce-scatter and, later, an all-gather."""

    def __init__(self, run: UpdatingRun) -> None:
        super().__init__(run)
        self._scattered: dict[tuple[int, float], ReduceScatter] = {}
        """Sums of this step that are not gathered yet, by bucket and start."""

    def _messages(self) -> Iterable[Message]:
        """Return the plan; without one, both halves of each bucket at once.

        A plan of whole messages becomes the paper's: the last bucket is gathered first.
        """
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
        """Start one half of a sum; only the second half is waited for."""
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
    """Return the elements of a bucket's buffer that *message* sends.

    Cuts are at whole elements, the same on all ranks.
    """
    buffer, count = bucket.buffer, bucket.buffer.numel()
    flat = buffer[round(message.start * count) : round(message.stop * count)]
    if stands_in(buffer):  # few elements, and they may be fewer than its messages
        flat = flat if flat.numel() else buffer.new_zeros(1)
        stand_in_for(round((message.stop - message.start) * bucket.bytes), flat)
    return flat
