"""A step of each candidate that people will look at, moment by moment."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.tools.plan.estimates import DDP, Plan
from paceline.tools.plan.predict import TrainingJob, traced
from paceline.tools.plan.prediction_cost import UNBOUNDED, Budget, cost
from paceline.tools.plan.predictor import Predict, in_this_process
from paceline.tools.report.timeline import Step, step_of


def steps_of(
    plan: Plan,
    job: TrainingJob,
    told: Callable[[str, int, int], None] = lambda what, number, count: None,
    predict: Predict = in_this_process,
    budget: Budget = UNBOUNDED,
) -> list[Step]:
    """A settled step of what is recommended in each class, and of DDP's rule: run once more, and
    looked at, as far as *budget* goes. The first two are the best of the strongest class and, if that is another, DDP's
    rule."""
    specs = dict.fromkeys(row.spec for row in plan.recommended.values())
    first, *rest = [*specs, DDP]
    names = list(dict.fromkeys([first, DDP, *rest]))
    if plan.estimate(DDP) is None:  # it was not allowed, or cannot run
        names.remove(DDP)
    prices = {spec: cost(job, spec, short=False) for spec in names}
    names = [spec for spec in names if budget.takes(prices[spec])]
    asked = [(job, spec) for spec in names]
    steps = predict.map(step_in, asked, [prices[spec] for spec in names])
    found = []
    for number, spec in enumerate(names):
        told(f"a step of {spec}", number, len(names))
        found.append(next(steps))
    return [step for step in found if step is not None]


def step_in(asked: tuple[TrainingJob, str]) -> Step | None:
    """A settled step of a job by a spec; None where it cannot run."""
    job, spec = asked
    try:
        outcome = traced(job, spec)
    except PacelineError:
        return None
    records = [record for kept in outcome.kept for record in kept.steps]
    spans = [*outcome.spans, *(span for kept in outcome.kept for span in kept.spans)]
    return step_of(spec, lambda: spans, records)
