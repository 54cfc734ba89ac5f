"""Bucket rules: group gradients into all-reduces.

`plan_buckets` computes buckets from the gradients' sizes, their ready times and the cost of an
all-reduce; start here. `distribute`, the planner and the benchmarks use the same function.

==========  ===============================================================================
wfbp        a bucket per tensor
single      one bucket
ddp         PyTorch DDP's: 1 MiB, then 25 MiB
mg-wfbp     the paper's greedy rule (Shi et al., INFOCOM 2019), from measured times
optimal     exact from measured times, for one all-reduce at a time and any cost
3+5+2       these lengths: 3 tensors, then 5, then 2, in gradient-ready order
==========  ===============================================================================

MG-WFBP's Theorem 1 says that the greedy plan is optimal; docs/explanation/papers/mg-wfbp.md has three
tensors for which it is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from paceline.bucketing.cost_models import (
    AffineCost,
    Cost,
    Seconds,
    fit,
    many,
    overlappable_startup,
)
from paceline.bucketing.timeline import (
    check_sizes,
    check_times,
    finish_buckets,
    finish_time,
)
from paceline.errors import UsageError, unknown

DDP_FIRST_BYTES = 1024 * 1024
DDP_BYTES = 25 * 1024 * 1024
"""Bytes of DDP's later buckets; the first one has `DDP_FIRST_BYTES`."""

SEARCH_TRIALS = 400
"""The most plans that `optimal` tries by small changes.

It does so only if it is inexact, because several all-reduces run at a time.
"""


def plan_buckets(
    rule: str,
    sizes: Sequence[float],
    kinds: Sequence[Hashable] | None = None,
    ready: Sequence[float] = (),
    cost: Cost | None = None,
    *,
    max_in_flight: int = 1,
) -> list[list[int]]:
    """Group gradients into buckets.

    Each kind is planned separately, and buckets are ordered by the tensor that completes them. A
    measured rule also plans in ready order, where a bucket ends when the kind changes. It returns
    the plan that ends first. Plans of alternating kinds are not exact, but ``optimal`` never ends
    later than another rule.

    Args:
        rule: One of `RULES`, or lengths such as ``"3+5+2"``.
        sizes: Bytes of each gradient, in gradient-ready order.
        kinds: The kind of each gradient (dtype and device): a bucket has one kind. None: all are
            of one kind.
        ready: Seconds from the step's start to each gradient. The rules of `MEASURED` need them.
        cost: Seconds of an all-reduce by its bytes. The rules of `MEASURED` need it.
        max_in_flight: The number of all-reduces that may be in flight at a time.

    Returns:
        Positions of each bucket's tensors in ready order.

    Raises:
        UsageError: The rule is unknown, or sizes, times, kinds or lengths are impossible.

    Example:
        ::

            plan_buckets("optimal", [4e6, 1e6], None, [0.1, 0.2], AffineCost(1e-3, 8e-9))
    """
    lengths = _explicit_lengths(check_rule(rule))
    check_sizes(sizes)
    if kinds is None:
        kinds = [None] * len(sizes)
    if len(kinds) != len(sizes):
        raise UsageError(
            f"kinds: expected one per tensor, {len(sizes)}, got {len(kinds)}"
        )
    if lengths is not None:
        return _explicit_buckets(lengths, kinds)
    members: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        members.setdefault(kind, []).append(position)
    buckets: list[list[int]] = []
    if rule in FIXED:
        for positions in members.values():
            planned = _positions(FIXED[rule]([sizes[p] for p in positions]))
            buckets += [[positions[i] for i in part] for part in planned]
        return sorted(buckets, key=lambda bucket: bucket[-1])
    if cost is None:
        raise UsageError(
            f"bucket rule {rule!r}: expected ready times and a cost, got no cost. Pass both, or use "
            f"a rule that needs only sizes: {', '.join(FIXED)}"
        )
    check_times(sizes, ready, max_in_flight)
    for positions in members.values():
        own = [sizes[p] for p in positions], [ready[p] for p in positions]
        planned = _measured(rule, *own, cost, [0] * len(positions), max_in_flight)
        buckets += [[positions[i] for i in part] for part in planned]
    buckets.sort(key=lambda bucket: bucket[-1])
    if len(members) < 2:
        return buckets
    candidates = [
        buckets,
        _measured(rule, sizes, ready, cost, _runs(kinds), max_in_flight),
    ]
    # The plan of one kind ignores the messages of the others, so another rule may be faster.
    if rule == "optimal":
        others = [other for other in RULES if other != rule]
        candidates += [
            plan_buckets(other, sizes, kinds, ready, cost, max_in_flight=max_in_flight)
            for other in others
        ]
    return min(
        candidates,
        key=lambda plan: finish_time(
            plan, sizes, ready, cost, max_in_flight=max_in_flight
        ),
    )


def check_rule(rule: str) -> str:
    """Return *rule*; raise `UsageError` with the known rules if it does not exist."""
    if rule not in RULES and _explicit_lengths(rule) is None:
        known = unknown("bucket rule", rule, RULES)
        raise UsageError(f"{known} Or bucket lengths, such as '3+5+2'.")
    return rule


def wfbp(sizes: Sequence[float]) -> list[int]:
    """Return lengths of one bucket per tensor: wait-free backpropagation (Zhang et al., Poseidon, 2017)."""
    return [1] * len(sizes)


def single(sizes: Sequence[float]) -> list[int]:
    """Return the length of a single bucket, which is sent when backward has ended."""
    return [len(sizes)] if sizes else []


def ddp(sizes: Sequence[float]) -> list[int]:
    """Return bucket lengths by PyTorch DDP's rule: a first bucket of 1 MiB, then buckets of 25 MiB.

    A bucket is closed by the tensor that brings it to its limit (torch's
    ``_compute_bucket_assignment_by_size`` over the ready order).
    """
    lengths = []
    limit, count, total = DDP_FIRST_BYTES, 0, 0.0
    for size in sizes:
        count, total = count + 1, total + size
        if total >= limit:
            lengths.append(count)
            limit, count, total = DDP_BYTES, 0, 0.0
    if count:
        lengths.append(count)
    return lengths


FIXED: dict[str, Callable[[Sequence[float]], list[int]]] = {
    "ddp": ddp,
    "single": single,
    "wfbp": wfbp,
}
"""Rules that need only sizes."""

MEASURED = ("mg-wfbp", "optimal")
"""Rules that need ready times and a cost."""

RULES = (*FIXED, *MEASURED)
"""The names of all rules."""


def _measured(
    rule: str,
    sizes: Sequence[float],
    ready: Sequence[float],
    cost: Cost,
    runs: Sequence[int],
    max_in_flight: int,
) -> list[list[int]]:
    """Plan buckets of neighbours in ready order by a rule of `MEASURED`."""
    totals = list(itertools.accumulate(sizes))
    greedy = mg_wfbp(sizes, ready, fit(cost, [*sizes, *totals]), runs)
    if rule == "mg-wfbp":
        return _positions(greedy)
    others = [_cut_at_runs(fixed(sizes), runs) for fixed in FIXED.values()]
    return _positions(
        optimal(sizes, ready, cost, runs, max_in_flight, [greedy, *others])
    )


def mg_wfbp(
    sizes: Sequence[float],
    ready: Sequence[float],
    cost: AffineCost,
    runs: Sequence[int],
) -> list[int]:
    """Plan buckets by MG-WFBP's Algorithm 1, in one pass.

    A gradient is merged into the next one's message if that gradient is ready before this message
    would complete its start-up: r(l-1) < tau_c(l) + a (Theorem 1). The paper recomputes all tau_c
    after each merge, in O(L^2); the plans are the same.

    Args:
        sizes: Bytes of each gradient, in ready order.
        ready: Seconds from the step's start to each gradient.
        cost: Seconds of an all-reduce by its bytes.
        runs: For each tensor, the position at which the run of tensors of its kind began.

    Returns:
        The number of tensors in each bucket.
    """
    lengths = []
    # `busy` is the time at which the channel is free again.
    busy, waiting, count = 0.0, 0.0, 0
    for i, size in enumerate(sizes):
        waiting, count = waiting + size, count + 1
        # The paper's tau_c.
        start = max(busy, ready[i])
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
    max_in_flight: int,
    others: Sequence[list[int]],
) -> list[int]:
    """Plan the buckets whose last all-reduce ends first, and never later than with *others*.

    With one all-reduce at a time, the plan is exact for any cost that does not fall. With several,
    it is exact if there are few enough plans to try all. Otherwise, the candidates are *others* and
    the exact plans for one all-reduce at a time with 0 to 100 % of the start-up overlapped. Small
    changes then improve the best candidate. The search stops early when it meets `lower_bound`.

    Args:
        sizes: Bytes of each gradient, in ready order.
        ready: Seconds from the step's start to each gradient.
        cost: Seconds of an all-reduce by its bytes.
        runs: For each tensor, the position at which the run of tensors of its kind began.
        max_in_flight: The number of all-reduces that may be in flight at a time.
        others: Bucket lengths of other plans.

    Returns:
        The number of tensors in each bucket.
    """
    if max_in_flight == 1:
        return _exact(sizes, ready, cost, runs, 0.0)

    totals = [0, *itertools.accumulate(sizes)]

    def end(plan: Sequence[int]) -> float:
        ends = list(itertools.accumulate(plan))
        filled = [totals[b] - totals[a] for a, b in itertools.pairwise([0, *ends])]
        times = [ready[stop - 1] for stop in ends]
        return finish_buckets(filled, times, cost, max_in_flight=max_in_flight)

    overlap = overlappable_startup(cost)
    candidates = list(others)
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        candidates.append(_exact(sizes, ready, cost, runs, part * overlap))
    best = min(candidates, key=lambda plan: (end(plan), len(plan)))
    least = lower_bound(sizes, ready, cost, runs)
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


def lower_bound(
    sizes: Sequence[float], ready: Sequence[float], cost: Cost, runs: Sequence[int]
) -> float:
    """Return a lower bound of any plan's end, for any number of all-reduces in flight.

    If all are in flight, all start-ups overlap. The wire is never idle while a bucket is ready, and
    the order of buckets does not affect when it is done. So a queue for the wire alone gives the
    exact end. Fewer all-reduces in flight only delay buckets.

    Args:
        sizes: Bytes of each gradient, in ready order.
        ready: Seconds from the step's start to each gradient.
        cost: Seconds of an all-reduce by its bytes.
        runs: For each tensor, the position at which the run of tensors of its kind began.

    Returns:
        Seconds from the step's start.
    """
    overlap = overlappable_startup(cost)
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
    """Plan the buckets whose last all-reduce ends first, with one all-reduce at a time.

    *apart* is the seconds of each start-up that do not occupy the channel. With P the prefix sums
    of sizes, the first j gradients are done at ``f(j) = min over i < j of max(f(i), ready(j) +
    apart) + cost(P(j) - P(i)) - apart``. A later end never helps later messages. Of all i with
    f(i) <= ready(j) + apart only the last can be best, since its message is the smallest.
    """
    count = len(sizes)
    prefix: Seconds = np.concatenate(([0.0], np.cumsum(np.asarray(sizes, np.float64))))
    done: Seconds = np.zeros(count + 1)
    came_from = [0] * (count + 1)
    # The last i with f(i) <= ready(j) + apart.
    idle = 0
    for j in range(1, count + 1):
        released = ready[j - 1] + apart
        while idle + 1 < j and done[idle + 1] <= released:
            idle += 1
        first = max(idle, runs[j - 1])
        message = prefix[j] - prefix[first:j]
        ends = np.maximum(done[first:j], released) + (many(cost, message) - apart)
        # argmin returns the first of equal ends, which has the fewest messages.
        best = int(np.argmin(ends))
        done[j] = ends[best]
        came_from[j] = first + best
    lengths = []
    while count:
        lengths.append(count - came_from[count])
        count = came_from[count]
    return lengths[::-1]


def _forced_cuts(runs: Sequence[int]) -> set[int]:
    """Return the positions at which a bucket must end because the kind changes."""
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
    """Yield the plans in which one boundary is moved, removed or added."""
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


def _explicit_lengths(rule: str) -> list[int] | None:
    """Parse bucket lengths such as ``"3+5+2"``; return None if *rule* is not such a list."""
    words = rule.split("+")
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        return None
    return [int(word) for word in words]


def _positions(lengths: Sequence[int]) -> list[list[int]]:
    edges = [0, *itertools.accumulate(lengths)]
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]


def _runs(kinds: Sequence[Hashable]) -> list[int]:
    """Return, for each tensor, the position at which the run of tensors of its kind began."""
    runs: list[int] = []
    for i, kind in enumerate(kinds):
        runs.append(runs[-1] if i and kind == kinds[i - 1] else i)
    return runs


def _cut_at_runs(lengths: Sequence[int], runs: Sequence[int]) -> list[int]:
    """*lengths*, cut wherever the kind changes."""
    return [
        len(list(same))
        for positions in _positions(lengths)
        for _, same in itertools.groupby(positions, runs.__getitem__)
    ]


def _explicit_buckets(
    lengths: Sequence[int], kinds: Sequence[Hashable]
) -> list[list[int]]:
    text = "+".join(map(str, lengths))
    if sum(lengths) != len(kinds):
        raise UsageError(
            f"bucketing {text!r}: expected lengths that sum to the {len(kinds)} gradients of "
            f"the model, got {sum(lengths)}"
        )
    buckets = _positions(lengths)
    for positions in buckets:
        if len({kinds[position] for position in positions}) > 1:
            raise UsageError(
                f"bucketing {text!r}: the bucket of tensors "
                f"{positions[0]} to {positions[-1]} mixes dtypes or devices"
            )
    return buckets
