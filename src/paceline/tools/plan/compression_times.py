"""What codes take, of the candidates that are in front: measured, and predicted again with that."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import msgspec

from paceline.cluster.workload import CompressorTimes
from paceline.compression import full_spec
from paceline.core.settings import parse_method
from paceline.tools.plan.estimates import Estimate, Plan
from paceline.tools.plan.merged_tensors import coarse
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.prediction_cost import cost
from paceline.tools.plan.predictor import Predict, in_this_process

IN_FRONT = 1.2
"""Times the best of its class."""
MOST = 4
"""Codes that are measured: each takes up to a second or so."""


def code_of(spec: str) -> str:
    """What a candidate's gradients are coded with, as workloads call it."""
    _, settings = parse_method(spec)
    return full_spec(settings.compression.steady_state())


def codes_in_front(plan: Plan) -> list[str]:
    """Compressors whose times are estimated, of the rows in front of their class."""
    best = plan.fastest
    rows = [
        row
        for row in plan.estimates
        if row.estimated_compression
        and row.step_seconds <= IN_FRONT * best[row.consistency].step_seconds
    ]
    return list(dict.fromkeys(code_of(row.spec) for row in rows))[:MOST]


def revised(
    plan: Plan,
    job: TrainingJob,
    coding: Mapping[str, CompressorTimes],
    predict: Predict = in_this_process,
) -> tuple[Plan, TrainingJob]:
    """*plan* with the rows that code as in *coding* predicted again, as before in a short run or in
    full, and with what that is counted as; and *job*, which it was made of, with a workload that knows of these times."""
    spent = plan.spent_seconds + seconds_of(plan, job, coding)
    known = {**job.workload.coding, **coding}
    job = replace(job, workload=replace(job.workload, coding=known))
    mine = _coded(plan, coding)
    new: dict[str, Estimate] = {}
    for short in (True, False):
        rows = [row for row in mine if (row.fidelity == "short") == short]
        said = predict(_as_run(job, short), [row.spec for row in rows], short=short)
        for row, answer in zip(rows, said, strict=True):
            if isinstance(answer, Estimate):
                new[row.spec] = msgspec.structs.replace(
                    answer, fidelity=row.fidelity, rejected=row.rejected
                )
    rows = [new.get(row.spec, row) for row in plan.estimates]
    rows.sort(key=lambda row: row.step_seconds)
    plan = msgspec.structs.replace(plan, estimates=tuple(rows), spent_seconds=spent)
    return plan, job


def seconds_of(plan: Plan, job: TrainingJob, codes: Collection[str]) -> float:
    """About how many seconds of a core `revised` takes with the times of *codes*."""
    return sum(
        cost(_as_run(job, short), row.spec, short=short)
        for row in _coded(plan, codes)
        for short in [row.fidelity == "short"]
    )


def _as_run(job: TrainingJob, short: bool) -> TrainingJob:
    """Short runs are of a model with few tensors."""
    return replace(job, workload=coarse(job.workload)) if short else job


def _coded(plan: Plan, codes: Collection[str]) -> list[Estimate]:
    return [
        row
        for row in plan.estimates
        if row.estimated_compression and code_of(row.spec) in codes
    ]
