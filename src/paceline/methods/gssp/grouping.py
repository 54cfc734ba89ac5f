"""Which worker is in which group: step times, groups from these, and the decisions of server 0.

**Step times.** A step begins when the server lets a worker go on, and ends when all of its next
gradient is in. So it has pull, computation and push, without the wait at the gate. A worker's
first step, which loads things, does not count. A step time is the median of several steps. Its
standard error follows from the distance between their quartiles, in logarithms: a few slow steps
of a warm-up, or an evaluation, change neither. The first groups are formed as soon as all times
are known well enough, which takes `LEAST_STEPS` steps of the slowest worker where steps vary
little. Later times are of `measure_steps` steps, and are smoothed as in the published code (0.7 of
the new one).

**Groups.** Times are compared by their ratio, so all arithmetic is on their logarithms. In a best
partition groups are runs of the sorted times: a time between two members of a group can join it
and widens nothing. `partition` finds the partition whose widest group is least wide, since a group
waits for its slowest member. Times are known to within an error. Two workers may share a group
whatever the ratio, if they differ by at most `SIGNIFICANT_ERRORS` standard errors of their
difference. So noise alone forms no groups of workers that are equally fast.

**Decisions.** Servers measure the steps of their workers, and send the times to server 0. Once all
workers that train were measured anew, server 0 decides. It sends the groups to the other
servers, and each server sends them to its workers.

The paper does not say how it forms groups, and its code takes ranks modulo 4. All of this is
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
"""From so many steps on the error of their median is known: one slow step does not change it."""

MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349
"""A median's standard error times the root of the number of steps, over the distance of quartiles.
It is that of a normal distribution, whose quartiles are 1.349 standard deviations apart."""


class StepTime(NamedTuple):
    """How long a worker's step takes.

    Args:
        seconds: The time.
        error: The standard error of its logarithm; 0 where it is not known.
    """

    seconds: float
    error: float = 0.0


class StepTimes:
    """Measures the steps of the workers that push to this server: medians of *steps* steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began: dict[int, float] = {}
        self._times: defaultdict[int, list[float]] = defaultdict(list)
        self._known_steps = 0
        """How many steps of each worker there were at the last `take_early`."""

    def begin_step(self, worker: int, now: float) -> None:
        """The worker goes on at the time *now*."""
        self._began[worker] = now

    def end_step(self, worker: int, now: float) -> StepTime | None:
        """The worker's gradient is in. Returns the time of its last steps, if there are enough."""
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
        """The times of all *workers*, if they are known well enough before `end_step` returns them.

        Args:
            workers: The workers that train.
            error: The root of the mean square of their errors has to be below this one. The error
                of one worker alone, after few steps, is too uncertain.

        Returns:
            The times by worker; empty while they are not known well enough.
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
        """The worker pushes to another server, or does not train any more."""
        self._began.pop(worker, None)
        self._times.pop(worker, None)


def step_time(times: list[float]) -> StepTime:
    """The median of these steps, and its error."""
    seconds = median(times)
    if len(times) < LEAST_STEPS:
        return StepTime(seconds)
    first, _, third = quantiles((math.log(its) for its in times), n=4)
    return StepTime(seconds, MEDIAN_ERROR * (third - first) / math.sqrt(len(times)))


def smoothed(before: StepTime | None, now: StepTime) -> StepTime:
    """T = 0.3 T + 0.7 T_new; at first T_new."""
    if before is None:
        return now
    seconds = (1 - NEW_WEIGHT) * before.seconds + NEW_WEIGHT * now.seconds
    return StepTime(
        seconds, math.hypot((1 - NEW_WEIGHT) * before.error, NEW_WEIGHT * now.error)
    )


# ---- groups from step times ----

SIGNIFICANT_ERRORS = 4.0
"""Times that differ by more standard errors are different. Chance alone gets there once in about
16,000 pairs."""

MARGIN, DECISIONS = 0.15, 2
"""A worker moves if it is nearer to another group by this margin, at so many decisions in a row."""


def fewest_groups(
    seconds: Sequence[float], ratio: float, errors: Sequence[float] = ()
) -> int:
    """The least number of groups whose members differ by at most *ratio*, as far as is known.

    Args:
        seconds: Step times, by worker.
        ratio: No member of a group takes more than this times as long as another one.
        errors: Standard errors of the logarithms of *seconds*; 0 by default. They are not well
            known themselves, so half of each one's square is replaced by half of the mean square.
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
    """The group of each worker: the partition whose largest ratio within a group is least.

    Args:
        seconds: Step times, by worker.
        groups: How many groups there are; at most as many as times.

    Returns:
        By worker, the number of its group, from the fastest one.
    """
    order = sorted(range(len(seconds)), key=lambda i: (seconds[i], i))
    times = [seconds[i] for i in order]
    # The largest ratio is that of two times: the least with which few enough groups do.
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
    """As `partition`, of as few groups as `fewest_groups` finds, and of *most* at most."""
    return partition(seconds, min(fewest_groups(seconds, ratio, errors), most))


def _runs(times: Sequence[float], ratio: float) -> list[tuple[int, int]]:
    """The fewest runs of rising *times* within *ratio*, each as [start, stop)."""
    starts = [0]
    for place, seconds in enumerate(times):
        if seconds / times[starts[-1]] > ratio:
            starts.append(place)
    return list(zip(starts, [*starts[1:], len(times)], strict=True))


def _split(
    times: Sequence[float], runs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """One more run: the widest one is cut at its largest gap."""
    several = [run for run in runs if run[1] - run[0] > 1]
    start, stop = max(several, key=lambda run: times[run[1] - 1] / times[run[0]])
    cut = max(range(start + 1, stop), key=lambda i: times[i] / times[i - 1])
    return sorted([*(r for r in runs if r != (start, stop)), (start, cut), (cut, stop)])


def speed_classes(
    of: Sequence[int], servers: int, seconds: Mapping[int, float]
) -> tuple[SpeedClass, ...]:
    """The speed class of each group, by the mean step time of its members.

    The group with the largest mean is the slowest, that with the least the fastest. All others
    are in the middle; so are groups that do not differ, and groups without members.

    Args:
        of: By worker, the number of its group.
        servers: How many groups there are.
        seconds: Step times, by worker.
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
    """Number groups so that as many workers as possible keep their number; found greedily.

    Args:
        wanted: By worker, the number of its new group.
        of: By worker, the number of its group so far.

    Returns:
        By worker, another number of its new group. Groups that replace none take the least free
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
    """Moves a worker when it was nearer to another group at several *decisions* in a row.

    A worker is nearer if the distance of its time to that group's mean is less than to its own
    group's. Distances are of logarithms, and must differ by more than a *margin* (0.15: 15 %).
    """

    def __init__(self, margin: float, decisions: int) -> None:
        self._margin, self._needed = math.log1p(margin), decisions
        self._leans: dict[int, tuple[int, int]] = {}
        """By worker: the group that it is nearer to, and at how many decisions in a row."""

    def decide(
        self,
        of: Sequence[int],
        wanted: Mapping[int, int],
        seconds: Mapping[int, float],
    ) -> list[int]:
        """The groups from now on, by worker.

        Args:
            of: The groups so far.
            wanted: The best groups by now, with the numbers of `keep_numbers`.
            seconds: Step times, by worker.
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
    """By group, the mean over its members."""
    members: defaultdict[int, list[float]] = defaultdict(list)
    for worker, log in logs.items():
        members[of[worker]].append(log)
    return {group: math.fsum(its) / len(its) for group, its in members.items()}


class Merging:
    """Makes one group of two that were alike at several *decisions* in a row.

    Two groups are alike if no member of both takes more than *ratio* times as long as another.
    Their means also differ by at most half of that, in logarithms: so they do not part again soon.
    """

    def __init__(self, ratio: float, decisions: int) -> None:
        self._ratio, self._needed = ratio, decisions
        self._alike: dict[tuple[int, int], int] = {}
        """By pair, the faster group first: at how many decisions in a row they were alike."""

    def decide(self, of: Sequence[int], times: Mapping[int, StepTime]) -> list[int]:
        """The groups from now on, by worker. At most two become one, with the number of the
        larger."""
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
    """How server 0 forms groups of workers that are about as fast.

    Its first decision forms them. Later decisions move workers and merge groups.

    Args:
        number: How many groups there are; 0: as few as *ratio* allows.
        most: How many there are at most.
        ratio: No member of a group takes more than this times as long as another one.
        hysteresis: Moves workers; None: they stay.
        merging: Merges groups; None: they stay.
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
        """The first groups are formed as soon as step times have smaller errors.

        Then chance alone does not make two workers differ by the ratio.
        """
        return math.log(self._ratio) / SIGNIFICANT_ERRORS / math.sqrt(2)

    def decide(self, groups: Groups, times: Mapping[int, StepTime]) -> Sequence[int]:
        """The groups from now on, by rank. *times* are those of the workers that train."""
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
    """The groups from now on, by rank: as *wanted* at first; then as *hysteresis* allows."""
    if groups.version and hysteresis is not None:
        return hysteresis.decide(groups.of, wanted, seconds)
    return [wanted.get(worker, its) for worker, its in enumerate(groups.of)]


# ---- decisions ----

MOST_VERSIONS = 1 << 40
"""A larger version of groups is a mistake."""

MOST_ERROR = 1e4
"""A larger error of a step time is a mistake."""

MOST_STEPS = float(1 << 40)
"""So many steps of all workers are a mistake."""


@dataclass
class GroupKnowledge:
    """What a server knows of groups and speeds. It outlives loads: a new discipline takes it over.

    Args:
        groups: The groups.
        number: The number of this server.
        times: Step times, by worker.
        measured_anew: The workers that were measured since the last decision.
        steps: Steps of all workers: gradients in the model, divided by the number of workers.
    """

    groups: Groups
    number: int = 0
    times: dict[int, StepTime] = field(default_factory=dict)
    measured_anew: set[int] = field(default_factory=set)
    steps: float = 0.0

    def adopt(self, groups: Groups) -> bool:
        """Take over newer groups. Returns whether they are newer."""
        newer = groups.version > self.groups.version
        if newer:
            self.groups = groups
        return newer

    def add_time(self, worker: int, time: StepTime) -> None:
        """A worker was measured."""
        self.times[worker] = time
        self.measured_anew.add(worker)


class RegroupDecisions:
    """The decisions of server 0: groups, and their speed classes. Without *regroup* groups stay."""

    def __init__(self, regroup: Regrouping | None) -> None:
        self._regroup = regroup

    def needed_error(self, groups: Groups) -> float:
        """`Regrouping.error` before the first decision; 0 where early times are not asked for."""
        return 0.0 if self._regroup is None or groups.version else self._regroup.error

    def decide(self, known: GroupKnowledge, training: Collection[int]) -> bool:
        """Decide, once all *training* workers were measured. Returns whether anything is new."""
        if not training or not known.measured_anew.issuperset(training):
            return False
        known.measured_anew.clear()
        times = {worker: known.times[worker] for worker in training}
        before = known.groups
        of = before.of
        if self._regroup is not None:
            of = tuple(self._regroup.decide(before, times))
        # Workers that have left count, too: the class of the others stays.
        seconds = {worker: its.seconds for worker, its in known.times.items()}
        speeds = speed_classes(of, before.servers, seconds)
        if (of, speeds) == (before.of, before.speeds):
            return False
        known.groups = Groups(of, before.servers, before.version + 1, speeds)
        return True


# ---- as bytes ----


class GroupNotice(msgspec.Struct, frozen=True, array_like=True):
    """The notice of a server to the other servers.

    Args:
        groups: The groups that it knows.
        times: New step times, by worker.
        at_barrier: On server 0: the workers at the barrier where all workers meet.
    """

    groups: Groups
    times: dict[int, StepTime] = {}
    at_barrier: list[int] = []


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of a worker to its server.

    Args:
        groups: The last groups that the worker has received, encoded. A server that was away may
            not know them.
        steps: Steps of all workers in its model.
    """

    groups: bytes = b""
    steps: float = 0.0


class WorkerNotice(msgspec.Struct, frozen=True, array_like=True):
    """The notice of a server to its workers.

    Args:
        groups: The groups, encoded; empty while they are the first ones.
        steps: Steps of all workers in the model (`GroupKnowledge.steps`).
    """

    groups: bytes
    steps: float


def encode(message: GroupNotice | WorkerReport | WorkerNotice | Groups) -> bytes:
    """As bytes that the `read_` functions decode."""
    return msgspec.msgpack.encode(message)


def read_group_notice(data: bytes, like: Groups) -> GroupNotice:
    """A notice between servers. Raises `UsageError` where it does not fit groups *like* these."""
    found: GroupNotice = _decoded(data, GroupNotice)
    _check(found.groups, like)
    if not all(0 <= worker < len(like.of) for worker in found.at_barrier):
        raise UsageError(f"workers that there are not: {found.at_barrier}")
    for worker, its in found.times.items():
        if not (
            0 <= worker < len(like.of)
            and 0 < its.seconds < math.inf
            and 0 <= its.error <= MOST_ERROR
        ):
            raise UsageError(f"step times of worker {worker} that make no sense: {its}")
    return found


def read_report(data: bytes) -> WorkerReport:
    """The report of a worker. Raises `UsageError` for bytes that are none."""
    found: WorkerReport = _decoded(data, WorkerReport)
    if not 0 <= found.steps < MOST_STEPS:
        raise UsageError(f"steps of all that make no sense: {found}")
    return found


def read_worker_notice(data: bytes) -> WorkerNotice:
    """A notice to workers. Raises `UsageError` for bytes that are none."""
    found: WorkerNotice = _decoded(data, WorkerNotice)
    return found


def read_groups(data: bytes, like: Groups | None = None) -> Groups:
    """Groups. Raises `UsageError` where they do not fit groups *like* these."""
    found: Groups = _decoded(data, Groups)
    if like is not None:
        _check(found, like)
    return found


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"bytes that groups of workers do not say: {error}") from None


def _check(groups: Groups, like: Groups) -> None:
    if (
        len(groups.of) != len(like.of)
        or groups.servers != like.servers
        or not all(0 <= group < like.servers for group in groups.of)
        or not 0 <= groups.version <= MOST_VERSIONS
        or len(groups.speeds) not in (0, like.servers)
    ):
        raise UsageError(
            f"expected {like.servers} groups of {len(like.of)} workers, got {groups}"
        )
