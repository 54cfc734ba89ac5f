"""What one worker's script does: its options, its trainings, what is put off until its end.

A `World` has one `Job`. It is filled by `distribute`; worlds and checkpoints read it. What a
training holds is closed when all workers have done with it, and at the end at the latest. A model and its
optimizer are the script's own again when their training has ended and another begins: a script may train many.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.options import RunOptions

_OPTIMIZER = "_trained_by_paceline"
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
class Ended:
    """The `TrainingStatus` of a training that has ended well."""

    first_step: int
    finished: bool = True
    broken_by: str = ""


class _Kept:
    """An optimizer of this model alone: its copies and pickles have None."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Begun:
    """A training: the *model* that `distribute` was given, the *optimizer* that it gave back,
    and how far the *training* is on this worker."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        training: TrainingStatus,
        finish: Callable[[], None],
    ) -> None:
        self.training = training
        self._finish = finish
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._held: object = (model, optimizer)

    @property
    def model(self) -> torch.nn.Module:
        """Not to be asked for where it is `gone`."""
        model = self._model()
        assert model is not None, "let go of, and dropped by the script"
        return model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Not to be asked for where it is `gone`."""
        optimizer = self._optimizer()
        assert optimizer is not None, "let go of, and dropped by the script"
        return optimizer

    @property
    def gone(self) -> bool:
        """Whether it was let go of, and the script has dropped the model."""
        return self._model() is None or self._optimizer() is None

    def let_go(self) -> None:
        """Where the training has ended well, the script alone holds the model from now on, and that its
        optimizer: checkpoints have both or none."""
        ended_well = self.training.finished and not self.training.broken_by
        if self._held is None or not ended_well:
            return
        vars(self.model)[_OPTIMIZER] = _Kept(self.optimizer)
        self.training, self._held = Ended(self.training.first_step), None
        self._finish = lambda: None

    def finish(self) -> None:
        """End it, if the script has not."""
        self._finish()


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
        self.keeps_ended = options.profile is not None
        """Whether trainings that have ended are looked at after the script's end."""
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
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """One more training, which *finish* ends where the script does not. Those that have ended are
        let go of."""
        if not self.keeps_ended:
            for begun in self.trainings:
                begun.let_go()
        begun = Begun(model, optimizer, training, finish)
        self.trainings.append(begun)
        self._put_off.append(begun.finish)

    def there(self) -> Iterator[tuple[int, Begun]]:
        """The trainings whose model and optimizer are there, with their numbers."""
        return (pair for pair in enumerate(self.trainings) if not pair[1].gone)

    def drop_unheld(self) -> None:
        """Those that the script no longer reaches are `Begun.gone` from here on, on all workers that have
        run the same: not only when their memory is next collected."""
        if any(isinstance(begun.training, Ended) for begun in self.trainings):
            gc.collect()

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
