"""How fast a plan's workers come to agree.

A phase multiplies what the workers hold by a matrix W: blocks of 1/g, one per group. It is
symmetric, doubly stochastic and a projection, whatever the groups' sizes. The mean over
all workers is left as it is; what is left of their differences after a period is its product's
second largest eigenvalue, and how far they stay apart while each step adds noise is `spread`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline import units
from paceline.cluster import Cluster
from paceline.methods.ds_sync.cost import steady_seconds, step_seconds
from paceline.methods.ds_sync.groups import Groups
from paceline.methods.ds_sync.plan import Plan

NEVER = 1 - 1e-9
"""Workers whose differences shrink no faster than this never agree."""
EXACT = 1e-6
"""What rounding leaves of an eigenvalue of zero."""


def matrix(groups: Groups, members: Sequence[int]) -> NDArray[np.float64]:
    """What a phase does: n x n, rows and columns in the order of *members*."""
    place = {worker: number for number, worker in enumerate(members)}
    mean = np.zeros((len(members), len(members)))
    for group in groups:
        places = [place[worker] for worker in group]
        mean[np.ix_(places, places)] = 1 / len(group)
    return mean


def period_matrix(plan: Plan) -> NDArray[np.float64]:
    """What a period does: its phases' matrices multiplied, n x n."""
    total = np.eye(len(plan.members))
    for groups in plan.phases:
        total = matrix(groups, plan.members) @ total
    return total


def period_rate(plan: Plan) -> float:
    """What is left of the workers' differences after a period, from 0 (all agree exactly)
    to 1 (some never do): the second largest absolute eigenvalue of `period_matrix`."""
    if len(plan.members) == 1:
        return 0.0
    apart = period_matrix(plan) - 1 / len(plan.members)
    largest = float(np.abs(np.linalg.eigvals(apart)).max())
    return 0.0 if largest < EXACT else min(1.0, largest)


def rate_per_step(plan: Plan) -> float:
    """What is left of the workers' differences after a step, in the mean of a period."""
    return float(period_rate(plan) ** (1 / len(plan.phases)))


def spread(plan: Plan) -> float:
    """How far workers stay apart: the variance of a worker around the mean of all, right
    after averaging, where each step adds noise of variance 1 to each worker. Infinite if they
    never agree.

    An exact design of two steps has 1/g - 1/N; any other is solved for: V = W (V + I - J) W', from phase to phase until it repeats.
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
    """One sentence for people: how fast the workers agree, and what a step takes there.

    *compute*: seconds that a worker of speed 1 computes between two averages.
    """
    count, sizes = len(plan.members), sorted({len(g) for p in plan.phases for g in p})
    if count == 1:
        return "1 worker: it averages with nobody"
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
