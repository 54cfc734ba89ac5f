"""Groups from step times: who is about as fast as whom.

Times are compared by their ratio, so all that is done with them is done with their logarithms. A
best partition of numbers is one of runs of them in order: whatever lies between two members of a
group can join it and widens nothing. `partition` finds the one whose widest group is least wide,
since the slowest of a group is who the others wait for.

Times are known to within an error. Of two workers it says nothing that they seem to differ by no
more than `APART` standard errors of their difference: they may share a group whatever the ratio. So
steps that vary, of workers that are equally fast, form no groups.

How the paper forms its groups is not known: its code takes ranks modulo 4. All here is inferred
but the speed classes, which are the published code's rule for GDTopK.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from paceline.interfaces import Groups, SpeedClass
from paceline.methods.gssp.step_times import Measured

APART = 4.0
"""So many standard errors; chance alone gets there once in some 16,000 pairs."""

MARGIN, LOOKS = 0.15, 2
"""By how much a worker has to be nearer to another group, at how many looks in a row, to move."""


def fewest(seconds: Sequence[float], ratio: float, errors: Sequence[float] = ()) -> int:
    """How many groups there are at least, if nobody in a group takes more than *ratio* times
    as long as another, as far as can be told. *errors*: standard errors of the logarithms of
    *seconds*; none by default. They are not well known themselves, so half of each one's square
    is the mean of all."""
    errors = errors or (0.0,) * len(seconds)
    mean = math.fsum(error**2 for error in errors) / len(errors)
    errors = [math.sqrt((error**2 + mean) / 2) for error in errors]
    times = sorted(zip(seconds, errors, strict=True))
    count, (fastest, its) = 1, times[0]
    for one, error in times:
        apart = one / fastest
        if apart > ratio and math.log(apart) > APART * math.hypot(error, its):
            count, fastest, its = count + 1, one, error
    return count


def partition(seconds: Sequence[float], groups: int) -> list[int]:
    """The group of each, of exactly so many groups, numbered from the fastest: the partition
    whose largest ratio within a group is least. *groups* is at most the number of times."""
    order = sorted(range(len(seconds)), key=lambda i: (seconds[i], i))
    times = [seconds[i] for i in order]
    # The answer is the ratio of two of them: the least with which few enough groups do.
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


def found(
    seconds: Sequence[float], ratio: float, most: int, errors: Sequence[float] = ()
) -> list[int]:
    """As `partition`, of as few groups as `fewest` says, and of *most* at most."""
    return partition(seconds, min(fewest(seconds, ratio, errors), most))


def _runs(times: Sequence[float], ratio: float) -> list[tuple[int, int]]:
    """Rising *times* in as few runs as *ratio* allows, each [start, stop)."""
    starts = [0]
    for place, seconds in enumerate(times):
        if seconds / times[starts[-1]] > ratio:
            starts.append(place)
    return list(zip(starts, [*starts[1:], len(times)], strict=True))


def _split(
    times: Sequence[float], runs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """One more run: the widest is cut at its largest gap."""
    several = [run for run in runs if run[1] - run[0] > 1]
    start, stop = max(several, key=lambda run: times[run[1] - 1] / times[run[0]])
    cut = max(range(start + 1, stop), key=lambda i: times[i] / times[i - 1])
    return sorted([*(r for r in runs if r != (start, stop)), (start, cut), (cut, stop)])


def speed_classes(
    of: Sequence[int], servers: int, seconds: Mapping[int, float]
) -> tuple[SpeedClass, ...]:
    """The class of each group, by the mean over its members of *seconds*: the largest mean is
    the slowest group's, the least the fastest's, and all others are in the middle; so are groups
    that do not differ, and those without members."""
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


def renumbered(wanted: Mapping[int, int], of: Sequence[int]) -> dict[int, int]:
    """The same groups by worker, with numbers that leave as many workers as possible where they
    are by *of*, found greedily. New groups take the least numbers that are free."""
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
    """Lets a worker move to another group when it is nearer to it at several *looks* in a row:
    the distance of its time to the group's mean is less than that to its own group's, in
    logarithms, by more than a *margin* (0.15: 15 %)."""

    def __init__(self, margin: float, looks: int) -> None:
        self._margin, self._looks = math.log1p(margin), looks
        self._leans: dict[int, tuple[int, int]] = {}
        """By worker: to which group it is nearer, and at how many looks in a row."""

    def look(
        self,
        of: Sequence[int],
        wanted: Mapping[int, int],
        seconds: Mapping[int, float],
    ) -> list[int]:
        """The groups from now on. *of*: as they are; *wanted*: as they would be if there were
        none, with numbers that fit (`renumbered`); *seconds*: a step's, by worker."""
        logs = {worker: math.log(its) for worker, its in seconds.items()}
        now = _means(logs, {worker: of[worker] for worker in logs})
        then = _means(logs, wanted)
        after = list(of)
        for worker, group in wanted.items():
            gain = abs(logs[worker] - now[of[worker]]) - abs(logs[worker] - then[group])
            if group == of[worker] or gain <= self._margin:
                self._leans.pop(worker, None)
                continue
            before, looks = self._leans.get(worker, (group, 0))
            looks = looks + 1 if before == group else 1
            self._leans[worker] = group, looks
            if looks >= self._looks:
                after[worker] = group
                del self._leans[worker]
        return after


def _means(logs: Mapping[int, float], of: Mapping[int, int]) -> dict[int, float]:
    """By group: the mean over its members."""
    members: defaultdict[int, list[float]] = defaultdict(list)
    for worker, log in logs.items():
        members[of[worker]].append(log)
    return {group: math.fsum(its) / len(its) for group, its in members.items()}


class Merging:
    """Makes one group of two that have become alike, at several *looks* in a row: nobody of both
    takes more than *ratio* times as long as another, and their means differ by half of that at
    most, in logarithms. So they do not part again soon after."""

    def __init__(self, ratio: float, looks: int) -> None:
        self._ratio, self._looks = ratio, looks
        self._alike: dict[tuple[int, int], int] = {}
        """At how many looks in a row two groups, the faster one first, were."""

    def look(self, of: Sequence[int], times: Mapping[int, Measured]) -> list[int]:
        """The groups from now on; at most two become one, which has the larger one's number."""
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
        for (a, b), looks in alike.items():
            if looks >= self._looks:
                stays, goes = (a, b) if of.count(a) >= of.count(b) else (b, a)
                self._alike = {}
                return [stays if group == goes else group for group in of]
        return list(of)

    def _are_one(self, times: Sequence[Measured]) -> bool:
        seconds, errors = [t.seconds for t in times], [t.error for t in times]
        return fewest(seconds, self._ratio, errors) == 1


class BySpeed:
    """Groups of workers that are about as fast, *number* of them, or with 0 as few as *ratio*
    allows, *most* at most. The first look decides; then workers move with *hysteresis*, and groups
    that were found become one with *merging*; or, without them, nobody does."""

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
        """The first groups are formed as soon as times are known better than that
        (`StepTimes.soon`): who then seem to differ by the ratio do not by chance alone."""
        return math.log(self._ratio) / APART / math.sqrt(2)

    def look(self, groups: Groups, times: Mapping[int, Measured]) -> Sequence[int]:
        """The groups by rank, as they are from now on. *times*: of those that train."""
        if groups.version and self._hysteresis is None:
            return groups.of
        workers = sorted(times)
        by_worker = {worker: times[worker].seconds for worker in workers}
        seconds = list(by_worker.values())
        if self._number:
            labels = partition(seconds, min(self._number, len(seconds)))
        else:
            errors = [times[worker].error for worker in workers]
            labels = found(seconds, self._ratio, self._most, errors)
        wanted = renumbered(dict(zip(workers, labels, strict=True)), groups.of)
        of = settled(groups, wanted, by_worker, self._hysteresis)
        if self._merging is None or self._number or not groups.version:
            return of
        return self._merging.look(of, times)


def settled(
    groups: Groups,
    wanted: Mapping[int, int],
    seconds: Mapping[int, float],
    hysteresis: Hysteresis | None,
) -> list[int]:
    """By rank: all that is *wanted*, the first time; then what the *hysteresis* lets through."""
    if groups.version and hysteresis is not None:
        return hysteresis.look(groups.of, wanted, seconds)
    return [wanted.get(worker, its) for worker, its in enumerate(groups.of)]
