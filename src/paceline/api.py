"""What a training script calls beside `distribute`; the same in every runtime."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

from paceline.core.step_loggers import Told, report
from paceline.errors import UsageError
from paceline.interfaces import Runtime, current_runtime
from paceline.interfaces.trainings import Job
from paceline.records import StepRecord
from paceline.runtimes.join import join_runtime

Item = TypeVar("Item")


def init() -> None:
    """Join the job: the worker that torchrun's variables name, or the simulated worker that
    this script runs in; without either, a job of one.

    Initializes torch.distributed if the script has not. Again is harmless.
    """
    join_runtime().connect()


def rank() -> int:
    """This worker's number, 0 to `world_size` - 1."""
    return _runtime().rank


def world_size() -> int:
    """Number of workers."""
    return _runtime().size


def runtime_name() -> str:
    """``"real"``, ``"emulated"`` or ``"simulated"``."""
    return _runtime().name


def now() -> float:
    """Seconds on this runtime's clock, from an arbitrary origin."""
    return _runtime().now()


def pace(seconds: float) -> None:
    """Spend *seconds* of compute time: sleeps, or moves the virtual clock.

    In the simulated runtime a script that calls this is charged nothing else for computing,
    and a worker of speed 0.5 takes twice as long.
    """
    if not seconds >= 0:
        raise UsageError(f"pace(): expected zero or more seconds, got {seconds}")
    _runtime().pace(seconds)


def log(**metrics: object) -> None:
    """Note metrics (numbers or one-element tensors) for the records and the tables."""
    _runtime().journal.log(metrics)


@overload
def steps() -> Iterator[int]: ...


@overload
def steps(of: Iterable[Item]) -> Iterator[Item]: ...


def steps(of: Iterable[Any] | None = None) -> Iterator[Any]:
    """What *of* has, a loader or a range of epochs, or without it 0, 1, 2 and so on: until as many
    optimizer steps were done as ``--steps`` asks for. Joins the job.

    A loop over this ends by itself then, and what stands after it is run. In any other loop the last
    ``optimizer.step()`` raises `SystemExit`. Of loops in each other, such as epochs and batches, each is one over this.
    """
    job = join_runtime().job
    return _until_ended(job, itertools.count() if of is None else of)


def _until_ended(job: Job, items: Iterable[Any]) -> Iterator[Any]:
    if job.ended:
        return
    job.loops += 1
    try:
        for item in items:
            yield item
            if job.ended:
                return
    finally:
        job.loops -= 1


def on_step(callback: Callable[[StepRecord], None]) -> None:
    """Call *callback* with this worker's record of each step, from now on, when the step has
    ended: its seconds, computing and waiting, bytes, and what was logged in it. Joins the job.
    ``record.figures`` are the method's own: rounds, staleness, a budget, the norm of what compression has
    left out so far.

    It runs in the training's own thread, so what takes long makes steps longer; what it raises ends the
    training. Records come on every worker: ``if paceline.rank() == 0`` where one is enough.
    """
    runtime = join_runtime()
    runtime.connect()
    runtime.journal.tell(Told(callback), figures=True)


def report_to(where: str) -> None:
    """Send worker 0's step records to what people look at: ``"tensorboard:FOLDER"``, ``"wandb:PROJECT"``,
    ``"mlflow:EXPERIMENT"``, ``"csv:FILE"``. Joins the job.

    Of W&B and MLflow a run that the script has begun is used, else one is begun. Raises `UsageError` for what
    nobody knows, and where the package is missing.
    """
    report(join_runtime(), where)


def _runtime() -> Runtime:
    runtime = current_runtime()
    if runtime is None:
        raise UsageError("call paceline.init() or paceline.distribute(...) first")
    return runtime
