"""How long a worker's step takes, and how well that is known.

A step lasts from when its server has let a worker go on until all of its next gradient is in: pull,
compute and push, without the gate. So its very first one, in which things are loaded, counts for nothing.
What is told is the median of several, and its standard error by the distance between their
quartiles, in logarithms: a few slow steps of a warm-up, or an evaluation in between, change neither.

The first groups are formed as soon as times of all are known well enough, which takes `LEAST` steps
of the slowest where steps vary little. Later every time is of as many steps as may be, and is smoothed
as the published code does (0.7 of what is new): who is slow for a while only stays where it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from statistics import fmean, median, quantiles
from typing import NamedTuple

NEW = 0.7
"""The weight of a new time: the published code's."""

LEAST = 5
"""From so many steps on it is known how well their median is known; it takes two slow ones."""

OF_A_MEDIAN = math.sqrt(math.pi / 2) / 1.349
"""Its standard error, over the distance of quartiles and times the root of how many: of a normal
distribution, whose quartiles are 1.349 standard deviations apart."""


class Measured(NamedTuple):
    """The time of a worker's step, in *seconds*. *error*: the standard error of its logarithm,
    0 where nothing is known of it."""

    seconds: float
    error: float = 0.0


class StepTimes:
    """Measures the steps of those who push here: medians of *steps* each."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began: dict[int, float] = {}
        self._times: defaultdict[int, list[float]] = defaultdict(list)
        self._looked = 0
        """So many steps of each had been measured when `soon` last looked."""

    def goes_on(self, worker: int, now: float) -> None:
        self._began[worker] = now

    def step_is_in(self, worker: int, now: float) -> Measured | None:
        """Of its last steps, where there are enough."""
        began = self._began.pop(worker, None)
        if began is None or now <= began:
            return None
        times = self._times[worker]
        times.append(now - began)
        if len(times) < self._steps:
            return None
        del self._times[worker]
        return measured(times)

    def soon(self, workers: Collection[int], error: float) -> dict[int, Measured]:
        """Of all *workers*, if what is known of them by now has a smaller *error*, as the root
        of their mean square: one by one so few steps would say too little of it."""
        least = min((len(self._times.get(worker, ())) for worker in workers), default=0)
        if least < LEAST or least == self._looked:
            return {}
        self._looked = least
        found = {worker: measured(self._times[worker]) for worker in workers}
        if fmean(its.error**2 for its in found.values()) >= error**2:
            return {}
        for worker in workers:
            del self._times[worker]
        return found

    def forget(self, worker: int) -> None:
        """It pushes elsewhere, or nowhere."""
        self._began.pop(worker, None)
        self._times.pop(worker, None)


def measured(times: list[float]) -> Measured:
    """Of these steps."""
    seconds = median(times)
    if len(times) < LEAST:
        return Measured(seconds)
    first, _, third = quantiles((math.log(its) for its in times), n=4)
    return Measured(seconds, OF_A_MEDIAN * (third - first) / math.sqrt(len(times)))


def smoothed(before: Measured | None, now: Measured) -> Measured:
    """T = 0.3 T + 0.7 T_new; the first time T_new."""
    if before is None:
        return now
    seconds = (1 - NEW) * before.seconds + NEW * now.seconds
    return Measured(seconds, math.hypot((1 - NEW) * before.error, NEW * now.error))
