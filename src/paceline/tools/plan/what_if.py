"""Predicts what else would make a training faster: other links, batches and numbers of workers.

- `break_even_links`: the link at which all workers are as fast as one machine.
- `suggestions`: gradient accumulation, larger batches, fewer workers.
- `scaling_grid`: more workers and faster links.

Each figure is a prediction, in samples per second. It does not say whether a larger batch trains as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from paceline.cluster import Cluster, Rack
from paceline.interfaces import Consistency
from paceline.spec import parse
from paceline.tools.plan.estimates import DDP, Estimate, Infeasible, Plan
from paceline.tools.plan.predict import TrainingJob, merge_tensors, short_run_specs
from paceline.tools.plan.predictor import Predictor
from paceline.tools.plan.search import NEGLIGIBLE
from paceline.units import show_rate

PASSES = (4, 16)
"""Passes of an update, or batch multiples, that are suggested."""
HELPS = 1.02
"""Factor of samples per second: a smaller gain is none."""
MANY = 16
"""Workers: with more, suggestions are predicted with merged tensors."""
MOST_SCALE = 1024.0
"""Break-even links are at most this factor faster or slower than the links."""
PRECISION = 1.02
"""Relative precision of a break-even link."""
ASIDE = PRECISION**0.45
"""Factor to both sides of a guessed link at which predictions are made: a right guess ends the search."""
GUESSED = 4
"""Rounds in which links are guessed; later rounds bisect."""
WORKERS = (1, 2, 4, 8, 16, 32, 64)
RATES = (12.5e6, 125e6, 312.5e6, 1.25e9, 3.125e9)
"""0.1, 1, 2.5, 10 and 25 Gbit/s."""
EACH = 2
"""Methods of each consistency that a scaling grid predicts: the best one may differ from point to point."""


# ---- break-even ----


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """The link at which all workers are as fast as one machine.

    Attributes:
        spec: The method.
        rate: Bytes per second of the slowest link; None: no link is slow, or fast, enough.
        words: The same as text.
    """

    spec: str
    rate: float | None
    words: str


def break_even_links(
    job: TrainingJob,
    specs: Sequence[str],
    single_seconds: float,
    predictor: Predictor | None = None,
) -> list[BreakEven]:
    """Find the links at which all workers are as fast as one machine, within 2 %.

    A step takes about ``a + b / link``: exposed communication takes twice as long with half the link. So links just
    above and just below the intersection with one machine are predicted next, in short runs.

    Args:
        job: The training. All links of its cluster change by one factor.
        specs: Methods, each once.
        single_seconds: One worker's batch on one machine.
        predictor: Makes the predictions [default: this process].

    Returns:
        A link for each method for which `predictor` has simulated events left.
    """
    predictor = predictor or Predictor()
    target = job.cluster.workers * single_seconds
    searches = [_LinkSearch(spec, target, single_seconds) for spec in specs]
    while asked := [
        (search, scale, run)
        for search in searches
        for scale in search.next()
        for run in short_run_specs(search.spec)
    ]:
        jobs = [
            (replace(job, cluster=with_links(job.cluster, scale)), run)
            for _, scale, run in asked
        ]
        answers = list(predictor.predict(jobs, "short"))
        cut = {search.spec for search, _, _ in asked[len(answers) :]}
        searches = [search for search in searches if search.spec not in cut]
        for search in searches:
            seconds: dict[float, float] = {}
            for (of, scale, _), answer in zip(asked, answers, strict=False):
                if of is search:
                    fastest = seconds.get(scale, math.inf)
                    seconds[scale] = min(fastest, _step_seconds(answer))
            for scale, step in seconds.items():
                search.learn(scale, step)
    slowest = min(rate for rack in job.cluster.racks for rate in rack.links)
    return [search.found(slowest) for search in searches]


def _step_seconds(answer: Estimate | Infeasible) -> float:
    return math.inf if isinstance(answer, Infeasible) else answer.step_seconds


@dataclass
class _LinkSearch:
    """The search for one break-even link, as a factor on the present links.

    Attributes:
        spec: The method.
        target: Seconds of one machine with the global batch.
        single: Seconds of one machine with one worker's batch: a step without communication.
        low: A factor with which a step takes `low_seconds`, more than `target`.
        high: A factor with which a step takes `high_seconds`, at most `target`.
        rounds: Rounds so far.
        seen: Seconds of a step, by factor.
    """

    spec: str
    target: float
    single: float
    low: float = 0.0
    low_seconds: float = math.inf
    high: float = math.inf
    high_seconds: float = 0.0
    rounds: int = 0
    seen: dict[float, float] = field(default_factory=dict)

    def next(self) -> list[float]:
        """Factors to predict next; none at the end."""
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
        """Return the factor at which ``a + b / factor``, fitted to the two nearest points, meets the target."""
        near = [(self.high, self.high_seconds), (self.low, self.low_seconds)]
        if not self.low or self.high == math.inf:
            looks = sorted(
                self.seen.items(), key=lambda look: abs(look[1] - self.target)
            )
            near = looks[:2]
        scale, seconds = near[0]
        if not math.isfinite(seconds):
            return math.nan
        start, share = self.single, max(0.0, seconds - self.single) * scale
        if len(near) == 2 and near[1][1] != seconds:
            other, other_seconds = near[1]
            share = (seconds - other_seconds) / (1 / scale - 1 / other)
            start = seconds - share / scale
        return share / (self.target - start) if self.target > start else math.inf

    def learn(self, scale: float, seconds: float) -> None:
        """Record that a step takes *seconds* with links of *scale*."""
        self.seen[scale] = seconds
        if seconds <= self.target:
            if scale < self.high:
                self.high, self.high_seconds = scale, seconds
        elif scale > self.low:
            self.low, self.low_seconds = scale, seconds

    @property
    def is_over(self) -> bool:
        """Whether the factor is precise enough, or beyond `MOST_SCALE`."""
        return (
            self.low >= MOST_SCALE
            or self.high <= 1 / MOST_SCALE
            or self.high <= PRECISION * self.low
        )

    def found(self, slowest: float) -> BreakEven:
        """Return the result, if the slowest link has *slowest* bytes per second."""
        words, rate = "no link makes it as fast as one machine", None
        if self.high <= 1 / MOST_SCALE:
            words = f"faster than one machine even at {show_rate(slowest / MOST_SCALE)}"
        elif self.low < MOST_SCALE:
            rate = self.high * slowest
            shown = show_rate(float(f"{rate * 8:.2g}") / 8)
            words = f"as fast as one machine at {shown}"
        return BreakEven(spec=self.spec, rate=rate, words=words)


def with_links(cluster: Cluster, scale: float) -> Cluster:
    """Return the cluster with all links, uplinks and links of servers *scale* times as fast."""
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


# ---- other ways to gain ----


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """A change that gives more samples per second.

    Attributes:
        what: The change.
        spec: The method of the prediction.
        step_seconds: Time of a step with it.
        speedup: Samples per second relative to one machine.
    """

    what: str
    spec: str
    step_seconds: float
    speedup: float


class Suggestions(msgspec.Struct, frozen=True, kw_only=True):
    """Other ways to gain.

    Attributes:
        break_even: Links at which all workers are as fast as one machine.
        helps: Changes that gain, the largest gain first.
        tried: How many changes were predicted.
        untried: How many were not, since no simulated events were left.
    """

    break_even: tuple[BreakEven, ...]
    helps: tuple[Suggestion, ...]
    tried: int = 0
    untried: int = 0


def suggestions(
    plan: Plan, job: TrainingJob, predictor: Predictor | None = None
) -> Suggestions:
    """Find break-even links and other ways to gain.

    Changes are predicted with the recommended method of the strongest consistency; links also with
    DDP. With more than `MANY` workers, predictions merge tensors.

    Args:
        plan: The plan. With one worker there is nothing to suggest.
        job: The job that it was made from.
        predictor: Makes the predictions [default: this process].
    """
    if not plan.recommended:
        return Suggestions(break_even=(), helps=())
    predictor = predictor or Predictor()
    best = next(iter(plan.recommended.values()))
    baseline, spec = plan.baseline, best.spec
    single = baseline.single.step_seconds / baseline.workers
    if job.cluster.workers > MANY:
        job = replace(job, workload=merge_tensors(job.workload))
    usual = [DDP] if plan.estimate(DDP) is not None else []
    specs = list(dict.fromkeys((*usual, spec)))
    links = break_even_links(job, specs, single, predictor)
    wanted = [*_larger_updates(job), *_fewer_workers(job)]
    answers = list(predictor.predict([(changed, spec) for _, changed in wanted]))
    found = []
    for (what, changed), answer in zip(wanted, answers, strict=False):
        if isinstance(answer, Infeasible):
            continue
        passes = changed.batches * changed.passes / job.passes
        speedup = passes * changed.cluster.workers * single / answer.step_seconds
        if speedup >= HELPS * baseline.speedup(best):
            found.append(
                Suggestion(
                    what=what,
                    spec=spec,
                    step_seconds=answer.step_seconds,
                    speedup=speedup,
                )
            )
    found.sort(key=lambda one: -one.speedup)
    return Suggestions(
        break_even=tuple(links),
        helps=tuple(found),
        tried=len(answers),
        untried=len(wanted) - len(answers) + (len(links) < len(specs)),
    )


def _larger_updates(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """More samples per update."""
    for count in PASSES:
        if count > job.passes:
            more = replace(job, accumulate=count)
            yield f"gradient accumulation over {count} batches", more
        yield f"{count}x larger batches", replace(job, batches=count)


def _fewer_workers(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """Return the faster half of the hosts, and all hosts but the slowest one."""
    cluster = job.cluster
    hosts = fastest_first(cluster)
    counts = {cluster.hosts // 2}
    if len({_speed_of_host(cluster, host) for host in hosts}) > 1:
        counts.add(cluster.hosts - 1)
    for count in sorted(counts):
        if count < 2:
            continue
        smaller = with_hosts(cluster, hosts[:count])
        what = f"{smaller.workers} workers instead of {cluster.workers}"
        yield what, replace(job, cluster=smaller)


def fastest_first(cluster: Cluster) -> list[int]:
    """Hosts by their links, then by their speeds; equal hosts in their order."""
    return sorted(
        range(cluster.hosts),
        key=lambda host: _speed_of_host(cluster, host),
        reverse=True,
    )


def _speed_of_host(cluster: Cluster, host: int) -> tuple[float, float]:
    """Return a host's link, and the speed of its slowest worker."""
    mine = [w for w in range(cluster.workers) if cluster.host_of(w) == host]
    link = cluster.capacities[cluster.link_out_of(host)]
    return link, min(cluster.speeds[w] for w in mine)


def with_hosts(cluster: Cluster, hosts: list[int]) -> Cluster:
    """Return the cluster of these hosts, without rules, and with the servers of the remaining racks."""
    racks: list[Rack] = []
    kept: dict[int, int] = {}
    first = 0
    for number, rack in enumerate(cluster.racks):
        mine = [
            host - first for host in sorted(hosts) if 0 <= host - first < rack.hosts
        ]
        first += rack.hosts
        if not mine:
            continue
        kept[number] = len(racks)
        each = rack.workers_per_host
        workers = [host * each + i for host in mine for i in range(each)]
        racks.append(
            replace(
                rack,
                workers=len(workers),
                link=tuple(rack.links[host] for host in mine),
                speed=tuple(rack.speed[worker] for worker in workers),
                names=tuple(rack.names[host] for host in mine) if rack.names else (),
                group=tuple(rack.groups[worker] for worker in workers),
            )
        )
    servers = tuple(
        replace(server, rack=kept[server.rack])
        for server in cluster.servers
        if server.rack in kept
    )
    return Cluster(tuple(racks), processor=cluster.processor, servers=servers)


# ---- more workers, faster links ----


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The best method of a consistency with some number of workers on one switch.

    Attributes:
        workers: Number of workers.
        rate: Bytes per second of each worker's link.
        consistency: The consistency.
        spec: The method.
        step_seconds: Time of a step.
        speedup: Samples per second relative to one worker.
        efficiency: `speedup` over `workers`.
        samples_per_second: None if the batch is not known.
    """

    workers: int
    rate: float
    consistency: Consistency
    spec: str
    step_seconds: float
    speedup: float
    efficiency: float
    samples_per_second: float | None = None


def scaling_grid(
    plan: Plan,
    job: TrainingJob,
    workers: Sequence[int] = WORKERS,
    rates: Sequence[float] = RATES,
    predictor: Predictor | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, number, count: None,
) -> list[ScalingPoint]:
    """Predict the best method of each consistency with more workers and faster links, in short runs.

    Workers are in one rack. Its latency is the first rack's, and its speed the fastest worker's. If a method hardly
    gains by a faster link, yet faster ones are not predicted.

    Args:
        plan: The plan.
        job: The job that it was made from.
        workers: Numbers of workers.
        rates: Links, bytes per second.
        predictor: Makes the predictions, without a limit on their number [default: this process].
        on_progress: Called before each point with its name, its number, and the number of all.
    """
    predictor = predictor or Predictor()
    named = {
        run: spec
        for among in shortlist(plan).values()
        for spec in among
        for run in short_run_specs(spec)
    }
    every = sum(workers) * len(rates)
    done = 0
    points: list[ScalingPoint] = []
    for count in sorted(workers):
        curves: dict[str, Curve] = {spec: [] for spec in named}
        for rate in sorted(rates):
            on_progress(f"{count} workers, {show_rate(rate)}", done, every)
            there = replace(job, cluster=_one_rack(job, count, rate))
            if count > 1:
                _extend(predictor, there, rate, curves)
            points += _points(plan, named, curves, count, rate)
            done += count
    return points


def shortlist(plan: Plan) -> dict[Consistency, list[str]]:
    """Return the fastest specs of each consistency that differ in method or compressor."""
    found: dict[Consistency, dict[tuple[str, object], str]] = {}
    estimates = [
        *plan.recommended.values(),
        *(one for one in plan.estimates if not one.rejected),
    ]
    for one in estimates:
        mine = found.setdefault(one.consistency, {})
        spec = parse(one.spec)
        if len(mine) < EACH:
            mine.setdefault((spec.name, spec.values.get("compression")), one.spec)
    return {consistency: list(specs.values()) for consistency, specs in found.items()}


def _one_rack(job: TrainingJob, workers: int, rate: float) -> Cluster:
    first = job.cluster.racks[0]
    rack = Rack(
        workers=workers,
        link=rate,
        latency=first.latency,
        speed=(max(job.cluster.speeds),) * workers,
        burst=first.burst,
    )
    servers = job.cluster.servers and (replace(job.cluster.servers[0], rack=0),)
    return Cluster((rack,), processor=job.cluster.processor, servers=servers)


Curve = list[tuple[float, float]]
"""Links and seconds of a step, the slowest link first, as far as predicted."""


def _extend(
    predictor: Predictor, job: TrainingJob, rate: float, curves: Mapping[str, Curve]
) -> None:
    """Predict one more point of each curve that is not flat."""
    specs = [spec for spec, curve in curves.items() if not _is_flat(curve)]
    asked = [(job, spec) for spec in specs]
    answers = predictor.predict(asked, "short", until=math.inf)
    for spec, answer in zip(specs, answers, strict=True):
        if isinstance(answer, Estimate):
            curves[spec].append((rate, answer.step_seconds))


def _is_flat(curve: Curve) -> bool:
    """Return whether no link makes the step shorter by more than `NEGLIGIBLE`.

    A step is a convex function of the time per byte. So towards zero it falls at most as steeply as
    between the last two links.
    """
    if len(curve) < 2:
        return False
    (slow, before), (fast, after) = curve[-2:]
    slope = (before - after) / (1 / slow - 1 / fast)
    return slope / fast < NEGLIGIBLE * after


def _points(
    plan: Plan,
    named: Mapping[str, str],
    curves: Mapping[str, Curve],
    workers: int,
    rate: float,
) -> Iterator[ScalingPoint]:
    baseline = plan.baseline
    single = baseline.single.step_seconds / baseline.workers
    for consistency, among in shortlist(plan).items():
        found = [("one machine", single)] if workers == 1 else []
        found += [
            (spec, curve[-1][1])
            for run, curve in curves.items()
            if curve and (spec := named[run]) in among
        ]
        if found:
            spec, seconds = min(found, key=lambda pair: pair[1])
            yield ScalingPoint(
                workers=workers,
                rate=rate,
                consistency=consistency,
                spec=spec,
                step_seconds=seconds,
                speedup=workers * single / seconds,
                efficiency=single / seconds,
                samples_per_second=None
                if baseline.batch is None
                else workers * baseline.batch / baseline.workers / seconds,
            )
