"""R2SP: round-robin synchronous parallel training over a parameter server.

Chen, Wang and Li, "Round-robin synchronization: mitigating communication bottlenecks in
parameter servers" (INFOCOM 2019). The server applies each gradient when it arrives, as under asp.
But workers continue in a fixed order with even gaps, so that only about one at a time uses the
server's link.

In the warm-up no worker waits, and after it none until all have done equally many steps. Then worker
j continues when it has its turn, its step has arrived, and a gap has passed since the last turn:

    gap = T / (slack * N)

N is the number of active workers. T is the time of a step of worker 0, without the wait for its
turn. With slack above 1 a round of N gaps is shorter than a step: turns wait for workers rather than
workers for turns. `slack=1.2` is the authors' value (for VGG theirs is 1.25).

It is for equally fast workers. Otherwise all run at the slowest one's pace: give each a share of the
batch in proportion to its speed (`paceline.Sampler(..., shares="speed")`). Pushes are then weighted
by samples.

T is a mean over all steps since the warm-up's first half, as in the authors' code: an evaluation
between two steps of worker 0 counts as part of a step.

Differences from the authors' code, whose ring would wait forever for a dead worker:

- A worker that has left or died has no turn. If that is worker 0, the next worker's steps are
  measured.
- The ring begins when all workers have done equally many steps. So all can reach a barrier, such as a
  checkpoint, after the same step: a worker there never has the turn that another worker waits for.
- The turn with which the last worker has caught up is also the first of the ring.
- A worker gets the parameters of its turn, for all buckets of a step together.
- The first of several servers keeps the order. The others reply immediately, and a worker waits for
  the first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.interfaces import Discipline, MethodSummary, PushedGradient, Shard
from paceline.methods.push_pull import PushPull, without_gradient


@dataclass(frozen=True, kw_only=True)
class R2SP(PushPull):
    """Let workers continue in rank order, one after each gap.

    Attributes:
        slack: Length of a step, divided by the time in which each worker continues once; at least 1.
        warmup_steps: First steps of worker 0, in which no worker waits. The second half of these steps is measured.
    """

    name: ClassVar[str] = "r2sp"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Applies gradients as asp, and lets workers continue in turn, one at a time.",
        source="Chen, Wang and Li, Round-robin synchronization (INFOCOM 2019)",
        use_when="a server's link is the bottleneck, and all workers are equally fast",
        waits_for="its turn: workers continue in rank order, at equal intervals",
        sends="the whole gradient, and receives all parameters",
        guarantees=(
            "The server applies every gradient once, at the script's learning rate times the gradient's weight, 1/n. "
            "Once all workers have done equally many steps, they take turns: each active worker "
            "continues once before any continues again."
        ),
        limits=(
            "It gains over bsp without overlap, but little over bsp with overlap.",
            "If machines always differ in speed, all workers run at the slowest one's pace.",
            (
                "The server holds the momentum, and steps n times as often as a worker. So momentum "
                "covers n times fewer samples than under bsp."
            ),
        ),
    )
    steady_state_keys: ClassVar[Mapping[str, str]] = {"warmup_steps": "2"}

    slack: float = 1.2
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.slack < math.inf:
            raise UsageError(
                f"r2sp:slack={self.slack}: expected a number from 1 on; with less, a round "
                "takes longer than a step, and every worker idles in each"
            )
        if self.warmup_steps < 2:
            raise UsageError(
                f"r2sp:warmup_steps={self.warmup_steps}: expected 2 or more steps; the first alone "
                "does not tell how long a step takes"
            )

    @property
    def learns_for(self) -> int:
        """Steps until workers wait for their turns."""
        return self.warmup_steps

    def server(self, workers: int) -> Discipline:
        return RoundRobin(self.slack, self.warmup_steps)


class StepLengths:
    """Step times of each worker, from its turn until its next step has arrived.

    The wait for a turn does not count. The first *unmeasured* steps do not count, either.
    """

    def __init__(self, unmeasured: int) -> None:
        self._unmeasured = unmeasured
        self._began: dict[int, float] = {}
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._measured: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        """By worker: its number of steps, over all its incarnations."""

    def step_is_in(self, worker: int, now: float) -> None:
        began = self._began.pop(worker, None)
        if began is not None and self.done[worker] >= self._unmeasured:
            self._seconds[worker] += now - began
            self._measured[worker] += 1
        self.done[worker] += 1

    def begins_step(self, worker: int, now: float) -> None:
        self._began[worker] = now

    def only(self, here: Set[int]) -> None:
        """Forget the current steps of all workers except *here*: the others have left or died."""
        self._began = {w: began for w, began in self._began.items() if w in here}

    def mean(self, worker: int) -> float | None:
        """Return the paper's T; None while no step was measured."""
        measured = self._measured[worker]
        return self._seconds[worker] / measured if measured else None


class RoundRobin(Discipline):
    """Applies w <- w - lr/n g_i on the server on arrival, and replies to workers in turn.

    After a restart from a snapshot the ring warms up again.
    """

    follows_first_server = True

    def __init__(self, slack: float, warmup_steps: int) -> None:
        self._slack = slack
        self._warmup_steps = warmup_steps
        self._is_warm = False
        self._catching_up: int | None = None
        """The step that all workers begin before the ring starts; None in the warm-up."""
        self._follows = False
        self._times = StepLengths(unmeasured=warmup_steps // 2)
        self._held: dict[int, list[PushedGradient]] = {}
        """By worker: the pushes that get replies in its turn."""
        self._step_seconds = 0.0  # T
        self._next = (
            0  # next_id: the worker with the turn; if inactive, the next active one
        )
        self._next_time = 0.0
        self._deadline: float | None = None

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        shard.apply(push)
        if self._follows:
            shard.reply(push)
            return
        held = self._held.setdefault(push.worker, [])
        held.append(without_gradient(push))
        if shard.clock(push.worker) > push.step:
            self._times.step_is_in(push.worker, shard.now)

    def follow(self) -> None:
        self._follows = True

    def on_change(self, shard: Shard) -> None:
        here = shard.active_workers(shard.next_unstarted_step())
        self._times.only(set(here))
        for worker in sorted(self._held.keys() - here):
            self._answer(shard, worker)
        self._release(shard, here)

    def next_deadline(self) -> float | None:
        return self._deadline

    def on_timer(self, shard: Shard) -> None:
        self._release(shard, shard.active_workers(shard.next_unstarted_step()))

    def _release(self, shard: Shard, here: Sequence[int]) -> None:
        self._deadline = None
        self._begin_ring(shard, here)
        while (worker := self._whose_turn(shard, here)) is not None:
            if self._is_warm and shard.now < self._next_time:
                self._deadline = self._next_time
                return
            self._take_turn(shard, worker, here)
            self._begin_ring(shard, here)

    def _begin_ring(self, shard: Shard, here: Sequence[int]) -> None:
        step = self._catching_up
        if step is not None and all(self._begun(shard, w) >= step for w in here):
            self._is_warm, self._catching_up = True, None

    def _begun(self, shard: Shard, worker: int) -> int:
        """Return the last step that a worker may have begun."""
        return shard.clock(worker) - (1 if self._waits(shard, worker) else 0)

    def _waits(self, shard: Shard, worker: int) -> bool:
        """Return whether a worker's whole step has arrived, and the worker waits for its turn."""
        held = self._held.get(worker)
        return held is not None and shard.clock(worker) > held[0].step

    def _whose_turn(self, shard: Shard, here: Sequence[int]) -> int | None:
        """Return the worker that continues next; None while its step has not arrived."""
        waiting = [worker for worker in self._held if self._waits(shard, worker)]
        if waiting and self._is_warm:
            turn = min(here, key=lambda worker: (worker < self._next, worker))
            return turn if turn in waiting else None
        if self._catching_up is not None:
            last = self._catching_up
            waiting = [w for w in waiting if self._begun(shard, w) < last]
        return waiting[0] if waiting else None

    def _take_turn(self, shard: Shard, worker: int, here: Sequence[int]) -> None:
        self._answer(shard, worker)
        self._times.begins_step(worker, shard.now)
        if worker == here[0]:
            mean = self._times.mean(worker)
            if mean is not None:
                self._step_seconds = mean
                warm = self._times.done[worker] >= self._warmup_steps
                if warm and not self._is_warm and self._catching_up is None:
                    self._catching_up = max(self._begun(shard, w) for w in here)
        # gap = T / (1.2 N); next_time = now + gap; next_id = (j + 1) mod N
        gap = self._step_seconds / (self._slack * len(here))
        self._next_time = shard.now + gap
        self._next = worker + 1

    def _answer(self, shard: Shard, worker: int) -> None:
        for push in self._held.pop(worker):
            shard.reply(push)
