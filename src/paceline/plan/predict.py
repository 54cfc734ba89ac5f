"""One candidate in virtual time: stand-in tensors, few steps, the figures of settled ones.

The virtual world is the only predictor: what a method does is its own text. Here is only how
many steps of it tell enough:

- A training repeats after the period that its method tells (`Run.repeats_after`); two of them
  are run after the plan of buckets has settled, if it is measured.
- Rounds of more than `SHORTENED` steps are run with fewer: a step between two rounds
  only computes, so the others cost what these cost.
- Who waits for nobody drifts, until a bound is met: of a longer run the second half counts, and
  rates are added up, as workers may do different numbers of steps.
- Warm-ups are left out (`Method.in_the_long_run`, `Compressor.settled`).

Nothing here looks at a clock: equal questions have equal answers, to the bit.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import Any

import msgspec
import torch

from paceline.distributing import distribute, read_spec
from paceline.errors import PacelineError, UsageError, WorkerFailedError
from paceline.fusion import MEASURED
from paceline.instruments import Journal, StepRecord
from paceline.interfaces import Method
from paceline.network import Cluster, Workload
from paceline.options import RunOptions
from paceline.report.result import Summary
from paceline.settings import Settings
from paceline.spec import convert_fields
from paceline.stand_ins import stand_in
from paceline.worlds.join import join_world
from paceline.worlds.virtual import ComputeModel, Simulation, SimulationResult

SHORTENED = 16
"""Steps of a round that are run, where there are more."""
MOST_STEPS = 80
SETTLED = 4
"""Steps at least, once buckets are settled: what is waited for past backward fills the network
first."""
DRIFTING, DRIFTING_IN_SHORT = 24, 6
"""Steps of those that wait for nobody."""

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def plain_sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """What is trained with where nobody says."""
    return torch.optim.SGD(parameters, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, and where. *accumulate*: passes that an update takes, *batches*: how
    many times the workload's batch a pass has. *settled*: steps that count, at least."""

    cluster: Cluster
    workload: Workload
    optimizer: MakeOptimizer = plain_sgd
    accumulate: int = 1
    batches: int = 1
    jitter: float = 0.0
    seed: int = 0
    settled: int = SETTLED


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one step; see `Row`. *guessed*: what its code takes nobody has measured."""

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bytes_sent: float
    buckets: int
    notes: tuple[str, ...] = ()
    guessed: bool = False


class Refused(msgspec.Struct, frozen=True):
    """It cannot run, and *why*."""

    why: str


@dataclass(frozen=True)
class _Run:
    """A method as it is run, by how many steps its rounds are shorter, and whether few steps are
    enough."""

    method: Method
    missing: int
    settings: Settings
    short: bool

    @property
    def learns(self) -> int:
        """Steps in which the method finds out what it will do."""
        return 0 if self.short else getattr(self.method, "learns_for", 0)

    @property
    def drifts(self) -> bool:
        """Whether its workers wait for nobody."""
        return self.method.rhythm.every == 0


def predict(job: Job, spec: str, *, short: bool = False) -> Prediction | Refused:
    """What a step takes. *short*: without planning buckets from measured times; DDP's rule
    stands for those that would be."""
    try:
        run = _as_run(spec, short)
        outcome = _simulate(job, run)
    except WorkerFailedError as error:
        cause = error.__cause__
        if isinstance(cause, PacelineError):
            return Refused(str(cause))
        return Refused(str(error))
    except PacelineError as error:
        return Refused(str(error))
    return _figures(outcome.journals, run, guessed=bool(outcome.guessed))


def _as_run(spec: str, short: bool) -> _Run:
    method, settings = read_spec(spec)
    cls: Any = type(method)
    later = getattr(cls, "in_the_long_run", {})
    method = replace(method, **convert_fields(cls, later))  # type: ignore[type-var]
    if short and settings.fusion in MEASURED:
        settings = replace(settings, fusion="ddp")
    settings = replace(settings, compression=settings.compression.settled())
    return _Run(*_shorter(method), settings, short)


def _shorter(method: Any) -> tuple[Method, int]:
    """With rounds of fewer steps, where they are long and a shorter one is like them; and by how
    many."""
    whole = getattr(method, "every", 0)
    if whole <= SHORTENED or getattr(method, "group_every", 1) > 1:
        return method, 0
    for every in range(SHORTENED, whole):
        turn = every // getattr(method, "fragments", 1)
        if every % getattr(method, "fragments", 1) or turn <= getattr(
            method, "delay", 0
        ):
            continue
        try:
            return replace(method, every=every), whole - every
        except UsageError:
            continue
    return method, 0


def _simulate(job: Job, run: _Run) -> SimulationResult:
    def body(rank: int) -> None:
        world = join_world()
        model = stand_in(job.workload)
        settings = {
            f.name: getattr(run.settings, f.name)
            for f in fields(Settings)
            if f.name != "clip_norm"
        }
        optimizer = distribute(
            model, job.optimizer(model.parameters()), method=run.method, **settings
        )
        # No two workers' gradients are alike, and none is zero.
        batch = torch.full((int(job.workload.batch or 1) * job.batches,), 1.0 + rank)
        while not _is_enough(world.journal, run, job.settled):
            optimizer.zero_grad()
            for _ in range(job.accumulate - 1):
                with optimizer.no_sync():
                    model(batch).backward()
            model(batch).backward()
            optimizer.step()
        optimizer.finish()

    quiet = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(quiet))
        stack.enter_context(redirect_stderr(quiet))
        simulation = Simulation(
            job.cluster,
            options=RunOptions(tells=False, seed=job.seed),
            compute=ComputeModel(jitter=job.jitter, seed=job.seed),
        )
        return simulation.run(body)


def _is_enough(journal: Journal, run: _Run, settled: int) -> bool:
    if run.drifts:
        wanted = DRIFTING_IN_SHORT if run.short else DRIFTING + run.learns
        wanted += settled - SETTLED
    else:
        rounds = max(settled, 2 * journal.period)
        wanted = (journal.settled_after or MOST_STEPS) + run.learns + rounds
    return journal.step_count >= wanted


def _figures(journals: Sequence[Journal], run: _Run, *, guessed: bool) -> Prediction:
    notes = tuple(journals[0].notes)
    buckets = journals[0].buckets
    for journal in journals:
        journal.settled_after += run.learns
    if run.drifts:
        step, compute, exposed, sent = _drifting(journals)
    else:
        summaries = [Summary.of(journal) for journal in journals]
        step = fmean(s.step_seconds for s in summaries)
        compute = fmean(s.compute_seconds for s in summaries)
        exposed = fmean(s.exposed_communication_seconds for s in summaries)
        sent = fmean(s.bytes_sent for s in summaries)
        if run.missing:
            step, compute, exposed, sent = _lengthened(
                journals, (step, compute, exposed, sent), run.missing
            )
    return Prediction(
        step_seconds=step,
        compute_seconds=compute,
        exposed_seconds=exposed,
        bytes_sent=sent,
        buckets=buckets,
        notes=notes,
        guessed=guessed,
    )


Figures = tuple[float, float, float, float]
_FIELDS = (
    *("step_seconds", "compute_seconds"),
    *("exposed_communication_seconds", "bytes_sent"),
)


def _lengthened(journals: Sequence[Journal], means: Figures, missing: int) -> Figures:
    """The means over a round of so many steps more, which are as most of it are."""
    period = journals[0].period
    between = [
        fmean(
            median(getattr(step, name) for step in journal.settled_steps())
            for journal in journals
        )
        for name in _FIELDS
    ]
    whole = [
        (period * mean + missing * usual) / (period + missing)
        for mean, usual in zip(means, between, strict=True)
    ]
    return whole[0], whole[1], whole[2], whole[3]


def _drifting(journals: Sequence[Journal]) -> Figures:
    """Of the second half of the time in which all were training: the steps of a worker that has
    the mean rate."""
    end = min(journal.steps[-1].end_seconds for journal in journals)
    halves = [_second_half(list(journal.steps), end) for journal in journals]
    rates = [
        len(half) / sum(step.step_seconds for step in half) for half in halves if half
    ]
    rate = sum(rates) / len(journals)
    every = [step for half in halves for step in half]
    step = fmean(s.step_seconds for s in every)
    compute = fmean(s.compute_seconds for s in every) / step / rate
    exposed = fmean(s.exposed_communication_seconds for s in every) / step / rate
    return 1 / rate, compute, exposed, fmean(s.bytes_sent for s in every)


def _second_half(steps: Sequence[StepRecord], end: float) -> list[StepRecord]:
    within = [step for step in steps if step.end_seconds <= end]
    half = [s for s in within if s.end_seconds - s.step_seconds >= end / 2]
    return half or within[-1:] or list(steps[:1])
