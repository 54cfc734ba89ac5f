"""One worker decides for all, and tells it: the decisions of ``collective=native``.

Every rank tells when its gradients were ready; the first one that still trains, which also
knows how important each piece is, decides. The exchange is one small all-reduce beside
stage 2, so nobody waits for it either. When it takes place is not told: every rank finds it
from how many steps there were and from what is deferred, which are the same everywhere.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from paceline.interfaces import Comm, Pending, UpdatingRun
from paceline.methods.osp.choice import Rate, StepTimes
from paceline.methods.osp.decision import Decision
from paceline.methods.osp.trial import LOOK, Seen
from paceline.methods.osp.watch import FADES, Took
from paceline.methods.osp.worker import Worker

UPDATES = 3.0
"""Deferring costs a worker about so many updates of the same bytes: the tentative step, and
keeping and restoring exact values."""

TRIES = 5
"""Of the smallest all-reduce; the first makes connections."""


class Exchange:
    """Makes ``layout.deferred`` of a *worker*. Collective, step by step."""

    def __init__(
        self, worker: Worker[UpdatingRun], run: UpdatingRun, channel: Comm | None
    ) -> None:
        self._worker, self._channel = worker, channel
        self._options, self._layout, self._watch = (
            worker.options,
            worker.layout,
            worker.watch,
        )
        self._decision = Decision(worker.options)
        self._round = 0
        self._leads = run.comm.rank == 0
        self._start_up = 0.0
        if channel is not None and worker.options.defer == "measured":
            self._start_up = _start_up(run)
        self._look: int | None = None  # the round of a decision out of turn
        self._notes: torch.Tensor | None = None  # on their way
        self._agreed: StepTimes | None = None
        self._updates: deque[tuple[Any, Any, int]] = deque(
            maxlen=worker.options.interval
        )

    def rate(self, numbers: Sequence[int], means: Sequence[torch.Tensor]) -> None:
        """These mean gradients belong to the pieces as they are."""
        if self._channel is None or not self._leads or not self._ends_interval():
            return
        values = self._worker.updater.values(self._layout.some(numbers))
        for number, value, mean in zip(numbers, values, means, strict=True):
            self._decision.importance.rate(number, value, mean)

    def updated(self, start: Any, end: Any, size: int) -> None:
        """The optimizer took from *start* to *end* for so many bytes."""
        self._updates.append((start, end, size))

    def step_ended(self, run: UpdatingRun, pending: list[Pending]) -> None:
        """All that this step sends is under way; what else is sent goes to *pending*, which
        is waited for before the next step ends."""
        self._watch.step_ended(self._layout.changes, run.loss)
        if self._notes is not None:
            self._adopt(run, self._notes.tolist())
            self._notes = None
        due = self._ends_interval() or self._round == self._look
        if self._channel is not None and due and run.participants:
            self._leads = run.comm.rank == run.participants[0]
            self._notes = self._noted(run)
            pending.append(self._channel.all_reduce(self._notes, "max"))
        self._round += 1
        self._worker.steps += run.active
        self._watch.step_begins()

    def _ends_interval(self) -> bool:
        return self._round % self._options.interval == 0

    def _noted(self, run: UpdatingRun) -> torch.Tensor:
        """What this rank tells: when its gradients were ready and, if it leads, what is to
        be deferred."""
        took = self._watch.took()
        chosen = [0.0] * len(self._layout.pieces)
        for number in self._decided(run, took) if self._leads else ():
            chosen[number] = 1.0
        # As many as were delivered, on all ranks: buckets may have been made anew since.
        ready = [0.0] * (self._watch.delivered + 1)
        if took is not None:
            ready = [*took.times.ready, took.times.end]
        device = run.buckets[0].buffer.device
        return torch.tensor([*chosen, *ready], dtype=torch.float64, device=device)

    def _adopt(self, run: UpdatingRun, values: Sequence[float]) -> None:
        """All ranks do so at the end of the same step, and with the same *values*."""
        count, began = len(self._layout.pieces), not self._layout.deferred
        self._layout.defer([n for n in range(count) if values[n] > 0])
        self._look = None
        if self._layout.deferred:
            self._worker.has_deferred = True
            if began and self._options.defer == "measured":
                # The next step still waits for what its predecessor sent: it does not count.
                self._look = self._round + 1 + LOOK
        *ready, end = values[count:]
        fits = len(ready) == len(run.buckets) and all(ready)
        self._agreed = StepTimes(ready, end) if fits else None

    def _decided(self, run: UpdatingRun, took: Took | None) -> list[int]:
        """What is to be deferred, as the first rank that still trains sees it."""
        deferred, parts = self._layout.deferred, self._layout.parts()
        look = not self._ends_interval()
        seen = None
        if took is not None:
            agreed = self._agreed
            if not look and agreed and len(agreed.ready) == len(took.times.ready):
                took = took._replace(times=agreed)
            fades = 1.0 if look else FADES
            self._watch.measure(took, parts, deferred, fades, start_up=self._start_up)
            rate = Rate(self._start_up, self._watch.per_byte)
            seen = Seen(
                took.times, rate, took.whole, tuple(run.participants), self._cost(run)
            )
        if look:
            return self._decision.after_look(deferred, seen)
        growth = self._watch.growth.part
        return self._decision.after_interval(parts, deferred, growth, seen, self._round)

    def _cost(self, run: UpdatingRun) -> float:
        """Seconds per byte that a tentative step takes."""
        costs = [
            run.stopwatch.seconds(start, [end])[0] / size
            for start, end, size in self._updates
            if size
        ]
        return UPDATES * statistics.median(costs) if costs else 0.0


def _start_up(run: UpdatingRun) -> float:
    """Seconds that the smallest all-reduce takes. Collective."""
    times = []
    for _ in range(TRIES):
        one = torch.zeros(1, device=run.buckets[0].buffer.device)
        start = run.stopwatch.mark()
        run.comm.all_reduce(one, "sum").wait()
        times.append(run.stopwatch.seconds(start, [run.stopwatch.mark()])[0])
    return statistics.median(times)
