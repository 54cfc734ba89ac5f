"""Accepts valid pushes, in the order of steps.

Each of a worker's buckets has one main push per step; they come in any order. The last one moves
the worker's clock, and the next step may begin. A worker may leave out steps if another server
named a later one, once all of its pushes are answered.

A discipline that takes parts (`Discipline.accepts_partial_pushes`) accepts main pushes of some
units. The remaining units come late, all in one push: after all main pushes of their step, before
the late pushes of the next step, and before the main pushes of the step after that. Without this
rule other workers would wait forever for units that never come. So messages that must follow late
units, a leave included, are refused before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.errors import UsageError
from paceline.interfaces import PushedGradient, Sender
from paceline.interfaces.server_messages import Push
from paceline.parameter_server.state_machine.members import Member
from paceline.parameter_server.state_machine.shard import ModelShard


class PushOrder:
    """Decides which pushes a server accepts, by the worker's pushes before."""

    def __init__(self, shard: ModelShard) -> None:
        self._shard = shard
        self._members = shard.members
        self._number = 0

    def accept(
        self, sender: Sender, push: Push, payload: torch.Tensor | None
    ) -> PushedGradient:
        """Accept a push.

        Raises `UsageError`, with nothing changed, if it does not fit, or comes out of order.
        """
        shard, worker = self._shard, sender.worker
        if shard.fault:
            raise UsageError(shard.fault)
        gradient = shard.gradient(push, payload)
        member = self._members[worker]
        self._check_sense(worker, member, push)
        report = None
        if push.report:
            report = shard.discipline.decode_report(shard, push.report)
        if push.late:
            self._take_late(worker, member, push)
        else:
            self._take_main(worker, member, push)
        number, self._number = self._number, self._number + 1
        shard.unanswered[number] = sender, push.late
        return PushedGradient(
            worker=worker,
            step=push.step,
            bucket=push.bucket,
            weight=push.weight,
            used=push.used,
            hyperparameters=push.hyperparameters,
            gradient=gradient,
            number=number,
            late=push.late,
            units=push.units,
            report=report,
            applied=shard.store.has_applied(worker, push.step, push.bucket),
        )

    # ---- unanswered pushes ----

    def give_up(self) -> list[Sender]:
        """Drop all unanswered pushes; return their senders, which wait."""
        unanswered = [sender for sender, _ in self._shard.unanswered.values()]
        self._shard.unanswered.clear()
        return unanswered

    def is_idle(self, worker: int) -> bool:
        """Return whether a worker is between steps, and all of its pushes are answered."""
        return not (self._kinds_of(worker) or self._members[worker].begun)

    def owes_nothing(self, worker: int) -> bool:
        """Return whether a worker is idle, and has sent all late units of its steps."""
        steps = self._members[worker].whole.values()
        return self.is_idle(worker) and not any(step.left for step in steps)

    def can_only_wait(self, worker: int) -> bool:
        """Return whether a worker has sent all main pushes of a step, and waits for their replies."""
        begun = self._members[worker].begun
        return not begun and False in self._kinds_of(worker)

    def _kinds_of(self, worker: int) -> set[bool]:
        """Return the kinds of a worker's unanswered pushes: True for late, False for main."""
        return {
            late for to, late in self._shard.unanswered.values() if to.worker == worker
        }

    # ---- validation ----

    def _check_sense(self, worker: int, member: Member, push: Push) -> None:
        store = self._shard.store
        units = store.numbers(push.bucket, push.units)
        if not store.loaded[push.bucket]:
            raise UsageError("push: no parameters were loaded yet")
        if member.leaving:
            raise UsageError(f"push: worker {worker} has left")
        if len(push.used) != len(units):
            raise UsageError(
                f"push: expected {len(units)} used bits, got {len(push.used)}"
            )
        if not 0 <= push.weight < math.inf:
            raise UsageError(f"push: expected a weight of 0 or more, got {push.weight}")
        store.check_hyperparameters(push.hyperparameters)
        if self._shard.compression is not None:
            self._shard.compression.check_given(worker, push.bucket)
        takes_parts = self._shard.discipline.accepts_partial_pushes
        if push.late and not takes_parts:
            raise UsageError("push: this method takes no late units")
        if push.units is not None and not takes_parts:
            raise UsageError(
                f"push: this method takes whole buckets, got units {push.units} of bucket "
                f"{push.bucket}"
            )

    def _left_out(self, push: Push, sent: Sequence[int]) -> list[int]:
        every = self._shard.store.numbers(push.bucket, None)
        return sorted(set(every).difference(sent))

    # ---- main pushes ----

    def _take_main(self, worker: int, member: Member, push: Push) -> None:
        self._check_not_before(worker, push, member)
        if push.step > member.clock:
            self._check_may_skip(worker, push, member)
            member.begins_with(push.step)
        if member.whole:
            then = f"step {push.step}"
            self.check_late_units("push", worker, member, push.step - 1, then)
        self._members.furthest = max(self._members.furthest, push.step + 1)
        units = push.units
        member.begun[push.bucket] = [] if units is None else self._left_out(push, units)
        if len(member.begun) == len(self._shard.store.buckets):
            member.step_is_whole()

    def _check_not_before(self, worker: int, push: Push, member: Member) -> None:
        if push.step < member.clock or (
            push.step == member.clock and push.bucket in member.begun
        ):
            self._shard.counts["pushes that came again"] += 1
            raise UsageError(
                f"push: worker {worker} has pushed bucket {push.bucket} of step "
                f"{push.step} before"
            )

    def _check_may_skip(self, worker: int, push: Push, member: Member) -> None:
        self._members.check_step("push", push.step)
        if not self.is_idle(worker):
            raise UsageError(
                f"push: expected step {member.clock} of worker {worker}, whose earlier "
                f"pushes are not all in, or not all answered, got step {push.step}"
            )

    # ---- late pushes ----

    def _take_late(self, worker: int, member: Member, push: Push) -> None:
        step = member.whole.get(push.step)
        if step is None:
            raise UsageError(
                f"push: late units of step {push.step} of worker {worker}, whose next step "
                f"is {member.clock}"
            )
        if push.bucket in step.late:
            self._shard.counts["pushes that came again"] += 1
            raise UsageError(
                f"push: worker {worker} has pushed the late units of bucket {push.bucket} "
                f"of step {push.step} before"
            )
        then = f"late units of step {push.step}"
        self.check_late_units("push", worker, member, push.step, then)
        self._check_is_left(worker, push, step.left.get(push.bucket, []))
        del step.left[push.bucket]
        step.late.add(push.bucket)

    def check_late_units(
        self, what: str, worker: int, member: Member, before: int, then: str
    ) -> None:
        """Raise `UsageError` unless all late units of steps *before* this one have arrived.

        *then* is the worker's next action, for the message.
        """
        for number, step in member.whole.items():
            if number < before and step.left:
                bucket, units = min(step.left.items())
                raise UsageError(
                    f"{what}: worker {worker} has left units {units} of bucket {bucket} out "
                    f"of its push of step {number}: expected them late before {then}"
                )

    def _check_is_left(self, worker: int, push: Push, left: list[int]) -> None:
        """Raise `UsageError` unless a late push has exactly the units that its step has left out.

        A unit that came twice would wait for a second update in its step. One that never came would
        wait for its first.
        """
        units = list(self._shard.store.numbers(push.bucket, push.units))
        if not left or units != left:
            expected = f"units {left}, all that worker {worker} has left out"
            if not left:
                expected = f"none, as worker {worker} has left out nothing"
            raise UsageError(
                f"push: late units of step {push.step}, bucket {push.bucket}: expected "
                f"{expected}, got {units}"
            )
