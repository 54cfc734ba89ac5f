"""What belongs to a process in a real run belongs to a worker here.

Many workers share one process. Each gets, for its own eyes: the environment's rank
variables, ``__main__``, and the random states of Python, torch and numpy. The first two
are looked up per thread or swapped at each hand-over of the baton; random states are
swapped only when a worker other than their owner resumes.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from paceline.core.random_state import (
    random_states,
    seed_everything,
    set_random_states,
)
from paceline.runtimes.python_internals import Environ

_overlay = threading.local()


class _WorkerEnviron(Environ[str]):
    """``os.environ`` with the current worker's variables laid over it.

    What a worker sets or deletes stays the worker's own, as between processes.
    """

    def __getitem__(self, key: str) -> str:
        own: dict[str, str | None] | None = getattr(_overlay, "values", None)
        if own is not None and key in own:
            value = own[key]
            if value is None:
                raise KeyError(key)
            return value
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: str) -> None:
        own = getattr(_overlay, "values", None)
        if own is None:
            super().__setitem__(key, value)
        else:
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError("str expected in os.environ")
            own[key] = value

    def __delitem__(self, key: str) -> None:
        own = getattr(_overlay, "values", None)
        if own is None:
            super().__delitem__(key)
        else:
            self[key]  # raises KeyError where there is nothing to delete
            own[key] = None

    def __iter__(self) -> Iterator[str]:
        own = getattr(_overlay, "values", None) or {}
        for key in super().__iter__():
            if key not in own:
                yield key
        for key, value in list(own.items()):
            if value is not None:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)


class EnvironmentOverlay:
    """``with EnvironmentOverlay():`` worker threads may have variables of their own."""

    def __enter__(self) -> None:
        self._before = type(os.environ)
        os.environ.__class__ = _WorkerEnviron

    def __exit__(self, *exception: object) -> None:
        os.environ.__class__ = self._before

    @staticmethod
    def set_for_this_thread(values: Mapping[str, str]) -> None:
        """Lay *values* over the environment, for the calling thread."""
        _overlay.values = dict(values)


class RandomStates:
    """The process's random generators, held by one owner at a time.

    As a context manager it gives the process its own states back at the end.
    """

    def __init__(self, seed: int) -> None:
        self._owner: int | None = None
        self._saved: dict[int, tuple[Any, ...]] = {}
        self._seed = seed

    def __enter__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.init()  # later, a worker could find another one's states there
        self._before = _get_states()

    def __exit__(self, *exception: object) -> None:
        _set_states(self._before)

    def hand_to(self, worker: int) -> None:
        """Make the generators *worker*'s; at its first turn they are seeded."""
        if worker == self._owner:
            return
        if self._owner is not None:
            self._saved[self._owner] = _get_states()
        self._owner = worker
        saved = self._saved.pop(worker, None)
        if saved is None:
            numpy_random = sys.modules.get("numpy.random")
            if numpy_random is not None:
                numpy_random.set_bit_generator(numpy_random.MT19937())
            seed_everything(self._seed)
        else:
            _set_states(saved)


class UndrawnRandomStates:
    """Instead of `RandomStates`, for bodies that draw from no global generator: exchanging states
    is half of what a hand-over costs. *drawn* says, at the end, whether somebody did draw: then
    workers have shared one generator, and what they computed is not what they compute alone."""

    drawn = False

    def __enter__(self) -> None:
        self._before = random_states()

    def __exit__(self, *exception: object) -> None:
        self.drawn = not _alike(self._before, random_states())
        if self.drawn:
            set_random_states(self._before)

    def hand_to(self, worker: int) -> None:
        """Nothing is exchanged."""


def _alike(some: Any, others: Any) -> bool:
    if isinstance(some, torch.Tensor):
        return torch.equal(some, others)
    if isinstance(some, dict):  # others: numpy may have been loaded meanwhile
        return all(_alike(state, others[key]) for key, state in some.items())
    if isinstance(some, list):
        return all(map(_alike, some, others))
    return bool(some == others)


@contextmanager
def thread_count_kept() -> Iterator[None]:
    """Undo, for threads that the process starts later, ``torch.set_num_threads`` of the
    worker threads."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class MainModules:
    """Each worker's own ``__main__``."""

    def __init__(self) -> None:
        self._modules: dict[int, ModuleType] = {}

    def __enter__(self) -> None:
        self._before = sys.modules["__main__"]

    def __exit__(self, *exception: object) -> None:
        sys.modules["__main__"] = self._before

    def register(self, worker: int, module: ModuleType) -> None:
        """*module* is ``__main__`` while *worker* runs."""
        self._modules[worker] = module
        sys.modules["__main__"] = module

    def hand_to(self, worker: int) -> None:
        """Make ``__main__`` *worker*'s."""
        module = self._modules.get(worker)
        if module is not None:
            sys.modules["__main__"] = module


def _get_states() -> tuple[Any, ...]:
    numpy_random = sys.modules.get("numpy.random")
    cuda = torch.cuda.is_initialized()
    return (
        random.getstate(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if cuda else None,
        _get_numpy_state() if numpy_random is not None else None,
    )


def _get_numpy_state() -> tuple[Any, Any]:
    # The generator is an object that can be exchanged: 35 us cheaper than copying its
    # state back. Beside it numpy may hold a spare normal number, which is rarely there.
    numpy_random = sys.modules["numpy.random"]
    state = numpy_random.get_state(legacy=False)
    return numpy_random.get_bit_generator(), state if state["has_gauss"] else None


def _set_states(states: tuple[Any, ...]) -> None:
    python, cpu, cuda, numpy_state = states
    random.setstate(python)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    if numpy_state is not None:
        bit_generator, with_spare = numpy_state
        sys.modules["numpy.random"].set_bit_generator(bit_generator)
        if with_spare is not None:
            sys.modules["numpy.random"].set_state(with_spare)
