"""One run in one object: what ``--json`` prints."""

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
"""Steady steps: a median of fewer is not reliable."""


class RunResult(msgspec.Struct, kw_only=True):
    """What one run took.

    Figures of a step are medians over a worker's steady steps, of the last thousand, then means over
    workers (of methods with rounds medians of means: see `StepStats`).

    Attributes:
        steady_steps: How many steps the figures are of.
        steady_from: The first of them on rank 0: after tuning, trials, warm-ups and changes of the
            method. None: there were no steady steps.
        steady: Whether there were steady steps. If not, the figures are of others.
        asked: How many steps the user asked for.
        buckets: Pieces in which the gradient travelled at the end.
        metrics: The last values that rank 0 logged.
        network: Where the network comes from.
        compute: Where the times of computing come from.
        notes: Sentences that belong beside the figures.
        cautions: Those notes that say why the figures tell little.
        method: The full spec.
        brief: What of it is not as by default.
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
        """From rank 0's *recorder* and every worker's summary. *asked*: how many steps the job was
        to have; *before*: how many it had done when rank 0 joined it."""

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
        """One line. Values that are not finite become null: JSON has no words for them."""
        return msgspec.json.encode(self).decode()


@contextmanager
def standard_output_for_result(active: bool) -> Iterator[int]:
    """Within it, all prints go to standard error; yields a descriptor of the true standard output. Not *active*:
    nothing is moved.
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
    """What a job's rank 0 left at *path*, if it did."""
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=RunResult)


def _ended_early(asked: int, done: int) -> str:
    return f"asked for {asked} steps, and the script ended by itself after {show_count(done, 'step')}"


def not_steady(steps: int, recorder: StepRecorder) -> str:
    """Why a run of so many steps has none in steady state."""
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
    """A run that came to no result: *failed* says why, in one line."""

    failed: str
    exit_status: int

    @property
    def notes(self) -> list[str]:
        """What stands below a table with this run in it."""
        return [f"failed: {self.failed}"]

    cautions = notes


Outcome = RunResult | FailedRun


def gather_stats(mine: StepStats, rank: int, size: int, store: Any) -> list[StepStats]:
    """Leave this rank's summary in the job's *store*; rank 0 takes those of all that are at
    their end by now, in rank order.

    Not a collective: a rank that ends badly, or is in a collective of its own, would keep
    the others in it, and their ends are what tells it.
    """
    try:
        store.set(_key(rank), msgspec.msgpack.encode(mine))
        if rank:
            return [mine]
        keys = [_key(other) for other in range(size)]
        deadline = time.monotonic() + timeouts.last_figures
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.01)  # store.wait() would warn about its time-out
        here = [key for key in keys if store.check([key])]
        return [msgspec.msgpack.decode(store.get(key), type=StepStats) for key in here]
    except RuntimeError:
        return [mine]  # the rank that held the store has ended


def _key(rank: int) -> str:
    return f"paceline/summary/{rank}"
