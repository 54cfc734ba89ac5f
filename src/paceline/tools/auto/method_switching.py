"""Switches a training's method between two steps.

Theory of operation
-------------------
After each step all workers ask their controller, and all get the same answer. To switch, each worker ends the
present training as if it was out of data: messages arrive, delayed gradients are applied, and models become
equal. That is safe even if other workers are out of data, or have left their loop in the middle of a step,
and even if a worker does not know it.

Then all workers meet, including those without data. Each sends the spec that it continues with, or nothing.
If any worker continues, all begin a training by that spec. A worker without data ends it at once, so that it
takes part in the others' last collectives. If no worker continues, the job is over.

A method that cannot begin is refused before the present training ends. If a method fails to begin on any
worker, it is refused on all, and all begin the previous method again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from paceline.bucketing.tuner import BucketPlan
from paceline.collectives.communicator import Communicator
from paceline.core.broadcast import average_tensors, broadcast_tensors, gather_bytes
from paceline.core.checkpoint.worker_state import worker_states
from paceline.core.optimizer import (
    ActiveTraining,
    DistributedOptimizer,
    active_training,
)
from paceline.core.settings import Settings, parse_method
from paceline.core.training import Training
from paceline.core.training_setup import (
    ConnectedTraining,
    TrainingInputs,
    TrainingPlan,
    resolve,
    start,
    train,
)
from paceline.errors import UsageError
from paceline.interfaces import Comm
from paceline.interfaces.buckets import wire_bytes
from paceline.records import Span
from paceline.tools.auto.config import FIRST, AutoConfig
from paceline.tools.auto.controller import Controller, Steps
from paceline.tools.auto.decision_cache import (
    CacheKey,
    DecisionCache,
    DecisionLog,
    model_digest,
)
from paceline.tools.auto.deferred_messages import DeferredMessages
from paceline.tools.auto.measurements import TrainingMeasurements
from paceline.tools.auto.script_constraints import ScriptConstraints


class StepController(Protocol):
    """Decides after each step: `Controller`, and the tests' scripted one."""

    @property
    def steady(self) -> bool:
        """Whether a decision is made, and no trial runs."""
        ...

    @property
    def meets_before_change(self) -> bool:
        """Whether all workers have met in the step in which it requests a change, and none is out of data.

        Then one round of messages is not needed.
        """
        ...

    def run(self) -> Steps[None]:
        """Decide after each step whether to change the method.

        Each yield is the end of a step. It yields the spec of the next method, equal on all workers, or
        None. It receives the reason if the method cannot begin, else an empty string.
        """
        ...


@dataclass(frozen=True)
class SwitchableTraining:
    """A value of ``method=`` besides a method: a training that switches methods.

    Attributes:
        config: The methods that it may switch to.
        controller: For tests: decides in place of auto's `Controller`.
    """

    config: AutoConfig
    controller: StepController | None = None

    def train(self, inputs: TrainingInputs, settings: Settings) -> DistributedOptimizer:
        """See `paceline.core.training_setup.train`; *settings* are the user's."""
        chosen = parse_method(FIRST, settings)
        wrapped = train(inputs, *chosen)
        active = active_training(wrapped)
        now = resolve(inputs, *chosen)
        active.switcher = MethodSwitcher(
            inputs, active, settings, now, self.config, self.controller
        )
        recorder = inputs.runtime.recorder
        recorder.methods.append((recorder.step_count, recorder.brief))
        return wrapped


class _Vote(msgspec.Struct, frozen=True, array_like=True):
    """A worker's message when a training has ended.

    Attributes:
        steps: Steps of the training.
        spec: The spec with which the worker continues; empty if it is out of data.
        fault: The reason for which that method cannot be used.
    """

    spec: str = ""
    steps: int = 0
    fault: str = ""


class MethodSwitcher:
    """Switches the methods of one training. Made on all workers at once: collective.

    Attributes:
        now: The present method and settings.
        controller: Decides after each step.
    """

    def __init__(
        self,
        inputs: TrainingInputs,
        active: ActiveTraining,
        settings: Settings,
        now: TrainingPlan,
        config: AutoConfig,
        controller: StepController | None = None,
    ) -> None:
        """Switch *active*, the training of *inputs*, from its method *now* on.

        Args:
            inputs: The training.
            active: The running training.
            settings: Settings that specs do not name.
            now: Its present method and settings.
            config: The methods that it may switch to.
            controller: Decides in place of auto's.
        """
        self.now = now
        self._inputs, self._active, self._settings = inputs, active, settings
        self._runtime, self._allowed = inputs.runtime, config.allowed
        self._device = inputs.parameters[0][1].device
        self._constraints = ScriptConstraints(active)
        self._compression_states = CompressionStateCache()
        self._bucket_plans = BucketPlanCache()
        self._comm: Communicator | None = None
        self._messages: DeferredMessages | None = None
        self._measurements: TrainingMeasurements | None = None
        self.controller = controller or self._auto_controller(config)
        self._decisions, self._reply = self.controller.run(), ""
        self._begun = False
        self._constraints.watch(active.training, now.method)
        if self._measurements is not None:
            self._measurements.begin(active.training)
        self._runtime.recorder.selecting = not self.controller.steady

    def _auto_controller(self, config: AutoConfig) -> StepController:
        inputs, runtime = self._inputs, self._runtime
        self._comm = Communicator(runtime, f"auto {inputs.number}")
        comm = self._comm.channel("agreement")
        device = torch.device("cpu") if comm.moves_host_tensors else self._device
        self._messages = DeferredMessages(comm, device)
        key = CacheKey(
            model=model_digest(
                [name for name, _ in inputs.parameters],
                [wire_bytes(parameter) for _, parameter in inputs.parameters],
            ),
            optimizer=type(inputs.optimizer).__name__,
            workers=runtime.size,
            consistency=config.consistency,
            runtime=runtime.name,
        )
        cache = DecisionCache.of(config, runtime.registry.options, key)
        log = DecisionLog(runtime, config.consistency, cache)
        self._measurements = TrainingMeasurements(
            inputs, config, self._settings, self._constraints, comm, device, log
        )
        return Controller(self._measurements, self._messages, FIRST, log)

    # ---- calls from the training ----

    @property
    def spec(self) -> str:
        """The full spec of the present method."""
        return self.now.spec

    def after_step(self) -> None:
        """Handle the end of a step. Collective if the controller requests a change of method."""
        if self._measurements is not None:
            self._measurements.step_ended()
        wanted = self._decisions.send(self._reply if self._begun else None)
        self._begun, self._reply = True, ""
        self._runtime.recorder.selecting = not self.controller.steady
        if wanted is None:
            return
        met = self.controller.meets_before_change
        self._reply = self.switch_to(wanted, together=met)
        if self._reply:
            self._runtime.recorder.add_note(
                f"{wanted} cannot be begun here: {self._reply}"
            )

    def finish(self) -> None:
        """Handle the end of this worker's data: participate in the others' next methods until all have finished."""
        well = False
        try:
            if self._messages is not None:
                self._messages.finish()
            self._participate_until_all_finish()
            well = not self._active.broken_by
        finally:
            if self._measurements is not None:
                self._measurements.close()
            if well and self._messages is not None and self._comm is not None:
                self._messages.close()
                self._comm.close()

    def _participate_until_all_finish(self) -> None:
        while True:
            steps = self._end(together=False)
            if self._active.broken_by:
                return
            votes = self._exchange(_Vote(steps=steps))
            if not any(vote.spec for vote in votes):
                return
            try:
                self._go_on(votes)
            except BaseException as error:
                self._broke(error)
                raise

    # ---- a change ----

    def switch_to(self, spec: str, *, together: bool = False) -> str:
        """Train by *spec* from the next step on.

        Collective: between two steps, on all workers that train, after the same step.

        Args:
            spec: The method.
            together: Whether all workers take part, and know it.

        Returns:
            Why the method cannot be used; else an empty string.
        """
        try:
            plan = self._plan(spec)
        except UsageError as error:
            return str(error)
        began = self._runtime.clock.now()
        # Scripts may differ between workers, so workers agree on it when all have met.
        fault = self._constraints.reason_against(plan.method, plan.settings)
        try:
            steps = self._end(together)
            why = self._go_on(self._exchange(_Vote(spec, steps, fault)))
        except BaseException as error:
            self._broke(error)
            raise
        name = f"change to {spec}"
        span = Span(
            self._runtime.rank, "method", name, began, self._runtime.clock.now()
        )
        self._runtime.recorder.observe(span)
        return why

    def _plan(self, spec: str) -> TrainingPlan:
        """Raise `UsageError` if *spec* is known to be impossible here; equal on all workers."""
        plan = resolve(self._inputs, *parse_method(spec, self._settings))
        method = plan.method
        from paceline.tools.plan.candidates import (
            consistency_of,  # It needs the simulated runtime.
        )

        consistency = consistency_of(method, plan.settings)
        if consistency not in self._allowed:
            raise UsageError(
                f"{spec} is {consistency}. Expected a method of a consistency that this training allows: "
                f"{', '.join(self._allowed)}"
            )
        return plan

    def _end(self, together: bool) -> int:
        """End the present training; returns how many steps it has done. Collective."""
        steps = self._active.training.progress["step"]
        self._compression_states.save(self.now.spec, self._active.training)
        self._bucket_plans.save(self.now.spec, self._active.training)
        self._active.end(together=together)
        return steps

    def _go_on(self, votes: Sequence[_Vote]) -> str:
        """Begin the voted spec on all workers. Collective.

        If that fails on any worker, begin the previous method.

        Returns:
            The reason of the failure; empty without one.
        """
        going = [rank for rank, vote in enumerate(votes) if vote.spec]
        specs = {votes[rank].spec for rank in going}
        if len(specs) > 1:
            raise UsageError(
                f"workers request different specs, {' and '.join(sorted(specs))}: expected the same on all. "
                "Request a change on all ranks after the same step"
            )
        (spec,) = specs
        steps = max(votes[rank].steps for rank in going)
        self._share_optimizer(going, len(votes))
        faults = [vote.fault for vote in votes if vote.fault]
        before, made = self.now, None
        if not faults:
            made, faults = self._try(spec)
        if faults:
            made = self._make(before)
        assert made is not None
        self._use(made, steps)
        return faults[0] if faults else ""

    def _share_optimizer(self, going: Sequence[int], workers: int) -> None:
        """If workers' optimizers may differ, give all of them the state of the workers that continue."""
        differ = self.now.method.rounds.models_may_differ
        if (not differ and len(going) == workers) or workers == 1:
            return
        comm = Communicator(self._runtime, self._runtime.registry.next_name())
        optimizer = self._inputs.optimizer
        average_optimizer_state(comm, optimizer, going, self._device, mean=differ)
        comm.close()

    def _try(self, spec: str) -> tuple[ConnectedTraining | None, list[str]]:
        """Make the training by *spec*, or return why that fails on some worker."""
        made, fault = None, ""
        try:
            made = self._make(self._plan(spec))
        except UsageError as error:
            fault = str(error)
        votes = self._exchange(_Vote(fault=fault))
        faults = [vote.fault for vote in votes if vote.fault]
        if faults and made is not None:
            made.discard()
            made = None
        return made, faults

    def _make(self, plan: TrainingPlan) -> ConnectedTraining:
        self._runtime.recorder.change(plan.spec, plan.short_spec)
        self.now = plan
        return start(self._inputs, plan, anew=False)

    def _use(self, made: ConnectedTraining, steps: int) -> None:
        training = made.training
        training.go_on_from(self._active.training, steps)
        self._compression_states.restore(self.now.spec, training)
        self._bucket_plans.restore(self.now.spec, training)
        self._constraints.watch(training, self.now.method)
        self._runtime.registry.hold(training, made.close)
        self._active.training, self._active.endpoints = training, made.endpoints

    def _broke(self, error: BaseException) -> None:
        """No training continues here: tell the other workers, as when a training fails."""
        self._active.record_failure(error)
        self._runtime.registry.broke(self._inputs.number, self._active.broken_by)

    def _exchange(self, mine: _Vote) -> list[_Vote]:
        """Return each worker's vote, by rank. Collective."""
        return [
            msgspec.msgpack.decode(vote, type=_Vote)
            for vote in gather_bytes(msgspec.msgpack.encode(mine), self._device)
        ]


# ---- optimizer state for the next method ----


class _StateTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the optimizer's state for parameter number *index*."""

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def average_optimizer_state(
    comm: Comm,
    optimizer: torch.optim.Optimizer,
    sources: Sequence[int],
    device: torch.device,
    *,
    mean: bool,
) -> None:
    """Give all workers one state of the optimizer. Collective.

    Args:
        comm: All workers.
        optimizer: This worker's.
        sources: Ranks whose state is used.
        device: Device of the messages.
        mean: Whether to use the mean over the sources, instead of the first source's state. Integers are
            always the first source's. A missing tensor counts as zeros, as a momentum does before the
            first step.
    """
    mine = _state_tensors(optimizer)
    everyone = [
        msgspec.msgpack.decode(encoded, type=list[_StateTensor])
        for encoded in gather_bytes(msgspec.msgpack.encode(mine), device)
    ]
    wanted = everyone[sources[0]]
    if mean:
        more = {one for rank in sources for one in everyone[rank]} - set(wanted)
        wanted = wanted + sorted(more, key=lambda one: (one.index, one.name))
    tensors = _as_wanted(optimizer, mine, wanted)
    real = [tensor.is_floating_point() for tensor in tensors]
    averaged = [t for t, averages in zip(tensors, real, strict=True) if averages]
    if mean:
        average_tensors(comm, averaged, counts=comm.rank in sources)
        tensors = [t for t, averages in zip(tensors, real, strict=True) if not averages]
    broadcast_tensors(comm, tensors, sources[0])


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[_StateTensor]:
    return [
        _StateTensor(
            index, name, str(value.dtype).removeprefix("torch."), tuple(value.shape)
        )
        for index, parameter in enumerate(_parameters(optimizer))
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    ]


def _as_wanted(
    optimizer: torch.optim.Optimizer,
    mine: Sequence[_StateTensor],
    wanted: Sequence[_StateTensor],
) -> list[torch.Tensor]:
    """Return the *wanted* tensors in order, with zeros for missing ones."""
    parameters, there = _parameters(optimizer), set(mine)
    for one in there - set(wanted):
        del optimizer.state[parameters[one.index]][one.name]
    tensors = []
    for one in wanted:
        parameter = parameters[one.index]
        if one not in there:
            # torch keeps step counters in host memory, whatever the parameter's device.
            where = parameter.device if one.shape else torch.device("cpu")
            kind = getattr(torch, one.dtype)
            optimizer.state[parameter][one.name] = torch.zeros(
                one.shape, dtype=kind, device=where
            )
        tensors.append(optimizer.state[parameter][one.name])
    return tensors


class CompressionStateCache:
    """Error feedback of compressors from ended trainings, for the next use of the same spec."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}

    def save(self, spec: str, training: Training) -> None:
        """Save state before a training by *spec* ends."""
        for state in worker_states(training):
            if state.name.startswith("compression."):
                self._states[f"{spec} {state.name}"] = dict(state.save())

    def restore(self, spec: str, training: Training) -> None:
        """Restore state after a training by *spec* has begun."""
        for state in worker_states(training):
            saved = self._states.pop(f"{spec} {state.name}", None)
            if saved is not None:
                state.load(saved)


class BucketPlanCache:
    """Bucket plans by spec, so that a spec that is used again does not measure them again."""

    def __init__(self) -> None:
        self._plans: dict[str, BucketPlan] = {}

    def save(self, spec: str, training: Training) -> None:
        """Save state before a training by *spec* ends."""
        if training.tuner.adopted is not None:
            self._plans[spec] = training.tuner.adopted

    def restore(self, spec: str, training: Training) -> None:
        """Restore state after a training by *spec* has begun."""
        training.tuner.reuse(self._plans.get(spec))
