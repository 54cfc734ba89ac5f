"""Estimates the cost of a plan: the seconds of its averages, and how fast its workers agree.

- `group_seconds`, `step_seconds`, `steady_seconds`: times on a cluster.
- `period_rate`, `rate_per_step`, `spread`: agreement of the workers.
- `describe`: both in one sentence, for reports.

A group averages by a ring all-reduce in rank order: each of *g* workers sends 2(g-1)/g of the bytes
to the next one. Groups that share a link share its bandwidth max-min fairly.

A phase multiplies the workers' parameters by a matrix W, which has one block of 1/g for each group.
It is symmetric, doubly stochastic and a projection, whatever the groups' sizes. It preserves the mean
over all workers. After a period, the second largest eigenvalue of the product of its matrices remains
of the workers' differences. `spread` tells how far workers stay apart if each step adds noise.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline import units
from paceline.cluster import Cluster
from paceline.cluster.bandwidth import BandwidthSharing, Flow
from paceline.errors import UsageError
from paceline.methods.ds_sync.plan import Groups, Plan

NEVER = 1 - 1e-9
"""Workers never agree if the rate of a period is this or more."""
EXACT = 1e-6
"""A smaller eigenvalue is zero, apart from rounding."""
MEASURED_STEPS = 16
"""The steady state is simulated over whole periods, with at least this many steps."""


def ring_bytes(workers: int, size: float) -> float:
    """Return the bytes that each worker of a ring sends to average *size* bytes."""
    return 2 * (workers - 1) / workers * size


def group_seconds(
    plan: Plan,
    cluster: Cluster,
    bytes: float,  # noqa: A002 - as in the interfaces
) -> tuple[tuple[float, ...], ...]:
    """Return the seconds of each group of each phase, if all groups of a phase begin together.

    Args:
        plan: A plan of workers of the cluster.
        cluster: The network.
        bytes: Bytes that each worker averages in each step.

    Raises:
        UsageError: The cluster does not have all workers.
    """
    check_members(plan.members, cluster)
    return tuple(_together(groups, cluster, bytes) for groups in plan.phases)


def step_seconds(
    plan: Plan,
    cluster: Cluster,
    bytes: float,  # noqa: A002 - as in the interfaces
) -> tuple[float, ...]:
    """Return the seconds of each phase's slowest group, if all groups begin together.

    Arguments and errors are those of `group_seconds`.
    """
    return tuple(max(seconds) for seconds in group_seconds(plan, cluster, bytes))


def steady_seconds(
    plan: Plan,
    cluster: Cluster,
    bytes: float,  # noqa: A002 - as in the interfaces
    compute: float = 0.0,
) -> float:
    """Return the mean seconds of a step in steady state: computation and average.

    There is no barrier over all workers. A group begins when its members have arrived, so a slow group
    delays only workers that average with its members later. So a step takes less than the phases' slowest
    groups on average. A worker does not compute while it averages.

    Args:
        plan: A plan of workers of the cluster.
        cluster: The network, and the workers' speeds.
        bytes: Bytes that each worker averages in each step.
        compute: Seconds that a worker of speed 1 computes in a step.

    Raises:
        UsageError: The cluster does not have all workers.
    """
    check_members(plan.members, cluster)
    phases, speeds = plan.phases, cluster.speeds
    measured = len(phases) * math.ceil(MEASURED_STEPS / len(phases))
    # When the last worker ends each step.
    ends = [0.0] * (2 * measured)
    sharing, travelling = BandwidthSharing(cluster.capacities), dict[Flow, _Meeting]()
    # Breaks ties by the order of arrival, so that every worker computes the same time.
    ordered = itertools.count()
    coming = [(compute / speeds[w], next(ordered), w, 0) for w in plan.members]
    heapq.heapify(coming)
    there: Counter[_Meeting] = Counter()
    while coming or travelling:
        now = min(sharing.next_end(), coming[0][0] if coming else math.inf)
        for activity in sharing.advance(now):
            step, group = travelling.pop(activity)
            arrived = now + _ring_latency(group, cluster)
            ends[step] = max(ends[step], arrived)
            if step + 1 < len(ends):
                for worker in group:
                    ready = arrived + compute / speeds[worker]
                    heapq.heappush(coming, (ready, next(ordered), worker, step + 1))
        while coming and coming[0][0] <= now:
            _, _, worker, step = heapq.heappop(coming)
            groups = phases[step % len(phases)]
            meeting = (step, next(group for group in groups if worker in group))
            there[meeting] += 1
            if there[meeting] == len(meeting[1]):
                activity = _ring(meeting[1], cluster, bytes)
                travelling[activity] = meeting
                sharing.start(activity)
        # Let the averages that have just begun share the links.
        sharing.advance(now)
    return (ends[-1] - ends[measured - 1]) / measured


_Meeting = tuple[int, tuple[int, ...]]
"""A step, and a group in it."""


def _together(groups: Groups, cluster: Cluster, size: float) -> tuple[float, ...]:
    """Return the seconds of each group, if all begin together."""
    sharing, rings = BandwidthSharing(cluster.capacities), dict[Flow, tuple[int, ...]]()
    for group in groups:
        rings[_ring(group, cluster, size)] = group
    for activity in rings:
        sharing.start(activity)
    sharing.advance(0.0)
    seconds: dict[tuple[int, ...], float] = {}
    while len(seconds) < len(groups):
        now = sharing.next_end()
        for activity in sharing.advance(now):
            group = rings[activity]
            seconds[group] = now + _ring_latency(group, cluster)
    return tuple(seconds[group] for group in groups)


def _ring(group: Sequence[int], cluster: Cluster, size: float) -> Flow:
    demand = Counter(link for pair in _hops(group) for link in cluster.path(*pair))
    return Flow(demand, ring_bytes(len(group), size), lambda now: None)


def _ring_latency(group: Sequence[int], cluster: Cluster) -> float:
    """Return the latency of a ring: 2(g-1) messages in sequence, each over the longest path."""
    longest = max(cluster.latency(*pair) for pair in _hops(group))
    return 2 * (len(group) - 1) * longest


def _hops(group: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*group, group[0]]))


def check_members(members: Sequence[int], cluster: Cluster) -> None:
    """Check that the cluster has all of *members*.

    Raises:
        UsageError: It does not.
    """
    beyond = [worker for worker in members if not 0 <= worker < cluster.workers]
    if beyond:
        raise UsageError(
            f"expected a cluster that describes every worker, got one of {cluster.workers} workers, and "
            f"there is a worker {beyond[0]}. Give the cluster file of this job"
        )


def matrix(groups: Groups, members: Sequence[int]) -> NDArray[np.float64]:
    """Return the matrix of a phase, n x n, rows and columns in the order of *members*."""
    place = {worker: number for number, worker in enumerate(members)}
    mean = np.zeros((len(members), len(members)))
    for group in groups:
        places = [place[worker] for worker in group]
        mean[np.ix_(places, places)] = 1 / len(group)
    return mean


def period_matrix(plan: Plan) -> NDArray[np.float64]:
    """Return the product of a period's matrices, n x n."""
    total = np.eye(len(plan.members))
    for groups in plan.phases:
        total = matrix(groups, plan.members) @ total
    return total


def period_rate(plan: Plan) -> float:
    """Return the share of the workers' differences that remains after a period.

    It is the second largest absolute eigenvalue of `period_matrix`: 0 if all workers agree exactly, and 1
    if some never do.
    """
    if len(plan.members) == 1:
        return 0.0
    apart = period_matrix(plan) - 1 / len(plan.members)
    largest = float(np.abs(np.linalg.eigvals(apart)).max())
    return 0.0 if largest < EXACT else min(1.0, largest)


def rate_per_step(plan: Plan) -> float:
    """Return the share of the workers' differences that remains after a step (geometric mean)."""
    return float(period_rate(plan) ** (1 / len(plan.phases)))


def spread(plan: Plan) -> float:
    """Return how far workers stay apart if each step adds noise of variance 1 to each worker.

    It is the variance of a worker around the mean of all, right after an average. An exact design of two
    steps has 1/g - 1/N. For other designs V = W (V + I - J) W' is iterated over the phases until it
    repeats.

    Returns:
        The variance; infinite if the workers never agree.
    """
    count = len(plan.members)
    if count == 1:
        return 0.0
    if period_rate(plan) > NEVER:
        return math.inf
    alone = np.eye(count) - 1 / count
    means = [matrix(groups, plan.members) for groups in plan.phases]
    # The variance that one period adds, then the remainder of all periods before.
    variance = np.zeros((count, count))
    for mean in means:
        variance = mean @ (variance + alone) @ mean
    shrink = period_matrix(plan) - 1 / count
    while np.abs(shrink).max() > EXACT:
        variance = variance + shrink @ variance @ shrink.T
        shrink = shrink @ shrink
    traces = []
    for mean in means:
        variance = mean @ (variance + alone) @ mean
        traces.append(np.trace(variance) / count)
    return float(np.mean(traces))


def describe(
    plan: Plan,
    cluster: Cluster | None = None,
    bytes: float = 0,  # noqa: A002 - as in the interfaces
    compute: float = 0.0,
) -> str:
    """Return a sentence that says how fast the workers agree, and the time of a step on the cluster.

    Args:
        plan: The plan.
        cluster: The network; None leaves out the times.
        bytes: Bytes that each worker averages in each step.
        compute: Seconds that a worker of speed 1 computes between two averages.
    """
    count, sizes = len(plan.members), sorted({len(g) for p in plan.phases for g in p})
    if count == 1:
        return "1 worker: no averages"
    text = f"{count} workers in groups of {sizes[0]}"
    if sizes[-1] > sizes[0]:
        text += f" to {sizes[-1]}"
    text += f", {_agreement(plan)}"
    if cluster is not None:
        seconds = step_seconds(plan, cluster, bytes)
        text += f"; averaging takes {units.show_seconds(min(seconds))}"
        if max(seconds) > 1.005 * min(seconds):
            text += f" to {units.show_seconds(max(seconds))}"
        steady = steady_seconds(plan, cluster, bytes, compute)
        text += f", a step {units.show_seconds(steady)} in the mean"
        if compute:
            text += f" ({units.show_seconds(compute)} of it computing)"
    return text


def _agreement(plan: Plan) -> str:
    rate = period_rate(plan)
    if rate == 0:
        steps = len(plan.phases)
        text = f"which agree exactly after {steps} step{'s' if steps > 1 else ''}"
        return f"{text} (spread {spread(plan):.2g} of a step's noise)"
    return (
        f"in {len(plan.phases)} phases, a step of which leaves "
        f"{rate_per_step(plan):.2f} of their differences (spread "
        f"{spread(plan):.2g} of a step's noise)"
    )
