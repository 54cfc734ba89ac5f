"""DSSP: SSP with a staleness bound that follows the workers' speeds.

Zhao et al., "Dynamic stale synchronous parallel distributed training for deep learning" (ICDCS
2019, arXiv 1908.11848). The server applies each gradient when it arrives, as under ssp. If the
fastest worker would have to wait under ssp, the server computes the number of extra steps after
which it would wait least, and allows these. So it may be s_L to s_L + r_max steps ahead.

The rule, when worker p has done its step number t_p, and the slowest worker t_slow:

    r_p > 0                  ->  r_p = r_p - 1, and p continues
    t_p - t_slow <= s_L      ->  p continues
    p is the fastest         ->  r_p = the controller's; if r_p > 0, p continues
    else                     ->  p waits until t_p - t_slow <= s_L

The controller uses the last two times at which p, and the slowest worker, ended a step. It expects
their next steps to take as long, and chooses

    r in 0 ... r_max:  the least |(A_p + r I_p) - (A_slow + k I_slow)|, over k = 1 ... r_max + 1

where A is the last time and I the interval. The paper's bounds are 3 to 15: s_L = 3, r_max = 12.

The algorithm is known from abstracts and from other implementations, so two points are inferred. The
step that is allowed immediately is one of the r. A worker that has used them up only gets more if it
stays within s_L + r_max. So the bound holds for any order of arrival. Of equally good r the least is
chosen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.interfaces import Discipline, MethodSummary, PushedGradient, Shard
from paceline.methods.push_pull import PushPull, without_gradient


@dataclass(frozen=True, kw_only=True)
class DSSP(PushPull):
    """Bound staleness by *staleness* steps, and by up to *extra* more for the fastest worker.

    The fastest worker gets the extra steps if it then waits less.

    Attributes:
        staleness: Steps that a worker may be ahead of the slowest worker.
        extra: Further steps that the fastest worker may be ahead.
    """

    name: ClassVar[str] = "dssp"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Bounds staleness as ssp, and adapts the bound to measured speeds.",
        source="Zhao et al., DSSP (ICDCS 2019)",
        use_when="workers are slow now and then, and a fixed bound waits too often",
        waits_for=(
            "workers more than `staleness` steps behind; the fastest worker may be allowed up to "
            "`extra` more steps"
        ),
        sends="the whole gradient, and receives all parameters",
        guarantees=(
            "Step c of a worker uses all workers' gradients of the steps before c - `staleness` - "
            "`extra`."
        ),
        limits=(
            "If machines always differ in speed, all workers run at the slowest one's pace.",
            "The algorithm is reconstructed from abstracts and other implementations.",
            (
                "The server holds the momentum, and steps n times as often as a worker. So momentum "
                "covers n times fewer samples than under bsp."
            ),
        ),
    )

    staleness: int = 3
    extra: int = 12

    def __post_init__(self) -> None:
        for name in ("staleness", "extra"):
            steps = getattr(self, name)
            if steps < 0:
                raise UsageError(f"dssp:{name}={steps}: expected 0 or more steps")

    def server(self, workers: int) -> Discipline:
        return DynamicBound(self.staleness, self.extra)


class DynamicBound(Discipline):
    """Bounds the staleness on the server, by the paper's controller.

    Each of several servers decides for its part of the model, and a worker waits for the last of them.
    """

    def __init__(self, staleness: int, extra: int) -> None:
        self._staleness, self._extra = staleness, extra  # s_L, r_max
        self._waiting: list[PushedGradient] = []
        self._credit: Counter[int] = Counter()  # r_p
        self._moments: dict[int, tuple[float, ...]] = {}
        """By worker: the last two times at which it ended a step."""

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        shard.apply(push)
        self._waiting.append(without_gradient(push))
        if shard.clock(push.worker) > push.step:
            self._step_is_in(shard, push.worker)
        self._release(shard)

    def on_change(self, shard: Shard) -> None:
        here = set(shard.active_workers(shard.next_unstarted_step()))
        for worker in self._moments.keys() - here:
            del self._moments[worker]
            del self._credit[worker]
        self._release(shard)

    def _step_is_in(self, shard: Shard, worker: int) -> None:
        moments = *self._moments.get(worker, ()), shard.now
        self._moments[worker] = moments[-2:]
        if self._credit[worker]:
            self._credit[worker] -= 1
        elif shard.clock(worker) - shard.slowest_step() <= self._staleness:
            return  # `_release` replies anyway
        else:
            self._credit[worker] = self._controlled(shard, worker)
            if not self._credit[worker]:
                return
            self._credit[worker] -= 1
        self._answer(shard, [push for push in self._waiting if push.worker == worker])

    def _controlled(self, shard: Shard, worker: int) -> int:
        """Return the extra steps of the fastest worker, by the paper's controller; 0 for other workers."""
        here = shard.active_workers(shard.next_unstarted_step())
        clocks = {other: shard.clock(other) for other in here}
        if clocks.get(worker) != max(clocks.values(), default=None):
            return 0
        slowest = min(here, key=lambda other: (clocks[other], other))
        mine, theirs = self._moments[worker], self._moments.get(slowest, ())
        if len(mine) < 2 or len(theirs) < 2:
            return 0
        behind = clocks[worker] - clocks[slowest]
        most = self._staleness + self._extra - behind + 1
        interval, other = mine[1] - mine[0], theirs[1] - theirs[0]  # I_p, I_slow
        ends = [theirs[1] + k * other for k in range(1, self._extra + 2)]

        def wait(steps: int) -> float:
            return min(abs(mine[1] + steps * interval - end) for end in ends)

        return min(range(most + 1), key=wait, default=0)

    def _release(self, shard: Shard) -> None:
        slowest = shard.slowest_step()
        # The reply starts step c = push.step + 1: all must have done c - s_L.
        self._answer(
            shard,
            [p for p in self._waiting if p.step + 1 <= slowest + self._staleness],
        )

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        # A restarted worker continues after its own steps, which may be far ahead.
        return step <= shard.slowest_step() + self._staleness

    def _answer(self, shard: Shard, pushes: list[PushedGradient]) -> None:
        gone = {push.number for push in pushes}
        self._waiting = [push for push in self._waiting if push.number not in gone]
        for push in pushes:
            shard.reply(push)
