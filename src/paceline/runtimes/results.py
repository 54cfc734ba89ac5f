"""Collects the result of one run in one object, which ``--json`` prints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from paceline.records import StepRecorder, StepStats
from paceline.timeouts import timeouts
from paceline.units import show_count

FEW = 10
"""A median of fewer steady-state steps is not reliable."""


class RunResult(msgspec.Struct, kw_only=True):
    """The result of one run.

    Figures of a step are medians over a worker's last thousand steady-state steps, then means over
    workers. For methods with rounds they are medians of means: see `StepStats`.

    Attributes:
        steady_steps: Number of steps that the figures are of.
        steady_from: The first of them on rank 0, after tuning, trials, warm-ups and changes of the
            method. None: there were no steady-state steps.
        steady: Whether there were steady-state steps. If not, the figures are of other steps.
        asked: Number of steps that the user asked for.
        buckets: Number of the gradient's buckets at the end.
        metrics: The last values that rank 0 logged.
        network: Origin of the network.
        compute: Origin of compute times.
        notes: Sentences to print beside the figures.
        cautions: The notes that say why the figures are unreliable.
        method: The full spec.
        brief: The parts of the spec that differ from the defaults.
    """

    runtime: str
    workers: int
    method: str
    steps: int
    buckets: int
    step_seconds: float | None
    compute_seconds: float | None
    exposed_communication_seconds: float | None
    bytes_sent_per_worker: float | None
    metrics: dict[str, float | None]
    network: str = ""
    compute: str = ""
    brief: str = ""
    steady: bool = True
    steady_from: int | None = None
    steady_steps: int = 0
    asked: int | None = None
    methods: list[tuple[int, str]] = msgspec.field(default_factory=list)
    cautions: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @classmethod
    def of(
        cls,
        runtime: str,
        workers: int,
        recorder: StepRecorder,
        summaries: Sequence[StepStats],
        asked: int | None = None,
        before: int = 0,
    ) -> RunResult:
        """Make the result from rank 0's *recorder* and every worker's summary.

        *asked* is the requested number of steps of the job; *before* counts the steps that it had
        completed when rank 0 joined it.
        """

        def mean(field: str) -> float | None:
            values = [getattr(s, field) for s in summaries if s.steps]
            return fmean(values) if values else None

        steps = int(max(s.steps for s in summaries))
        steady_from = recorder.steady_from
        steady_steps = steps - steady_from + 1 if steady_from else 0
        cautions = []
        if asked is not None and before + recorder.step_count < asked:
            cautions.append(_ended_early(asked, before + recorder.step_count))
        if not steady_from:
            cautions.append(not_steady(steps, recorder))
        elif steady_steps < max(FEW, recorder.period):
            cautions.append(_few(steady_steps, recorder))
        notes = []
        if len(recorder.methods) > 1:
            notes.append(_changed(recorder))
        if recorder.period > 1 and steady_steps >= recorder.period:
            notes.append(
                f"steps repeat after {recorder.period}: figures are medians of means over so many"
            )
        return cls(
            runtime=runtime,
            workers=workers,
            method=recorder.method,
            brief=recorder.brief,
            steps=steps,
            buckets=recorder.buckets,
            step_seconds=mean("step_seconds"),
            compute_seconds=mean("compute_seconds"),
            exposed_communication_seconds=mean("exposed_communication_seconds"),
            bytes_sent_per_worker=mean("bytes_sent"),
            metrics=dict(recorder.metrics),
            steady=steady_from > 0,
            steady_from=steady_from or None,
            steady_steps=steady_steps,
            asked=asked,
            methods=list(recorder.methods),
            cautions=cautions,
            notes=[*cautions, *notes, *recorder.notes],
        )

    def to_json(self) -> str:
        """Return one line. Values that are not finite become null, as JSON cannot write them."""
        return msgspec.json.encode(self).decode()


@contextmanager
def standard_output_for_result(active: bool) -> Iterator[int]:
    """Send all prints in this context to standard error; yield a descriptor of the true output.

    Without *active*, nothing is moved.
    """
    if not active:
        yield 1
        return
    sys.stdout.flush()
    true_output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield true_output
    finally:
        sys.stdout.flush()
        os.dup2(true_output, 1)
        os.close(true_output)


def read_result(path: Path) -> RunResult | None:
    """Return the result that a job's rank 0 wrote to *path*; None: it wrote none."""
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=RunResult)


def _ended_early(asked: int, done: int) -> str:
    return f"asked for {asked} steps, and the script ended by itself after {show_count(done, 'step')}"


def not_steady(steps: int, recorder: StepRecorder) -> str:
    """Return why a run of *steps* steps did not reach steady state."""
    if not steps:
        return "no step was taken"
    if steps == 1 and recorder.steady_after == 1:
        return "one step only: its figures include the start-up"
    if not 0 < recorder.tuned_after < steps:
        why = "buckets were still being measured and tried"
    elif recorder.selecting:
        why = "methods were still being tried"
    else:
        why = f"the method needs {show_count(recorder.steady_after, 'step')}"
    return f"{show_count(steps, 'step')} did not reach steady state: {why}"


def _few(steady: int, recorder: StepRecorder) -> str:
    many = f"figures are of {show_count(steady, 'step')}, from step {recorder.steady_from} on"
    period = recorder.period
    wanted = recorder.steady_from - 1 + max(FEW, 4 * period if period > 1 else 0)
    if steady < period:
        many += f", and steps repeat after {period}"
    return f"{many}: train for {wanted} or more"


def _changed(recorder: StepRecorder) -> str:
    since, spec = recorder.methods[-1]
    return f"the method has changed while it trained; figures are of {spec}, from step {since + 1} on"


class FailedRun(msgspec.Struct, kw_only=True):
    """A run without a result: *failed* is the reason, in one line."""

    failed: str
    exit_status: int

    @property
    def notes(self) -> list[str]:
        """Notes below a table that contains this run."""
        return [f"failed: {self.failed}"]

    cautions = notes


Outcome = RunResult | FailedRun


def gather_stats(mine: StepStats, rank: int, size: int, store: Any) -> list[StepStats]:
    """Put this rank's summary into the job's *store*; rank 0 collects all that are there, by rank.

    Rank 0 waits for the others for `Timeouts.last_figures`. This is no collective: a rank that
    fails, or is in a collective of its own, would block the others in it, and only their ends
    inform it.
    """
    try:
        store.set(_key(rank), msgspec.msgpack.encode(mine))
        if rank:
            return [mine]
        keys = [_key(other) for other in range(size)]
        deadline = time.monotonic() + timeouts.last_figures
        while not store.check(keys) and time.monotonic() < deadline:
            # store.wait() would warn about its time-out.
            time.sleep(0.01)
        here = [key for key in keys if store.check([key])]
        return [msgspec.msgpack.decode(store.get(key), type=StepStats) for key in here]
    except RuntimeError:
        # The rank that held the store has ended.
        return [mine]


def _key(rank: int) -> str:
    return f"paceline/summary/{rank}"
