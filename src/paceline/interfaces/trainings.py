"""The trainings of one worker's script, its options, and the work put off until its end.

A `Runtime` has one `TrainingRegistry`. It is filled by `distribute`; runtimes and checkpoints read it. What a
training holds is closed when all workers have done with it, and at the end at the latest. A model and its
optimizer are the script's own again when their training has ended and another begins: a script may train many.
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
class EndedTraining:
    """The `TrainingStatus` of a training that has ended well."""

    first_step: int
    finished: bool = True
    broken_by: str = ""


class _UncopiedOptimizer:
    """An optimizer of this model alone: its copies and pickles have None."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class StartedTraining:
    """A training that `distribute` has started: its *model*, the *optimizer* that `distribute`
    returned, and how far the *training* is on this worker."""

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
        """Not to be asked for where it is `released`."""
        model = self._model()
        assert model is not None, "let go of, and dropped by the script"
        return model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Not to be asked for where it is `released`."""
        optimizer = self._optimizer()
        assert optimizer is not None, "let go of, and dropped by the script"
        return optimizer

    @property
    def released(self) -> bool:
        """Whether `release` was called, and the script has dropped the model."""
        return self._model() is None or self._optimizer() is None

    def release(self) -> None:
        """Where the training has ended well, leave the model to the script alone, and the optimizer to
        the model: checkpoints have both or none."""
        ended_well = self.training.finished and not self.training.broken_by
        if self._held is None or not ended_well:
            return
        vars(self.model)[_OPTIMIZER] = _UncopiedOptimizer(self.optimizer)
        self.training, self._held = EndedTraining(self.training.first_step), None
        self._finish = lambda: None

    def finish(self) -> None:
        """End it, if the script has not."""
        self._finish()


class Place(msgspec.Struct, frozen=True):
    """Where a rank is when another one enters `consolidated` of a *training* for the *count*-th
    time: "inside", on its way "beyond", or it has "left". *half*: twice the steps that it had
    done then, and one more between ``backward()`` and ``step()``."""

    training: int
    count: int
    half: int
    how: Literal["inside", "beyond", "left"]


class Places:
    """Sees to it that all ranks enter a collective `consolidated` after the same step.

    Who enters tells all others. Who has begun a step after that, or is out of data, answers so.
    Nobody's steps wait for that: messages go beside the collectives, by *tell*. *waits*: who
    enters waits until all others have, since its collectives would meet those of their steps.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._tell: Callable[[Place], None] = lambda place: None
        self._waits = False
        self._present = math.inf
        self._changed = threading.Condition()
        self._heard: dict[tuple[int, int], dict[int, Place]] = {}
        self._counts: Counter[int] = Counter()
        self._begun: dict[int, int] = {}
        self._left: set[int] = set()
        self._trainings = 0

    def add(self) -> int:
        """One more training, on all ranks; returns its number."""
        self._trainings += 1
        return self._trainings

    def take_back(self, training: int) -> None:
        """It was not begun, after all: on a rank that failed to make it, it has no number."""
        assert training == self._trainings, "another training has begun since"
        self._trainings -= 1

    def connect(self, rank: int, tell: Callable[[Place], None], *, waits: bool) -> None:
        """From now on there are others."""
        self._rank, self._tell, self._waits = rank, tell, waits

    def disconnect(self) -> None:
        """Nothing is heard any more."""
        with self._changed:
            self._waits = False
            self._changed.notify_all()

    def begins_anew(self, training: int) -> None:
        """Its steps are counted from elsewhere: a checkpoint was loaded."""
        with self._changed:
            self._begun.pop(training, None)

    def goes_on(self, training: int, half: int) -> None:
        """This rank is on its way to so many half steps. Raises `UsageError` where others are
        inside after fewer."""
        self._begun[training] = half
        if self._heard:
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
        """This rank enters after so many half steps; returns when all have. *without_left*: those
        that are out of data need not. Raises `UsageError` where another one is elsewhere."""
        with self._changed:
            self._counts[training] += 1
            mine = Place(training, self._counts[training], half, "inside")
            heard = self._heard.setdefault((training, mine.count), {})
        self._tell(mine)
        with self._changed:
            while True:
                for rank, place in heard.items():
                    fits = place.how == "inside" and place.half == half
                    if not fits and not (place.how == "left" and without_left):
                        raise _differ(self._rank, mine, rank, place)
                if not self._waits or len(heard) >= self._present - 1:
                    break
                self._changed.wait()
            del self._heard[training, mine.count]

    def hear(self, rank: int, place: Place, present: int) -> None:
        """What another *rank* tells; so many are *present*, with this one."""
        with self._changed:
            self._present = present
            self._changed.notify_all()
            if rank == self._rank:
                return  # it comes back, with how many there are
            key = place.training, place.count
            is_next = place.count == self._counts[place.training] + 1
            if not is_next and key not in self._heard:
                return  # this rank has been inside
            self._heard.setdefault(key, {})[rank] = place
            beyond = self._begun.get(place.training, 0) > place.half
            elsewhere = beyond or place.training in self._left
            if is_next and place.how == "inside" and elsewhere:
                self._answer(place.training)

    def _inside(self, training: int, before: float = math.inf) -> dict[int, Place]:
        """The ranks that are inside after fewer half steps than *before*, and this one not."""
        heard = self._heard.get((training, self._counts[training] + 1), {})
        return {r: p for r, p in heard.items() if p.how == "inside" and p.half < before}

    def _answer(self, training: int) -> Place:
        how: Literal["beyond", "left"] = "left" if training in self._left else "beyond"
        half = self._begun.get(training, 0) - (how == "beyond")
        mine = Place(training, self._counts[training] + 1, half, how)
        self._tell(mine)
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
    """Keeps the trainings of a script on one worker, in the order in which `distribute` was called;
    *options* are what the command line has decided for it.

    *tell* passes on that an error has ended a training here, though the script goes on: the
    training's number, counted from 0, and the cause. Those who wait for this worker are to
    learn it. ``holding`` are trainings whose process groups and threads are there, with what
    closes these. ``watchers``: called when a training begins, with its model and its trainable tensors; what they
    give back is told its events (`paceline.core.step_listeners`). ``loops``: how many of the script's loops over
    `paceline.steps` are under way; ``ended``: it has done as many steps as it was asked for, and these
    loops come to their end.
    """

    def __init__(self, options: RunOptions, tell: Callable[[int, str], None]) -> None:
        self.options = options
        self.keeps_ended = options.profile is not None
        """Whether trainings that have ended are looked at after the script's end."""
        self.trainings: list[StartedTraining] = []
        self.hidden: list[StartedTraining] = []
        """Those before them that checkpoints are to know nothing of (`paceline.testing`)."""
        self._tell = tell
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
        """One more training, which *finish* ends where the script does not. Those that have ended are
        released."""
        if not self.keeps_ended:
            for begun in self.trainings:
                begun.release()
        begun = StartedTraining(model, optimizer, training, finish)
        self.trainings.append(begun)
        self._put_off.append(begun.finish)

    def there(self) -> Iterator[tuple[int, StartedTraining]]:
        """The trainings whose model and optimizer are there, with their numbers."""
        return (pair for pair in enumerate(self.trainings) if not pair[1].released)

    def drop_unheld(self) -> None:
        """Those that the script no longer reaches are `StartedTraining.released` from here on, on all workers that have
        run the same: not only when their memory is next collected."""
        if any(isinstance(begun.training, EndedTraining) for begun in self.trainings):
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
    def unfinished(self) -> list[StartedTraining]:
        """The trainings that have steps to do, or are broken."""
        return [begun for begun in self.trainings if not begun.training.finished]

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined it."""
        return max((b.training.first_step for b in self.trainings), default=0)

    def broke(self, number: int, cause: str) -> None:
        """An error has ended `trainings` *number* here."""
        self._tell(len(self.hidden) + number, cause)

    def is_over(self, number: int) -> bool:
        """Whether training *number*, as others tell it, was begun here, and has ended, well or not."""
        training = self._as_told(number)
        return training is not None and (training.finished or bool(training.broken_by))

    def broken_by(self, number: int) -> str:
        """The error that has ended training *number*, as others tell it, here, if any."""
        training = self._as_told(number)
        return "" if training is None else training.broken_by

    def _as_told(self, number: int) -> TrainingStatus | None:
        """Numbers count hidden ones: others' news may come when these have been hidden since."""
        everything = [*self.hidden, *self.trainings]
        return everything[number].training if number < len(everything) else None

    @property
    def in_use(self) -> list[bool]:
        """Of each training in `holding` whether this worker needs what it holds: it has steps to
        do, or is broken. Closing waits for what is under way, and nobody may come to that."""
        return [
            not training.finished or bool(training.broken_by)
            for training, _ in self.holding
        ]

    def close_unused(self, in_use: Sequence[bool]) -> None:
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
