"""A training changes its method between two steps.

Theory of operation
-------------------
All workers that train ask their `Course` after the same step, and it answers all of them alike. Then
each ends the present training, as if it was out of data: what is under way arrives, late gradients are
applied, and models become equal. That is safe whoever else is out of data, has left its loop in the
middle of a step, or does not know that others are: ending is what a training is made for.

Then all workers meet, those out of data too, and each says what it wants: a spec, or nothing.
Where anybody wants to go on all begin by that spec, and who is out of data ends that training at once, which
keeps the others company. Where nobody does, the job is over.

What cannot be begun is refused before anything ends. What fails nevertheless while it is begun,
fails on all, and the spec of before is begun again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from paceline.collectives.communicator import Communicator
from paceline.core.broadcast import gather_bytes
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
from paceline.interfaces import CONSISTENCIES, Consistency, Method
from paceline.records import Span
from paceline.tools.auto.script_constraints import Habits
from paceline.tools.auto.switched_state import KeptCodes, KeptPlans, equalize


class Course(Protocol):
    """Says when to change, and to what. *meets*: before it asks for a change it has met all workers
    in that very step, and none is out of data: that saves a round of messages."""

    @property
    def meets(self) -> bool: ...

    def after_step(self, step: int) -> str | None:
        """Step number *step*, from 1, has ended: the spec to go on with, the same on all workers
        that train; None: as before."""
        ...

    def begin(
        self, training: Training, forbid: Callable[[Method, Settings], str]
    ) -> None:
        """The first *training* has begun. *forbid* tells why a method cannot be begun, given what this
        worker's script has done until then; or nothing."""
        ...

    def refused(self, spec: str, why: str) -> None:
        """What it has asked for cannot be begun, on any worker: training goes on as before."""
        ...

    def leave(self) -> None:
        """This worker is out of data. Not collective."""
        ...

    def close(self, *, well: bool) -> None:
        """The last training has ended here. Collective where it has ended *well*."""
        ...


@dataclass(frozen=True)
class Auto:
    """What ``method=`` may be, beside a method: one that changes. *course* makes who decides;
    training *begins* by that spec; *consistency* is the weakest class that it may change to."""

    course: Callable[[TrainingInputs], Course]
    begins: str = "bsp"
    consistency: Consistency = "local"

    def train(self, inputs: TrainingInputs, settings: Settings) -> DistributedOptimizer:
        """See `paceline.core.training_setup.train`."""
        chosen = parse_method(self.begins, settings)
        wrapped = train(inputs, *chosen)
        active = active_training(wrapped)
        now, course = resolve(inputs, *chosen), self.course(inputs)
        active.switcher = MethodChanges(
            inputs, active, settings, now, course, self.consistency
        )
        recorder = inputs.runtime.recorder
        recorder.methods.append((recorder.step_count, recorder.brief))
        return wrapped


class _Wish(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says when a training has ended, of which it has done so many *steps*: the *spec*
    that it goes on with, or nothing where it is out of data; *fault*: why that cannot be."""

    spec: str = ""
    steps: int = 0
    fault: str = ""


class MethodChanges:
    """The `MethodSwitcher` of one training. *settings* are those that specs do not name; *now*: how it is
    trained at present; ``steps``: how many it has done."""

    def __init__(
        self,
        inputs: TrainingInputs,
        active: ActiveTraining,
        settings: Settings,
        now: TrainingPlan,
        course: Course,
        consistency: Consistency,
    ) -> None:
        self.now, self.course, self.steps = now, course, 0
        self._allowed = CONSISTENCIES[: CONSISTENCIES.index(consistency) + 1]
        self._inputs, self._active, self._settings = inputs, active, settings
        self._runtime = inputs.runtime
        self._device = inputs.parameters[0][1].device
        self._habits = Habits()
        self._codes, self._plans = KeptCodes(), KeptPlans()
        self._habits.watch(active.training, now.method)
        course.begin(active.training, self._forbid)

    # ---- what training calls ----

    @property
    def spec(self) -> str:
        """What training goes by now, in full."""
        return self.now.spec

    def after_step(self) -> None:
        """A step has ended. Collective where the course says so."""
        self.steps += 1
        wanted = self.course.after_step(self.steps)
        if wanted is None:
            return
        why = self.change(wanted, together=self.course.meets)
        if why:
            self._runtime.recorder.add_note(f"{wanted} cannot be begun here: {why}")
            self.course.refused(wanted, why)

    def finish(self) -> None:
        """This worker is out of data: keep the others company, whatever they change to."""
        well = False
        try:
            self.course.leave()
            self._keep_company()
            well = not self._active.broken_by
        finally:
            self.course.close(well=well)

    def _keep_company(self) -> None:
        while True:
            steps = self._end(together=False)
            if self._active.broken_by:
                return
            wishes = self._meet(_Wish(steps=steps))
            if not any(wish.spec for wish in wishes):
                return
            try:
                self._go_on(wishes)
            except BaseException as error:
                self._broke(error)
                raise

    # ---- a change ----

    def change(self, spec: str, *, together: bool = False) -> str:
        """Train by *spec* from the next step on; or say why that cannot be. Collective: between
        two steps, on all workers that train, after the same step; *together*: they know that
        these are all."""
        try:
            plan = self._plan(spec)
        except UsageError as error:
            return str(error)
        began = self._runtime.clock.now()
        # Workers' scripts may differ in it: so it is said where all meet.
        fault = self._forbid(plan.method, plan.settings)
        try:
            steps = self._end(together)
            why = self._go_on(self._meet(_Wish(spec, steps, fault)))
        except BaseException as error:
            self._broke(error)
            raise
        name = f"change to {spec}"
        span = Span(
            self._runtime.rank, "method", name, began, self._runtime.clock.now()
        )
        self._runtime.recorder.observe(span)
        return why

    def _forbid(self, method: Method, settings: Settings) -> str:
        return self._habits.forbid(
            method, settings, scales=self._active.uses_grad_scaler
        )

    def _plan(self, spec: str) -> TrainingPlan:
        """Raises `UsageError` for what is known to be impossible here; alike on all workers."""
        plan = resolve(self._inputs, *parse_method(spec, self._settings))
        method = plan.method
        from paceline.tools.plan.candidates import (
            consistency_of,  # it needs the simulated runtime
        )

        consistency = consistency_of(method, plan.settings)
        if consistency not in self._allowed:
            raise UsageError(
                f"{spec} is {consistency}, and this training may change to what is "
                f"{', '.join(self._allowed)}"
            )
        return plan

    def _end(self, together: bool) -> int:
        """End the present training; returns how many steps it has done. Collective."""
        steps = self._active.training.progress["step"]
        self._codes.take(self.now.spec, self._active.training)
        self._plans.take(self.now.spec, self._active.training)
        self._active.end(together=together)
        return steps

    def _go_on(self, wishes: Sequence[_Wish]) -> str:
        """All workers begin what was wished for; or what was before, if that fails anywhere: then
        it says why. Collective."""
        going = [rank for rank, wish in enumerate(wishes) if wish.spec]
        specs = {wishes[rank].spec for rank in going}
        if len(specs) > 1:
            raise UsageError(
                f"workers want to go on by different specs, {' and '.join(sorted(specs))}: a "
                "course answers all workers alike"
            )
        (spec,) = specs
        steps = max(wishes[rank].steps for rank in going)
        self._share_optimizer(going, len(wishes))
        faults = [wish.fault for wish in wishes if wish.fault]
        before, made = self.now, None
        if not faults:
            made, faults = self._try(spec)
        if faults:
            made = self._make(before)
        assert made is not None
        self._use(made, steps)
        return faults[0] if faults else ""

    def _share_optimizer(self, going: Sequence[int], workers: int) -> None:
        """Its state, where workers' may differ, becomes that of those who go on."""
        differ = self.now.method.rounds.models_may_differ
        if (not differ and len(going) == workers) or workers == 1:
            return
        comm = Communicator(self._runtime, self._runtime.registry.next_name())
        optimizer = self._inputs.optimizer
        equalize(comm, optimizer, going, self._device, mean=differ)
        comm.close()

    def _try(self, spec: str) -> tuple[ConnectedTraining | None, list[str]]:
        """The training by *spec*, or why it cannot be made on some worker."""
        made, fault = None, ""
        try:
            made = self._make(self._plan(spec))
        except UsageError as error:
            fault = str(error)
        faults = [wish.fault for wish in self._meet(_Wish(fault=fault)) if wish.fault]
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
        self._codes.give_back(self.now.spec, training)
        self._plans.give_back(self.now.spec, training)
        self._habits.watch(training, self.now.method)
        self._runtime.registry.hold(training, made.close)
        self._active.training, self._active.endpoints = training, made.endpoints

    def _broke(self, error: BaseException) -> None:
        """No training goes on here: the others are told, as when one breaks."""
        self._active.record_failure(error)
        self._runtime.registry.broke(self._inputs.number, self._active.broken_by)

    def _meet(self, mine: _Wish) -> list[_Wish]:
        """What each worker says, by rank. Collective."""
        return [
            msgspec.msgpack.decode(said, type=_Wish)
            for said in gather_bytes(msgspec.msgpack.encode(mine), self._device)
        ]
