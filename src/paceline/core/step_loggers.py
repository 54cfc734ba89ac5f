"""Loggers of steps: each step's record, in the user's own tool.

A sink turns a `StepRecord` into numbers by name: those that the script logged under its own names, and
the step's seconds and bytes under ``paceline/``.
"""

from __future__ import annotations

import atexit
import csv
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

from paceline.errors import UsageError, unknown
from paceline.interfaces import Runtime
from paceline.records import Span, StepRecord


class Sink(Protocol):
    """Takes records, one a step, and is closed at the end."""

    def step(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class StepCallback:
    """A `RecordListener` that calls a function with each step's record."""

    def __init__(self, callback: Callable[[StepRecord], None]) -> None:
        self._callback = callback

    def step(self, record: StepRecord) -> None:
        self._callback(record)

    def span(self, span: Span) -> None:
        """Ignore spans."""


def report(runtime: Runtime, where: str) -> None:
    """Send worker 0's records to *where*, until its script ends."""
    runtime.connect()
    if runtime.rank == 0:
        sink = OptionalSink(where, sink_for(where))
        runtime.recorder.subscribe(StepCallback(sink.step), figures=True)
        runtime.registry.at_exit(sink.close)
        # Close at the interpreter's end, too. A script that fails does not reach the job's own
        # exit functions, and its steps until then help to find the cause. W&B stops its service
        # at the interpreter's end; functions registered later are called earlier.
        atexit.register(sink.close)


class OptionalSink:
    """A sink of *place* whose failure does not stop the training.

    If its server is unreachable or the disk is full, only the figures are lost.
    """

    def __init__(self, place: str, sink: Sink) -> None:
        self._place = place
        self._sink: Sink | None = sink

    def step(self, record: StepRecord) -> None:
        if self._sink is not None:
            try:
                self._sink.step(record)
            except Exception as error:
                self._give_up(f"from step {record.step} on", error)

    def close(self) -> None:
        """Close the sink; a second call does nothing."""
        sink = self._sink
        if sink is not None:
            try:
                sink.close()
            except Exception as error:
                self._give_up("at its end", error)
        self._sink = None

    def _give_up(self, when: str, error: Exception) -> None:
        self._sink = None
        print(
            f"paceline: nothing is reported to {self._place} {when}: "
            f"{type(error).__name__}: {error}",
            file=sys.stderr,
        )


def report_as_asked(runtime: Runtime) -> None:
    """Begin to report where the command line asks for it, before the first training."""
    where = runtime.registry.options.report_to
    if where is not None and not runtime.registry.trainings:
        report(runtime, where)


def numbers_of(record: StepRecord) -> dict[str, float]:
    """A record's numbers by name: seconds, bytes, the method's figures, and logged numbers."""
    ours = {
        "paceline/step_seconds": record.step_seconds,
        "paceline/compute_seconds": record.compute_seconds,
        "paceline/exposed_seconds": record.exposed_communication_seconds,
        "paceline/bytes_sent": float(record.bytes_sent),
    }
    ours |= {f"paceline/{name}": value for name, value in record.figures.items()}
    logged = {n: v for n, v in record.metrics.items() if v is not None}
    return ours | logged


def sink_for(where: str) -> Sink:
    """The sink of ``KIND`` or ``KIND:NAME``. Raises `UsageError`."""
    check_place(where)
    kind, _, name = where.partition(":")
    return SINKS[kind](name)


def check_place(where: str) -> None:
    """Raise `UsageError` for an unknown kind, before workers are started."""
    kind = where.partition(":")[0]
    if kind not in SINKS:
        raise UsageError(unknown("place to report to", kind, SINKS))


class Csv:
    """One row per step. Metrics that first appear after the first step are in a column ``more``.

    The job's first step overwrites an existing file. If worker 0 is restarted under ``--survive``,
    its rows follow those of its earlier incarnations.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise UsageError("report to csv: expected a file, such as csv:steps.csv")
        self._path = Path(name)
        try:
            # This may be a later incarnation: keep earlier rows until the number of the first
            # step shows which one it is.
            self._file: TextIO = self._path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {name}: {error.strerror}") from None
        self._rows = csv.writer(self._file)
        self._names: list[str] = []

    def step(self, record: StepRecord) -> None:
        numbers = numbers_of(record)
        if not self._names:
            self._begin(record.step, list(numbers))
        more = " ".join(f"{n}={v}" for n, v in numbers.items() if n not in self._names)
        row = [numbers.get(name, "") for name in self._names]
        self._rows.writerow([record.step, record.end_seconds, *row, more])
        self._file.flush()

    def _begin(self, step: int, names: list[str]) -> None:
        """Write the header, unless the file has one of an earlier incarnation."""
        if self._path.is_file():  # a pipe or /dev/null has no earlier rows
            if step == 1:
                self._file.truncate(0)
            elif columns := self._columns():
                self._names = columns
                return
        self._names = names
        self._rows.writerow(["step", "seconds", *names, "more"])

    def _columns(self) -> list[str]:
        with self._path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
        return header[2:-1] if header[:2] == ["step", "seconds"] else []

    def close(self) -> None:
        self._file.close()


FLUSH_SECONDS = 10


class TensorBoard:
    """Scalars in a TensorBoard log folder."""

    def __init__(self, name: str) -> None:
        module = _needs("torch.utils.tensorboard", "tensorboard")
        # The default of two minutes is long for a user who watches.
        self._writer = module.SummaryWriter(name or None, flush_secs=FLUSH_SECONDS)

    def step(self, record: StepRecord) -> None:
        for name, value in numbers_of(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The script's own run, or one of project *name*; offline if W&B is configured so."""

    def __init__(self, name: str) -> None:
        wandb = _needs("wandb", "wandb")
        self._ours = wandb.run is None
        self._run = wandb.run or wandb.init(project=name or None)

    def step(self, record: StepRecord) -> None:
        # W&B's own step rises with each log, including the script's: ours is a separate number.
        self._run.log({"paceline/step": record.step, **numbers_of(record)})

    def close(self) -> None:
        if self._ours:
            self._run.finish()


class MLflow:
    """The script's own run, or one of experiment *name*."""

    def __init__(self, name: str) -> None:
        self._mlflow = _needs("mlflow", "mlflow")
        self._ours = self._mlflow.active_run() is None
        if self._ours:
            if name:
                self._mlflow.set_experiment(name)
            self._mlflow.start_run()

    def step(self, record: StepRecord) -> None:
        self._mlflow.log_metrics(numbers_of(record), step=record.step)

    def close(self) -> None:
        if self._ours:
            self._mlflow.end_run()


SINKS: dict[str, Callable[[str], Sink]] = {
    "csv": Csv,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""A sink class for each kind of place. It gets the text after the colon."""


def _needs(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"reporting to {package} needs it: pip install {package}"
        ) from None
