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


class Told:
    """A `RecordListener` that passes steps on."""

    def __init__(self, callback: Callable[[StepRecord], None]) -> None:
        self._callback = callback

    def step(self, record: StepRecord) -> None:
        self._callback(record)

    def span(self, span: Span) -> None:
        """Nobody has asked for these."""


def report(runtime: Runtime, where: str) -> None:
    """Send worker 0's records there, from now on until its script ends."""
    runtime.connect()
    if runtime.rank == 0:
        sink = Dispensable(where, sink_for(where))
        runtime.recorder.subscribe(Told(sink.step), figures=True)
        runtime.registry.at_exit(sink.close)
        # Close at the interpreter's end, too. A script that fails does not reach the job's own
        # exit functions, and its steps until then help to find the cause. W&B stops its service
        # at the interpreter's end; functions registered later are called earlier.
        atexit.register(sink.close)


class Dispensable:
    """A sink of *place* without which training goes on: a server that is away, or a full disk, costs the
    figures alone."""

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
        """Nothing more will come; again is harmless."""
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
    """Where the command line says, from the first training on."""
    where = runtime.registry.options.report_to
    if where is not None and not runtime.registry.trainings:
        report(runtime, where)


def numbers_of(record: StepRecord) -> dict[str, float]:
    """What a record says, by name: seconds, bytes, the method's own figures, and what was logged and
    is a number."""
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
    """A row a step; metrics that come later than the first step's stand in a column ``more``.

    A file that is there is begun anew with the job's first step. Where worker 0 comes back into a job that
    survives, its rows go on below those of its earlier incarnations.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise UsageError("report to csv: expected a file, such as csv:steps.csv")
        self._path = Path(name)
        try:
            # This may be a later incarnation. Keep earlier rows until the number of the first
            # step shows that.
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
        """The header, unless the columns of earlier incarnations are there."""
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
    """Scalars in a folder of TensorBoard's."""

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
"""A row for each place; what stands after its colon is its to read."""


def _needs(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"reporting to {package} needs it: pip install {package}"
        ) from None
