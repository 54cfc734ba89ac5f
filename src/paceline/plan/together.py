"""Many predictions, in this process or in some beside it: the same ones either way."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from paceline.plan.predict import Job, Prediction, Refused, predict


class Predict(Protocol):
    """Answers in the order of *specs*, as they come."""

    def __call__(
        self, job: Job, specs: Sequence[str], *, short: bool
    ) -> Iterator[Prediction | Refused]: ...


def in_this_process(
    job: Job, specs: Sequence[str], *, short: bool
) -> Iterator[Prediction | Refused]:
    """One after the other."""
    return (predict(job, spec, short=short) for spec in specs)


@contextmanager
def in_processes(count: int) -> Iterator[Predict]:
    """Within it, so many at a time; by this process alone where *count* is 1, and for what cannot
    be handed over, such as an optimizer of the script's own."""
    if count == 1:
        yield in_this_process
        return
    # A fork of a process with threads, as torch's autograd engine has, can hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    )

    def predict_all(
        job: Job, specs: Sequence[str], *, short: bool
    ) -> Iterator[Prediction | Refused]:
        try:
            pickle.dumps(job)
        except Exception:
            return in_this_process(job, specs, short=short)
        return pool.map(partial(predict, job, short=short), specs)

    try:
        yield predict_all
    finally:
        pool.shutdown(cancel_futures=True)
