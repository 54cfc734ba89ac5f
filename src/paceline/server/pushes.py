"""Which pushes a server takes: those that make sense, in the order of steps.

In a step's first stage each of a worker's buckets comes once, in any order. With the last
one the worker's clock moves, and the next step may begin; a later step than that, where
another server named it, leaves out those before, and may begin once all of the worker's
pushes are answered. In the second stage, where a discipline defers, come exactly the units
that the first one left out, in one push per bucket that had some: after all of the step's
first stage, and before the second stage of the next step, and all of the one after that. What
was left out and never came would be waited for for ever, so what has to come after it, a
leave too, is refused before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from paceline.errors import UsageError
from paceline.interfaces import HeldPush, Sender
from paceline.messages import FIRST, SECOND, Measured, Push
from paceline.server.bound_discipline import BoundDiscipline
from paceline.server.held_model import HeldModel
from paceline.server.members import Member, Members


class Pushes:
    """The pushes that a server has taken, until they are answered."""

    def __init__(
        self,
        members: Members,
        model: HeldModel,
        discipline: BoundDiscipline,
        counts: Counter[str],
    ) -> None:
        self._members = members
        self._model = model
        self._discipline = discipline
        self._counts = counts
        self._unanswered: dict[int, tuple[Sender, int]] = {}
        """By stamp; with their stage."""
        self._stamp = 0

    def take(
        self, sender: Sender, push: Push, payload: torch.Tensor | None
    ) -> HeldPush:
        """A push that is in, from now on. Raises `UsageError`, with nothing changed, where
        it does not fit, or does not come at its time."""
        if self._model.fault:
            raise UsageError(self._model.fault)
        gradient = self._model.fitting("push", push.bucket, payload, push.units)
        self._check_sense(sender.worker, push)
        if push.stage == FIRST:
            self._take_first(sender.worker, push)
        else:
            self._take_second(sender.worker, push)
        return self._hold(sender, push, gradient)

    def _hold(self, sender: Sender, push: Push, gradient: torch.Tensor) -> HeldPush:
        held = HeldPush(
            worker=sender.worker,
            step=push.step,
            bucket=push.bucket,
            weight=push.weight,
            used=push.used,
            hyperparameters=push.hyperparameters,
            gradient=gradient,
            stamp=self._stamp,
            stage=push.stage,
            units=push.units,
            measured=push.measured,
        )
        self._unanswered[self._stamp] = sender, push.stage
        self._stamp += 1
        return held

    # ---- until they are answered ----

    def answered(self, push: HeldPush) -> Sender | None:
        """Who is to get the answer to a push; None where it was refused meanwhile, or its
        worker is lost."""
        sender, _ = self._unanswered.pop(push.stamp, (None, 0))
        return sender

    def give_up(self) -> list[Sender]:
        """No push will be answered any more: who waits."""
        unanswered, self._unanswered = self._unanswered, {}
        return [sender for sender, _ in unanswered.values()]

    def forget(self, worker: int) -> None:
        self._unanswered = {
            stamp: (sender, stage)
            for stamp, (sender, stage) in self._unanswered.items()
            if sender.worker != worker
        }

    def are_all_answered(self) -> bool:
        return not self._unanswered

    def is_idle(self, worker: int) -> bool:
        """Whether all of a worker's steps are in as a whole, and answered."""
        return not (self._stages_of(worker) or self._members[worker].begun)

    def owes_nothing(self, worker: int) -> bool:
        """Whether a worker is idle, and has sent all second stages of its steps."""
        steps = self._members[worker].whole.values()
        return self.is_idle(worker) and not any(step.left for step in steps)

    def can_only_wait(self, worker: int) -> bool:
        """Whether a worker has sent a step as a whole, and cannot go on before its
        answers."""
        begun = self._members[worker].begun
        return not begun and FIRST in self._stages_of(worker)

    def _stages_of(self, worker: int) -> list[int]:
        return [t for sender, t in self._unanswered.values() if sender.worker == worker]

    # ---- whether they make sense ----

    def _check_sense(self, worker: int, push: Push) -> None:
        store, units = self._model.store, self._units(push)
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
        if push.measured is not None:
            self._check_measured(push.measured)
        if push.units is not None and not self._discipline.defers:
            raise UsageError(
                f"push: this method takes whole buckets, got units {push.units} of bucket "
                f"{push.bucket}"
            )

    def _check_measured(self, measured: Measured) -> None:
        numbers = [
            *measured.ready,
            measured.end,
            measured.start_up,
            measured.per_byte,
            measured.whole,
        ]
        if (
            len(measured.ready) not in (0, len(self._model.store.flats))
            or not all(0 <= number < math.inf for number in numbers)
            or not all(size >= 0 for size in measured.bytes)
            or not 0 <= measured.part <= 1
        ):
            raise UsageError(
                f"push: measured times, bytes or parts that make no sense: {measured}"
            )

    def _units(self, push: Push) -> Sequence[int]:
        return self._model.numbers(push.bucket, push.units)

    def _left_out(self, push: Push) -> list[int]:
        sent = set(self._units(push))
        every = self._model.numbers(push.bucket, None)
        return [unit for unit in every if unit not in sent]

    # ---- the first stage ----

    def _take_first(self, worker: int, push: Push) -> None:
        member = self._members[worker]
        self._check_not_before(worker, push, member)
        if push.step > member.clock:
            self._check_may_skip(worker, push, member)
            member.begins_with(push.step)
        self.check_second_stages("push", worker, push.step - 1, f"step {push.step}")
        self._members.has_begun(push.step)
        member.begun[push.bucket] = self._left_out(push)
        if len(member.begun) == len(self._model.buckets):
            member.step_is_whole()

    def _check_not_before(self, worker: int, push: Push, member: Member) -> None:
        if push.step < member.clock or (
            push.step == member.clock and push.bucket in member.begun
        ):
            self._counts["pushes that came again"] += 1
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

    # ---- the second stage ----

    def _take_second(self, worker: int, push: Push) -> None:
        if not self._discipline.defers or push.stage != SECOND:
            raise UsageError(f"push: this method has no stage {push.stage}")
        member = self._members[worker]
        step = member.whole.get(push.step)
        if step is None:
            raise UsageError(
                f"push: stage 2 of step {push.step} of worker {worker}, whose next step is "
                f"{member.clock}"
            )
        if push.bucket in step.second:
            self._counts["pushes that came again"] += 1
            raise UsageError(
                f"push: worker {worker} has pushed bucket {push.bucket} of step "
                f"{push.step}, stage 2, before"
            )
        self.check_second_stages(
            "push", worker, push.step, f"stage 2 of step {push.step}"
        )
        self._check_is_left(worker, push, step.left.get(push.bucket, []))
        del step.left[push.bucket]
        step.second.add(push.bucket)

    def check_second_stages(
        self, what: str, worker: int, before: int, then: str
    ) -> None:
        """Raise `UsageError` unless all second stages of a worker's steps *before* this one
        are in; *then*: what it wants to do after them."""
        for number, step in self._members[worker].whole.items():
            if number < before and step.left:
                bucket, units = min(step.left.items())
                raise UsageError(
                    f"{what}: worker {worker} has left units {units} of bucket {bucket} out "
                    f"of stage 1 of step {number}: expected them in stage 2 before {then}"
                )

    def _check_is_left(self, worker: int, push: Push, left: list[int]) -> None:
        """A unit that came in both stages would wait for its update to come a second time,
        and one that came in neither for its first."""
        units = list(self._units(push))
        if not left or units != left:
            expected = f"units {left}, all that worker {worker} has left out of stage 1"
            if not left:
                expected = f"none, as worker {worker} has left out nothing of stage 1"
            raise UsageError(
                f"push: stage 2 of step {push.step}, bucket {push.bucket}: expected "
                f"{expected}, got {units}"
            )
