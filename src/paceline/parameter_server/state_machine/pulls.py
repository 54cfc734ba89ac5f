"""Pulls: of parameters and of the optimizer's state, which wait until these may be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import HeldPush, Sender
from paceline.interfaces.server_messages import (
    Blended,
    OptimizerState,
    Parameters,
    Pull,
    PullBuffers,
    PullRest,
    PullState,
    Rest,
)
from paceline.parameter_server.state_machine.pushes import Pushes
from paceline.parameter_server.state_machine.replies import Answers
from paceline.parameter_server.state_machine.shard import HeldShard
from paceline.parameter_server.state_machine.untrained_tensors import HeldRest


class Pulls:
    """The pulls that wait, in the order in which they came; and what parameters leave with.
    *loads*: how many loads there were by now; *may_pull*: whether a worker may have anything
    now."""

    def __init__(
        self,
        shard: HeldShard,
        pushes: Pushes,
        answers: Answers,
        rest: HeldRest,
        loads: Callable[[], int],
        may_pull: Callable[[int], bool],
    ) -> None:
        self._shard = shard
        self._members = shard.members
        self._pushes = pushes
        self._answers = answers
        self._rest = rest
        self._loads, self._may_pull = loads, may_pull
        self._rests: list[tuple[Sender, PullRest | PullBuffers]] = []
        self._parameters: list[tuple[Sender, Pull]] = []
        """Each with the step that its worker begins with."""
        self._states: list[tuple[Sender, PullState]] = []

    def ask_parameters(self, sender: Sender, pull: Pull) -> None:
        """Raises `UsageError` for what there is not, and for a step too far ahead."""
        self._shard.store.check_bucket(pull.bucket)
        self.go_on("pull", sender.worker, pull.step)
        step = max(pull.step, self._members[sender.worker].first_step)
        self._parameters.append((sender, msgspec.structs.replace(pull, step=step)))
        self.let_go()

    def go_on(self, what: str, worker: int, step: int) -> None:
        """A worker goes on with *step*: nobody waits for its steps before. Example: it has
        joined, and another server is further than this one; or it came too late for its own
        step. Raises `UsageError` for a step too far ahead."""
        if step > self._members[worker].clock and self._pushes.is_idle(worker):
            self._members.check_step(what, step)
            self._members.goes_on_with(worker, step)
            self._shard.changed()

    def begin_with(self, worker: int, step: int) -> None:
        """A worker says what its next step is. Where it has sent nothing yet that may be an
        earlier one than was thought: another server has let it in. Raises `UsageError` for a
        step too far ahead."""
        member = self._members[worker]
        if step < member.clock == member.first_step and self._pushes.is_idle(worker):
            member.begins_with(step)
        self.go_on("note", worker, step)

    def ask_state(self, sender: Sender, pull: PullState) -> None:
        """Raises `UsageError` for units that there are not, and for a step too far ahead."""
        self._shard.store.check_bucket(pull.bucket)
        self._shard.store.elements(pull.bucket, pull.units)
        if self._waits_for_updates(pull):
            self._check_state_step(sender.worker, pull.step)
        self._states.append((sender, pull))
        self.let_go()

    def ask_buffers(self, sender: Sender, pull: PullBuffers) -> None:
        """Buffers as they were mixed. Raises `UsageError` where nothing is held."""
        self.ask_rest(sender, pull)
        self._members[sender.worker].has_buffers = True

    def ask_rest(self, sender: Sender, pull: PullRest | PullBuffers) -> None:
        """Frozen parameters and buffers. Raises `UsageError` where nothing is held."""
        self._shard.check_held()
        self._rests.append((sender, pull))
        self.let_go()

    def waits(self, worker: int) -> bool:
        """Whether a worker waits for parameters."""
        return any(sender.worker == worker for sender, _ in self._parameters)

    def forget(self, worker: int) -> None:
        self._rests = [pull for pull in self._rests if pull[0].worker != worker]
        self._parameters = [p for p in self._parameters if p[0].worker != worker]
        self._states = [pull for pull in self._states if pull[0].worker != worker]

    def let_go(self) -> None:
        """Answer all that may be answered by now."""
        self._let_rests_go()
        self._let_parameters_go()
        self._let_states_go()

    def answer(self, push: HeldPush, counted: Sequence[int]) -> None:
        """Answer a push, for whose step the workers *counted*, unless it was refused
        meanwhile, or its worker is lost."""
        sender = self._pushes.answered(push)
        if sender is None:
            return
        told = b"" if push.late else self._told(push.bucket)
        coded, bucket = self._shard.coded, push.bucket
        if coded is None or coded.shadows is None:
            values, turn = self._shard.store.parameters(bucket, push.units), 0
        else:
            try:
                values, turn = coded.difference(sender.worker, bucket)
            except UsageError as error:
                self._answers.refuse(sender, str(error))
                return
        self._give(sender, bucket, values, turn, counted, told)

    def _give(
        self,
        to: Sender,
        bucket: int,
        values: torch.Tensor,
        turn: int,
        counted: Sequence[int],
        told: bytes,
    ) -> None:
        message = Parameters(
            bucket=bucket,
            version=self._shard.store.versions[bucket],
            step=self._members[to.worker].clock,
            counted=list(counted),
            told=told,
            load=self._loads(),
            turn=turn,
        )
        self._answers.send(to, message, values)

    def _told(self, bucket: int) -> bytes:
        informed = self._shard.informed
        return b"" if informed is None else informed.tells(bucket)

    def _let_parameters_go(self) -> None:
        waiting, self._parameters = self._parameters, []
        for sender, pull in waiting:
            member = self._members[sender.worker]
            # A worker that has left takes what there is: it does no step with it.
            if member.leaving or self._may_have(sender.worker, pull.step):
                member.settled = True
                self._give_all(sender, pull, is_last=member.leaving)
            elif self._shard.fault:
                self._answers.refuse(sender, self._shard.fault)
            else:
                self._parameters.append((sender, pull))

    def _give_all(self, to: Sender, pull: Pull, is_last: bool) -> None:
        """All of a bucket, which becomes what the worker holds, unless it only looks, or needs
        no more."""
        values, turn = self._shard.store.parameters(pull.bucket), 0
        coded = self._shard.coded
        if coded is not None and is_last:
            coded.forget(to.worker)
        elif coded is not None and not pull.looks:
            turn = coded.given(to.worker, pull.bucket, values)
        self._give(to, pull.bucket, values, turn, (), self._told(pull.bucket))

    def _may_have(self, worker: int, step: int) -> bool:
        """Whether a worker that begins with *step* may have the model."""
        return (
            self._shard.is_loaded
            and self._may_pull(worker)
            and self._shard.may_pull(step)
        )

    def _let_rests_go(self) -> None:
        if not self._shard.is_loaded:
            return
        waiting, self._rests = self._rests, []
        for sender, pull in waiting:
            if isinstance(pull, PullBuffers):
                self._answers.send(sender, Blended(), self._rest.buffers)
                continue
            try:
                part = self._rest.part(pull.start, pull.most)
            except UsageError as error:
                self._answers.refuse(sender, str(error))
                continue
            whole = self._rest.bytes.numel()
            self._answers.send(sender, Rest(whole=whole), part)

    def _let_states_go(self) -> None:
        waiting, self._states = self._states, []
        for sender, pull in waiting:
            waits = self._waits_for_updates(pull)
            if waits and self._shard.fault:
                self._answers.refuse(sender, self._shard.fault)
            elif waits and not self._has(pull):
                self._states.append((sender, pull))
            else:
                self._give_state(sender, pull)

    def _give_state(self, to: Sender, pull: PullState) -> None:
        try:
            entries, payload = self._shard.store.state(pull.bucket, pull.units)
        except UsageError as error:
            # It has waited, maybe, and the request at hand is another worker's.
            self._answers.refuse(to, str(error))
            return
        self._answers.send(to, OptimizerState(entries=entries), payload)

    def _waits_for_updates(self, pull: PullState) -> bool:
        """Whether it is of some units, as they are before a step. A whole bucket's state is
        given as it is."""
        return pull.units is not None and self._shard.in_parts is not None

    def _has(self, pull: PullState) -> bool:
        shard = self._shard
        assert shard.in_parts is not None
        assert pull.units is not None
        return shard.in_parts.has(shard, pull.step, pull.bucket, pull.units)

    def _check_state_step(self, worker: int, step: int) -> None:
        """A worker may ask for what its step under way makes. A later state waits for pushes
        that do not come while the worker waits."""
        clock = self._members[worker].clock
        if step > clock + 1:
            raise UsageError(
                f"pull-state: expected a step up to {clock + 1} of worker {worker}, whose "
                f"next step is {clock}, got step {step}"
            )
