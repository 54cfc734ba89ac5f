"""Priority order: what the next forward pass uses first is sent first.

ByteScheduler (Peng et al., SOSP 2019) and P3 (Jayarajan et al., MLSys 2019): gradients are
cut into pieces, pieces of the layers that compute first overtake others, and the next
forward pass waits layer by layer instead of for all at once. Where both order pieces while
they run, by a race that all-reduces cannot have, here the order is a plan that all ranks
share (`paceline.bucketing.message_plan`; unequal pieces as in US-Byte, Gao et al., 2023).

"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.interfaces import (
    EVERY_STEP,
    Bucket,
    Clips,
    Consistency,
    GradientSeen,
    Message,
    MethodSummary,
    Pending,
    Rounds,
    UpdatesOn,
    UpdatingRun,
)
from paceline.methods.forward_overlap.worker import LateWorker, part


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

    def init(self, run: UpdatingRun) -> LateWorker:
        return LateWorker(run, self._send)

    def bucket_ready(self, state: LateWorker, run: UpdatingRun, bucket: Bucket) -> None:
        state.bucket_ready(run, bucket)

    def backward_ended(self, state: LateWorker, run: UpdatingRun) -> None:
        state.backward_ended(run)

    def before_use(self, state: LateWorker, run: UpdatingRun, bucket: Bucket) -> None:
        state.before_use(run, bucket)

    def after_update(self, state: LateWorker, run: UpdatingRun) -> None:
        state.after_update(run)

    def buckets_rebuilt(self, state: LateWorker, run: UpdatingRun) -> None:
        state.buckets_rebuilt(run)

    def finish(self, state: LateWorker, run: UpdatingRun) -> None:
        state.finish(run)

    def consolidate(self, state: LateWorker, run: UpdatingRun) -> Callable[[], None]:
        state.settle()
        return lambda: None

    def save_state(self, state: LateWorker, run: UpdatingRun) -> dict[str, Any]:
        state.settle()
        return {}

    def load_state(
        self, state: LateWorker, run: UpdatingRun, saved: dict[str, Any]
    ) -> None:
        """Nothing is under way between a save and the next step."""

    def redistribute_state(
        self, state: LateWorker, run: UpdatingRun, parts: Any
    ) -> dict[str, Any]:
        return {}

    @staticmethod
    def _send(run: UpdatingRun, bucket: Bucket, message: Message) -> Pending:
        if (message.start, message.stop) == (0.0, 1.0):
            return run.mean(bucket)
        return run.mean(part(bucket, message), of=bucket)
