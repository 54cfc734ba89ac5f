"""Which pushes a server takes: those that make sense, in the order of steps.

Each of a worker's buckets has one main push per step; they come in any order. The last one
moves the worker's clock, and the next step may begin. A worker may leave out steps, where
another server named a later one, once all of its pushes are answered.

A discipline that takes parts (`InParts`) takes main pushes of some units. The units that one
left out come late, all of them in one push: after all main pushes of their step, before the
late pushes of the next step, and before the main pushes of the step after that. Others would
wait for ever for units that never come, so whatever has to come after them, a leave too, is
refused before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import HeldPush, Sender
from paceline.interfaces.server_messages import Push
from paceline.parameter_server.state_machine.members import Member
from paceline.parameter_server.state_machine.shard import HeldShard


class Pushes:
    """The pushes that a server has taken, until they are answered."""

    def __init__(self, shard: HeldShard) -> None:
        self._shard = shard
        self._members = shard.members
        self._unanswered: dict[int, tuple[Sender, bool]] = {}
        """By number; and whether they are late ones."""
        self._number = 0

    def take(
        self, sender: Sender, push: Push, payload: torch.Tensor | None
    ) -> HeldPush:
        """A push that is in, from now on. Raises `UsageError`, with nothing changed, where
        it does not fit, or does not come at its time."""
        if self._shard.fault:
            raise UsageError(self._shard.fault)
        gradient = self._shard.gradient(push, payload)
        self._check_sense(sender.worker, push)
        report = self._read_report(push.report)
        if push.late:
            self._take_late(sender.worker, push)
        else:
            self._take_main(sender.worker, push)
        return self._hold(sender, push, gradient, report)

    def _hold(
        self, sender: Sender, push: Push, gradient: torch.Tensor, report: Any
    ) -> HeldPush:
        held = HeldPush(
            worker=sender.worker,
            step=push.step,
            bucket=push.bucket,
            weight=push.weight,
            used=push.used,
            hyperparameters=push.hyperparameters,
            gradient=gradient,
            number=self._number,
            late=push.late,
            units=push.units,
            report=report,
            applied=self._shard.store.has_applied(
                sender.worker, push.step, push.bucket
            ),
        )
        self._unanswered[self._number] = sender, push.late
        self._number += 1
        return held

    # ---- until they are answered ----

    def answered(self, push: HeldPush) -> Sender | None:
        """The worker that gets the answer to a push; None where the push was refused
        meanwhile, or its worker is lost."""
        sender, _ = self._unanswered.pop(push.number, (None, False))
        return sender

    def give_up(self) -> list[Sender]:
        """No push will be answered any more: the workers that wait."""
        unanswered, self._unanswered = self._unanswered, {}
        return [sender for sender, _ in unanswered.values()]

    def forget(self, worker: int) -> None:
        self._unanswered = {
            number: (sender, late)
            for number, (sender, late) in self._unanswered.items()
            if sender.worker != worker
        }

    def are_all_answered(self) -> bool:
        return not self._unanswered

    def is_idle(self, worker: int) -> bool:
        """Whether a worker is between steps, and all of its pushes are answered."""
        return not (self._kinds_of(worker) or self._members[worker].begun)

    def owes_nothing(self, worker: int) -> bool:
        """Whether a worker is idle, and has sent all late units of its steps."""
        steps = self._members[worker].whole.values()
        return self.is_idle(worker) and not any(step.left for step in steps)

    def can_only_wait(self, worker: int) -> bool:
        """Whether a worker has sent all main pushes of a step, and waits for their
        answers."""
        begun = self._members[worker].begun
        return not begun and False in self._kinds_of(worker)

    def _kinds_of(self, worker: int) -> set[bool]:
        """Of a worker's unanswered pushes, whether there are main ones and late ones."""
        return {late for to, late in self._unanswered.values() if to.worker == worker}

    # ---- whether they make sense ----

    def _check_sense(self, worker: int, push: Push) -> None:
        store, units = self._shard.store, self._units(push)
        if not store.loaded[push.bucket]:
            raise UsageError("push: no parameters were loaded yet")
        if self._members[worker].leaving:
            raise UsageError(f"push: worker {worker} has left")
        if len(push.used) != len(units):
            raise UsageError(
                f"push: expected {len(units)} used bits, got {len(push.used)}"
            )
        if not 0 <= push.weight < math.inf:
            raise UsageError(f"push: expected a weight of 0 or more, got {push.weight}")
        store.check_hyperparameters(push.hyperparameters)
        if self._shard.coded is not None:
            self._shard.coded.check_given(worker, push.bucket)
        if push.late and self._shard.in_parts is None:
            raise UsageError("push: this method takes no late units")
        if push.units is not None and self._shard.in_parts is None:
            raise UsageError(
                f"push: this method takes whole buckets, got units {push.units} of bucket "
                f"{push.bucket}"
            )

    def _read_report(self, report: bytes) -> Any:
        if not report:
            return None
        if self._shard.informed is None:
            raise UsageError("push: this method takes no reports")
        return self._shard.informed.read_report(self._shard, report)

    def _units(self, push: Push) -> Sequence[int]:
        return self._shard.store.numbers(push.bucket, push.units)

    def _left_out(self, push: Push) -> list[int]:
        sent = set(self._units(push))
        every = self._shard.store.numbers(push.bucket, None)
        return [unit for unit in every if unit not in sent]

    # ---- main pushes ----

    def _take_main(self, worker: int, push: Push) -> None:
        member = self._members[worker]
        self._check_not_before(worker, push, member)
        if push.step > member.clock:
            self._check_may_skip(worker, push, member)
            member.begins_with(push.step)
        self.check_late_units("push", worker, push.step - 1, f"step {push.step}")
        self._members.has_begun(push.step)
        member.begun[push.bucket] = self._left_out(push)
        if len(member.begun) == len(self._shard.buckets):
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

    def _take_late(self, worker: int, push: Push) -> None:
        member = self._members[worker]
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
        self.check_late_units(
            "push", worker, push.step, f"late units of step {push.step}"
        )
        self._check_is_left(worker, push, step.left.get(push.bucket, []))
        del step.left[push.bucket]
        step.late.add(push.bucket)

    def check_late_units(self, what: str, worker: int, before: int, then: str) -> None:
        """Raise `UsageError` unless all late units of a worker's steps *before* this one are
        in; *then*: what the worker wants to do after them."""
        for number, step in self._members[worker].whole.items():
            if number < before and step.left:
                bucket, units = min(step.left.items())
                raise UsageError(
                    f"{what}: worker {worker} has left units {units} of bucket {bucket} out "
                    f"of its push of step {number}: expected them late before {then}"
                )

    def _check_is_left(self, worker: int, push: Push, left: list[int]) -> None:
        """A unit that came twice would wait for a second update in its step; one that never
        came would wait for its first."""
        units = list(self._units(push))
        if not left or units != left:
            expected = f"units {left}, all that worker {worker} has left out"
            if not left:
                expected = f"none, as worker {worker} has left out nothing"
            raise UsageError(
                f"push: late units of step {push.step}, bucket {push.bucket}: expected "
                f"{expected}, got {units}"
            )
