"""Sync-Switch: synchronous steps first, and asynchronous ones to the end.

Li, Mangoubi, Xu and Guo, "Sync-Switch: hybrid parameter synchronization for distributed deep
learning" (ICDCS 2021). The first few steps decide the final accuracy. With the first 5 to 6 %
synchronous (BSP) and the rest asynchronous (ASP), the authors' runs ended as accurate as with BSP
alone. In the opposite order they did not, so the switch is never undone.

The learning rate needs no change at the switch. A synchronous step moves by lr times the mean
gradient, and n asynchronous ones by lr/n times a gradient each: equally far. (This is the linear rule
of the authors' settings, lr 0.8 for 8 workers together and 0.1 for each; without it their runs ended
in NaN.) In both phases a step is one step of each worker, so schedules continue unchanged.

The server has the momentum. After the switch it is a mean over the last few *updates*: n times fewer
samples than before. The switch zeroes SGD's momentum buffer and Adam's first moment. Second moments
stay. In the notes of the authors' repository kept momentum ended at a training loss of 0.04 to 0.33,
zeroed momentum at 0.001 to 0.002. Scaling it, or letting it grow again, was as good as zeroing it.

The number of synchronous steps should be the least that loses no accuracy. The authors search it by
halving, for recurring jobs. `bsp_steps` counts each worker's steps, and 500 are 6 % of their 8,000. A
shorter run is synchronous to its end. Their policies for stragglers in the first phase are not
implemented.

A checkpoint has its number of steps, so a job that loads it switches after as many steps as an
uninterrupted one. A job that has switched never switches back, whatever it loads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import UsageError
from paceline.interfaces import (
    Bucket,
    Clips,
    Discipline,
    MethodSummary,
    PushedGradient,
    ServerRun,
    Shard,
)
from paceline.methods.push_pull import PushPull, PushPullWorker


@dataclass(frozen=True, kw_only=True)
class SyncSwitch(PushPull):
    """Wait for all workers in the first *bsp_steps* steps, and for none after them.

    Attributes:
        bsp_steps: Synchronous steps of each worker; 0: none, which is asp.
    """

    name: ClassVar[str] = "sync-switch"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Takes synchronous steps first, and asynchronous ones to the end.",
        source="Li, Mangoubi, Xu and Guo, Sync-Switch (ICDCS 2021)",
        use_when="workers differ in speed, and asp from the first step loses accuracy",
        waits_for="every worker in the first `bsp_steps` steps, and for no worker after them",
        sends="the whole gradient, and receives all parameters",
        guarantees=(
            "The first `bsp_steps` steps are bsp's, except that `clip_norm` limits each worker's "
            "own gradient. Later steps are asp's, without a bound on staleness."
        ),
        limits=(
            (
                "The authors found 5 to 6 % synchronous steps enough. The default is 6 % of the "
                "authors' 8,000 steps."
            ),
            "The switch sets momentum to zero. The method never becomes synchronous again.",
            "The authors' policies for stragglers in the first phase are not implemented.",
        ),
    )
    steady_state_keys: ClassVar[Mapping[str, str]] = {"bsp_steps": "0"}

    bsp_steps: int = 500

    def __post_init__(self) -> None:
        if self.bsp_steps < 0:
            raise UsageError(
                f"sync-switch:bsp_steps={self.bsp_steps}: expected 0 or more steps; 0 is asp"
            )

    @property
    def learns_for(self) -> int:
        """Number of steps until workers wait for no other worker."""
        return self.bsp_steps

    @property
    def clips(self) -> Clips:
        """Each worker's own: asynchronous steps have no mean, and one job has one rule."""
        return "own"

    def server(self, workers: int) -> Discipline:
        return BSPThenASP(self.bsp_steps)

    def start(self, run: ServerRun) -> SyncSwitchWorker:
        return SyncSwitchWorker(run, self)


class SyncSwitchWorker(PushPullWorker):
    """Runs one worker, and reports to the servers how many steps a loaded checkpoint has.

    Attributes:
        before: Steps before the loaded checkpoint, which this job's servers have not seen.
    """

    def __init__(self, run: ServerRun, method: SyncSwitch) -> None:
        """Create the worker, and join the training. All ranks must call this together."""
        super().__init__(run, method)
        self.before = 0
        self.parameters_replaced()

    def _report(self, bucket: Bucket) -> bytes:
        return _encode_steps(self.before)

    def parameters_replaced(self) -> None:
        """Take *before* from the servers' notices: a restarted worker does not know it."""
        remote = self.run.remote
        notices = [
            server.notice
            for bucket in self.run.buckets
            for server in remote.notices(bucket.index)
        ]
        self.before = max([self.before, *map(_decode_steps, notices)])

    def save_state(self) -> dict[str, Any]:
        return {"steps": self.before + self.step}

    def load_state(self, saved: dict[str, Any]) -> None:
        self.before = max(self.before, saved["steps"] - self.step)

    def redistribute_state(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {"steps": max(part["steps"] for part in parts)}


class BSPThenASP(Discipline):
    """Averages gradients on the server before the switch, and applies them one by one after it.

    The switch is before step S = `bsp_steps` - *before* of this job. A worker that begins step S has
    the replies of all servers to step S - 1. So no server applies a gradient alone while a mean is
    still due on any server.

    A restarted worker may not know *before*. Its gradients wait for those of the others, which report
    it. Gradients of asynchronous steps are applied then.
    """

    def __init__(self, bsp_steps: int) -> None:
        self._bsp_steps = bsp_steps
        self._before = 0
        self._rounds: dict[tuple[int, int], list[PushedGradient]] = {}
        """By step and bucket."""
        self._ended: Counter[int] = Counter()
        """By bucket: the means of all steps below this one were applied."""

    @property
    def _switch(self) -> int:
        return max(0, self._bsp_steps - self._before)

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        self._before = max(self._before, push.report or 0)
        self._rounds.setdefault((push.step, push.bucket), []).append(push)
        self._close(shard)

    def on_change(self, shard: Shard) -> None:
        self._close(shard)

    def _close(self, shard: Shard) -> None:
        for bucket in shard.buckets:
            last = min(self._switch, shard.next_unstarted_step())
            while self._ended[bucket] < last and self._form_mean(shard, bucket):
                pass
        for step, bucket in sorted(self._rounds):
            # A load may have ended this step for other workers, before any knew of *before*.
            if step >= self._switch or step < self._ended[bucket]:
                for push in self._taken(step, bucket):
                    shard.apply(push)
                    shard.reply(push)

    def _form_mean(self, shard: Shard, bucket: int) -> bool:
        """Form the mean of the bucket's next step; returns whether all gradients had arrived."""
        step = self._ended[bucket]
        here = {push.worker for push in self._rounds.get((step, bucket), [])}
        if not here.issuperset(shard.active_workers(step)):
            return False
        pushes = self._taken(step, bucket)
        shard.apply_mean(bucket, pushes)
        self._ended[bucket] += 1
        if self._ended[bucket] == self._switch:
            shard.zero_momentum(bucket)
        for push in pushes:
            shard.reply(push)
        return True

    def _taken(self, step: int, bucket: int) -> list[PushedGradient]:
        pushes = self._rounds.pop((step, bucket), [])
        return sorted(pushes, key=lambda push: push.worker)

    def first_step(self, shard: Shard) -> int:
        if shard.next_unstarted_step() <= self._switch:
            return shard.next_unstarted_step()
        return max(self._switch, shard.slowest_step())

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return self._ended[bucket] >= min(step, self._switch)

    def completed_step(self, shard: Shard) -> int | None:
        steps = {min(self._ended[bucket], self._switch) for bucket in shard.buckets}
        if steps == {self._switch}:
            return max(self._switch, shard.slowest_step())
        return steps.pop() if len(steps) == 1 else None

    def resume(self, shard: Shard, step: int) -> None:
        self._ended = Counter(dict.fromkeys(shard.buckets, step))

    def decode_report(self, shard: Shard, report: bytes) -> int:
        return _decode_steps(report)

    def notice(self, bucket: int) -> bytes:
        return _encode_steps(self._before)


def _encode_steps(before: int) -> bytes:
    """Encode *before*; empty for 0, so that nothing is sent."""
    return str(before).encode() if before else b""


def _decode_steps(steps: bytes) -> int:
    """Decode the number that `_encode_steps` was given; raise `UsageError` for other bytes."""
    if not steps:
        return 0
    if not steps.isdigit() or len(steps) > 18:
        raise UsageError(
            f"sync-switch: expected a number of steps as a worker's report, got {steps!r}. Run one "
            "version of paceline on all hosts"
        )
    return int(steps)
