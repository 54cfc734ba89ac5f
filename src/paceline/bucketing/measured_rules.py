"""Bucket rules that know when gradients are ready and what an all-reduce costs.

`mg_wfbp` is the paper's greedy rule; `optimal` is exact for one lane. The paper's Theorem 1
says that the greedy plan is optimal; docs/design.md has three tensors for which it is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from paceline.bucketing.cost_models import (
    AffineCost,
    Cost,
    Seconds,
    many,
    overlapping_seconds,
)
from paceline.bucketing.timeline import finish

SEARCH_TRIALS = 400
"""Plans that `optimal` tries by small changes, where several lanes make it inexact."""


def mg_wfbp(
    sizes: Sequence[float],
    ready: Sequence[float],
    cost: AffineCost,
    runs: Sequence[int],
) -> list[int]:
    """MG-WFBP's Algorithm 1, in one pass.

    A gradient is merged into the next one's message where that next gradient is ready
    before this message could have passed its start-up: r(l-1) < tau_c(l) + a (Theorem 1).
    The paper recomputes all tau_c after each merge, in O(L^2); the plans are the same.
    ``runs[i]`` is where the run of tensors of one kind that holds tensor i began.
    """
    lengths = []
    busy, waiting, count = 0.0, 0.0, 0  # busy: when the channel is free again
    for i, size in enumerate(sizes):
        waiting, count = waiting + size, count + 1
        start = max(busy, ready[i])  # tau_c
        more = i + 1 < len(sizes) and runs[i + 1] == runs[i]
        if more and ready[i + 1] < start + cost.start_up:
            continue
        busy = start + cost(waiting)
        lengths.append(count)
        waiting, count = 0.0, 0
    return lengths


def optimal(
    sizes: Sequence[float],
    ready: Sequence[float],
    cost: Cost,
    runs: Sequence[int],
    lanes: int,
    others: Sequence[list[int]],
) -> list[int]:
    """The plan that ends first; *others* are plans it must not be worse than.

    One lane: exact, for any cost that does not fall. More lanes: exact where so few plans
    exist that all can be tried; else the best of *others*, of exact plans for one lane
    with more or less of the start-up counted as the wire's, and of small changes to the
    best of these; it stops early where it meets `bound`.
    """
    if lanes == 1:
        return _exact(sizes, ready, cost, runs, 0.0)

    def end(plan: Sequence[int]) -> float:
        return finish(plan, sizes, ready, cost, lanes=lanes)

    overlap = overlapping_seconds(cost)
    candidates = list(others)
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        candidates.append(_exact(sizes, ready, cost, runs, part * overlap))
    best = min(candidates, key=lambda plan: (end(plan), len(plan)))
    least = bound(sizes, ready, cost, runs)
    best_end, trials, improved = end(best), 0, True
    if best_end > least * (1 + 1e-12) and _count_plans(runs) <= SEARCH_TRIALS:
        return min(_all_plans(runs), key=lambda plan: (end(plan), len(plan)))
    while improved and trials < SEARCH_TRIALS and best_end > least * (1 + 1e-12):
        improved = False
        for plan in _neighbours(best, runs):
            trials += 1
            if (time := end(plan)) < best_end * (1 - 1e-12):
                best, best_end, improved = plan, time, True
                break
            if trials >= SEARCH_TRIALS:
                break
    return best


def bound(
    sizes: Sequence[float], ready: Sequence[float], cost: Cost, runs: Sequence[int]
) -> float:
    """Seconds below which no plan can end, on any number of lanes.

    With lanes enough for all, every start-up passes beside the others and the wire never
    rests while something is there to move; in what order it moves does not change when it
    is done. So one queue for the wire alone gives the end exactly, and fewer lanes only
    make buckets later.
    """
    overlap = overlapping_seconds(cost)
    plan = _exact(sizes, ready, cost, runs, overlap)
    free, start = 0.0, 0
    for length in plan:
        stop = start + length
        wire = cost(sum(sizes[start:stop])) - overlap
        free = max(free, ready[stop - 1] + overlap) + wire
        start = stop
    return free


def _exact(
    sizes: Sequence[float],
    ready: Sequence[float],
    cost: Cost,
    runs: Sequence[int],
    apart: float,
) -> list[int]:
    """The plan whose last all-reduce ends first where one moves at a time.

    *apart*: seconds of each start-up that do not occupy the channel. With P the prefix
    sums of sizes, the first j gradients are done at
    ``f(j) = min over i < j of max(f(i), ready(j) + apart) + cost(P(j) - P(i)) - apart``:
    ending later never helps what follows. Of all i with f(i) <= ready(j) + apart only the
    last can be best, since its message is the smallest.
    """
    count = len(sizes)
    prefix: Seconds = np.concatenate(([0.0], np.cumsum(np.asarray(sizes, np.float64))))
    done: Seconds = np.zeros(count + 1)
    came_from = [0] * (count + 1)
    idle = 0  # the last i with f(i) <= ready(j) + apart
    for j in range(1, count + 1):
        released = ready[j - 1] + apart
        while idle + 1 < j and done[idle + 1] <= released:
            idle += 1
        first = max(idle, runs[j - 1])
        message = prefix[j] - prefix[first:j]
        ends = np.maximum(done[first:j], released) + (many(cost, message) - apart)
        best = int(np.argmin(ends))  # of equal ones the first: fewer messages
        done[j] = ends[best]
        came_from[j] = first + best
    lengths = []
    while count:
        lengths.append(count - came_from[count])
        count = came_from[count]
    return lengths[::-1]


def _forced_cuts(runs: Sequence[int]) -> set[int]:
    """Where a bucket must end, because the kind changes."""
    return {i for i in range(1, len(runs)) if runs[i] != runs[i - 1]}


def _with_cuts(cuts: set[int], count: int) -> list[int]:
    edges = [0, *sorted(cuts), count]
    return [b - a for a, b in itertools.pairwise(edges)]


def _count_plans(runs: Sequence[int]) -> int:
    return 1 << (len(runs) - 1 - len(_forced_cuts(runs)))


def _all_plans(runs: Sequence[int]) -> Iterator[list[int]]:
    forced = _forced_cuts(runs)
    free = [i for i in range(1, len(runs)) if i not in forced]
    for cuts in itertools.product((False, True), repeat=len(free)):
        chosen = set(itertools.compress(free, cuts))
        yield _with_cuts(forced | chosen, len(runs))


def _neighbours(plan: Sequence[int], runs: Sequence[int]) -> Iterator[list[int]]:
    """Plans that differ in one boundary: moved, taken out or added."""
    count = sum(plan)
    cuts = list(itertools.accumulate(plan))[:-1]
    forced = _forced_cuts(runs)

    def with_cuts(new: set[int]) -> list[int]:
        return _with_cuts(new, count)

    now = set(cuts)
    for cut in cuts:
        if cut in forced:
            continue
        for moved in (cut - 1, cut + 1, cut - 4, cut + 4):
            if 0 < moved < count and moved not in now:
                yield with_cuts(now - {cut} | {moved})
        yield with_cuts(now - {cut})
    for a, b in itertools.pairwise([0, *cuts, count]):
        if b - a > 1:
            yield with_cuts(now | {(a + b) // 2})
            yield with_cuts(now | {b - 1})
