"""The process that predicts beside a training: ``python -m paceline.tools.auto``.

It reads a `Question` from the file that it was given open, by its number, and prints an `Answer`
(`paceline.tools.auto.decision`). It ends when its standard input does, which is when the worker that asks has ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import partial

import msgspec
import torch

from paceline.bucketing.tuner import WORTH_IT
from paceline.cluster import Workload, parse_cluster
from paceline.errors import PacelineError
from paceline.interfaces import CONSISTENCIES, Consistency
from paceline.spec import parse
from paceline.tools.auto.decision import Answer, Predicted, Question
from paceline.tools.plan.estimates import LOSSLESS, Estimate, Plan
from paceline.tools.plan.predict import (
    MakeOptimizer,
    TrainingJob,
    plain_sgd,
    predict,
)
from paceline.tools.plan.search import plan

TRIED = 2
"""Candidates that take turns with what runs."""
ALIKE = 1.02
"""Of two that are predicted to differ by less, the one with the stronger promise comes first."""
NICE = 19


def answer(question: Question) -> Answer:
    """Plan for what a training has found out."""
    cluster = parse_cluster(question.cluster)
    workload = msgspec.convert(question.workload, Workload)
    allowed = CONSISTENCIES[: CONSISTENCIES.index(question.consistency) + 1]
    following = CONSISTENCIES[len(allowed) : -1][:1]
    optimizer = optimizer_like(question)
    made = plan(
        cluster,
        workload,
        allowed=(*allowed, *following),
        budget_seconds=question.budget_seconds,
        optimizer=optimizer,
        refused=question.refused,
        epoch_steps=question.epoch_steps,
    )
    job = TrainingJob(
        cluster=cluster,
        workload=workload,
        optimizer=optimizer,
        epoch_steps=question.epoch_steps,
    )
    present = present_of(made, question.present, job)
    recommended = made.recommended
    return Answer(
        best=tuple(map(_predicted, worth_trying(made, allowed, present))),
        present=present,
        next=_predicted(recommended[following[0]])
        if set(following) & set(recommended)
        else None,
        candidates=len(made.estimates),
        limit=made.baseline.lower_bound_seconds,
        one_machine=made.baseline.single.step_seconds / made.baseline.workers,
    )


def present_of(made: Plan, spec: str, job: TrainingJob) -> Predicted | None:
    """What runs, predicted: its row, or else on its own; None where it cannot run there."""
    row = made.estimate(spec)
    if row is not None and row.fidelity == "full":
        return _predicted(row)
    found = predict(job, spec)
    return _predicted(found) if isinstance(found, Estimate) else None


def worth_trying(
    made: Plan, allowed: Sequence[Consistency], present: Predicted | None
) -> list[Estimate]:
    """The best of the allowed classes that are predicted to be clearly faster than what runs, and
    are not of one kind: another bucket rule alone makes no other candidate. Of classes that lose something
    only what is recommended."""
    most = float("inf") if present is None else WORTH_IT * present.seconds
    recommended, fastest = made.recommended, made.fastest
    usable = [
        row
        for row in made.estimates
        if row.consistency in allowed
        # What the budget was too small for counts, too.
        and row.rejected <= fastest[row.consistency].rejected
        and row.step_seconds < most
        and (row.consistency in LOSSLESS or row == recommended.get(row.consistency))
    ]
    chosen: list[Estimate] = []
    while usable and len(chosen) < TRIED:
        least = min(row.step_seconds for row in usable)
        near = [row for row in usable if row.step_seconds <= ALIKE * least]
        first = min(near, key=lambda row: CONSISTENCIES.index(row.consistency))
        chosen.append(first)
        usable = [row for row in usable if _kind(row.spec) != _kind(first.spec)]
    return chosen


def _kind(text: str) -> tuple[str, ...]:
    spec = parse(text)
    said = (spec.values.get(key, "") for key in ("collective", "compression"))
    return spec.name, *said


def _predicted(row: Estimate) -> Predicted:
    return Predicted(
        spec=row.spec, consistency=row.consistency, seconds=row.step_seconds
    )


def optimizer_like(question: Question) -> MakeOptimizer:
    """What makes one of the training's class, where it is torch's own; else plain SGD."""
    cls = getattr(torch.optim, question.optimizer, None)
    if cls is None:
        return plain_sgd
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in question.hyperparameters.items()
    }
    make: MakeOptimizer = partial(cls, **values)
    try:
        make([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError, RuntimeError):
        return plain_sgd
    return make


def _end_with_worker() -> None:
    """Wait for the end of standard input, which comes with that of the worker."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Answer one question."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    torch.set_num_threads(1)
    with open(int(sys.argv[1]), "rb") as asked:
        question = msgspec.json.decode(asked.read(), type=Question)
    threading.Thread(target=_end_with_worker, daemon=True).start()
    output = os.dup(1)
    os.dup2(2, 1)  # what is printed on the way is no answer
    try:
        said = answer(question)
    except PacelineError as error:
        said = Answer(fault=str(error))
    except Exception as error:  # whatever it is, training goes on
        traceback.print_exc()
        said = Answer(fault=f"{type(error).__name__}: {error}")
    with open(output, "wb") as stream:
        stream.write(msgspec.json.encode(said))
    sys.stdout.flush()
    os._exit(0)  # a thread still reads


if __name__ == "__main__":
    main()
