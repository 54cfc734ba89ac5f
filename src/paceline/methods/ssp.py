"""SSP: stale synchronous parallel training over a parameter server.

Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server"
(NIPS 2013). The server applies each gradient when it arrives, as under asp. A worker that has done
c steps only continues when every other worker has done at least c - s.

With ``staleness=0`` a step's gradients, all computed from the same parameters, are applied one after
the other in rank order, and timing has no effect. (With plain SGD that equals bsp's step; momentum
makes n steps of it.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.interfaces import Clips, Discipline, MethodSummary, PushedGradient, Shard
from paceline.methods.push_pull import PushPull, without_gradient


@dataclass(frozen=True, kw_only=True)
class SSP(PushPull):
    """Let no worker be more than *staleness* steps ahead of another.

    Attributes:
        staleness: Steps that a worker may be ahead of the slowest worker; 0: servers apply a
            step's gradients in rank order.
    """

    name: ClassVar[str] = "ssp"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Applies each gradient when it arrives, within a staleness bound.",
        source="Ho et al., SSP (NIPS 2013)",
        use_when="workers are slow now and then",
        waits_for="workers more than `staleness` steps behind",
        sends="the whole gradient, and receives all parameters",
        guarantees=(
            "Step c of a worker uses all workers' gradients of the steps before c - `staleness`."
        ),
        limits=(
            "If machines always differ in speed, all workers run at the slowest one's pace.",
            (
                "With `staleness=0` servers apply a step's gradients in rank order. With plain SGD the "
                "result is bsp's step."
            ),
            (
                "The server holds the momentum, and steps n times as often as a worker. So momentum "
                "covers n times fewer samples than under bsp."
            ),
        ),
    )

    staleness: int = 3

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise UsageError(
                f"ssp:staleness={self.staleness}: expected a bound of 0 or more steps"
            )

    @property
    def clips(self) -> Clips:
        return "own" if self.staleness else "mean"

    def server(self, workers: int) -> Discipline:
        return (
            BoundedStaleness(self.staleness) if self.staleness else RankOrderedRounds()
        )


class BoundedStaleness(Discipline):
    """Bounds the staleness on the server, for a bound s of at least 1.

    Gradients are applied at once, and workers that are too far ahead get their reply later.
    """

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._waiting: list[PushedGradient] = []

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        shard.apply(push)
        self._waiting.append(without_gradient(push))
        self._release(shard)

    def on_change(self, shard: Shard) -> None:
        self._release(shard)

    def _release(self, shard: Shard) -> None:
        slowest, waiting = shard.slowest_step(), self._waiting
        self._waiting = []
        for push in waiting:
            # The reply starts step c = push.step + 1: all must have done c - s.
            if push.step + 1 <= slowest + self._staleness:
                shard.reply(push)
            else:
                self._waiting.append(push)

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        # A restarted worker continues after its own steps, which may be far ahead.
        return step <= shard.slowest_step() + self._staleness


class RankOrderedRounds(Discipline):
    """Updates a bucket on the server when all its gradients have arrived; for s = 0."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], list[PushedGradient]] = {}
        self._ended: Counter[int] = Counter()
        """By bucket: the gradients of all steps below this one have arrived."""

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        self._rounds.setdefault((push.step, push.bucket), []).append(push)
        self._close(shard)

    def on_change(self, shard: Shard) -> None:
        self._close(shard)

    def _close(self, shard: Shard) -> None:
        for bucket in shard.buckets:
            while self._ended[bucket] < shard.next_unstarted_step():
                step = self._ended[bucket]
                pushes = self._rounds.get((step, bucket), [])
                here = {push.worker for push in pushes}
                if not here.issuperset(shard.active_workers(step)):
                    break
                self._rounds.pop((step, bucket), None)
                self._ended[bucket] += 1
                pushes.sort(key=lambda push: push.worker)
                for push in pushes:
                    shard.apply(push)
                for push in pushes:
                    shard.reply(push)

    def first_step(self, shard: Shard) -> int:
        return shard.next_unstarted_step()

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return self._ended[bucket] >= step

    def completed_step(self, shard: Shard) -> int | None:
        steps = {self._ended[bucket] for bucket in shard.buckets}
        return steps.pop() if len(steps) == 1 else None

    def resume(self, shard: Shard, step: int) -> None:
        self._ended = Counter(dict.fromkeys(shard.buckets, step))
