"""What a prediction takes, counted and not timed: so that equal questions have equal plans.

A step in virtual time is each worker's own text, once for itself and once for each tensor, and
messages: those that a collective is played in, which schedules tell, and those between workers
and servers. The figures are of a core of 2025; how they were found stands with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from paceline.bucketing.rules import MEASURED
from paceline.cluster import Cluster
from paceline.collectives.registry import COLLECTIVES
from paceline.core.settings import Settings, parse_method
from paceline.errors import UsageError
from paceline.interfaces import Placement
from paceline.tools.plan.predict import (
    SHORTENED,
    SHORTENED_IN_SHORT,
    TrainingJob,
    drifting_steps,
    in_the_long_run,
    shorter,
)

START, ENTERING = 0.03, 4e-3
"""Seconds of any prediction, and of each worker of it: its thread, its model, its groups."""
STEP, TENSOR, SUM = 0.5e-3, 0.1e-3, 0.1e-3
"""Of a worker's step, of each tensor in it (twice that where the method updates), and of each sum."""
PASS = 0.04e-3
"""Of a tensor in each more pass that a step accumulates."""
MESSAGE, REQUEST = 0.035e-3, 0.12e-3
"""Of a message of a collective that is played; of one to a server, and its answer..."""
ON_ITS_OWN = 1.5
"""...and times that, where each is an update of its own."""
USUAL, MORE, FEW_WORKERS = 60.0, 8.0, 16
"""Seconds of a plan's budget, more for each worker beyond so many."""
BUCKET = 25e6
"""Bytes of most of DDP's buckets."""


@dataclass
class Budget:
    """What predictions may still take: *left* seconds of a core, as `cost` counts them."""

    left: float

    def takes(self, price: float, keep: float = 0.0) -> bool:
        """Whether *price* fits, with *keep* seconds left; then it is spent."""
        if self.left - price < keep:
            return False
        self.left -= price
        return True


UNBOUNDED = Budget(float("inf"))


def cost(job: TrainingJob, spec: str, *, short: bool) -> float:
    """About how many seconds of a core a prediction takes; of a spec that is refused, it takes its
    start alone."""
    try:
        return _cost(job, spec, short)
    except UsageError:  # by who reads it, or by a method that has no groups of so many
        return START


def _cost(job: TrainingJob, spec: str, short: bool) -> float:
    read, settings = parse_method(spec)
    method: Any = in_the_long_run(read)
    cluster, workload = job.cluster, job.workload
    workers, tensors = cluster.workers, len(workload.names)
    steps, rounds = _steps(method, settings, workers, short)
    updates = 2 if method.updates_on == "method" else 1
    each = STEP + (TENSOR * updates + PASS * (job.passes - 1)) * tensors
    seconds = START + workers * (ENTERING + steps * each)
    total = sum(workload.sizes)
    buckets = min(float(tensors), 2 + total / BUCKET)
    remote = method.updates_on == "server"
    if remote or COLLECTIVES[settings.collective].needs == "servers":
        servers = len(cluster.servers) or cluster.hosts
        if remote and method.groups(workers) is not None:
            servers = 1  # of each group its own
        asked = rounds * buckets * workers * servers
        alone = getattr(method, "consistency", "asynchronous") == "asynchronous"
        return seconds + asked * REQUEST * (ON_ITS_OWN if alone else 1)
    if settings.buckets == "wfbp" or (settings.buckets in MEASURED and not short):
        buckets = tensors
    played = _messages(cluster, settings, max(1, round(total / buckets)))
    return seconds + rounds * buckets * (workers * SUM + played * MESSAGE)


def usual_seconds(cluster: Cluster) -> float:
    """The budget of a plan where nobody says one."""
    return USUAL + MORE * max(0, cluster.workers - FEW_WORKERS)


def _steps(
    method: Any, settings: Settings, workers: int, short: bool
) -> tuple[int, float]:
    """How many steps are run, and in how many of them workers meet."""
    run, _ = shorter(method, SHORTENED_IN_SHORT if short else SHORTENED)
    period = getattr(run, "sync_every", 1) or 1
    late = getattr(method, "waits_in_forward", False)
    planned = not short and settings.buckets in MEASURED
    steps = 3
    if method.rounds.every == 0:
        steps = drifting_steps(short, workers)
    elif planned:
        steps = 12 if late else 8
    elif late:
        steps = 5
    if period > 1:
        steps = max(steps, 2 * period + 1)
    steps += 0 if short else getattr(run, "learns_for", 0)
    return steps, steps / period


def _messages(cluster: Cluster, settings: Settings, size: int) -> int:
    """In how many messages the mean of a bucket of *size* bytes is played, coded as it is."""
    code, workers = settings.compression.code, cluster.workers
    if not settings.compression.compresses:
        return messages(cluster, settings.collective, size)
    found = 0
    for leg in code.wire_bytes([(max(1, size // 4),)], torch.float32, workers):
        if leg.kind == "sum":
            found += messages(cluster, settings.collective, max(1, round(leg.size)))
        elif leg.kind == "all-to-all":
            found += workers * (workers - 1)
    return found


@lru_cache(maxsize=256)
def messages(cluster: Cluster, name: str, size: int) -> int:
    """In how many messages a sum of *size* bytes by the collective *name* is played; 0 where it is
    priced as a whole."""
    schedule = COLLECTIVES[name]().schedule(size, Placement.on(cluster))
    if schedule.phases() is not None:
        return 0
    return sum(1 for number in range(schedule.steps) for _ in schedule.step(number))
