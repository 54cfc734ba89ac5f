"""Makes many predictions in one or several processes, with the same answers in the same order.

The cost of predictions is counted in simulated events: events of the simulator's clock, plus the tensors in the
workers' steps. Unlike time, that is the same on every machine.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from paceline.cluster import Cluster
from paceline.collectives.registry import COLLECTIVES
from paceline.compression import COMPRESSORS
from paceline.methods import METHODS
from paceline.runtimes.python_internals import end_pool
from paceline.tools.plan.estimates import Estimate, Fidelity, Infeasible
from paceline.tools.plan.predict import MakeOptimizer, TrainingJob, predict
from paceline.transport.liveness import end_with_parent, without_interrupts

EVENTS_PER_SECOND = 5_000
"""Simulated events in a second of one core; an event takes 0.13 to 0.24 ms. It sets defaults and patience; no
decision depends on it."""
USUAL_SECONDS, MORE_SECONDS, FEW_WORKERS = 140.0, 16.0, 16
"""Seconds of one core for a plan, and for each worker beyond so many."""
IN_FLIGHT = 2
"""Predictions that each process has or will get, so that none waits for work."""

Result = TypeVar("Result")


def usual_events(cluster: Cluster) -> int:
    """Return the default limit on a plan's simulated events.

    It is enough for all candidates of usual models on up to `FEW_WORKERS` workers.
    """
    more = MORE_SECONDS * max(0, cluster.workers - FEW_WORKERS)
    return round(EVENTS_PER_SECOND * (USUAL_SECONDS + more))


class Predictor:
    """Makes predictions, and counts the simulated events that they take.

    Answers come in the order of the questions, and their events are counted in that order. So
    neither the answers nor the point where `max_events` ends them depends on the number of
    processes. Other processes end with the ``with`` block.

    Args:
        processes: Simultaneous predictions. With 1, this process makes them. It also makes those that
            other processes cannot: with the script's own optimizer class, or with registries to which
            the script has added rows.

    Attributes:
        events: Simulated events so far.
    """

    def __init__(self, processes: int = 1, max_events: float = math.inf) -> None:
        self.max_events = max_events
        self.events = 0
        self._in_flight = IN_FLIGHT * processes
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            # A fork of a process with threads, such as torch's autograd engine, can hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                processes, mp_context=context, initializer=_begin
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            end_pool(self._pool)  # predictions in progress are dropped

    @property
    def events_left(self) -> float:
        """Simulated events until `max_events`."""
        return max(0.0, self.max_events - self.events)

    def predict(
        self,
        asked: Sequence[tuple[TrainingJob, str]],
        fidelity: Fidelity = "full",
        *,
        until: float | None = None,
    ) -> Iterator[Estimate | Infeasible]:
        """Predict each job with its spec.

        Args:
            asked: Jobs and specs.
            fidelity: See `predict.predict`.
            until: Value of `events` at which to stop (None: `max_events`).

        Yields:
            The answers, in the order of `asked`; fewer where the limit is reached.
        """
        return self.map(partial(_predict, fidelity=fidelity), asked, until=until)

    def map(
        self,
        function: Callable[..., tuple[Result, int]],
        asked: Sequence[tuple[Any, ...]],
        *,
        until: float | None = None,
    ) -> Iterator[Result]:
        """Call a function with each tuple of arguments.

        Args:
            function: A module-level function. It returns a result, and its simulated events.
            asked: Its arguments.
            until: Value of `events` at which to stop (None: `max_events`).

        Yields:
            The results, in the order of `asked`; fewer where the limit is reached.
        """
        limit = self.max_events if until is None else until
        with closing(self._answers(function, asked)) as answers:
            while self.events < limit:
                answer = next(answers, None)
                if answer is None:
                    return
                result, events = answer
                self.events += events
                yield result

    def _answers(
        self,
        function: Callable[..., tuple[Result, int]],
        asked: Sequence[tuple[Any, ...]],
    ) -> Generator[tuple[Result, int], None, None]:
        pool = self._pool
        if pool is None or has_rows_of_others() or not _can_travel(asked):
            yield from (function(*arguments) for arguments in asked)
            return
        rest = iter(asked)
        pending: deque[Future[tuple[Result, int]]] = deque()

        def submit(count: int) -> None:
            with without_interrupts():  # it may start a process
                pending.extend(
                    pool.submit(function, *arguments)
                    for arguments in islice(rest, count)
                )

        try:
            submit(self._in_flight)
            while pending:
                answer = pending.popleft().result()
                submit(1)
                yield answer
        finally:
            for future in pending:
                future.cancel()


def has_rows_of_others() -> bool:
    """Return whether the script, or a module that it imports, has added rows to a registry.

    Other processes would not know these rows.
    """
    rows = (*METHODS.values(), *COLLECTIVES.values(), *COMPRESSORS.values())
    ours = __name__.partition(".")[0]
    return any(row.__module__.partition(".")[0] != ours for row in rows)


def _can_travel(asked: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether another process can unpickle the questions.

    It cannot import modules of the script's folder.
    """
    jobs = (part for one in asked for part in one if isinstance(part, TrainingJob))
    if not all(is_known_elsewhere(job.optimizer) for job in jobs):
        return False
    try:
        pickle.dumps(asked)
    except Exception:
        return False
    return True


def is_known_elsewhere(make: MakeOptimizer) -> bool:
    """Return whether an optimizer's class is torch's or paceline's."""
    module = str(getattr(getattr(make, "func", make), "__module__", ""))
    return module.partition(".")[0] in ("torch", __name__.partition(".")[0])


def _predict(
    job: TrainingJob, spec: str, *, fidelity: Fidelity
) -> tuple[Estimate | Infeasible, int]:
    found = predict(job, spec, fidelity)
    return found, 0 if isinstance(found, Infeasible) else found.events


def _begin() -> None:
    """Initialize a process of the pool, which ends when its parent is killed."""
    end_with_parent()
    torch.set_num_threads(1)
