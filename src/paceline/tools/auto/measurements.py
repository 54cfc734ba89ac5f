"""Measures one rank's training, and asks the planner.

In the first steps `StepObserver` times the model tensor by tensor, which costs some microseconds a tensor.
Later only the ends of steps are marked.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import torch

from paceline.cluster import Cluster, Workload, cluster_toml, parse_cluster
from paceline.cluster.probe.quick import neighbour_rates, quick_probe
from paceline.cluster.profiling import StepProfiler
from paceline.core.settings import Settings
from paceline.core.training import Training
from paceline.core.training_setup import TrainingInputs
from paceline.errors import PacelineError, UsageError
from paceline.interfaces import Comm, Stopwatch
from paceline.methods import METHODS
from paceline.tools.auto.config import AutoConfig
from paceline.tools.auto.controller import MEASURED_STEPS
from paceline.tools.auto.decision_cache import CachedDecision, DecisionLog
from paceline.tools.auto.planner_process import Answer, PlannerProcess, Question
from paceline.tools.auto.script_constraints import ScriptConstraints
from paceline.torch_internals import Uncopied

PROFILED_STEPS = 12
"""Steps that are timed tensor by tensor."""
STEPS_KEPT = 4096
PLAN_STEPS = 24
"""Steps that predictions take in virtual time, in which they take no time themselves."""
LOOK_SECONDS = 0.5
"""Duration of the check whether the network is unchanged."""
SAME_NETWORK = 1.3
"""Factor by which links may have become faster, or slower, and still count as unchanged."""
SAME_SPEED = 1.1
"""Smaller differences between workers count as noise."""


@dataclass
class _Plan:
    """The last question to the planner, and its result."""

    process: PlannerProcess | None = None
    fault: str = ""
    begun_at: int = 0


class TrainingMeasurements:
    """The `Measurements` of a training.

    Args:
        inputs: The training.
        config: The user's settings for auto.
        settings: The other settings of the user.
        constraints: The script's constraints.
        comm: For the few numbers that ranks exchange.
        device: Device of these numbers.
        log: Receives decisions and messages.
    """

    def __init__(
        self,
        inputs: TrainingInputs,
        config: AutoConfig,
        settings: Settings,
        constraints: ScriptConstraints,
        comm: Comm,
        device: torch.device,
        log: DecisionLog,
    ) -> None:
        self._inputs, self._config, self._settings = inputs, config, settings
        self._runtime, self._recorder = inputs.runtime, inputs.runtime.recorder
        self._constraints, self._comm, self._log = constraints, comm, log
        self._device, models_device = device, inputs.parameters[0][1].device
        self._on_host = models_device.type == "cpu"
        self._stopwatch = self._runtime.clock.stopwatch(models_device)
        self._marks: deque[Any] = deque([self._stopwatch.mark()], STEPS_KEPT + 1)
        self._observer = StepObserver(inputs.model, inputs.parameters, self._stopwatch)
        self._steps = 0
        self._named = config.load_cluster(self._runtime.size)
        self._recalled: CachedDecision | None = None
        self._plan = _Plan()

    def begin(self, training: Training) -> None:
        """Handle the beginning of the first *training*."""
        training.context.listeners.add(self._observer)

    def step_ended(self) -> None:
        """A step has ended."""
        self._steps += 1
        self._marks.append(self._stopwatch.mark())

    def close(self) -> None:
        """Handle the end or failure of the training."""
        self._observer.end()
        if self._plan.process is not None:
            self._plan.process.end()

    # ---- times of steps ----

    def last(self, steps: int) -> list[float]:
        """See `Measurements.last`."""
        marks = list(self._marks)[-steps - 1 :]
        ends = self._stopwatch.seconds(marks[0], marks[1:])
        return [end - start for start, end in pairwise([0.0, *ends])]

    @property
    def period(self) -> int:
        """See `Measurements.period`."""
        return self._recorder.period

    @property
    def steady(self) -> bool:
        """See `Measurements.steady`."""
        after = self._recorder.steady_after
        return 0 < after <= self._recorder.step_count

    def exposed(self) -> float:
        """See `Measurements.exposed`."""
        if not self._on_host:
            return -1.0
        steps = list(self._recorder.steps)[-MEASURED_STEPS * self.period :]
        exposed = sum(step.exposed_communication_seconds for step in steps)
        return exposed / sum(step.step_seconds for step in steps)

    # ---- the decision of an earlier run ----

    def recall(self) -> tuple[str, float]:
        """See `Measurements.recall`."""
        if self._runtime.rank:
            return "", 0.0
        try:
            self._recalled = self._log.cache.load()
        except UsageError as error:
            self._log.report(f"auto: deciding anew: {error}")
        if self._recalled is None:
            return "", 0.0
        return self._recalled.spec, self._recalled.seconds

    def network_is_as_recalled(self) -> bool:
        """See `Measurements.network_is_as_recalled`."""
        known = self._known_cluster()
        rates = [] if known is not None else self._neighbour_rates()
        same = True
        if self._recalled is not None:
            before = parse_cluster(self._recalled.cluster)
            same = known == before if known is not None else links_alike(rates, before)
            if not same:
                self._log.report(
                    "auto: deciding anew: the network is not that of the earlier run"
                )
        return not self._sums([float(not same)])[0]

    # ---- a plan ----

    def _known_cluster(self) -> Cluster | None:
        """Return the network from a file or from the runtime, which is not measured.

        An emulated network is measured like a real one, unless it has properties that a probe cannot see.
        """
        if self._named is not None:
            return self._named
        described = self._runtime.cluster
        if described is None or self._runtime.name != "emulated":
            return described
        helped = described.servers or any(rack.aggregates for rack in described.racks)
        return described if helped else None

    def _neighbour_rates(self) -> list[float]:
        return neighbour_rates(self._runtime, LOOK_SECONDS, self._device)

    @property
    def needs_probe(self) -> bool:
        """See `Measurements.needs_probe`."""
        return self._known_cluster() is None

    def begin_plan(self, present: str, probe_seconds: float) -> None:
        """See `Measurements.begin_plan`."""
        self._plan = _Plan(begun_at=self._steps)
        cluster = self._known_cluster()
        if cluster is None:
            cluster = quick_probe(self._runtime, probe_seconds, self._device)
        compute = self._compute_seconds()
        speeds = [min(compute) / one if one else 1.0 for one in compute]
        if self._runtime.rank:
            return
        try:
            if set(cluster.speeds) == {1.0} and self._on_host:
                cluster = with_speeds(cluster, speeds)
            self._log.cluster, self._log.answer = cluster, None
            question = self._question(present, cluster, compute[0])
            self._plan.process = PlannerProcess(question)
        except PacelineError as error:
            self._plan.fault = str(error)

    def _question(self, present: str, cluster: Cluster, compute: float) -> Question:
        workload = self._observer.workload("measured in the first steps")
        if workload is None:
            raise UsageError(
                "the script never calls the model itself, so the compute time of its layers is "
                "unknown"
            )
        if self._runtime.clock.is_virtual:
            workload = as_one_pass(workload)
        workload = with_all_compute(
            workload, compute if self._on_host else 0.0, cluster.speeds[0]
        )
        if self._settings.use_gradients:
            workload = replace(workload, uses_gradients=True)
        optimizer = self._inputs.optimizer
        cls: Any = type(optimizer)
        known = inspect.signature(cls).parameters
        values = {
            key: value for key, value in optimizer.defaults.items() if key in known
        }
        is_torchs = getattr(torch.optim, cls.__name__, None) is cls
        sampler = self._inputs.sampler
        # Imported here, since workers that do not ask need not import the planner.
        from paceline.tools.plan.predictor import usual_events

        return Question(
            cluster=cluster_toml(cluster, exact=True),
            workload=msgspec.to_builtins(workload),
            consistency=self._config.consistency,
            present=present,
            optimizer=cls.__name__ if is_torchs else "",
            hyperparameters={k: v for k, v in values.items() if _is_plain(v)},
            refused=self._refused_methods(),
            epoch_steps=0 if sampler is None else len(sampler),
            max_events=usual_events(cluster),
        )

    def _refused_methods(self) -> dict[str, str]:
        """Methods that are known in advance not to work here, and the reasons."""
        refused: dict[str, str] = {}
        for name, cls in METHODS.items():
            method = cls()
            why = self._constraints.reason_against(method, self._settings)
            if method.clips == "own" and self._settings.clip_norm < math.inf:
                why = (
                    "clip_norm would limit each worker's own gradient, not the average"
                )
            if why:
                refused[name] = why
        return refused

    def plan_is_there(self) -> bool:
        """See `Measurements.plan_is_there`."""
        process = self._plan.process
        if self._runtime.rank:
            return False
        if process is None:
            return True
        if not self._runtime.clock.is_virtual:
            return process.is_over
        if self._steps < self._plan.begun_at + PLAN_STEPS:
            return False
        self._runtime.clock.external(process.wait)
        return True

    def candidates(self) -> list[tuple[str, float]]:
        """See `Measurements.candidates`."""
        if self._runtime.rank:
            return []
        process, self._plan.process = self._plan.process, None
        answer = Answer(fault=self._plan.fault) if process is None else process.answer()
        self._log.answer = answer
        return [
            (one.spec, one.seconds)
            for one in answer.best
            if one.consistency in self._config.allowed
        ]

    # ---- numbers exchanged between ranks ----

    def _compute_seconds(self) -> list[float]:
        """Compute seconds of a usual step, by worker."""
        steps = list(self._recorder.steps)[-MEASURED_STEPS * self.period :]
        mine = statistics.median(step.compute_seconds for step in steps)
        row = [0.0] * self._runtime.size
        row[self._runtime.rank] = mine
        return self._sums(row)

    def _sums(self, values: Sequence[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._comm.all_reduce(numbers, "sum").wait()
        sums: list[float] = numbers.tolist()
        return sums


class StepObserver:
    """Times the first steps of one worker's training, tensor by tensor."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        stopwatch: Stopwatch,
    ) -> None:
        self._profiler = profiler = StepProfiler(model, parameters, stopwatch)
        # Before the training's own hook, which may charge the whole pass at once.
        before = Uncopied(self._forward_begins)
        self._handle = model.register_forward_pre_hook(
            before, with_kwargs=True, prepend=True
        )
        self.step_begins = profiler.step_begins
        self.gradient = profiler.gradient
        self.gradient_ready = profiler.gradient_ready
        self.step_is_called = profiler.step_is_called
        self.gradient_taken = profiler.gradient_taken
        self.update_begins = profiler.update_begins
        self.step_ended = profiler.step_ended

    def workload(self, source: str) -> Workload | None:
        """Medians over the observed steps; None if the script never called the model itself."""
        return (
            self._profiler.workload(source) if self._profiler.profiled_steps else None
        )

    def end(self) -> None:
        """Remove the hooks, and measure nothing any more."""
        self._handle.remove()
        self._profiler.detach()

    def means_are_there(self) -> None:
        if not self._is_enough:
            self._profiler.means_are_there()

    @property
    def _is_enough(self) -> bool:
        return self._profiler.profiled_steps >= PROFILED_STEPS

    def _forward_begins(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        if torch.is_grad_enabled() and not self._is_enough:
            given = (*args, *kwargs.values())
            sizes = [
                value.shape[0]
                for value in given
                if isinstance(value, torch.Tensor) and value.dim()
            ]
            self._profiler.forward(sizes[0] if sizes else None, True)


def with_all_compute(workload: Workload, compute: float, scale: float) -> Workload:
    """Return *workload* with all *compute* seconds of a step, and *scale* times as long.

    Compute time outside passes and updates, such as loading batches, is placed before each pass.
    """
    more = max(0.0, compute - workload.compute_seconds)
    more /= len(workload.names) * (workload.passes or 1)
    return replace(
        workload,
        forward=tuple(scale * (one + more) for one in workload.forward),
        backward=tuple(scale * one for one in workload.backward),
        update=scale * workload.update,
    )


def as_one_pass(workload: Workload) -> Workload:
    """Return *workload* with its forward pass spread like its backward pass.

    Virtual time charges a forward pass as a whole.
    """
    total = workload.backward_seconds
    if not total:
        return workload
    forward = workload.forward_seconds
    return replace(
        workload, forward=tuple(forward * one / total for one in workload.backward)
    )


def with_speeds(cluster: Cluster, speeds: Sequence[float]) -> Cluster:
    """Return *cluster* with these relative speeds of workers, of which the fastest is 1."""
    near = [1.0 if SAME_SPEED * one > 1 else round(one, 2) for one in speeds]
    racks, first = [], 0
    for rack in cluster.racks:
        mine = tuple(near[first : first + rack.workers])
        racks.append(replace(rack, speed=mine))
        first += rack.workers
    return replace(cluster, racks=tuple(racks))


def links_alike(rates: Sequence[float], before: Cluster) -> bool:
    """Return whether hosts send as fast to their neighbours as the earlier network allows."""
    links = [rate for rack in before.racks for rate in rack.links]
    if len(rates) != len(links):
        return not rates  # One host has no links.
    now, then = statistics.median(rates), statistics.median(links)
    slowest = min(rates) / min(links)
    ratios = (now / then, slowest)
    return all(1 / SAME_NETWORK < ratio < SAME_NETWORK for ratio in ratios)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
