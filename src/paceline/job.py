"""What one worker's script does: its options, its trainings, what is put off until its end.

A `World` has one `Job`. It is filled by `distribute`; worlds and checkpoints read it. What a
training holds is closed when all workers have done with it, and at the end at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.options import RunOptions

Watcher = Callable[
    [torch.nn.Module, Sequence[tuple[str, torch.nn.Parameter]]], Sequence[object]
]


class TrainingStatus(Protocol):
    """How far a training is on this worker."""

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined the training."""
        ...

    @property
    def finished(self) -> bool:
        """Whether this worker has no more steps to do in it."""
        ...

    @property
    def broken_by(self) -> str:
        """The error after which it cannot go on, if any."""
        ...


@dataclass(frozen=True)
class Begun:
    """A training: the *model* that `distribute` was given, the *optimizer* that it gave back,
    and how far the *training* is on this worker."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    training: TrainingStatus


class Job:
    """A script's trainings on one worker, in the order in which `distribute` was called;
    *options* are what the command line has decided for it.

    *tell* passes on that an error has ended a training here, though the script goes on: the
    training's number, counted from 0, and the cause. Those who wait for this worker are to
    learn it. ``holding`` are trainings whose process groups and threads are there, with what
    closes these. ``watchers``: called when a training begins, with its model and its trainable tensors; what they
    give back is told its events (`paceline.training.observers`). ``loops``: how many of the script's loops over
    `paceline.steps` are under way; ``ended``: it has done as many steps as it was asked for, and these
    loops come to their end.
    """

    def __init__(self, options: RunOptions, tell: Callable[[int, str], None]) -> None:
        self.options = options
        self.trainings: list[Begun] = []
        self.broke = tell
        self.holding: list[tuple[TrainingStatus, Callable[[], None]]] = []
        self.watchers: list[Watcher] = []
        self.loops, self.ended = 0, False
        self._put_off: list[Callable[[], None]] = []
        self._names = 0
        self._last: list[Callable[[], None]] = []

    def begin(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        training: TrainingStatus,
    ) -> None:
        """One more training."""
        self.trainings.append(Begun(model, optimizer, training))

    def hold(self, training: TrainingStatus, close: Callable[[], None]) -> None:
        """A training holds something; *close* lets go of it."""
        self.holding.append((training, close))

    def next_name(self) -> str:
        """What the next training's communicator is called, on all workers."""
        self._names += 1
        return f"training {self._names - 1}"

    def beside(self, number: int) -> bool:
        """Whether there are others than training *number* that have steps to do, or are
        broken."""
        return any(
            not begun.training.finished
            for other, begun in enumerate(self.trainings)
            if other != number
        )

    @property
    def unfinished(self) -> list[Begun]:
        """The trainings that have steps to do, or are broken."""
        return [begun for begun in self.trainings if not begun.training.finished]

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined it."""
        return max((b.training.first_step for b in self.trainings), default=0)

    def is_over(self, number: int) -> bool:
        """Whether training *number* was begun here, and has ended, well or not."""
        if number >= len(self.trainings):
            return False
        training = self.trainings[number].training
        return training.finished or bool(training.broken_by)

    def broken_by(self, number: int) -> str:
        """The error that has ended training *number* here, if any."""
        if number >= len(self.trainings):
            return ""
        return self.trainings[number].training.broken_by

    @property
    def in_use(self) -> list[bool]:
        """Of each training in `holding` whether this worker needs what it holds: it has steps to
        do, or is broken. Closing waits for what is under way, and nobody may come to that."""
        return [
            not training.finished or bool(training.broken_by)
            for training, _ in self.holding
        ]

    def let_go(self, in_use: Sequence[bool]) -> None:
        """Close those in `holding` that are not *in_use* on any worker."""
        held = list(zip(self.holding, in_use, strict=True))
        self.holding = [one for one, needed in held if needed]
        for (_, close), needed in held:
            if not needed:
                close()

    def at_exit(self, action: Callable[[], None], *, last: bool = False) -> None:
        """Call *action* when the script ends without an error; *last*: when all trainings
        have ended."""
        (self._last if last else self._put_off).append(action)

    def end(self) -> None:
        """The script has ended without an error: do what was put off, and close all
        trainings, once."""
        for actions in (self._put_off, self._last):
            for action in actions:
                action()
            actions.clear()
        for _, close in self.holding:
            close()
        self.holding.clear()
