"""Predicts one method in virtual time: with placeholder tensors, few steps, and figures of steady steps.

The planner has no performance model of any method: the simulated runtime runs the method's own code. This module
decides how many steps suffice:

- A training repeats after the period that its method sets (`Run.set_period`). If measurements plan the buckets, two
  periods run after that.
- Rounds of more than `SHORTENED` steps run with fewer. Between two rounds a step only computes, so
  the omitted steps take as long as those that run.
- Workers of asynchronous methods drift apart until a bound stops them. The second half of a longer
  run counts. Rates are added up, as workers may do different numbers of steps.
- Warm-ups are left out (`Method.steady_state_keys`, `Compressor.steady_state`). A note says for how many steps a
  compressor sends more, and how much.

A short run also merges the model's tensors (`merge_tensors`). It uses DDP's bucket rule in place of planned
buckets.

Nothing here reads a clock: equal questions have bit-equal answers.
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
from paceline.compression import GradientCompression, warmup_message
from paceline.core.settings import Settings, parse_method
from paceline.core.training_setup import TrainingInputs, train
from paceline.errors import PacelineError, UsageError, WorkerFailedError
from paceline.interfaces import Method, Runtime
from paceline.interfaces.buckets import nearly_square
from paceline.records import StepRecord, StepRecorder, steady_steps
from paceline.run_options import RunOptions
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import ComputeModel, Simulation, SimulationResult
from paceline.spec import Spec, convert_fields, parse
from paceline.tools.plan.candidates import declared_consistency
from paceline.tools.plan.estimates import Estimate, Fidelity, Infeasible
from paceline.tools.report.timeline import Step, typical_step

SHORTENED, SHORTENED_IN_SHORT = 16, 8
"""Steps of a round that run, if it has more."""
FEW = 16
"""Tensors of a short run, if the model has more: each makes a step slower to simulate, and hardly changes the
result."""
MOST_STEPS = 80
STEADY_STEPS, STEADY_STEPS_AT_ONCE = 4, 2
"""Fewest steady steps. `STEADY_STEPS` is for methods that wait for averages in the next forward pass, which fill the
network first. `STEADY_STEPS_AT_ONCE` is for those whose every step is like the one before."""
DRIFTING, DRIFTING_IN_SHORT = 24, 6
"""Steps of asynchronous methods..."""
FEW_DRIFT = 16
"""...with at most so many workers; with more workers they run half as many."""

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def plain_sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that is used if none is named."""
    return torch.optim.SGD(parameters, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training to predict, and its network.

    Attributes:
        cluster: The network and its workers.
        workload: The model's tensors and compute times.
        optimizer: Makes an optimizer like the training's.
        accumulate: Passes of one update (None: as many as the workload's script has, or one).
        batches: Number of the workload's batches in a pass.
        jitter: Relative spread of compute times.
        seed: Seed of the jitter.
        steady_steps: Fewest steady steps.
        inputs: By worker, seconds that it waits for a batch before each pass (empty: none).
        trace: Whether runs keep records and spans.
        epoch_steps: Steps of an epoch of the sampler (0: not known).
        brief: Simulate exact repetitions as rarely as possible, instead of as often as a training.
    """

    cluster: Cluster
    workload: Workload
    optimizer: MakeOptimizer = plain_sgd
    accumulate: int | None = None
    batches: int = 1
    jitter: float = 0.0
    seed: int = 0
    steady_steps: int = STEADY_STEPS
    inputs: tuple[float, ...] = ()
    trace: bool = False
    epoch_steps: int = 0
    brief: bool = True

    @property
    def passes(self) -> int:
        """Forward and backward passes of one update."""
        return self.accumulate or self.workload.passes or 1


@dataclass(frozen=True)
class _Run:
    """A method as it is simulated.

    Attributes:
        method: The method with shorter rounds, and without its warm-up.
        missing: By how many steps its rounds are shorter.
        settings: The settings, without the compressor's warm-up.
        short: Whether few steps are enough.
        learns_longer: Warm-up steps of a training that are omitted here.
    """

    method: Method
    missing: int
    settings: Settings
    short: bool
    learns_longer: int = 0

    @property
    def drifts(self) -> bool:
        """Whether its workers are asynchronous."""
        return self.method.rounds.every == 0


def predict(
    job: TrainingJob, spec: str, fidelity: Fidelity = "full"
) -> Estimate | Infeasible:
    """Predict the steady-state step of one method.

    Args:
        job: The training and its network.
        spec: The method.
        fidelity: ``"short"`` runs few steps of a model with few tensors, and DDP's rule instead of
            planned buckets.

    Returns:
        The estimate; `Infeasible` if the method refuses the job.
    """
    if fidelity == "short":
        job = replace(job, workload=merge_tensors(job.workload))
    with _no_collection():
        return _predicted(job, spec, fidelity)


def predict_single(job: TrainingJob) -> Estimate:
    """Predict the fastest machine when it computes the global batch of all workers alone.

    Raises:
        UsageError: It cannot run.
    """
    fastest = max(job.cluster.speeds)
    rack = Rack(workers=1, link=125e6, latency=0.0, speed=(fastest,))
    with _no_collection():
        found = _predicted(replace(job, cluster=Cluster((rack,))), "bsp", "short")
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
        outcome, events = _simulate(job, run)
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
        events=events,
        notes=(*recorders[0].notes, *([warm_up] if warm_up else [])),
    )


def _warm_up(job: TrainingJob, spec: str) -> str:
    """Return a note on the bytes of the first steps, which the figures leave out."""
    compression = _of_epochs(parse_method(spec)[1].compression, job)
    workload = job.workload
    shapes = workload.shapes or [nearly_square(size // 4) for size in workload.sizes]
    note = warmup_message(compression, shapes, torch.float32, job.cluster.workers)
    return note and f"{note}; the figures are of these later steps"


def _of_epochs(
    compression: GradientCompression, job: TrainingJob
) -> GradientCompression:
    """Return the compressor with the epochs of the script's sampler."""
    return compression.with_epoch(job.epoch_steps) if job.epoch_steps else compression


def trace_step(job: TrainingJob, spec: str) -> tuple[Step | None, int]:
    """Trace a typical step of a full run, moment by moment.

    Args:
        job: The training and its network.
        spec: The method.

    Returns:
        The step (None if the method refuses the job), and the simulated events of the run.
    """
    job = replace(job, trace=True)
    try:
        outcome, events = _simulate(job, _as_run(spec, short=False, brief=job.brief))
    except PacelineError:
        return None, 0
    records = [record for kept in outcome.kept for record in kept.steps]
    spans = [*outcome.spans, *(span for kept in outcome.kept for span in kept.spans)]
    return typical_step(spec, lambda: spans, records), events


def _in_steady_state(method: Method) -> Method:
    """Return the method with the keys of its steady state, so without its warm-up."""
    cls: Any = type(method)
    later = getattr(cls, "steady_state_keys", {})
    changed: Method = replace(method, **convert_fields(cls, later))  # type: ignore[type-var]
    return changed


def _as_run(spec: str, short: bool, brief: bool) -> _Run:
    read, settings = parse_method(spec)
    method = _in_steady_state(read)
    longer = max(0, _learns_for(read) - _learns_for(method))
    if short and settings.buckets in MEASURED:
        settings = replace(settings, buckets="ddp")
    longer += settings.compression.warmup_steps
    settings = replace(settings, compression=settings.compression.steady_state())
    run_as = _shorter(method, SHORTENED_IN_SHORT if short else SHORTENED)
    return _Run(*(run_as if brief else (method, 0)), settings, short, longer)


def _learns_for(method: Any) -> int:
    steps: int = getattr(method, "learns_for", 0)
    return steps


def says_more_in_full(spec: str) -> bool:
    """Return whether a full run can differ from a short run with the same tensors."""
    quick, full = (_as_run(spec, short, brief=True) for short in (True, False))
    method = full.method
    return (
        method.updates_on == "server"
        or full.drifts
        or _learns_for(method) > 0
        or (quick.method, quick.settings) != (method, full.settings)
    )


def _shorter(method: Any, steps: int) -> tuple[Method, int]:
    """Return the method with rounds of about *steps* steps, and by how many they are shorter.

    It is unchanged if rounds are not longer, or if a shorter round would make it another method.
    """
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


def merge_tensors(workload: Workload, most: int = FEW) -> Workload:
    """Merge a workload's tensors into at most *most*, of about equal bytes.

    Neighbours in ready order become one tensor. Sums of bytes and times stay. A workload of at most
    *most* tensors is returned unchanged.
    """
    if len(workload.names) <= most:
        return workload
    share = sum(workload.sizes) / most
    groups: list[list[int]] = [[]]
    done = 0.0
    for index in workload.order:
        if groups[-1] and len(groups) < most and done >= share * len(groups):
            groups.append([])
        groups[-1].append(index)
        done += workload.sizes[index]
    groups.reverse()  # the tensor registered last is ready first
    return replace(
        workload,
        names=tuple(f"part{number}" for number in range(len(groups))),
        sizes=tuple(sum(workload.sizes[i] for i in group) for group in groups),
        forward=tuple(sum(workload.forward[i] for i in group) for group in groups),
        backward=tuple(sum(workload.backward[i] for i in group) for group in groups),
        order=(),
        shapes=(),
    )


def short_run_specs(spec: str) -> tuple[str, ...]:
    """Return the specs that represent *spec* in short runs.

    If measurements plan its buckets, they are DDP's rule, which a short run uses instead, and a bucket per tensor.
    Planned buckets are as fast as the faster of them, or a little faster.
    """
    read = parse(spec)
    method, settings = parse_method(spec)
    if method.updates_on == "server" or settings.buckets not in MEASURED:
        return (spec,)
    return spec, str(Spec(read.name, read.values | {"buckets": "wfbp"}))


def _simulate(job: TrainingJob, run: _Run) -> tuple[SimulationResult, int]:
    """Run the simulation; returns its result and its simulated events."""

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
            runtime.recorder.warmup_steps = 0
        # Gradients must differ between workers and must not be zero.
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
        events = _events(outcome, job)
        if simulation.drawn:  # a method from the user's code
            outcome = _simulation(job, run, draws=True).run(body)
            events += _events(outcome, job)
    return outcome, events


def _events(outcome: SimulationResult, job: TrainingJob) -> int:
    """Return the work of a run: events of the clock, and the tensors of all passes of all workers."""
    passes = job.passes * sum(one.step_count for one in outcome.recorders)
    return outcome.events + passes * len(job.workload.names)


def _charged(job: TrainingJob) -> Workload:
    """Return the workload with the input time of all batches of a step.

    A batch of unknown size counts as one sample, so that more batches take longer.
    """
    workload = job.workload
    batches = job.batches * job.passes / (workload.passes or 1)
    return replace(
        workload, batch=workload.batch or 1.0, input=batches * workload.input
    )


def _use_gradients(model: torch.nn.Module) -> None:
    """Read all gradients after backward, like a script that clips."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.norm()


def _few_are_enough(job: TrainingJob, run: _Run) -> bool:
    """Return whether a few representatives of many workers give the figures of all workers."""
    return (
        job.cluster.workers > FEW_DRIFT
        and getattr(run.method, "symmetric", False)
        and COLLECTIVES[run.settings.collective].needs == "nothing"
        # Some compressors exchange parts message by message, so ranks end at different times.
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
    """Collect reference cycles once at the end, and only among objects made inside.

    Many workers make many objects: otherwise the collector would take a fifth of the time.
    """
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
    if job.inputs:
        # The clock divides by the worker's speed, but data loaders do not depend on it.
        runtime.clock.charge(
            job.inputs[runtime.rank] * job.cluster.speeds[runtime.rank], "input"
        )


def _is_enough(recorder: StepRecorder, run: _Run, job: TrainingJob) -> bool:
    if run.drifts:
        wanted = _drifting_steps(run.short, job.cluster.workers) + recorder.warmup_steps
        wanted += job.steady_steps - STEADY_STEPS
    else:
        late = getattr(run.method, "waits_in_forward", False)
        steady_steps = (
            job.steady_steps if late or not job.brief else STEADY_STEPS_AT_ONCE
        )
        rounds = max(steady_steps, 2 * recorder.period)
        wanted = (recorder.steady_after or MOST_STEPS) + rounds
    return recorder.step_count >= wanted


def _drifting_steps(short: bool, workers: int) -> int:
    """Number of steps that an asynchronous method runs."""
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
    """Means over a round with *missing* more steps, each like most of its steps.

    At the round's end all workers wait for the slowest. So each of these steps takes as long as the
    slowest worker's, and the others wait for the rest.
    """
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
    """Figures of a worker with the mean rate, in the second half of the time in which all workers train."""
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
