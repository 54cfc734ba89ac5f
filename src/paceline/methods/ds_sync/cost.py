"""Cost of a plan: the seconds of its averages on a cluster, and how fast its workers agree.

A group averages round a ring, in the order of its ranks: each of *g* workers sends
2(g-1)/g of the bytes to the next. Groups that share a link share its bandwidth max-min fairly.

A phase multiplies what the workers hold by a matrix W: blocks of 1/g, one per group. It is
symmetric, doubly stochastic and a projection, whatever the groups' sizes. The mean over
all workers is left as it is; what is left of their differences after a period is its product's
second largest eigenvalue, and how far they stay apart while each step adds noise is `spread`.
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
"""With this rate of a period, or more, workers never agree."""
EXACT = 1e-6
"""What rounding leaves of an eigenvalue of zero."""
MEASURED_STEPS = 16
"""A steady state is measured over whole periods, and no fewer steps than these."""


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
        plan: Of workers of the cluster.
        cluster: The network.
        bytes: Averaged in each step by each worker.

    Raises:
        UsageError: For workers that the cluster does not have.
    """
    check_members(plan.members, cluster)
    return tuple(_together(groups, cluster, bytes) for groups in plan.phases)


def step_seconds(
    plan: Plan,
    cluster: Cluster,
    bytes: float,  # noqa: A002 - as in the interfaces
) -> tuple[float, ...]:
    """Return the seconds of each phase's slowest group, if all groups begin together.

    Raises as `group_seconds` does.
    """
    return tuple(max(seconds) for seconds in group_seconds(plan, cluster, bytes))


def steady_seconds(
    plan: Plan,
    cluster: Cluster,
    bytes: float,  # noqa: A002 - as in the interfaces
    compute: float = 0.0,
) -> float:
    """Return the seconds of a step in steady state: computing and averaging.

    There is no barrier: a group begins when its members have arrived, so a slow group delays only
    those who meet its members later. A step takes less than the phases' slowest groups do in the
    mean. A worker does nothing else while it averages. Raises as `group_seconds` does.

    Args:
        plan: Of workers of the cluster.
        cluster: The network, and the workers' speeds.
        bytes: Averaged in each step by each worker.
        compute: Seconds of computing of a worker of speed 1.
    """
    check_members(plan.members, cluster)
    phases, speeds = plan.phases, cluster.speeds
    measured = len(phases) * math.ceil(MEASURED_STEPS / len(phases))
    ends = [0.0] * (2 * measured)  # of each step, for the last of its workers
    sharing, travelling = BandwidthSharing(cluster.capacities), dict[Flow, _Meeting]()
    ordered = itertools.count()  # who came first goes first: the same on every worker
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
        sharing.advance(now)  # what has just begun shares from now on
    return (ends[-1] - ends[measured - 1]) / measured


_Meeting = tuple[int, tuple[int, ...]]
"""A step, and a group in it."""


def _together(groups: Groups, cluster: Cluster, size: float) -> tuple[float, ...]:
    """Seconds of groups that begin together."""
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
    """2(g-1) messages come one after another, each as late as the longest way makes it."""
    longest = max(cluster.latency(*pair) for pair in _hops(group))
    return 2 * (len(group) - 1) * longest


def _hops(group: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*group, group[0]]))


def check_members(members: Sequence[int], cluster: Cluster) -> None:
    """Raise `UsageError` for workers that the cluster does not have."""
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
    """Return the share of the workers' differences that a period leaves.

    From 0, all agree exactly, to 1, some never do. It is the second largest absolute eigenvalue of
    `period_matrix`.
    """
    if len(plan.members) == 1:
        return 0.0
    apart = period_matrix(plan) - 1 / len(plan.members)
    largest = float(np.abs(np.linalg.eigvals(apart)).max())
    return 0.0 if largest < EXACT else min(1.0, largest)


def rate_per_step(plan: Plan) -> float:
    """Return the share of the workers' differences that a step leaves, in the mean of a period."""
    return float(period_rate(plan) ** (1 / len(plan.phases)))


def spread(plan: Plan) -> float:
    """Return how far workers stay apart, in steps that each add noise of variance 1 to each worker.

    It is the variance of a worker around the mean of all, right after averaging; infinite if they
    never agree. An exact design of two steps has 1/g - 1/N. For any other one
    V = W (V + I - J) W' is iterated from phase to phase until it repeats.
    """
    count = len(plan.members)
    if count == 1:
        return 0.0
    if period_rate(plan) > NEVER:
        return math.inf
    alone = np.eye(count) - 1 / count
    means = [matrix(groups, plan.members) for groups in plan.phases]
    # What a period adds, and then what all periods before have left of theirs.
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
    """Return one sentence: how fast the workers agree, and the time of a step on the cluster.

    *compute*: seconds that a worker of speed 1 computes between two averages.
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
