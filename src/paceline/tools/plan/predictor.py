"""Many predictions, in this process or in some beside it: the same ones either way."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

import torch

from paceline.collectives.registry import COLLECTIVES
from paceline.compression import COMPRESSORS
from paceline.methods import METHODS
from paceline.runtimes.python_internals import end_pool
from paceline.tools.plan.estimates import Estimate, Infeasible
from paceline.tools.plan.predict import TrainingJob, predict
from paceline.tools.plan.prediction_cost import cost
from paceline.transport.liveness import end_with_parent, without_interrupts

A = TypeVar("A")
B = TypeVar("B")


class Predict(Protocol):
    """Answers in the order of what is asked, as they come."""

    def __call__(
        self, job: TrainingJob, specs: Sequence[str], *, short: bool
    ) -> Iterator[Estimate | Infeasible]:
        """Of one job by each of *specs*."""
        ...

    def each(
        self, asked: Sequence[tuple[TrainingJob, str]], *, short: bool = False
    ) -> Iterator[Estimate | Infeasible]:
        """Of jobs, each by its spec."""
        ...

    def map(
        self, function: Callable[[A], B], asked: Sequence[A], prices: Sequence[float]
    ) -> Iterator[B]:
        """What *function*, of a module, makes of each; in the order of *asked*. *prices*: about how long
        each takes."""
        ...


class _InThisProcess:
    """One after the other."""

    def __call__(
        self, job: TrainingJob, specs: Sequence[str], *, short: bool
    ) -> Iterator[Estimate | Infeasible]:
        return self.each([(job, spec) for spec in specs], short=short)

    def each(
        self, asked: Sequence[tuple[TrainingJob, str]], *, short: bool = False
    ) -> Iterator[Estimate | Infeasible]:
        prices = [cost(job, spec, short=short) for job, spec in asked]
        return self.map(partial(_predict, short=short), asked, prices)

    def map(
        self, function: Callable[[A], B], asked: Sequence[A], prices: Sequence[float]
    ) -> Iterator[B]:
        return map(function, asked)


in_this_process = _InThisProcess()


class _Pool(_InThisProcess):
    """So many at a time as *pool* has processes, the longest first, so that none of them is left with a
    long one at the end; here, what cannot be handed over."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def map(
        self, function: Callable[[A], B], asked: Sequence[A], prices: Sequence[float]
    ) -> Iterator[B]:
        if has_rows_of_others() or not _can_be_handed_over(asked):
            return super().map(function, asked, prices)
        longest_first = sorted(range(len(asked)), key=lambda i: -prices[i])
        with without_interrupts():
            under_way = {
                i: self._pool.submit(function, asked[i]) for i in longest_first
            }
        return (under_way[i].result() for i in range(len(asked)))


def _can_be_handed_over(asked: object) -> bool:
    try:
        pickle.dumps(asked)
    except Exception:
        return False
    return True


def has_rows_of_others() -> bool:
    """Whether the script, or what it imports, has put rows into a registry: another process would not
    know them."""
    rows = (*METHODS.values(), *COLLECTIVES.values(), *COMPRESSORS.values())
    ours = __name__.partition(".")[0]
    return any(row.__module__.partition(".")[0] != ours for row in rows)


def _begin() -> None:
    """A process of the pool: it waits for what is asked next, and nobody asks any more once its
    parent was killed."""
    end_with_parent()
    torch.set_num_threads(1)


def _predict(asked: tuple[TrainingJob, str], *, short: bool) -> Estimate | Infeasible:
    return predict(*asked, "short" if short else "full")


@contextmanager
def in_processes(count: int) -> Iterator[Predict]:
    """Within it, so many at a time; by this process alone where *count* is 1, and for what cannot
    be handed over, such as an optimizer of the script's own."""
    if count == 1:
        yield in_this_process
        return
    # A fork of a process with threads, as torch's autograd engine has, can hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin)
    try:
        yield _Pool(pool)
    finally:
        end_pool(pool)  # what it still does is for nobody
