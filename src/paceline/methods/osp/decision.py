"""What is deferred, decided every few steps by one worker for all.

Every rank tells when its gradients were ready; the first one that still trains, which also
knows how important each piece is, decides. Its decision is made of its own arithmetic and
clock, and travels: workers that each decided for themselves could disagree in a last bit,
and then wait for messages that never come. The exchange is one small all-reduce beside
stage 2, so nobody waits for it either.

When that exchange takes place is not told: every rank finds it from how many steps there
were and from what is deferred, which are the same everywhere.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from paceline.interfaces import Comm, Pending, Piece, Updater, UpdatingRun
from paceline.methods.osp.budget import Growth
from paceline.methods.osp.choice import (
    Rate,
    StepTimes,
    choose,
    fill,
    measured_rate,
    turns,
)
from paceline.methods.osp.explain import why_nothing
from paceline.methods.osp.importance import product
from paceline.methods.osp.layout import Layout
from paceline.methods.osp.options import FADES, INTERVAL, OSPOptions
from paceline.methods.osp.trial import LOOK, Seen, Trial
from paceline.methods.osp.watch import StepWatch

UPDATES = 3.0
"""Deferring costs a worker about so many updates of the same bytes: the tentative step, and
keeping and restoring exact values."""

TRIES = 5
"""Of the smallest all-reduce; the first makes connections."""


class Decider:
    """Observes steps, and makes ``layout.deferred``. Collective, step by step."""

    def __init__(
        self,
        options: OSPOptions,
        run: UpdatingRun,
        layout: Layout,
        channel: Comm | None,
    ) -> None:
        self._options, self._layout, self._channel = options, layout, channel
        self._growth = Growth(options.budget, options.ramp, run.say)
        self._round = 0
        self._steps = 0  # without those that only kept the others company
        self._deferred = False  # anything, ever
        self._leads = run.comm.rank == 0
        self._values = [0.0] * len(layout.pieces)
        self._numbers = {piece: n for n, piece in enumerate(layout.pieces)}
        self._device = run.buckets[0].buffer.device
        self._start_up = 0.0
        if channel is not None and options.defer == "measured":
            self._start_up = _start_up(run, self._device)
        self._per_byte = 0.0
        self._trial = Trial()
        self._look: int | None = None  # the round of a decision out of turn
        self._exchange: torch.Tensor | None = None
        self._agreed: StepTimes | None = None
        self.watch = StepWatch(run.stopwatch, options.overlap)
        self._updates: deque[tuple[Any, Any, int]] = deque(maxlen=INTERVAL)

    # ---- moments ----

    def rate(
        self,
        updater: Updater,
        pieces: Sequence[Piece],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """These mean *gradients* belong to the parameters as they are."""
        if self._channel is None or self._options.importance == "random":
            return
        if not self._leads or not self._ends_interval():
            return
        values = updater.values(pieces)
        for piece, value, gradient in zip(pieces, values, gradients, strict=True):
            self._values[self._numbers[piece]] = product(value, gradient)

    def updated(self, start: Any, end: Any, size: int) -> None:
        """The optimizer took from *start* to *end* for so many bytes."""
        self._updates.append((start, end, size))

    def step_ended(self, run: UpdatingRun, pending: list[Pending]) -> None:
        """All that this step sends is under way; what else is sent goes to *pending*, which
        is waited for before the next step ends."""
        if self._channel is None:
            self.watch.step_begins()
            return
        self._growth.step(run.loss)
        self.watch.step_ended(self._layout.changes)
        if self._exchange is not None:
            self._adopt(run)
        due = self._ends_interval() or self._round == self._look
        if due and run.participants:
            self._leads = run.comm.rank == run.participants[0]
            self._exchange = self._notes(run)
            pending.append(self._channel.all_reduce(self._exchange, "max"))
        self._round += 1
        self._steps += run.active
        self.watch.step_begins()

    def ended(self, run: UpdatingRun) -> None:
        """The training is over: say why nothing was deferred in it, if nothing was."""
        if self._deferred:
            return
        waited = self._per_byte > 0
        why = why_nothing(self._options, self._steps, self._growth.part, waited)
        if why is not None:
            run.say(why)

    # ---- the exchange ----

    def _ends_interval(self) -> bool:
        return self._round % INTERVAL == 0

    def _notes(self, run: UpdatingRun) -> torch.Tensor:
        """What this rank tells: when its gradients were ready and, if it leads, what is to
        be deferred."""
        times = self.watch.times()
        chosen = [0.0] * len(self._layout.pieces)
        if self._leads:
            decides = self._choose if self._ends_interval() else self._look_at
            for number in decides(run, times):
                chosen[number] = 1.0
        # As many as were delivered: a rank without data is here before the planner was,
        # which may make other buckets, and the others after it.
        ready = [0.0] * (self.watch.delivered + 1)
        if times is not None:
            ready = [*times.ready, times.end]
        return torch.tensor([*chosen, *ready], dtype=torch.float64, device=self._device)

    def _adopt(self, run: UpdatingRun) -> None:
        """All ranks do so at the end of the same step, and with the same values."""
        assert self._exchange is not None
        values, self._exchange = self._exchange.tolist(), None
        count = len(self._layout.pieces)
        began = not self._layout.deferred
        self._layout.defer([n for n in range(count) if values[n] > 0])
        self._deferred = self._deferred or bool(self._layout.deferred)
        self._look = None
        if began and self._layout.deferred and self._options.defer == "measured":
            # The next step, which still waits for what its predecessor sent, does not count.
            self._look = self._round + 1 + LOOK
        *ready, end = values[count:]
        fits = len(ready) == len(run.buckets) and all(ready)
        self._agreed = StepTimes(ready, end) if fits else None

    # ---- the decision ----

    def _choose(self, run: UpdatingRun, own: StepTimes | None) -> list[int]:
        options, parts = self._options, self._layout.parts()
        order = turns(options, parts, self._values, self._round)
        budget = options.most * sum(parts.sizes) * self._growth.part
        if options.defer == "most":
            return sorted(fill(parts, order, budget))
        if own is None:
            return self._layout.deferred  # nothing was seen yet
        times = own
        if self._agreed is not None and len(self._agreed.ready) == len(own.ready):
            times = self._agreed
        measured = self._measured(times)
        self._per_byte = FADES * self._per_byte if measured is None else measured
        if self._trial.rests(bool(self._layout.deferred), self._seen(run)):
            return []
        if not self._per_byte:
            return []
        rate = Rate(self._start_up, self._per_byte)
        return choose(
            parts, [order], times, rate, budget, UPDATES * self._update_cost(run)
        )

    def _look_at(self, run: UpdatingRun, own: StepTimes | None) -> list[int]:
        """A trial has begun: what is deferred stays so, unless that does not pay."""
        deferred = self._layout.deferred
        if own is None:
            return deferred  # buckets have changed
        measured = self._measured(own)
        if measured is not None:
            self._per_byte = measured
        stops = self._trial.stops_early(bool(deferred), self._seen(run))
        return [] if stops else deferred

    def _seen(self, run: UpdatingRun) -> Seen:
        return Seen(self.watch.whole(), self._per_byte, tuple(run.participants))

    def _measured(self, times: StepTimes) -> float | None:
        """The network, from how long steps took."""
        parts, deferred = self._layout.parts(), self._layout.deferred
        return measured_rate(
            times,
            parts.total(deferred),
            parts.left(deferred),
            self._start_up,
            self.watch.arrived(),
        )

    def _update_cost(self, run: UpdatingRun) -> float:
        """Seconds per byte of the optimizer's own step."""
        costs = [
            run.stopwatch.seconds(start, [end])[0] / size
            for start, end, size in self._updates
            if size
        ]
        self._updates.clear()
        return statistics.median(costs) if costs else 0.0


def _start_up(run: UpdatingRun, device: torch.device) -> float:
    """Seconds that the smallest all-reduce takes. Collective."""
    times = []
    for _ in range(TRIES):
        one = torch.zeros(1, device=device)
        start = run.stopwatch.mark()
        run.comm.all_reduce(one, "sum").wait()
        times.append(run.stopwatch.seconds(start, [run.stopwatch.mark()])[0])
    return statistics.median(times)
