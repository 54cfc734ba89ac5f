"""*Break-even*: the link at which all workers together are as fast as one machine.

Each look at a link is a run in virtual time, so few of them are made. What does not wait for the
network takes the same with any link, and what waits about twice as long with one half as fast: a step is
about ``a + b / link``. The next links to look at are just above and just below where that meets
one machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from paceline.cluster import Cluster
from paceline.tools.plan.estimates import Infeasible
from paceline.tools.plan.merged_tensors import coarse, unplanned
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.prediction_cost import UNBOUNDED, Budget, cost
from paceline.tools.plan.predictor import Predict, in_this_process
from paceline.units import show_rate

MOST_SCALE = 1024.0
"""Times faster, or slower, than the links are: what lies beyond is not looked for."""
PRECISION = 1.02
ASIDE = PRECISION**0.45
"""Of a guess, to both sides of which runs are made: if it was right that ends the search."""
GUESSED = 4
"""Rounds in which links are guessed; after them what is left is halved."""


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """With *spec*, links of *rate* (the slowest of them, bytes a second) make all workers as fast
    as one machine; None: no link does, or every one."""

    spec: str
    rate: float | None
    words: str


@dataclass
class _Search:
    """Links, as factors of what they are: with *low* a step takes longer than *target*, *low_seconds*; with *high* it
    does not, but *high_seconds*. A step of one machine, without any link, takes *one*."""

    spec: str
    target: float
    one: float
    low: float = 0.0
    low_seconds: float = math.inf
    high: float = math.inf
    high_seconds: float = 0.0
    rounds: int = 0
    seen: dict[float, float] = field(default_factory=dict)

    def next(self) -> list[float]:
        """Which ones to look at next; none at the end."""
        if self.is_over:
            return []
        self.rounds += 1
        if self.rounds == 1:
            return [1.0]
        guess = self._guess() if self.rounds <= GUESSED else math.nan
        near = [guess / ASIDE, guess * ASIDE]
        inside = {
            min(max(scale, 1 / MOST_SCALE), MOST_SCALE)
            for scale in near
            if self.low < scale < self.high
        }
        inside -= {self.low, self.high}
        if not inside and not self.low:
            return [1 / MOST_SCALE]
        if not inside and self.high == math.inf:
            return [MOST_SCALE]
        return sorted(inside) or [math.sqrt(self.low * self.high)]

    def _guess(self) -> float:
        """Where a line through the two nearest looks meets the target: seconds over one over the link."""
        near = [(self.high, self.high_seconds), (self.low, self.low_seconds)]
        if not self.low or self.high == math.inf:
            looks = sorted(
                self.seen.items(), key=lambda look: abs(look[1] - self.target)
            )
            near = looks[:2]
        scale, seconds = near[0]
        if not math.isfinite(seconds):
            return math.nan
        start, share = self.one, max(0.0, seconds - self.one) * scale
        if len(near) == 2 and near[1][1] != seconds:
            other, other_seconds = near[1]
            share = (seconds - other_seconds) / (1 / scale - 1 / other)
            start = seconds - share / scale
        return share / (self.target - start) if self.target > start else math.inf

    def learn(self, scale: float, seconds: float) -> None:
        """A step takes so many *seconds* with links of *scale*."""
        self.seen[scale] = seconds
        if seconds <= self.target:
            if scale < self.high:
                self.high, self.high_seconds = scale, seconds
        elif scale > self.low:
            self.low, self.low_seconds = scale, seconds

    @property
    def is_over(self) -> bool:
        return (
            self.low >= MOST_SCALE
            or self.high <= 1 / MOST_SCALE
            or self.high <= PRECISION * self.low
        )

    def found(self, slowest: float) -> BreakEven:
        """Where the slowest link is *slowest* as it is, bytes a second."""
        words, rate = "no link makes it as fast as one machine", None
        if self.high <= 1 / MOST_SCALE:
            words = f"faster than one machine even at {show_rate(slowest / MOST_SCALE)}"
        elif self.low < MOST_SCALE:
            rate = self.high * slowest
            shown = show_rate(float(f"{rate * 8:.2g}") / 8)
            words = f"as fast as one machine at {shown}"
        return BreakEven(spec=self.spec, rate=rate, words=words)


def break_evens(
    job: TrainingJob,
    specs: Sequence[str],
    one: float,
    predict: Predict = in_this_process,
    budget: Budget = UNBOUNDED,
) -> list[BreakEven]:
    """The link, with each of *specs*, at which as many samples a second come out as on one machine, which takes *one*
    second a batch; to 2 %, in short runs of few tensors. Specs are looked at side by side; without those
    that *budget* does not see to their end, as nobody knows before how many looks they take."""
    quick = replace(job, workload=coarse(job.workload))
    searches = [_Search(spec, job.cluster.workers * one, one) for spec in specs]
    prices = {
        spec: sum(cost(quick, run, short=True) for run in unplanned(spec))
        for spec in specs
    }
    while asked := _looks(searches, prices, budget):
        runs = [
            (replace(quick, cluster=with_links(job.cluster, scale)), spec)
            for search, scale in asked
            for spec in unplanned(search.spec)
        ]
        said = predict.each(runs, short=True)
        for search, scale in asked:
            answers = [next(said) for _ in unplanned(search.spec)]
            search.learn(
                scale,
                min(
                    math.inf if isinstance(one, Infeasible) else one.step_seconds
                    for one in answers
                ),
            )
    slowest = min(rate for rack in job.cluster.racks for rate in rack.links)
    return [search.found(slowest) for search in searches]


def _looks(
    searches: list[_Search], prices: Mapping[str, float], budget: Budget
) -> list[tuple[_Search, float]]:
    """What to look at next. A search that does not fit into the budget is taken out of *searches*."""
    asked: list[tuple[_Search, float]] = []
    for search in list(searches):
        scales = search.next()
        if budget.takes(len(scales) * prices[search.spec]):
            asked += [(search, scale) for scale in scales]
        else:
            searches.remove(search)
    return asked


def with_links(cluster: Cluster, scale: float) -> Cluster:
    """The cluster with all links, uplinks and those of servers that many times as fast."""
    racks = tuple(
        replace(
            rack,
            link=tuple(rate * scale for rate in rack.links),
            uplink=None if rack.uplink is None else rack.uplink * scale,
        )
        for rack in cluster.racks
    )
    servers = tuple(
        replace(server, link=None if server.link is None else server.link * scale)
        for server in cluster.servers
    )
    return Cluster(racks, processor=cluster.processor, servers=servers)
