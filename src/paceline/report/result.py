"""One run in one object: what ``--json`` prints."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from paceline.instruments import Journal


class Summary(msgspec.Struct, array_like=True):
    """One worker's run in numbers: its steps, and medians over them; where workers do not
    communicate in each step alike, medians over means of as many as it takes to repeat."""

    steps: float
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    bytes_sent: float

    @classmethod
    def of(cls, journal: Journal) -> Summary:
        """Medians over the journal's settled steps."""
        steps = journal.settled_steps()
        period = max(1, min(journal.period, len(steps)))
        rounds = [
            steps[first : first + period]
            for first in range(len(steps) % period, len(steps), period)
        ]

        def middle(field: str) -> float:
            if not steps:
                return math.nan
            return float(
                median(fmean(getattr(step, field) for step in one) for one in rounds)
            )

        return cls(
            journal.step_count,
            middle("step_seconds"),
            middle("compute_seconds"),
            middle("exposed_communication_seconds"),
            middle("bytes_sent"),
        )


class Result(msgspec.Struct, kw_only=True):
    """What one run took: per-step figures are medians over a worker's last thousand steps
    (without those that measured; of means, see `Summary`), then means over workers; *buckets* is the number of pieces in
    which the gradient travelled at the end; *metrics* are the last values that rank 0
    logged; *network* and *compute* say where the one and the times of the other come from.
    *notes* are sentences that belong beside the figures, *method* is the full spec, *brief* what
    of it is not as by default. Not *settled*: there were no other steps than those that
    measured, and the figures are of these.
    """

    world: str
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
    settled: bool = True
    methods: list[tuple[int, str]] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @classmethod
    def of(
        cls, world: str, workers: int, journal: Journal, summaries: Sequence[Summary]
    ) -> Result:
        """From rank 0's *journal* and every worker's summary."""

        def mean(field: str) -> float | None:
            values = [getattr(s, field) for s in summaries if s.steps]
            return fmean(values) if values else None

        steps = int(max(s.steps for s in summaries))
        settled = 0 < journal.settled_after < steps
        notes = [] if settled else [_unsettled(steps, journal.settled_after)]
        if len(journal.methods) > 1:
            notes.append(_changed(journal))
        if journal.period > 1:
            notes.append(_repeating(len(journal.settled_steps()), journal.period))
        return cls(
            world=world,
            workers=workers,
            method=journal.method,
            brief=journal.brief,
            steps=steps,
            buckets=journal.buckets,
            step_seconds=mean("step_seconds"),
            compute_seconds=mean("compute_seconds"),
            exposed_communication_seconds=mean("exposed_communication_seconds"),
            bytes_sent_per_worker=mean("bytes_sent"),
            metrics=dict(journal.metrics),
            settled=settled,
            methods=list(journal.methods),
            notes=[*notes, *journal.notes],
        )

    def to_json(self) -> str:
        """One line. Values that are not finite become null: JSON has no words for them."""
        return msgspec.json.encode(self).decode()


def read_result(path: Path) -> Result | None:
    """What a job's rank 0 left at *path*, if it did."""
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=Result)


def _unsettled(steps: int, settled_after: int) -> str:
    if not steps:
        return "no step was taken"
    if settled_after == steps == 1:
        return "one step only: its figures include the start-up"
    many = "1 step" if steps == 1 else f"{steps} steps"
    return (
        f"not settled in {many}: buckets were still being measured and tried, and the "
        "figures are of such steps"
    )


def _changed(journal: Journal) -> str:
    since, spec = journal.methods[-1]
    return f"the method has changed while it trained; figures are of {spec}, from step {since + 1} on"


def _repeating(steps: int, period: int) -> str:
    if steps < period:
        return (
            f"figures are means over {steps} steps, and steps repeat after {period}: say "
            f"--steps {4 * period} or more"
        )
    return f"steps repeat after {period}: figures are medians of means over so many"


class Failed(msgspec.Struct, kw_only=True):
    """A run that came to no result: *failed* says why, in one line."""

    failed: str
    exit_status: int

    @property
    def notes(self) -> list[str]:
        """What stands below a table with this run in it."""
        return [f"failed: {self.failed}"]


Outcome = Result | Failed


PATIENCE = 5.0  # seconds
"""For the figures of ranks that are not at their end yet."""


def exchange_summaries(
    mine: Summary, rank: int, size: int, store: Any
) -> list[Summary]:
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
        deadline = time.monotonic() + PATIENCE
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.01)  # store.wait() would warn of its time-out
        here = [key for key in keys if store.check([key])]
        return [msgspec.msgpack.decode(store.get(key), type=Summary) for key in here]
    except RuntimeError:
        return [mine]  # who had the store has ended


def _key(rank: int) -> str:
    return f"paceline/summary/{rank}"
