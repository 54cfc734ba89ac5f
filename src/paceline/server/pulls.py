"""Pulls: of parameters and of the optimizer's state, which wait until these may be had."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.messages import OptimizerState, Parameters, Pull, PullState
from paceline.server.answers import Answers
from paceline.server.bound_discipline import BoundDiscipline
from paceline.server.held_model import HeldModel
from paceline.server.members import Members
from paceline.server.pushes import Pushes


class Pulls:
    """The pulls that wait, in the order in which they came."""

    def __init__(
        self,
        members: Members,
        model: HeldModel,
        discipline: BoundDiscipline,
        pushes: Pushes,
        answers: Answers,
    ) -> None:
        self._members = members
        self._model = model
        self._discipline = discipline
        self._pushes = pushes
        self._answers = answers
        self._parameters: list[tuple[Sender, int, int]] = []
        """With the bucket, and the step that their worker begins with."""
        self._states: list[tuple[Sender, PullState]] = []

    def ask_parameters(self, sender: Sender, pull: Pull) -> None:
        """Raises `UsageError` for what there is not, and for a step too far ahead."""
        self._model.check_bucket(pull.bucket)
        member = self._members[sender.worker]
        if pull.step > member.clock and self._pushes.is_idle(sender.worker):
            # It joined where servers were at different steps, or came too late for its own,
            # and goes on with the latest: do not wait for it before that.
            self._members.check_step("pull", pull.step)
            self._members.goes_on_with(sender.worker, pull.step)
            self._discipline.changed()
        step = max(pull.step, member.first_step)
        self._parameters.append((sender, pull.bucket, step))
        self.let_go()

    def ask_state(self, sender: Sender, pull: PullState) -> None:
        """Raises `UsageError` for units that there are not, and for a step too far ahead."""
        self._model.check_bucket(pull.bucket)
        self._model.store.elements(pull.bucket, pull.units)
        if self._is_staged(pull):
            self._check_state_step(sender.worker, pull.step)
        self._states.append((sender, pull))
        self.let_go()

    def forget(self, worker: int) -> None:
        self._parameters = [p for p in self._parameters if p[0].worker != worker]
        self._states = [pull for pull in self._states if pull[0].worker != worker]

    def let_go(self) -> None:
        """Answer all that may be answered by now."""
        self._let_parameters_go()
        self._let_states_go()

    def give_parameters(
        self,
        to: Sender,
        bucket: int,
        units: Sequence[int] | None = None,
        counted: Sequence[int] = (),
    ) -> None:
        """Answer a pull of a bucket, or a push of some *units* of it, for whose step the
        workers *counted*."""
        message = Parameters(
            bucket=bucket,
            version=self._model.store.versions[bucket],
            step=self._members[to.worker].clock,
            counted=list(counted),
            deferred=list(self._discipline.deferred(bucket)),
        )
        self._answers.send(to, message, self._model.parameters(bucket, units))

    def _let_parameters_go(self) -> None:
        waiting, self._parameters = self._parameters, []
        for sender, bucket, step in waiting:
            # Who has left takes what there is: no step of its own is to come.
            if self._members[sender.worker].leaving or (
                self._model.store.loaded[bucket]
                and self._discipline.may_pull(step, bucket)
            ):
                self.give_parameters(sender, bucket)
            elif self._model.fault:
                self._answers.refuse(sender, self._model.fault)
            else:
                self._parameters.append((sender, bucket, step))

    def _let_states_go(self) -> None:
        waiting, self._states = self._states, []
        for sender, pull in waiting:
            staged = self._is_staged(pull)
            if staged and self._model.fault:
                self._answers.refuse(sender, self._model.fault)
            elif staged and not self._has(pull):
                self._states.append((sender, pull))
            else:
                self._give_state(sender, pull)

    def _give_state(self, to: Sender, pull: PullState) -> None:
        try:
            entries, payload = self._model.state(pull.bucket, pull.units)
        except UsageError as error:
            # It has waited, maybe, and the request at hand is another worker's.
            self._answers.refuse(to, str(error))
            return
        self._answers.send(to, OptimizerState(entries=entries), payload)

    def _is_staged(self, pull: PullState) -> bool:
        """Whether it is of some units, as they are before a step: a whole bucket's state is
        given as it is."""
        return pull.units is not None and self._discipline.defers

    def _has(self, pull: PullState) -> bool:
        assert pull.units is not None
        return self._discipline.has(pull.step, pull.bucket, pull.units)

    def _check_state_step(self, worker: int, step: int) -> None:
        """A worker may ask for what its step under way makes; what is later waits for
        pushes that do not come while it waits."""
        clock = self._members[worker].clock
        if step > clock + 1:
            raise UsageError(
                f"pull-state: expected a step up to {clock + 1} of worker {worker}, whose "
                f"next step is {clock}, got step {step}"
            )
