"""Trains one script with several methods, each in a process of its own.

Start at `run_variants`. A `Goal` is a target value of a metric.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.records import StepRecord
from paceline.runtimes.processes import as_launcher, end_all, ends_with_this
from paceline.runtimes.progress import FILE_VARIABLE
from paceline.runtimes.results import FailedRun, Outcome, RunResult
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.tools.report.run_files import claim, make_folder
from paceline.transport.liveness import without_interrupts

ROUNDING = 1e-6
"""Relative tolerance: 342 of 360 in single precision is a little less than 0.95."""
MOST_AT_ONCE = 2
"""Variants that train at the same time: each holds a model for every worker."""
_VERBS = {"simulated": "simulate", "real": "run", "emulated": "emulate"}
_RECORDS = "records.jsonl"
_OURS = "paceline: "


Curve = Sequence[tuple[StepRecord, float]]
"""Values of a metric, each with the step that logged it."""


@dataclass(frozen=True)
class Goal:
    """A logged *metric* and its *value*."""

    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"

    @classmethod
    def read(cls, text: str) -> Goal:
        """Parse text such as ``accuracy=0.95``."""
        metric, equals, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not metric or not equals or not math.isfinite(value):
            raise UsageError(
                f"--until: expected METRIC=VALUE, such as accuracy=0.95, got {text!r}"
            )
        return cls(metric, value)

    def check_logged(self, metrics: Mapping[str, float | None]) -> None:
        """Raise `UsageError` if a script logged only other *metrics*."""
        if self.metric not in metrics:
            there = ", ".join(sorted(metrics)) or "none"
            raise UsageError(
                f"--until {self}: the script logs no such metric (it logs {there}): "
                f"paceline.log({self.metric}=...)"
            )

    def curve(self, steps: Sequence[StepRecord], last: float | None) -> Curve:
        """Return the values that one worker logged, each with its step.

        Args:
            steps: The worker's steps.
            last: The metric after the last step, if any was logged there.
        """
        values = [
            (step, value)
            for step in steps
            if (value := step.metrics.get(self.metric)) is not None
        ]
        if last is not None and steps:
            values.append((steps[-1], last))
        return values

    def rises(self, curves: Sequence[Curve]) -> bool:
        """Return whether larger values are better, judged by most runs.

        If no run shows it, larger values are better if a run begins at the goal or below it.
        """
        firsts = [curve[0][1] for curve in curves if curve]
        lasts = [curve[-1][1] for curve in curves if curve]
        pairs = list(zip(firsts, lasts, strict=True))
        up = sum(last > first for first, last in pairs)
        down = sum(last < first for first, last in pairs)
        if up != down:
            return up > down
        return any(first <= self.value for first in firsts)

    def reached(self, values: Curve, rises: bool) -> StepRecord | None:
        """Return the first step whose metric is at least as good as the goal."""
        near = ROUNDING * abs(self.value)
        return next(
            (
                step
                for step, value in values
                if (value >= self.value - near if rises else value <= self.value + near)
            ),
            None,
        )


@dataclass(frozen=True)
class Variant:
    """A method's spec, as given, and its place in the table.

    *consistency* is empty if the method is chosen during training. *predicted*: seconds of a step in a plan.
    """

    number: int
    spec: str
    consistency: str = ""
    predicted: float | None = None

    @property
    def file_name(self) -> str:
        """A name for its files: its number and the spec, with safe characters only."""
        return f"{self.number + 1}-{re.sub(r'[^A-Za-z0-9.-]+', '-', self.spec)}"


@dataclass(frozen=True)
class VariantRun:
    """A variant after its run.

    Attributes:
        outcome: The result or the failure.
        steps: The steps of all workers.
        reached: The step that reached the goal, if any.
    """

    variant: Variant
    outcome: Outcome
    steps: Sequence[StepRecord] = ()
    reached: StepRecord | None = None

    @property
    def result(self) -> RunResult | None:
        """The outcome of a successful run."""
        return self.outcome if isinstance(self.outcome, RunResult) else None


class VariantStep(StepRecord, kw_only=True):
    """A step's record with the name of its variant."""

    variant: str


@dataclass(frozen=True, kw_only=True)
class Training:
    """The job that variants share: the script, the runtime, and the command's other *options*.

    Records are written to *folder*.
    """

    script: str
    arguments: Sequence[str]
    runtime: str
    options: Sequence[str]
    folder: Path


def number_at_once(runtime: str, *, measures: bool, processes: int) -> int:
    """Return how many variants to train at the same time.

    It is one if the variants' clock is this machine's: in real time, or if compute times are measured.
    """
    if runtime != "simulated" or measures:
        return 1
    return min(MOST_AT_ONCE, processes)


def run_variants(
    variants: Sequence[Variant],
    training: Training,
    goal: Goal | None,
    *,
    at_once: int,
    begin: Callable[[str, Path], Callable[[], None]],
    report: Callable[[str], None],
) -> list[VariantRun]:
    """Run each variant in a process of its own, and merge the records of the successful ones.

    Args:
        variants: The variants.
        training: The script, the runtime and the folder of the records.
        goal: The target value of a metric.
        at_once: Number of variants that run at the same time.
        begin: Shows that a variant runs: takes its name and the file of its progress; returns a
            function that ends the display.
        report: Prints a permanent line, such as the errors of a failed variant.
    """
    running: list[subprocess.Popen[str]] = []
    interrupted = threading.Event()

    def started(process: subprocess.Popen[str]) -> None:
        running.append(process)
        if interrupted.is_set():
            process.terminate()

    with scratch_folder() as folder:

        def run(variant: Variant) -> Outcome:
            file = Path(folder) / str(variant.number)
            end = begin(f"[{variant.number + 1}/{len(variants)}] {variant.spec}", file)
            environment = {FILE_VARIABLE: str(file), **as_launcher()}
            outcome, errors = run_variant(variant, training, environment, started)
            if isinstance(outcome, FailedRun) and not interrupted.is_set():
                report(f"{errors.strip()}\npaceline: variant {variant.spec!r} failed")
            end()
            return outcome

        with ThreadPoolExecutor(at_once) as pool:
            try:
                outcomes = list(pool.map(run, variants))
            except BaseException:
                interrupted.set()
                end_all(running)
                raise
    return merge_records(variants, outcomes, training.folder, goal)


def run_variant(
    variant: Variant,
    training: Training,
    environment: Mapping[str, str],
    started: Callable[[subprocess.Popen[str]], None],
) -> tuple[Outcome, str]:
    """Run one variant and read its result; its records stay in the folder.

    Args:
        variant: The variant.
        training: Everything that variants share.
        environment: Environment variables of this variant's process.
        started: Receives the process, which ignores Ctrl-C: the caller must end it.

    Returns:
        The outcome, and the process's standard error.
    """
    with _ONE_AT_A_TIME:
        claim(str(training.folder), variant.file_name)
        records = make_folder(str(training.folder / variant.file_name))
    verb = _VERBS[training.runtime]
    command = [
        *(sys.executable, "-m", "paceline", verb, training.script, "--json"),
        *(f"--method={variant.spec}", f"--records={records}", *training.options),
        *("--", *training.arguments),
    ]
    with without_interrupts():
        process = subprocess.Popen(
            ends_with_this(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
    started(process)
    printed, errors = process.communicate()
    status = process.returncode
    if status or not printed.strip():
        with suppress(OSError):
            records.rmdir()  # Fails if the folder is not empty.
        return FailedRun(failed=_reason(errors, status), exit_status=status), errors
    return msgspec.json.decode(printed, type=RunResult), errors


_ONE_AT_A_TIME = threading.Lock()
"""Serializes variants that run at the same time, since they claim files in one folder."""


def _reason(errors: str, status: int) -> str:
    """Return the cause of a failed run in one line: paceline's last error, or else the last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    ours = [line.removeprefix(_OURS) for line in lines if line.startswith(_OURS)]
    return (ours or lines or [f"exit status {status}"])[-1]


def merge_records(
    variants: Sequence[Variant],
    outcomes: Sequence[Outcome],
    folder: Path,
    goal: Goal | None = None,
) -> list[VariantRun]:
    """Read the records of all successful variants.

    Their steps are merged into ``records.jsonl``; each trace is named after its variant,
    ``NAME.trace.json``.
    """
    runs: list[VariantRun] = []
    curves: dict[int, Curve] = {}
    decode = msgspec.json.Decoder(StepRecord).decode_lines
    for variant, outcome in zip(variants, outcomes, strict=True):
        if isinstance(outcome, FailedRun):
            runs.append(VariantRun(variant, outcome))
            continue
        steps = decode((folder / variant.file_name / _RECORDS).read_bytes())
        if goal is not None:
            mine = [step for step in steps if step.worker == 0]
            last = outcome.metrics.get(goal.metric)
            curves[len(runs)] = goal.curve(mine, last)
        runs.append(VariantRun(variant, outcome, steps))
    if goal is not None:
        rises = goal.rises(list(curves.values()))
        for place, curve in curves.items():
            reached = goal.reached(curve, rises)
            runs[place] = replace(runs[place], reached=reached)
    ran = [run for run in runs if run.result is not None]
    names = [f"{run.variant.file_name}.trace.json" for run in ran]
    claim(str(folder), _RECORDS, *names)
    with (folder / _RECORDS).open("wb") as file:
        for run, name in zip(ran, names, strict=True):
            own = folder / run.variant.file_name
            for step in run.steps:
                fields = msgspec.structs.asdict(step)
                named = VariantStep(variant=run.variant.spec, **fields)
                file.write(msgspec.json.encode(named) + b"\n")
            (own / _RECORDS).unlink()
            (own / "records.trace.json").replace(folder / name)
            own.rmdir()
    return runs
