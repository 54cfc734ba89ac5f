"""Measures workers' step times, and forms groups of workers that are about as fast.

- `StepTimes`: measures the steps of a server's workers.
- `partition`, `fewest_groups`, `speed_classes`: groups and their speed classes from step times.
- `Hysteresis`, `Merging`, `Regrouping`: the rules by which workers change groups.
- `GroupKnowledge`, `RegroupDecisions`: what a server knows of groups, and the decisions of server 0.
- `encode`, `read_*`: the messages about groups, as bytes.

**Step times.** A step begins when the server lets a worker go on, and ends when all of its next
gradient has arrived. So it has pull, computation and push, without the wait for other workers. A
worker's first step does not count: it loads code and data. A step time is the median of several
steps. Its standard error follows from the distance between their quartiles, in logarithms. A few
slow steps, such as an evaluation, change neither. The first groups are formed as soon as all times
are known well enough. If steps vary little, this takes `LEAST_STEPS` steps of the slowest worker.
Later times are of `measure_steps` steps, and are smoothed as in the published code: the new time
has a weight of 0.7.

**Groups.** Times are compared by their ratio, so all arithmetic is on their logarithms. In a best
partition, groups are runs of the sorted times: a time between two members of a group can join that
group without widening it. A group waits for its slowest member, so `partition` makes the widest
group as narrow as possible. Measured times have errors. Two workers may share a group whatever the
ratio, if they differ by at most `SIGNIFICANT_ERRORS` standard errors of their difference. So noise
alone does not separate workers that are equally fast.

**Decisions.** Servers measure the steps of their workers, and send the times to server 0. Server 0
decides once all active workers were measured again. It sends the groups to the other servers, and
each server sends them to its workers.

The paper does not say how it forms groups, and its code takes ranks modulo 4. So these rules are
inferred, except the speed classes, which are the published code's rule for GDTopK.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import msgspec

from paceline.errors import UsageError
from paceline.interfaces import Groups, SpeedClass

# ---- step times ----

NEW_WEIGHT = 0.7
"""The weight of a new time in a smoothed one, as in the published code."""

LEAST_STEPS = 5
"""A median of fewer steps has no known error. Of this many, one slow step does not change it."""

MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349
"""A median's standard error is this, times the distance of quartiles, over the root of the steps.

This holds for a normal distribution, whose quartiles are 1.349 standard deviations apart.
"""


class StepTime(NamedTuple):
    """The measured time of a worker's step.

    Attributes:
        seconds: The time in seconds.
        error: The standard error of its logarithm; 0 if it is not known.
    """

    seconds: float
    error: float = 0.0


class StepTimes:
    """Measures the step times of the workers that push to this server.

    Args:
        steps: A step time is the median of this many steps.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began: dict[int, float] = {}
        self._times: defaultdict[int, list[float]] = defaultdict(list)
        self._known_steps = 0
        """Steps of each worker at the last `take_early`."""

    def begin_step(self, worker: int, now: float) -> None:
        """Begin a step of *worker* at the time *now*, in seconds."""
        self._began[worker] = now

    def end_step(self, worker: int, now: float) -> StepTime | None:
        """End a step of *worker*: its gradient has arrived at the time *now*, in seconds.

        Returns:
            The median of its last steps; None if there are not enough of them.
        """
        began = self._began.pop(worker, None)
        if began is None or now <= began:
            return None
        times = self._times[worker]
        times.append(now - began)
        if len(times) < self._steps:
            return None
        del self._times[worker]
        return step_time(times)

    def take_early(self, workers: Collection[int], error: float) -> dict[int, StepTime]:
        """Take the times of all *workers* before `end_step` returns them, if they are certain enough.

        Args:
            workers: The active workers.
            error: The root mean square of the workers' errors must be below this. After few steps,
                the error of one worker alone is too uncertain.

        Returns:
            The time of each worker; empty while they are not certain enough.
        """
        least = min((len(self._times.get(worker, ())) for worker in workers), default=0)
        if least < LEAST_STEPS or least == self._known_steps:
            return {}
        self._known_steps = least
        found = {worker: step_time(self._times[worker]) for worker in workers}
        if fmean(its.error**2 for its in found.values()) >= error**2:
            return {}
        for worker in workers:
            del self._times[worker]
        return found

    def forget(self, worker: int) -> None:
        """Discard the steps of *worker*, which pushes to another server or has left."""
        self._began.pop(worker, None)
        self._times.pop(worker, None)


def step_time(times: list[float]) -> StepTime:
    """Return the median of *times*, in seconds, and its error if there are `LEAST_STEPS`."""
    seconds = median(times)
    if len(times) < LEAST_STEPS:
        return StepTime(seconds)
    first, _, third = quantiles((math.log(its) for its in times), n=4)
    return StepTime(seconds, MEDIAN_ERROR * (third - first) / math.sqrt(len(times)))


def smoothed(before: StepTime | None, now: StepTime) -> StepTime:
    """Return the smoothed time T = 0.3 T + 0.7 T_new; without *before* it is *now*."""
    if before is None:
        return now
    seconds = (1 - NEW_WEIGHT) * before.seconds + NEW_WEIGHT * now.seconds
    return StepTime(
        seconds, math.hypot((1 - NEW_WEIGHT) * before.error, NEW_WEIGHT * now.error)
    )


# ---- groups from step times ----

SIGNIFICANT_ERRORS = 4.0
"""Times that differ by more standard errors count as different.

By chance alone, one of about 16,000 pairs differs as much.
"""

MARGIN, DECISIONS = 0.15, 2
"""A worker moves if it is nearer to another group by this margin, in this many decisions in a row."""


def fewest_groups(
    seconds: Sequence[float], ratio: float, errors: Sequence[float] = ()
) -> int:
    """Count the fewest groups whose members differ by at most *ratio*, or by measurement errors only.

    Args:
        seconds: The step time of each worker.
        ratio: No member of a group takes more than *ratio* times as long as another one.
        errors: Standard errors of the logarithms of *seconds*; 0 by default. They are uncertain
            themselves, so half of each square is replaced by half of the mean square.

    Returns:
        The number of groups.
    """
    errors = errors or (0.0,) * len(seconds)
    mean = math.fsum(error**2 for error in errors) / len(errors)
    errors = [math.sqrt((error**2 + mean) / 2) for error in errors]
    times = sorted(zip(seconds, errors, strict=True))
    count, (fastest, its) = 1, times[0]
    for one, error in times:
        apart = one / fastest
        if apart > ratio and math.log(apart) > SIGNIFICANT_ERRORS * math.hypot(
            error, its
        ):
            count, fastest, its = count + 1, one, error
    return count


def partition(seconds: Sequence[float], groups: int) -> list[int]:
    """Divide workers into groups so that the largest ratio within a group is as small as possible.

    Args:
        seconds: The step time of each worker.
        groups: Number of groups, at most the number of workers.

    Returns:
        The group of each worker. Groups are numbered from the fastest on.
    """
    order = sorted(range(len(seconds)), key=lambda i: (seconds[i], i))
    times = [seconds[i] for i in order]
    # The largest ratio is that of two times. Find the smallest for which *groups* groups suffice.
    ratios = sorted({b / a for i, a in enumerate(times) for b in times[i:]})
    least = bisect_left(ratios, -groups, key=lambda ratio: -len(_runs(times, ratio)))
    runs = _runs(times, ratios[least])
    while len(runs) < groups:
        runs = _split(times, runs)
    of = [0] * len(seconds)
    for group, (start, stop) in enumerate(runs):
        for place in order[start:stop]:
            of[place] = group
    return of


def group_by_speed(
    seconds: Sequence[float], ratio: float, most: int, errors: Sequence[float] = ()
) -> list[int]:
    """Divide workers by `partition` into `fewest_groups` groups, or into *most* if these are fewer.

    Args:
        seconds: The step time of each worker.
        ratio: See `fewest_groups`.
        most: The most groups.
        errors: See `fewest_groups`.

    Returns:
        The group of each worker.
    """
    return partition(seconds, min(fewest_groups(seconds, ratio, errors), most))


def _runs(times: Sequence[float], ratio: float) -> list[tuple[int, int]]:
    """Return the fewest runs of rising *times* within *ratio*, each as [start, stop)."""
    starts = [0]
    for place, seconds in enumerate(times):
        if seconds / times[starts[-1]] > ratio:
            starts.append(place)
    return list(zip(starts, [*starts[1:], len(times)], strict=True))


def _split(
    times: Sequence[float], runs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Cut the widest run at its largest gap, for one more run."""
    several = [run for run in runs if run[1] - run[0] > 1]
    start, stop = max(several, key=lambda run: times[run[1] - 1] / times[run[0]])
    cut = max(range(start + 1, stop), key=lambda i: times[i] / times[i - 1])
    return sorted([*(r for r in runs if r != (start, stop)), (start, cut), (cut, stop)])


def speed_classes(
    of: Sequence[int], servers: int, seconds: Mapping[int, float]
) -> tuple[SpeedClass, ...]:
    """Return the speed class of each group, by the mean step time of its members.

    The group with the largest mean is the slowest, and the one with the smallest mean the fastest.
    Others are in the middle; so are groups with equal means, and groups without members.

    Args:
        of: The group of each worker.
        servers: Number of groups.
        seconds: The step time of each worker that was measured.
    """
    times: defaultdict[int, list[float]] = defaultdict(list)
    for worker, its in seconds.items():
        times[of[worker]].append(its)
    means = {group: math.fsum(its) / len(its) for group, its in times.items()}
    low, high = min(means.values()), max(means.values())

    def class_of(group: int) -> SpeedClass:
        if low == high or group not in means or low < means[group] < high:
            return "middle"
        return "fastest" if means[group] == low else "slowest"

    return tuple(class_of(group) for group in range(servers))


def keep_numbers(wanted: Mapping[int, int], of: Sequence[int]) -> dict[int, int]:
    """Renumber new groups so that many workers stay in a group of the same number.

    The search is greedy: the largest overlaps of an old and a new group come first.

    Args:
        wanted: The new group of each worker, with any numbers.
        of: The previous group of each worker.

    Returns:
        The new group of each worker. Groups that replace no previous one take the smallest free
        numbers.
    """
    pairs = Counter((of[worker], group) for worker, group in wanted.items())
    number: dict[int, int] = {}
    for (before, group), _ in sorted(
        pairs.items(), key=lambda item: (-item[1], item[0])
    ):
        if group not in number and before not in number.values():
            number[group] = before
    free = (n for n in range(len(of)) if n not in number.values())
    for group in sorted(set(wanted.values())):
        if group not in number:
            number[group] = next(free)
    return {worker: number[group] for worker, group in wanted.items()}


class Hysteresis:
    """Moves a worker that was nearer to another group in several decisions in a row.

    Distances are those of the logarithms of a worker's time and a group's mean time.

    Args:
        margin: The distances to both groups must differ by more than this (0.15: 15 %).
        decisions: Number of decisions in a row.
    """

    def __init__(self, margin: float, decisions: int) -> None:
        self._margin, self._needed = math.log1p(margin), decisions
        self._leans: dict[int, tuple[int, int]] = {}
        """For each worker, the group that it is nearer to, and in how many decisions in a row."""

    def decide(
        self,
        of: Sequence[int],
        wanted: Mapping[int, int],
        seconds: Mapping[int, float],
    ) -> list[int]:
        """Return the group of each worker from now on.

        Args:
            of: The previous group of each worker.
            wanted: The best group of each active worker, with the numbers of `keep_numbers`.
            seconds: The step time of each active worker.
        """
        logs = {worker: math.log(its) for worker, its in seconds.items()}
        now = _means(logs, {worker: of[worker] for worker in logs})
        then = _means(logs, wanted)
        after = list(of)
        for worker, group in wanted.items():
            gain = abs(logs[worker] - now[of[worker]]) - abs(logs[worker] - then[group])
            if group == of[worker] or gain <= self._margin:
                self._leans.pop(worker, None)
                continue
            before, times = self._leans.get(worker, (group, 0))
            times = times + 1 if before == group else 1
            self._leans[worker] = group, times
            if times >= self._needed:
                after[worker] = group
                del self._leans[worker]
        return after


def _means(logs: Mapping[int, float], of: Mapping[int, int]) -> dict[int, float]:
    """Return the mean of each group over its members."""
    members: defaultdict[int, list[float]] = defaultdict(list)
    for worker, log in logs.items():
        members[of[worker]].append(log)
    return {group: math.fsum(its) / len(its) for group, its in members.items()}


class Merging:
    """Merges two groups that were alike in several decisions in a row.

    Two groups are alike if both conditions hold:

    - None of their members takes more than *ratio* times as long as another.
    - The logarithms of their means differ by at most half of log(ratio). So they do not part soon.

    Args:
        ratio: The largest ratio of step times in a group.
        decisions: Number of decisions in a row.
    """

    def __init__(self, ratio: float, decisions: int) -> None:
        self._ratio, self._needed = ratio, decisions
        self._alike: dict[tuple[int, int], int] = {}
        """For each pair, the faster group first: in how many decisions in a row it was alike."""

    def decide(self, of: Sequence[int], times: Mapping[int, StepTime]) -> list[int]:
        """Return the group of each worker from now on; at most two groups are merged.

        A merged group has the number of the larger one.

        Args:
            of: The previous group of each worker.
            times: The step time of each active worker.
        """
        logs = {worker: math.log(its.seconds) for worker, its in times.items()}
        means = _means(logs, {worker: of[worker] for worker in logs})
        order = sorted(means, key=means.__getitem__)
        alike = {
            (a, b): self._alike.get((a, b), 0) + 1
            for a, b in pairwise(order)
            if means[b] - means[a] <= math.log(self._ratio) / 2
            and self._are_one([its for w, its in times.items() if of[w] in (a, b)])
        }
        self._alike = alike
        for (a, b), count in alike.items():
            if count >= self._needed:
                stays, goes = (a, b) if of.count(a) >= of.count(b) else (b, a)
                self._alike = {}
                return [stays if group == goes else group for group in of]
        return list(of)

    def _are_one(self, times: Sequence[StepTime]) -> bool:
        seconds, errors = [t.seconds for t in times], [t.error for t in times]
        return fewest_groups(seconds, self._ratio, errors) == 1


class Regrouping:
    """Forms groups of workers that are about as fast; server 0 uses it.

    The first decision forms the groups. Later decisions move workers and merge groups.

    Args:
        number: Number of groups; 0: as few as *ratio* allows.
        most: The most groups.
        ratio: No member of a group takes more than *ratio* times as long as another one.
        hysteresis: Moves workers between groups; None: workers stay.
        merging: Merges groups; None: groups stay.
    """

    def __init__(
        self,
        number: int,
        most: int,
        ratio: float,
        hysteresis: Hysteresis | None,
        merging: Merging | None = None,
    ) -> None:
        self._number, self._most, self._ratio = number, most, ratio
        self._hysteresis, self._merging = hysteresis, merging

    @property
    def error(self) -> float:
        """The error of step times below which the first groups are formed.

        Below it, equally fast workers do not differ by the ratio through chance alone.
        """
        return math.log(self._ratio) / SIGNIFICANT_ERRORS / math.sqrt(2)

    def decide(self, groups: Groups, times: Mapping[int, StepTime]) -> Sequence[int]:
        """Return the group of each rank from now on.

        Args:
            groups: The previous groups.
            times: The step time of each active worker.
        """
        if groups.version and self._hysteresis is None:
            return groups.of
        workers = sorted(times)
        by_worker = {worker: times[worker].seconds for worker in workers}
        seconds = list(by_worker.values())
        if self._number:
            labels = partition(seconds, min(self._number, len(seconds)))
        else:
            errors = [times[worker].error for worker in workers]
            labels = group_by_speed(seconds, self._ratio, self._most, errors)
        wanted = keep_numbers(dict(zip(workers, labels, strict=True)), groups.of)
        of = _apply_hysteresis(groups, wanted, by_worker, self._hysteresis)
        if self._merging is None or self._number or not groups.version:
            return of
        return self._merging.decide(of, times)


def _apply_hysteresis(
    groups: Groups,
    wanted: Mapping[int, int],
    seconds: Mapping[int, float],
    hysteresis: Hysteresis | None,
) -> list[int]:
    """Return the group of each rank: *wanted* at the first decision, later what *hysteresis* allows."""
    if groups.version and hysteresis is not None:
        return hysteresis.decide(groups.of, wanted, seconds)
    return [wanted.get(worker, its) for worker, its in enumerate(groups.of)]


# ---- decisions ----

MOST_VERSIONS = 1 << 40
"""The largest version of groups that a message may carry."""

MOST_ERROR = 1e4
"""The largest error of a step time that a message may carry."""

MOST_STEPS = float(1 << 40)
"""A message must carry fewer steps of all workers."""

ONE_JOB = (
    "Start all workers and servers of a job with one script and one version of paceline"
)
"""The remedy for messages that do not fit."""


@dataclass
class GroupKnowledge:
    """Holds the groups and step times that a server knows.

    It outlives a load of parameters: the new discipline takes it over.

    Attributes:
        groups: The current groups.
        number: The number of this server.
        times: The last step time of each measured worker.
        measured_anew: Workers that were measured since the last decision.
        steps: Steps of all workers: gradients in the model, divided by the number of workers.
    """

    groups: Groups
    number: int = 0
    times: dict[int, StepTime] = field(default_factory=dict)
    measured_anew: set[int] = field(default_factory=set)
    steps: float = 0.0

    def adopt(self, groups: Groups) -> bool:
        """Take over *groups* if they are newer, and return whether they are."""
        newer = groups.version > self.groups.version
        if newer:
            self.groups = groups
        return newer

    def add_time(self, worker: int, time: StepTime) -> None:
        """Store the step time of a worker that was measured."""
        self.times[worker] = time
        self.measured_anew.add(worker)


class RegroupDecisions:
    """Makes the decisions of server 0: groups, and their speed classes.

    Args:
        regroup: Forms the groups; None: groups stay.
    """

    def __init__(self, regroup: Regrouping | None) -> None:
        self._regroup = regroup

    def needed_error(self, groups: Groups) -> float:
        """Return `Regrouping.error` before the first decision; 0 if early times are not needed."""
        return 0.0 if self._regroup is None or groups.version else self._regroup.error

    def decide(self, known: GroupKnowledge, training: Collection[int]) -> bool:
        """Decide once all *training* workers were measured, and return whether groups or classes changed.

        Args:
            known: Groups and step times; the decision is stored there.
            training: The active workers.
        """
        if not training or not known.measured_anew.issuperset(training):
            return False
        known.measured_anew.clear()
        times = {worker: known.times[worker] for worker in training}
        before = known.groups
        of = before.of
        if self._regroup is not None:
            of = tuple(self._regroup.decide(before, times))
        # Workers that have left count too, so that the classes of the others stay.
        seconds = {worker: its.seconds for worker, its in known.times.items()}
        speeds = speed_classes(of, before.servers, seconds)
        if (of, speeds) == (before.of, before.speeds):
            return False
        known.groups = Groups(of, before.servers, before.version + 1, speeds)
        return True


# ---- messages as bytes ----


class GroupNotice(msgspec.Struct, frozen=True, array_like=True):
    """The notice of a group server to the other group servers.

    Attributes:
        groups: The groups that the server knows.
        times: New step times, by worker.
        at_barrier: From server 0: the workers that wait at the barrier of all workers.
    """

    groups: Groups
    times: dict[int, StepTime] = {}
    at_barrier: list[int] = []


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of a worker to its group server.

    Attributes:
        groups: The encoded groups that the worker has received last. A restarted server may not know
            them.
        steps: Steps of all workers in the worker's model.
    """

    groups: bytes = b""
    steps: float = 0.0


class WorkerNotice(msgspec.Struct, frozen=True, array_like=True):
    """The notice of a group server to its workers.

    Attributes:
        groups: The encoded groups; empty before the first decision.
        steps: Steps of all workers in the model (`GroupKnowledge.steps`).
    """

    groups: bytes
    steps: float


def encode(message: GroupNotice | WorkerReport | WorkerNotice | Groups) -> bytes:
    """Encode a message as bytes, which the ``read_`` functions decode."""
    return msgspec.msgpack.encode(message)


def read_group_notice(data: bytes, like: Groups) -> GroupNotice:
    """Decode and check a notice between group servers.

    Args:
        data: The bytes.
        like: Groups of the same number of workers and servers.

    Raises:
        UsageError: The bytes are no `GroupNotice`, or its numbers do not fit *like*.
    """
    found: GroupNotice = _decoded(data, GroupNotice)
    _check(found.groups, like)
    if not all(0 <= worker < len(like.of) for worker in found.at_barrier):
        raise UsageError(
            f"notice of a group server: workers {found.at_barrier} at a barrier, expected ranks below "
            f"{len(like.of)}. {ONE_JOB}"
        )
    for worker, its in found.times.items():
        if not (
            0 <= worker < len(like.of)
            and 0 < its.seconds < math.inf
            and 0 <= its.error <= MOST_ERROR
        ):
            raise UsageError(
                f"notice of a group server: worker {worker} has {its}, expected a rank below "
                f"{len(like.of)}, a finite time above 0 and an error from 0 to {MOST_ERROR:g}. {ONE_JOB}"
            )
    return found


def read_report(data: bytes) -> WorkerReport:
    """Decode and check the report of a worker.

    Raises:
        UsageError: The bytes are no `WorkerReport`, or its steps are out of range.
    """
    found: WorkerReport = _decoded(data, WorkerReport)
    if not 0 <= found.steps < MOST_STEPS:
        raise UsageError(
            f"report of a worker: {found.steps:g} steps of all workers, expected 0 or more and less than "
            f"{MOST_STEPS:g}. {ONE_JOB}"
        )
    return found


def read_worker_notice(data: bytes) -> WorkerNotice:
    """Decode the notice of a group server to its workers.

    Raises:
        UsageError: The bytes are no `WorkerNotice`.
    """
    found: WorkerNotice = _decoded(data, WorkerNotice)
    return found


def read_groups(data: bytes, like: Groups | None = None) -> Groups:
    """Decode groups, and check them.

    Args:
        data: The bytes.
        like: Groups of the same number of workers and servers; None: any number.

    Raises:
        UsageError: The bytes are no `Groups`, or they do not fit *like*.
    """
    found: Groups = _decoded(data, Groups)
    if like is not None:
        _check(found, like)
    return found


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read a message about groups: {error}. {ONE_JOB}"
        ) from None


def _check(groups: Groups, like: Groups) -> None:
    if (
        len(groups.of) != len(like.of)
        or groups.servers != like.servers
        or not all(0 <= group < like.servers for group in groups.of)
        or not 0 <= groups.version <= MOST_VERSIONS
        or len(groups.speeds) not in (0, like.servers)
    ):
        raise UsageError(
            f"groups of another job: expected {like.servers} groups of {len(like.of)} workers, got "
            f"{groups}. {ONE_JOB}"
        )
