"""DeAR: reduce-scatter while backward computes, all-gather while the next forward does.

Zhang, Shi, Chu and Li, "DeAR: Accelerating Distributed Deep Learning with Fine-Grained
All-Reduce Pipelining" (ICDCS 2023): each all-reduce is cut into its two halves, and of these only the
first must follow backward's order. The second halves go in the order in which the next
forward pass uses the tensors, which waits for them layer by layer.

Differs from the authors' code: every optimizer can be used, with the hyperparameters of
``step()``; an evaluation, a checkpoint and the end see the last step; and a module may be called
twice, not at all, or in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from paceline.interfaces import (
    Bucket,
    Message,
    MethodSummary,
    Pending,
    Scattered,
    UpdatingRun,
)
from paceline.methods.forward_overlap.priority import Priority
from paceline.methods.forward_overlap.worker import LateWorker, part


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

    def init(self, run: UpdatingRun) -> LateWorker:
        return LateWorker(run, Halves().send, in_halves)


@dataclass
class Halves:
    """Sends them. *scattered*: what of a step is to be gathered still, by bucket and start."""

    scattered: dict[tuple[int, float], Scattered] = field(default_factory=dict)

    def send(
        self, run: UpdatingRun, bucket: Bucket, message: Message
    ) -> Pending | None:
        """Start one message; a first half is nothing to wait for."""
        key = message.bucket, message.start
        if message.half == "gather":
            return self.scattered.pop(key).gather()
        if (message.start, message.stop) == (0.0, 1.0):
            self.scattered[key] = run.scatter_mean(bucket)
        else:
            self.scattered[key] = run.scatter_mean(part(bucket, message), of=bucket)
        return None


def in_halves(run: UpdatingRun) -> Iterator[Message]:
    """The plan; a plan of whole messages as the paper has it, the last bucket gathered first.
    Where all is waited for when backward ends, second halves follow at once."""
    plan = run.sending
    if plan is None:
        for bucket in run.buckets:
            yield Message(bucket.index, half="scatter")
            yield Message(bucket.index, half="gather")
    elif any(message.half == "all" for message in plan):
        yield from (replace(message, half="scatter") for message in plan)
        yield from (replace(message, half="gather") for message in reversed(plan))
    else:
        yield from plan
