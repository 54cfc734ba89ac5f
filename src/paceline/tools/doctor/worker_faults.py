"""Faults of hosts and what runs there: each a function of the picture that names it, or finds nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from statistics import median, median_high, median_low

from paceline.cluster import Workload
from paceline.tools.doctor.evidence import Measured, WorkerEvidence
from paceline.tools.doctor.fault_kinds import Detection, Hosts, listed
from paceline.tools.doctor.network_model import NetworkModel
from paceline.tools.doctor.thresholds import (
    AT_END,
    BUSY,
    FEWEST_WORKERS,
    NOISE,
    SLOW_PASSES,
    STARVES,
)
from paceline.tools.doctor.training_model import TrainingModel
from paceline.units import show_seconds


def threads(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """Hosts whose workers compute with more threads than they have cores."""
    bad: dict[int, tuple[int, int, int]] = {}
    for host in picture.hosts:
        workers = picture.on(host)
        count, cores = sum(one.threads for one in workers), workers[0].cores
        if count > cores:
            bad[host] = count, cores, len(workers)
    if not bad:
        return None
    count, cores, workers_there = max(bad.values(), key=lambda one: one[0] / one[1])
    each = cores // workers_there
    return Detection(
        where=_hosts(picture, bad),
        because=f"{workers_there} worker{'s' * (workers_there > 1)} with {count} threads "
        f"together on {cores} core{'s' * (cores > 1)}",
        do=f"OMP_NUM_THREADS={each} on each"
        if each
        else f"start {cores} workers there",
        # Where all are like that nobody knows how fast they could be.
        mend=None
        if set(bad) == set(picture.hosts)
        else _full_speed(_ranks(picture, bad)),
        hosts=frozenset(bad),
        command=f"OMP_NUM_THREADS={each} torchrun ..." if each else "",
    )


def slow_host(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """Hosts, fewer than half of them, whose passes take far longer than the median worker's. Without a
    script each worker's speed was measured once: two say nothing of what is usual, and
    processes of one machine have the same hardware."""
    evidence = picture.evidence
    one_machine = evidence.shared_cores is not None
    if not picture.trains and (one_machine or len(evidence.workers) < FEWEST_WORKERS):
        return None
    factors = _factors(picture)
    bad = {
        host: max(factors[one.rank] for one in picture.on(host))
        for host in picture.hosts
        if host not in spared
        and any(factors.get(one.rank, 0.0) > SLOW_PASSES for one in picture.on(host))
    }
    if not bad or 2 * len(bad) >= max(len(picture.hosts), 3):
        return None
    busy = [
        one
        for host in bad
        for one in picture.on(host)[:1]
        if one.other_load > BUSY * one.cores
    ]
    because = f"its passes take {max(bad.values()):.2f} times the usual worker's"
    if busy:
        because += f", other programs keep {busy[0].other_load:.1f} of its {busy[0].cores} cores busy"
        do = "end them, or move the worker"
    elif one_machine:
        do = "look at what it computes more than others of this machine; or give it less: "
        do += "paceline.Sampler(shares=[...])"
    else:
        do = "look at its clock and heat; or give it less: paceline.Sampler(shares=[...])"
    return Detection(
        where=_hosts(picture, bad),
        because=because if len(bad) == 1 else because.replace("its", "their", 1),
        do=do,
        # A sum of gradients alone does not show what it costs.
        mend=_full_speed(_ranks(picture, bad)) if picture.trains else None,
        hosts=frozenset(bad),
    )


def input_starves(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """Hosts whose workers wait long between two steps."""
    bad: dict[int, float] = {}
    for one in picture.evidence.workers:
        if one.step is None or one.host in spared:
            continue
        passes = picture.passes[one.rank]
        if (
            one.step.input.median - _error(one.step.input, one.step.steps)
            > STARVES * passes
        ):
            bad[one.host] = max(bad.get(one.host, 0.0), one.step.input.median)
    if not bad:
        return None
    usual = min(picture.inputs.values())

    def mend(patient: TrainingModel) -> TrainingModel:
        inputs = [
            min(wait, usual, STARVES / 10 * patient.workload.forward_seconds)
            if host in bad
            else wait
            for wait, host in zip(patient.inputs, patient.hosts, strict=True)
        ]
        return replace(patient, inputs=tuple(inputs))

    return Detection(
        where=_hosts(picture, bad),
        because=f"{show_seconds(float(f'{max(bad.values()):.2g}'))} a step go by before the "
        "model has its batch",
        do="DataLoader(num_workers=..., prefetch_factor=...), data nearer, less between steps",
        mend=mend,
        hosts=frozenset(bad),
    )


def no_overlap(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """A model whose gradients all become ready at the end of backward."""
    steps = [one.step for one in picture.evidence.workers if one.step is not None]
    if not steps or picture.evidence.workload is None:
        return None
    at_end = median(step.at_end for step in steps)
    whole = any(step.compiled_whole for step in steps)
    if not whole and at_end < AT_END:
        return None
    because = (
        f"{100 * at_end:.0f} % of the gradients are ready in the last tenth of backward"
    )
    return Detection(
        where="every worker",
        because=f"the whole model is compiled: {because}" if whole else because,
        do="compile blocks: for block in model.blocks: block.compile()"
        if whole
        else "let backward reach layers one by one: no checkpoint around the whole model",
        mend=lambda patient: replace(patient, workload=_spread(patient.workload)),
    )


def _spread(workload: Workload) -> Workload:
    """With its times spread over its tensors by their bytes, in the same order."""
    spread = Workload.spread(
        workload.names,
        workload.sizes,
        workload.forward_seconds,
        workload.backward_seconds,
    )
    return replace(workload, forward=spread.forward, backward=spread.backward, order=())


def _factors(picture: NetworkModel) -> dict[int, float]:
    """How many times longer than usual each worker's passes take, beyond noise."""
    workers = picture.evidence.workers
    if not picture.trains or not all(picture.passes.values()):
        usual = median_high(one.speed for one in workers)
        return {one.rank: usual / one.speed for one in workers}
    usual = median_low(picture.passes.values())
    return {
        one.rank: (picture.passes[one.rank] - _noise(one)) / usual for one in workers
    }


def _noise(worker: WorkerEvidence) -> float:
    step = worker.step
    if step is None:
        return 0.0
    return math.hypot(
        _error(step.forward, step.steps), _error(step.backward, step.steps)
    )


def _error(seconds: Measured, count: int) -> float:
    """`NOISE` standard errors of a median: 1.25 times a mean's, of a deviation that is 1.48 times
    the median distance."""
    return NOISE * 1.25 * 1.48 * seconds.spread / math.sqrt(max(count, 1))


def _full_speed(ranks: Collection[int]) -> Callable[[TrainingModel], TrainingModel]:
    """With those workers as fast as the median one."""

    def mend(patient: TrainingModel) -> TrainingModel:
        usual = median_high(patient.speeds)
        speeds = [
            max(speed, usual) if rank in ranks else speed
            for rank, speed in enumerate(patient.speeds)
        ]
        return replace(patient, speeds=tuple(speeds))

    return mend


def _ranks(picture: NetworkModel, hosts: Collection[int]) -> list[int]:
    return [one.rank for one in picture.evidence.workers if one.host in hosts]


def _hosts(picture: NetworkModel, bad: Collection[int]) -> str:
    if len(picture.hosts) > 1 and set(bad) == set(picture.hosts):
        return "every host"
    return listed([picture.label(host) for host in sorted(bad)])
