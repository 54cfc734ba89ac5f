"""The trainings of one worker's script, its options, and actions deferred to its end.

A `Runtime` has one `TrainingRegistry`. `distribute` adds trainings; runtimes and checkpoints read them. A
training's resources are closed when all workers have finished with it, at the end at the latest. When a
training has ended and another begins, its model and optimizer belong to the script again. So a script may
train many models.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.interfaces.consolidated_entry import ConsolidatedEntries
from paceline.run_options import RunOptions

_OPTIMIZER = "_trained_by_paceline"
Watcher = Callable[
    [torch.nn.Module, Sequence[tuple[str, torch.nn.Parameter]]], Sequence[object]
]


class TrainingStatus(Protocol):
    """Progress of a training on this worker."""

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined the training."""
        ...

    @property
    def finished(self) -> bool:
        """Whether this worker has no more steps to do in the training."""
        ...

    @property
    def broken_by(self) -> str:
        """The error that broke the training, if any."""
        ...


@dataclass(frozen=True)
class EndedTraining:
    """The `TrainingStatus` of a training that has ended without an error."""

    first_step: int
    finished: bool = True
    broken_by: str = ""


class _UncopiedOptimizer:
    """Refers to a model's optimizer; copies and pickles of the reference hold None."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class StartedTraining:
    """A training that `distribute` has started: its *model*, the *optimizer* that `distribute`
    returned, and the status of the *training* on this worker."""

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
        """The model. Not available once it is `released`."""
        model = self._model()
        assert model is not None, "let go of, and dropped by the script"
        return model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. Not available once it is `released`."""
        optimizer = self._optimizer()
        assert optimizer is not None, "let go of, and dropped by the script"
        return optimizer

    @property
    def released(self) -> bool:
        """Whether `release` was called, and the script no longer has the model."""
        return self._model() is None or self._optimizer() is None

    def release(self) -> None:
        """If the training has ended without an error, leave the model to the script alone, and the
        optimizer to the model: checkpoints have both or none."""
        ended_well = self.training.finished and not self.training.broken_by
        if self._held is None or not ended_well:
            return
        vars(self.model)[_OPTIMIZER] = _UncopiedOptimizer(self.optimizer)
        self.training, self._held = EndedTraining(self.training.first_step), None
        self._finish = lambda: None

    def finish(self) -> None:
        """End the training if the script has not."""
        self._finish()


class TrainingRegistry:
    """The trainings of a script on one worker, in the order of the calls of `distribute`; *options* come
    from the command line.

    *report_error* reports to waiting workers that an error ended a training here, though the script goes on: with
    the training's number, counted from 0, and the cause.

    - ``holding``: trainings with open process groups and threads, and the functions that close them.
    - ``watchers``: called when a training begins, with its model and its trainable tensors. Their results
      receive the training's events (`paceline.core.step_listeners`).
    - ``loops``: how many of the script's loops over `paceline.steps` are active.
    - ``ended``: the requested number of steps is done, and these loops end.
    """

    def __init__(
        self, options: RunOptions, report_error: Callable[[int, str], None]
    ) -> None:
        self.options = options
        self.keeps_ended = options.profile is not None
        """Whether ended trainings are inspected after the script's end."""
        self.trainings: list[StartedTraining] = []
        self.hidden: list[StartedTraining] = []
        """Earlier trainings that checkpoints must not see (`paceline.testing`)."""
        self._report_error = report_error
        self.holding: list[tuple[TrainingStatus, Callable[[], None]]] = []
        self.watchers: list[Watcher] = []
        self.loops, self.ended = 0, False
        self._put_off: list[Callable[[], None]] = []
        self._names = 0
        self._last: list[Callable[[], None]] = []
        self.consolidated_entries = ConsolidatedEntries()

    def begin(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        training: TrainingStatus,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Add a training. *finish* ends it if the script does not. Ended trainings are released."""
        if not self.keeps_ended:
            for begun in self.trainings:
                begun.release()
        begun = StartedTraining(model, optimizer, training, finish)
        self.trainings.append(begun)
        self._put_off.append(begun.finish)

    def there(self) -> Iterator[tuple[int, StartedTraining]]:
        """The trainings whose model and optimizer still exist, with their numbers."""
        return (pair for pair in enumerate(self.trainings) if not pair[1].released)

    def drop_unheld(self) -> None:
        """Release trainings that the script can no longer reach (`StartedTraining.released`).

        Workers that run the same code then release them at the same point, whenever Python's garbage
        collector would run.
        """
        if any(isinstance(begun.training, EndedTraining) for begun in self.trainings):
            gc.collect()

    def hold(self, training: TrainingStatus, close: Callable[[], None]) -> None:
        """Register a training's resources; *close* releases them."""
        self.holding.append((training, close))

    def next_name(self) -> str:
        """Name of the next training's communicator, equal on all workers."""
        self._names += 1
        return f"training {self._names - 1}"

    def beside(self, number: int) -> bool:
        """Whether a training other than *number* has steps to do, or is broken."""
        return any(
            not begun.training.finished
            for other, begun in enumerate(self.trainings)
            if other != number
        )

    @property
    def unfinished(self) -> list[StartedTraining]:
        """The trainings that have steps to do, or are broken."""
        return [begun for begun in self.trainings if not begun.training.finished]

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined it."""
        return max((b.training.first_step for b in self.trainings), default=0)

    def broke(self, number: int, cause: str) -> None:
        """Record that an error has ended `trainings` *number* here."""
        self._report_error(len(self.hidden) + number, cause)

    def is_over(self, number: int) -> bool:
        """Whether training *number*, as other workers count, has begun and ended here, well or not."""
        training = self._as_others_count(number)
        return training is not None and (training.finished or bool(training.broken_by))

    def broken_by(self, number: int) -> str:
        """The error that ended training *number* here, as other workers count; empty if there is none."""
        training = self._as_others_count(number)
        return "" if training is None else training.broken_by

    def _as_others_count(self, number: int) -> TrainingStatus | None:
        """Return the training that has this number for other workers; None if it has not begun here.

        Their numbers count hidden trainings, since their messages may arrive after these were hidden.
        """
        everything = [*self.hidden, *self.trainings]
        return everything[number].training if number < len(everything) else None

    @property
    def in_use(self) -> list[bool]:
        """For each training in `holding`, whether this worker still needs its resources: it has steps to
        do, or is broken. Closing waits for operations in flight, which other workers may never join."""
        return [
            not training.finished or bool(training.broken_by)
            for training, _ in self.holding
        ]

    def close_unused(self, in_use: Sequence[bool]) -> None:
        """Close the trainings in `holding` that no worker uses (*in_use*)."""
        held = list(zip(self.holding, in_use, strict=True))
        self.holding = [one for one, needed in held if needed]
        for (_, close), needed in held:
            if not needed:
                close()

    def at_exit(self, action: Callable[[], None], *, last: bool = False) -> None:
        """Call *action* when the script ends without an error; *last*: after all trainings have ended."""
        (self._last if last else self._put_off).append(action)

    def end(self) -> None:
        """The script has ended without an error: run the deferred actions, and close all trainings,
        once."""
        for actions in (self._put_off, self._last):
            for action in actions:
                action()
            actions.clear()
        for _, close in self.holding:
            close()
        self.holding.clear()
