"""Each worker's own part of a checkpoint: its random states, buffers and metrics, and its
`WorkerState`s.

A part holds ``worker``, with the random states, the buffers and the last metrics, and one entry
for each own state of a training that goes on. Who finds its own part goes on from that, bit for bit.
Where the workers are others than those that saved, each state's owner says what comes of
it (`WorkerState.redistribute`), and random states and buffers stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.core.checkpoint import files
from paceline.core.checkpoint import folder as folders
from paceline.core.checkpoint.method_switch import specs_of
from paceline.core.checkpoint.structure import as_data
from paceline.core.optimizer import training_of
from paceline.core.random_state import random_states, set_random_states
from paceline.errors import UsageError
from paceline.interfaces import Runtime, WorkerState

VERSION = 3
"""Of the format that `save` writes and `load` reads."""

_WORKER = "worker"


class Saved(msgspec.Struct, frozen=True):
    """What a checkpoint's index says: its *version*; the names of what is *shared*; of how many
    *workers* the job was that has saved, which ones' *parts* there are, the
    names of the *states* that each of them holds, and each training's *progress*, nothing of those that
    are gone; *specs*: by which
    each was trained then, of those that change their method; nothing of others."""

    version: int
    shared: list[str]
    workers: int
    parts: list[int]
    states: list[str]
    progress: list[dict[str, int]]
    specs: list[str] = []

    @classmethod
    def now(cls, runtime: Runtime, shared: list[str], parts: list[int]) -> Saved:
        """What is saved now."""
        progress = [
            {} if begun.released else training_of(begun.optimizer).progress
            for begun in runtime.job.trainings
        ]
        states = sorted(_owners(runtime))
        return cls(
            *(VERSION, sorted(shared), runtime.size, parts, states),
            *(progress, specs_of(runtime)),
        )

    def is_of(self, workers: int) -> bool:
        """Whether a job of so many has a part for each."""
        return self.workers == workers and self.parts == list(range(workers))


def pack_own(runtime: Runtime) -> dict[str, Any]:
    """This worker's part."""
    own = {
        "random": random_states(),
        "buffers": _buffers(runtime),
        "metrics": dict(runtime.journal.metrics),
    }
    states = {_WORKER: own}
    states |= {name: owner.save() for name, owner in _owners(runtime).items()}
    return {name: as_data(state, name) for name, state in states.items()}


class OwnPart:
    """What this worker takes from the checkpoint *found*, of the workers that *saved* it.

    Reads all of it, and changes nothing before `give_back`. Raises `UsageError` where an
    owner refuses, or its part is not there.
    """

    def __init__(self, runtime: Runtime, found: Path, saved: Saved) -> None:
        self._runtime, self._found, self._saved = runtime, found, saved
        self._worker = self._read_worker()
        self._owners = _owners(runtime)
        self._states = {
            name: self._state(name, owner)
            for name, owner in self._owners.items()
            if name in saved.states
        }
        if runtime.rank == 0:
            self._say_what_is_left()

    def give_back(self) -> None:
        """Everybody goes on from it."""
        trainings = self._runtime.job.trainings
        for begun, progress in zip(trainings, self._saved.progress, strict=True):
            if not begun.released:
                training_of(begun.optimizer).progress = progress
        if self._worker is not None:
            give_back_worker(self._runtime, self._worker)
        for name, state in self._states.items():
            self._owners[name].load(state)

    # ---- what is read ----

    def _read_worker(self) -> dict[str, Any] | None:
        rank = self._runtime.rank
        if rank not in self._saved.parts:
            return None
        place = folders.part(self._found, rank)
        if not place.exists():
            _say(f"{place} is not there: worker {rank} has random states of its own")
            return None
        return _read(place, _WORKER)

    def _state(self, name: str, owner: WorkerState) -> dict[str, Any]:
        if self._saved.is_of(self._runtime.size):
            return _read(self._place(self._runtime.rank), name)
        return owner.redistribute(self._parts(name), self._runtime.size)

    def _parts(self, name: str) -> Iterator[dict[str, Any]]:
        for rank in self._saved.parts:
            yield _read(self._place(rank), name)

    def _place(self, rank: int) -> Path:
        place = folders.part(self._found, rank)
        if not place.exists():
            raise UsageError(
                f"{place} is not there, the part of the checkpoint that worker {rank} has "
                "saved. Where machines have disks of their own it has stayed in "
                f"{place.name} of {folders.partial(self._found).name}, where that worker "
                f"was: copy it into {self._found} on every machine"
            )
        return place

    def _say_what_is_left(self) -> None:
        there = set(self._saved.states)
        for name in sorted(self._owners.keys() - there):
            _say(f"{self._found} holds no {name}: it begins anew")
        for name in sorted(there - self._owners.keys()):
            _say(f"{self._found} holds {name}, which nothing in this job takes")


def give_back_worker(runtime: Runtime, saved: dict[str, Any]) -> None:
    """Random states, buffers, and what the script last reported: a method may go by its
    loss (`Run.loss`)."""
    set_random_states(saved["random"])
    runtime.journal.metrics.update(saved["metrics"])
    with torch.no_grad():
        for here, buffers in zip(_buffers(runtime), saved["buffers"], strict=True):
            for name, buffer in here.items():
                buffer.copy_(buffers[name])


def _owners(runtime: Runtime) -> dict[str, WorkerState]:
    """Of all trainings that go on, by the name that their states have in a checkpoint."""
    return {
        f"training{number}.{owner.name}": owner
        for number, begun in enumerate(runtime.job.trainings)
        if not begun.training.finished
        for owner in training_of(begun.optimizer).worker_states
    }


def _buffers(runtime: Runtime) -> list[dict[str, torch.Tensor]]:
    """Each model's buffers here: ranks differ in them between steps."""
    return [
        {} if begun.released else dict(begun.model.named_buffers())
        for begun in runtime.job.trainings
    ]


def _read(place: Path, name: str) -> dict[str, Any]:
    state: dict[str, Any] = files.read(place, [name])[name]
    return state


def _say(sentence: str) -> None:
    print(f"paceline: {sentence}", file=sys.stderr)
