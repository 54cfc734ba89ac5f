"""The functions that a training script calls beside `distribute`; the same in every runtime."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

from paceline.core.step_loggers import StepCallback, report
from paceline.errors import UsageError
from paceline.interfaces import Runtime, current_runtime
from paceline.interfaces.trainings import TrainingRegistry
from paceline.records import StepRecord
from paceline.runtimes.join import join_runtime

Item = TypeVar("Item")


def init() -> None:
    """Join the job, and make sure that torch.distributed is initialized. Collective.

    torchrun's variables or the simulation name the worker. Without them the job has one worker.
    `paceline.distribute` also calls `init`. A second call has no effect.

    Example:
        ::

            paceline.init()
            data = data[paceline.rank() :: paceline.world_size()]

    Raises:
        UsageError: A launcher's variable is wrong, or two of them contradict each other.
    """
    join_runtime().connect()


def rank() -> int:
    """Return this worker's number, 0 to `world_size` - 1.

    Raises:
        UsageError: Neither `init` nor `distribute` was called before.

    Example:
        ::

            if paceline.rank() == 0:
                print(accuracy)
    """
    return _runtime().rank


def world_size() -> int:
    """Return the number of workers of the job.

    Raises:
        UsageError: Neither `init` nor `distribute` was called before.

    Example:
        ::

            batch_size = 256 // paceline.world_size()
    """
    return _runtime().size


def runtime_name() -> str:
    """Return the name of the runtime: ``"real"``, ``"emulated"`` or ``"simulated"``.

    Raises:
        UsageError: Neither `init` nor `distribute` was called before.
    """
    return _runtime().name


def now() -> float:
    """Return the seconds on this runtime's clock, from an arbitrary origin.

    In the simulated runtime this is virtual time.

    Raises:
        UsageError: Neither `init` nor `distribute` was called before.

    Example:
        ::

            start = paceline.now()
            evaluate(model)
            paceline.log(evaluation_seconds=paceline.now() - start)
    """
    return _runtime().clock.now()


def pace(seconds: float) -> None:
    """Spend compute time: sleep, or advance the virtual clock.

    In the simulated runtime the compute time of a script that calls this is only the time that it
    asks for here.

    Args:
        seconds: Seconds on a worker of speed 1, zero or more. A worker of speed 0.5 takes twice as
            long.

    Raises:
        UsageError: *seconds* is negative or NaN, or neither `init` nor `distribute` was called before.

    Example:
        ::

            paceline.pace(0.1)  # a forward pass of 0.1 s
    """
    if not seconds >= 0:
        raise UsageError(f"pace(): expected zero or more seconds, got {seconds}")
    _runtime().clock.pace(seconds)


def log(**metrics: object) -> None:
    """Add metrics to the record of the present step.

    Args:
        **metrics: Numbers or one-element tensors, by name. Reports show ``loss``.

    Raises:
        UsageError: A value is neither, or neither `init` nor `distribute` was called before.

    Example:
        ::

            paceline.log(loss=loss, accuracy=0.93)
    """
    _runtime().recorder.log(metrics)


@overload
def steps() -> Iterator[int]: ...


@overload
def steps(of: Iterable[Item]) -> Iterator[Item]: ...


def steps(of: Iterable[Any] | None = None) -> Iterator[Any]:
    """Iterate over *of* until ``--steps`` optimizer steps are done. Joins the job.

    A loop over `steps` then ends, and the script continues after the loop. In any other loop the
    last ``optimizer.step()`` raises `SystemExit`. Of nested loops, such as epochs and batches, each
    must be a loop over `steps`.

    Args:
        of: A loader, or a range of epochs; without it 0, 1, 2 and so on.

    Yields:
        The items of *of*.

    Example:
        ::

            for epoch in paceline.steps(range(10)):
                for inputs, labels in paceline.steps(loader):
                    ...
    """
    job = join_runtime().registry
    return _until_ended(job, itertools.count() if of is None else of)


def _until_ended(job: TrainingRegistry, items: Iterable[Any]) -> Iterator[Any]:
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
    """Call *callback* with this worker's record of each step, when the step has ended. Joins the job.

    A record has the step's times of computing and waiting, its bytes, and the values that the
    script logged. ``record.figures`` are the method's own: rounds, staleness, a budget, the norm of
    the compression error so far. Every worker calls *callback*: test ``paceline.rank() == 0`` where
    one is enough.

    Args:
        callback: Called on the training's own thread: a slow one makes steps longer, and an error
            that it raises ends the training.

    Example:
        ::

            paceline.on_step(lambda record: print(record.step_seconds))
    """
    runtime = join_runtime()
    runtime.connect()
    runtime.recorder.subscribe(StepCallback(callback), figures=True)


def report_to(where: str) -> None:
    """Send worker 0's step records to a tracker. Joins the job.

    The script's open run of W&B or MLflow is used; without one, a new run begins.

    Args:
        where: ``"tensorboard:FOLDER"``, ``"wandb:PROJECT"``, ``"mlflow:EXPERIMENT"`` or
            ``"csv:FILE"``.

    Raises:
        UsageError: *where* names none of these, or its package is not installed.

    Example:
        ::

            paceline.report_to("csv:steps.csv")
    """
    report(join_runtime(), where)


def _runtime() -> Runtime:
    runtime = current_runtime()
    if runtime is None:
        raise UsageError("call paceline.init() or paceline.distribute(...) first")
    return runtime
