"""The trainings of one worker's script, its options, and actions deferred to its end.

A `Runtime` has one `TrainingRegistry`. `distribute` adds trainings; runtimes and checkpoints read them. A
training's resources are closed when all workers have finished with it, at the end at the latest. When a
training has ended and another begins, its model and optimizer belong to the script again. So a script may
train many models.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import torch

from paceline.errors import UsageError
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


class Place(msgspec.Struct, frozen=True):
    """Position of a rank relative to a collective `consolidated` that another rank enters.

    - *training*, *count*: it is the *count*-th `consolidated` of this training.
    - *half*: twice the rank's completed steps, plus one between ``backward()`` and ``step()``.
    - *how*: the rank is "inside", on its way "beyond", or has "left".
    """

    training: int
    count: int
    half: int
    how: Literal["inside", "beyond", "left"]


class Places:
    """Ensures that all ranks enter a collective `consolidated` after the same step.

    A rank that enters tells all others. A rank that has begun a later step, or is out of data, replies
    with its place. Messages go through *send*, beside the collectives, so steps do not wait for them.
    With *waits* an entering rank waits until all others have entered: otherwise its collectives could be
    matched with those of the others' steps.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._send: Callable[[Place], None] = lambda place: None
        self._waits = False
        self._present = math.inf
        self._changed = threading.Condition()
        self._received: dict[tuple[int, int], dict[int, Place]] = {}
        self._counts: Counter[int] = Counter()
        self._begun: dict[int, int] = {}
        self._left: set[int] = set()
        self._trainings = 0

    def add(self) -> int:
        """Register one more training, on all ranks; returns its number."""
        self._trainings += 1
        return self._trainings

    def take_back(self, training: int) -> None:
        """Unregister the last training: a rank that failed to make it must not have its number."""
        assert training == self._trainings, "another training has begun since"
        self._trainings -= 1

    def connect(self, rank: int, send: Callable[[Place], None], *, waits: bool) -> None:
        """Connect to the other ranks."""
        self._rank, self._send, self._waits = rank, send, waits

    def disconnect(self) -> None:
        """Receive no more messages."""
        with self._changed:
            self._waits = False
            self._changed.notify_all()

    def begins_anew(self, training: int) -> None:
        """A checkpoint was loaded, so the training's steps count from another number."""
        with self._changed:
            self._begun.pop(training, None)

    def goes_on(self, training: int, half: int) -> None:
        """This rank continues to *half* half steps. Raises `UsageError` if other ranks are inside after
        fewer."""
        self._begun[training] = half
        if self._received:
            with self._changed:
                inside = self._inside(training, half)
                if inside:
                    mine = self._answer(training)
                    raise _differ(*next(iter(inside.items())), self._rank, mine)

    def leaves(self, training: int) -> None:
        """This rank is out of data."""
        with self._changed:
            self._left.add(training)
            if self._inside(training):
                self._answer(training)

    def enter(self, training: int, half: int, *, without_left: bool) -> None:
        """Enter after *half* half steps; returns when all have entered. With *without_left*, ranks
        without data need not enter. Raises `UsageError` if another rank is elsewhere."""
        with self._changed:
            self._counts[training] += 1
            mine = Place(training, self._counts[training], half, "inside")
            received = self._received.setdefault((training, mine.count), {})
        self._send(mine)
        with self._changed:
            while True:
                for rank, place in received.items():
                    fits = place.how == "inside" and place.half == half
                    if not fits and not (place.how == "left" and without_left):
                        raise _differ(self._rank, mine, rank, place)
                if not self._waits or len(received) >= self._present - 1:
                    break
                self._changed.wait()
            del self._received[training, mine.count]

    def receive(self, rank: int, place: Place, present: int) -> None:
        """Handle a message of another *rank*; *present* ranks exist, with this one."""
        with self._changed:
            self._present = present
            self._changed.notify_all()
            if rank == self._rank:
                return  # this rank's own message, which returns with the number of ranks
            key = place.training, place.count
            is_next = place.count == self._counts[place.training] + 1
            if not is_next and key not in self._received:
                return  # this rank has already been inside
            self._received.setdefault(key, {})[rank] = place
            beyond = self._begun.get(place.training, 0) > place.half
            elsewhere = beyond or place.training in self._left
            if is_next and place.how == "inside" and elsewhere:
                self._answer(place.training)

    def _inside(self, training: int, before: float = math.inf) -> dict[int, Place]:
        """The ranks that are inside after fewer half steps than *before*, while this rank is not."""
        received = self._received.get((training, self._counts[training] + 1), {})
        return {
            r: p for r, p in received.items() if p.how == "inside" and p.half < before
        }

    def _answer(self, training: int) -> Place:
        how: Literal["beyond", "left"] = "left" if training in self._left else "beyond"
        half = self._begun.get(training, 0) - (how == "beyond")
        mine = Place(training, self._counts[training] + 1, half, how)
        self._send(mine)
        return mine


def _differ(first: int, mine: Place, second: int, place: Place) -> UsageError:
    where = {
        "inside": f"rank {second} {_after(place.half)}",
        "beyond": f"rank {second} goes on {_after(place.half)}",
        "left": f"rank {second} is out of data {_after(place.half)}",
    }
    return UsageError(
        f"consolidated() was entered by rank {first} {_after(mine.half)}; "
        f"{where[place.how]}. Under this method its result is formed by all workers: enter it "
        "on all of them after the same step"
    )


def _after(half: int) -> str:
    step, inside = divmod(half, 2)
    return (
        f"between backward() and step() {step + 1}" if inside else f"after step {step}"
    )


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
        self.places = Places()

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
