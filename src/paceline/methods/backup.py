"""Backup workers: synchronous training that does not wait for the last ones.

Chen et al., "Revisiting distributed synchronous SGD" (ICLR workshop 2016): a step ends with the
fastest m of n workers, and later gradients are dropped.

``wait_for=0`` means all workers: bsp with its parameters on the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.interfaces import Clips, Discipline, MethodSummary, PushedGradient, Shard
from paceline.methods.push_pull import PushPull, without_gradient


@dataclass(frozen=True, kw_only=True)
class Backup(PushPull):
    """End each step with the mean over the fastest *wait_for* workers.

    Attributes:
        wait_for: Number of workers whose gradients complete a step; 0: all workers.
    """

    name: ClassVar[str] = "backup"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Ends each step with the mean of the fastest gradients, and drops late ones.",
        source="Chen et al., Revisiting distributed synchronous SGD (ICLR workshop 2016)",
        use_when="workers are slow now and then, and their late gradients may be dropped",
        waits_for="the fastest `wait_for` workers (by default all), in every step",
        sends="the whole gradient, and receives all parameters",
        guarantees=(
            "No gradient is stale. Gradients that arrive too late for their step are dropped and "
            "counted."
        ),
        limits=(
            (
                "With the default `wait_for=0` the server waits for all workers, as in bsp."
            ),
            "`clip_norm` needs a single server.",
        ),
    )

    wait_for: int = 0

    def __post_init__(self) -> None:
        if self.wait_for < 0:
            raise UsageError(
                f"backup:wait_for={self.wait_for}: expected a number of workers, or 0 for "
                "all of them"
            )

    @property
    def clips(self) -> Clips:
        return "mean"

    @property
    def coordinates(self) -> bool:
        return self.wait_for > 0  # each would choose other workers

    def server(self, workers: int) -> Discipline:
        if self.wait_for > workers:
            raise UsageError(
                f"backup:wait_for={self.wait_for}: expected at most the {workers} workers, or 0 for all of them"
            )
        return BackupWorkers(
            self.wait_for or workers, is_partial=0 < self.wait_for < workers
        )


class BackupWorkers(Discipline):
    """Ends a step on the server with its fastest workers, and drops later gradients.

    A worker counts for a step when its last bucket has arrived. If the step waits for all workers,
    each bucket is updated when all have sent it. The first of several servers decides which workers
    count, and the others wait for its decision.
    """

    follows_first_server = True

    def __init__(self, wait_for: int, is_partial: bool = False) -> None:
        self._wait_for = wait_for
        self.finishes_without_stragglers = is_partial
        self._rounds: dict[tuple[int, int], list[PushedGradient]] = {}
        self._complete: dict[int, list[int]] = {}
        """By open step: the workers whose gradients have all arrived, in order of arrival."""
        self._follows = False
        self._counted: dict[int, list[int]] = {}
        """By step: the workers that count, after the decision. Replies to slow workers need it, too."""
        self._closed = 0
        """Steps below this one have ended."""
        self._late: dict[int, list[PushedGradient]] = {}
        """By worker: pushes of a step that has ended.

        They get replies together, with one version, when all pushes of the worker's step have arrived.
        """

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        if push.step < self._closed:
            self._drop(push)
            shard.count("gradients dropped")
        else:
            self._rounds.setdefault((push.step, push.bucket), []).append(push)
            if shard.clock(push.worker) > push.step:
                self._complete.setdefault(push.step, []).append(push.worker)
        self.on_change(shard)

    def follow(self) -> None:
        self._follows = True

    def on_decision(self, shard: Shard, step: int, workers: Sequence[int]) -> None:
        if step >= self._closed:
            self._counted.setdefault(step, list(workers))
            self.on_change(shard)

    def on_change(self, shard: Shard) -> None:
        while self._closed < shard.next_unstarted_step() and self._close(
            shard, self._closed
        ):
            self._closed += 1
        for worker in list(self._late):
            pushes = self._late[worker]
            if worker not in shard.active_workers(pushes[0].step):
                # It has left, has died, or was restarted.
                del self._late[worker]
                for push in pushes:
                    shard.reply(push)
            elif shard.clock(worker) > pushes[0].step:
                del self._late[worker]
                shard.skip_to(worker, self._closed)
                for push in pushes:
                    shard.reply(push, self._counted.get(push.step, ()))
        for step in [s for s in self._counted if s < shard.slowest_step() - 1]:
            del self._counted[step]

    def _close(self, shard: Shard, step: int) -> bool:
        """End *step* where that can be; returns whether it has ended as a whole."""
        expected = shard.active_workers(step)
        open_buckets = [b for b in shard.buckets if shard.version(b) <= step]
        complete = self._complete.get(step, [])
        if self._wait_for < len({*expected, *complete}) or step in self._counted:
            counting = self._choice(step, complete)
            if counting is None:
                return False
            for bucket in open_buckets:
                pushes = self._rounds.get((step, bucket), [])
                needed = set(counting).intersection(expected)
                if needed.issubset(push.worker for push in pushes):
                    self._end(shard, step, bucket, counting)
        else:
            for bucket in open_buckets:
                pushes = self._rounds.get((step, bucket), [])
                here = sorted(push.worker for push in pushes)
                if set(here).issuperset(expected):
                    self._end(shard, step, bucket, here)
        if any(shard.version(bucket) <= step for bucket in shard.buckets):
            return False
        self._complete.pop(step, None)
        return True

    def _choice(self, step: int, complete: list[int]) -> list[int] | None:
        """Return the workers that count for a step; None while that is not decided."""
        if step not in self._counted:
            if self._follows or len(complete) < self._wait_for:
                return None
            self._counted[step] = complete[: self._wait_for]
        return self._counted[step]

    def _end(self, shard: Shard, step: int, bucket: int, counting: list[int]) -> None:
        pushes = self._rounds.pop((step, bucket), [])
        pushes.sort(key=lambda push: push.worker)
        shard.apply_mean(bucket, [p for p in pushes if p.worker in counting])
        for push in pushes:
            if push.worker in counting:
                shard.reply(push, self._counted.get(step, ()))
            else:
                self._drop(push)
                shard.count("gradients dropped")

    def _drop(self, push: PushedGradient) -> None:
        self._late.setdefault(push.worker, []).append(without_gradient(push))

    def first_step(self, shard: Shard) -> int:
        return shard.next_unstarted_step()

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return shard.version(bucket) >= step

    def completed_step(self, shard: Shard) -> int | None:
        whole = all(shard.version(bucket) == self._closed for bucket in shard.buckets)
        return self._closed if whole else None

    def resume(self, shard: Shard, step: int) -> None:
        self._closed = step
