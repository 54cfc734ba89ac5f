"""One candidate in virtual time: stand-in tensors, few steps, the figures of settled ones.

The simulated runtime is the only predictor: what a method does is its own text. Here is only how
many steps of it tell enough:

- A training repeats after the period that its method tells (`Run.set_period`); two of them
  are run after the plan of buckets has settled, if it is measured.
- Rounds of more than `SHORTENED` steps are run with fewer: a step between two rounds
  only computes, so the others cost what these cost.
- Who waits for nobody drifts, until a bound is met: of a longer run the second half counts, and
  rates are added up, as workers may do different numbers of steps.
- Warm-ups are left out (`Method.in_the_long_run`, `Compressor.steady_state`); a note of the prediction
  says for how many steps a compressor sends more, and how much.

Nothing here looks at a clock: equal questions have equal answers, to the bit.
"""

from __future__ import annotations

import gc
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch

from paceline.bucketing.rules import MEASURED
from paceline.cluster import Cluster, Rack, Workload
from paceline.cluster.stand_in import stand_in
from paceline.collectives.registry import COLLECTIVES
from paceline.compression import GradientCompression, warm_up_message
from paceline.core.settings import Settings, parse_method
from paceline.core.training_setup import TrainingInputs, train
from paceline.errors import PacelineError, UsageError, WorkerFailedError
from paceline.interfaces import Method, Runtime
from paceline.interfaces.buckets import nearly_square
from paceline.records import StepRecord, StepRecorder, steady_steps
from paceline.run_options import RunOptions
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import ComputeModel, Simulation, SimulationResult
from paceline.spec import convert_fields
from paceline.tools.plan.candidates import declared_consistency
from paceline.tools.plan.estimates import Estimate, Fidelity, Infeasible

SHORTENED, SHORTENED_IN_SHORT = 16, 8
"""Steps of a round that are run, where there are more."""
MOST_STEPS = 80
SETTLED, SETTLED_AT_ONCE = 4, 2
"""Steps at least, once buckets are settled: of methods that wait for means past backward, which
fill the network first, and of those whose every step is like the one before."""
DRIFTING, DRIFTING_IN_SHORT = 24, 6
"""Steps of those that wait for nobody..."""
FEW_DRIFT = 16
"""...where there are so many workers at most; of more there are half as many."""

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def plain_sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """What is trained with where nobody says."""
    return torch.optim.SGD(parameters, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What is to be trained, and where. *accumulate*: passes that an update takes (None: as many as the
    workload's script has, or one where nobody knows), *batches*: how
    many times the workload's batch a pass has. *settled*: steps that count, at least. *inputs*: by
    worker, seconds that it waits for its batch before each pass (none: nobody waits). *trace*: runs
    keep their records and spans. *epoch_steps*: of the sampler (0: nobody knows). *brief*: what repeats exactly is run, and measured, as seldom as
    can be; without, as often as in a training."""

    cluster: Cluster
    workload: Workload
    optimizer: MakeOptimizer = plain_sgd
    accumulate: int | None = None
    batches: int = 1
    jitter: float = 0.0
    seed: int = 0
    settled: int = SETTLED
    inputs: tuple[float, ...] = ()
    trace: bool = False
    epoch_steps: int = 0
    brief: bool = True

    @property
    def passes(self) -> int:
        """How many an update takes."""
        return self.accumulate or self.workload.passes or 1


@dataclass(frozen=True)
class _Run:
    """A method as it is run, by how many steps its rounds are shorter, whether few steps are
    enough, and how many more than here it takes in a training to learn what it will do."""

    method: Method
    missing: int
    settings: Settings
    short: bool
    learns_longer: int = 0

    @property
    def drifts(self) -> bool:
        """Whether its workers wait for nobody."""
        return self.method.rounds.every == 0


def predict(
    job: TrainingJob, spec: str, fidelity: Fidelity = "full"
) -> Estimate | Infeasible:
    """Predict the steady-state step of one method.

    Args:
        job: What is trained, and where.
        spec: The method.
        fidelity: ``"short"`` runs few steps, and DDP's rule instead of planned buckets.

    Returns:
        The estimate; `Infeasible` where the method refuses the job.
    """
    with _no_collection():
        return _predicted(job, spec, fidelity)


def predict_single(job: TrainingJob) -> Estimate:
    """One machine, the fastest, that computes the global batch of all workers alone.

    Raises:
        UsageError: If it cannot run.
    """
    fastest = max(job.cluster.speeds)
    rack = Rack(workers=1, link=125e6, latency=0.0, speed=(fastest,))
    found = predict(replace(job, cluster=Cluster((rack,))), "bsp", "short")
    if isinstance(found, Infeasible):
        raise UsageError(found.reason)
    workers = job.cluster.workers
    return Estimate(
        spec="one machine",
        consistency="exact",
        step_seconds=workers * found.step_seconds,
        compute_seconds=workers * found.compute_seconds,
        exposed_seconds=workers * found.exposed_seconds,
        bytes_sent=0.0,
        buckets=found.buckets,
    )


def _predicted(
    job: TrainingJob, spec: str, fidelity: Fidelity
) -> Estimate | Infeasible:
    consistency = declared_consistency(spec)
    try:
        run = _as_run(spec, fidelity == "short", job.brief)
        outcome = _simulate(job, run)
    except PacelineError as error:
        cause = error.__cause__ if isinstance(error, WorkerFailedError) else None
        reason = cause if isinstance(cause, PacelineError) else error
        return Infeasible(spec=spec, consistency=consistency, reason=str(reason))
    recorders = outcome.by_worker(outcome.recorders)
    step, compute, exposed, sent = _figures(recorders, run)
    steady = 0 if run.short else recorders[0].steady_after
    warm_up = _warm_up(job, spec)
    return Estimate(
        spec=spec,
        consistency=consistency,
        step_seconds=step,
        compute_seconds=compute,
        exposed_seconds=exposed,
        bytes_sent=sent,
        buckets=recorders[0].buckets,
        fidelity=fidelity,
        steady_after=steady + run.learns_longer if steady else 0,
        estimated_compression=bool(outcome.estimated_compressors),
        events=outcome.switches,
        notes=(*recorders[0].notes, *([warm_up] if warm_up else [])),
    )


def _warm_up(job: TrainingJob, spec: str) -> str:
    """What first steps send that the figures leave out."""
    compression = _of_epochs(parse_method(spec)[1].compression, job)
    workload = job.workload
    shapes = workload.shapes or [nearly_square(size // 4) for size in workload.sizes]
    said = warm_up_message(compression, shapes, torch.float32, job.cluster.workers)
    return said and f"{said}; the figures are of these later steps"


def _of_epochs(
    compression: GradientCompression, job: TrainingJob
) -> GradientCompression:
    """As the script's sampler has epochs."""
    return compression.with_epoch(job.epoch_steps) if job.epoch_steps else compression


def traced(job: TrainingJob, spec: str) -> SimulationResult:
    """The run that `predict` takes its figures from, with records and spans. Raises
    `PacelineError` where it cannot run."""
    return _simulate(
        replace(job, trace=True), _as_run(spec, short=False, brief=job.brief)
    )


def in_the_long_run(method: Method) -> Method:
    """As it is after its warm-up."""
    cls: Any = type(method)
    later = getattr(cls, "in_the_long_run", {})
    changed: Method = replace(method, **convert_fields(cls, later))  # type: ignore[type-var]
    return changed


def _as_run(spec: str, short: bool, brief: bool) -> _Run:
    read, settings = parse_method(spec)
    method = in_the_long_run(read)
    longer = max(0, _learns_for(read) - _learns_for(method))
    if short and settings.buckets in MEASURED:
        settings = replace(settings, buckets="ddp")
    longer += settings.compression.warmup_steps
    settings = replace(settings, compression=settings.compression.steady_state())
    run_as = shorter(method, SHORTENED_IN_SHORT if short else SHORTENED)
    return _Run(*(run_as if brief else (method, 0)), settings, short, longer)


def _learns_for(method: Any) -> int:
    steps: int = getattr(method, "learns_for", 0)
    return steps


def says_more_in_full(spec: str) -> bool:
    """Whether a full run can come to other figures than a short one of the same workload."""
    quick, full = (_as_run(spec, short, brief=True) for short in (True, False))
    method = full.method
    return (
        method.updates_on == "server"
        or full.drifts
        or _learns_for(method) > 0
        or (quick.method, quick.settings) != (method, full.settings)
    )


def shorter(method: Any, steps: int) -> tuple[Method, int]:
    """With rounds of so many *steps*, or a few more, where they are long and a shorter one is like them; and by how
    many they are shorter."""
    whole = getattr(method, "sync_every", 0)
    if whole <= steps or getattr(method, "group_every", 1) > 1:
        return method, 0
    for every in range(steps, whole):
        turn = every // getattr(method, "fragments", 1)
        if every % getattr(method, "fragments", 1) or turn <= getattr(
            method, "delay", 0
        ):
            continue
        try:
            return replace(method, sync_every=every), whole - every
        except UsageError:
            continue
    return method, 0


def _simulate(job: TrainingJob, run: _Run) -> SimulationResult:
    def body(rank: int) -> None:
        runtime = join_runtime()
        model = stand_in(_charged(job))
        plain = job.optimizer(model.parameters())
        settings = replace(
            run.settings,
            clip_norm=math.inf,
            compression=_of_epochs(run.settings.compression, job),
        )
        optimizer = train(TrainingInputs(runtime, model, plain), run.method, settings)
        if run.short:
            runtime.recorder.warm_up_steps = 0
        # No two workers' gradients are alike, and none is zero.
        batch = torch.full((int(job.workload.batch or 1) * job.batches,), 1.0 + rank)
        while not _is_enough(runtime.recorder, run, job):
            optimizer.zero_grad()
            for _ in range(job.passes - 1):
                with optimizer.no_sync():
                    _wait_for_batch(runtime, job)
                    model(batch).backward()
            _wait_for_batch(runtime, job)
            model(batch).backward()
            if job.workload.uses_gradients or run.settings.use_gradients:
                _use_gradients(model)
            optimizer.step()
        optimizer.finish()

    quiet = io.StringIO()
    with redirect_stdout(quiet), redirect_stderr(quiet):
        simulation = _simulation(job, run, draws=False)
        outcome = simulation.run(body)
        if simulation.drawn:  # a method of the user's own
            outcome = _simulation(job, run, draws=True).run(body)
    return outcome


def _charged(job: TrainingJob) -> Workload:
    """The workload with all batches of a step ready before it. Where nobody knows how many samples
    a batch has, one stands for it, so that more take longer."""
    workload = job.workload
    batches = job.batches * job.passes / (workload.passes or 1)
    return replace(
        workload, batch=workload.batch or 1.0, input=batches * workload.input
    )


def _use_gradients(model: torch.nn.Module) -> None:
    """As a script does that clips: it waits for all of them where backward ends."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.norm()


def _few_are_enough(job: TrainingJob, run: _Run) -> bool:
    """Whether representatives of many workers have the figures of all."""
    return (
        job.cluster.workers > FEW_DRIFT
        and getattr(run.method, "symmetric", False)
        and COLLECTIVES[run.settings.collective].needs == "nothing"
        # Some compressors exchange parts message by message, and ranks end at other times.
        and not run.settings.compression.compresses
        and not (job.jitter or job.inputs or job.trace or job.cluster.rules)
    )


def _simulation(job: TrainingJob, run: _Run, *, draws: bool) -> Simulation:
    return Simulation(
        job.cluster,
        options=RunOptions(tells=False, seed=job.seed),
        compute=ComputeModel(jitter=job.jitter, seed=job.seed, workload=_charged(job)),
        trace=job.trace,
        draws=draws,
        repeats=job.brief and not job.jitter,
        workers="classes" if _few_are_enough(job, run) else "all",
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """The cycle collector looks through everything that a process holds, again and again, while
    many workers make many objects: a fifth of the time. Here it does so once, at the end, and
    only through what was made meanwhile."""
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.enable()
        gc.unfreeze()


def _wait_for_batch(runtime: Runtime, job: TrainingJob) -> None:
    if (
        job.inputs
    ):  # what is spent is over the worker's speed, and loaders do not know that
        runtime.clock.charge(
            job.inputs[runtime.rank] * job.cluster.speeds[runtime.rank], "input"
        )


def _is_enough(recorder: StepRecorder, run: _Run, job: TrainingJob) -> bool:
    if run.drifts:
        wanted = drifting_steps(run.short, job.cluster.workers) + recorder.warm_up_steps
        wanted += job.settled - SETTLED
    else:
        late = getattr(run.method, "waits_in_forward", False)
        settled = job.settled if late or not job.brief else SETTLED_AT_ONCE
        rounds = max(settled, 2 * recorder.period)
        wanted = (recorder.steady_after or MOST_STEPS) + rounds
    return recorder.step_count >= wanted


def drifting_steps(short: bool, workers: int) -> int:
    """How many are run of those that wait for nobody."""
    steps = DRIFTING_IN_SHORT if short else DRIFTING
    return steps if workers <= FEW_DRIFT else max(DRIFTING_IN_SHORT, steps // 2)


Figures = tuple[float, float, float, float]
_FIELDS = (
    *("step_seconds", "compute_seconds"),
    *("exposed_communication_seconds", "bytes_sent"),
)


def _figures(recorders: Sequence[StepRecorder], run: _Run) -> Figures:
    if run.drifts:
        return _drifting(recorders)
    stats = [recorder.stats() for recorder in recorders]
    step = fmean(s.step_seconds for s in stats)
    compute = fmean(s.compute_seconds for s in stats)
    exposed = fmean(s.exposed_communication_seconds for s in stats)
    sent = fmean(s.bytes_sent for s in stats)
    if run.missing:
        return _lengthened(recorders, (step, compute, exposed, sent), run.missing)
    return step, compute, exposed, sent


def _lengthened(
    recorders: Sequence[StepRecorder], means: Figures, missing: int
) -> Figures:
    """The means over a round of so many steps more, which are as most of it are. At its end all wait
    for the slowest: so each of them takes as long as its step, and the others wait for the rest."""
    period = recorders[0].period
    usual = [
        [median(getattr(step, name) for step in steady_steps(list(recorder.steps))) for name in _FIELDS]
        for recorder in recorders
    ]  # fmt: skip
    slowest = max(step for step, *_ in usual)
    between = [
        (slowest, compute, exposed + slowest - step, sent)
        for step, compute, exposed, sent in usual
    ]
    more = [fmean(values) for values in zip(*between, strict=True)]
    whole = [
        (period * mean + missing * one) / (period + missing)
        for mean, one in zip(means, more, strict=True)
    ]
    return whole[0], whole[1], whole[2], whole[3]


def _drifting(recorders: Sequence[StepRecorder]) -> Figures:
    """Of the second half of the time in which all were training: the steps of a worker that has
    the mean rate."""
    end = min(recorder.steps[-1].end_seconds for recorder in recorders)
    halves = [_second_half(list(recorder.steps), end) for recorder in recorders]
    rates = [
        len(half) / sum(step.step_seconds for step in half) for half in halves if half
    ]
    rate = sum(rates) / len(recorders)
    every = [step for half in halves for step in half]
    step = fmean(s.step_seconds for s in every)
    compute = fmean(s.compute_seconds for s in every) / step / rate
    exposed = fmean(s.exposed_communication_seconds for s in every) / step / rate
    return 1 / rate, compute, exposed, fmean(s.bytes_sent for s in every)


def _second_half(steps: Sequence[StepRecord], end: float) -> list[StepRecord]:
    within = [step for step in steps if step.end_seconds <= end]
    half = [s for s in within if s.end_seconds - s.step_seconds >= end / 2]
    return half or within[-1:] or list(steps[:1])
