"""The norm of a step's mean gradient, where several servers hold parts of it."""

from __future__ import annotations

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.interfaces.server_messages import Done, Norm, NormPart, PullNorm
from paceline.parameter_server.state_machine.replies import Answers
from paceline.parameter_server.state_machine.shard import ClippedSteps, HeldShard


class Norms:
    """The workers that wait for this server's part of the norm."""

    def __init__(self, shard: HeldShard, answers: Answers) -> None:
        self._shard, self._answers = shard, answers
        self._waiting: list[tuple[Sender, int]] = []
        """With their steps."""

    def ask(self, sender: Sender, pull: PullNorm) -> None:
        """A worker asks for the part of its step. Raises `UsageError` where nothing is
        clipped, and for a step too far ahead."""
        if self._shard.fault:
            raise UsageError(self._shard.fault)
        self._clipped("pull-norm")
        self._shard.members.check_step("pull-norm", pull.step)
        self._waiting.append((sender, pull.step))

    def take(self, sender: Sender, norm: Norm) -> None:
        """A worker tells the norm of all parts. Raises `UsageError` as `ask` does, and for
        what is no sum of squares."""
        clipped = self._clipped("norm")
        self._shard.members.check_step("norm", norm.step)
        if norm.squares < 0:  # what is not finite shows in the gradients
            raise UsageError(f"norm: expected a sum of squares, got {norm.squares}")
        clipped.norm(norm.step, norm.squares)
        self._answers.send(sender, Done())

    def let_go(self) -> None:
        """Answer all whose step's part is known by now."""
        waiting, self._waiting = self._waiting, []
        for sender, step in waiting:
            part = self._clipped("pull-norm").part(step)
            if part is None:
                self._waiting.append((sender, step))
            else:
                answer = NormPart(squares=part.squares, counted=list(part.counted))
                self._answers.send(sender, answer)

    def forget(self, worker: int) -> None:
        """This worker is lost."""
        self._waiting = [wait for wait in self._waiting if wait[0].worker != worker]

    def give_up(self) -> list[Sender]:
        """No norm will be known any more: the workers that wait."""
        waiting, self._waiting = self._waiting, []
        return [sender for sender, _ in waiting]

    def _clipped(self, what: str) -> ClippedSteps:
        if self._shard.clipped is None:
            raise UsageError(f"{what}: nothing is clipped on this server")
        return self._shard.clipped
