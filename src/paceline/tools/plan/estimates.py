"""What a plan says: plain data, equal on all who make it of the same cluster and workload."""

from __future__ import annotations

import msgspec

from paceline.interfaces import CONSISTENCIES, Consistency
from paceline.spec import parse

LOSSLESS: tuple[Consistency, ...] = ("exact", "delayed")
"""Classes in which every gradient is applied, as it is."""
GENTLE = 1.2
"""Times the fastest of its class: so much longer may a step take that tells the others more."""
ABOUT = 0.9
"""Of the most that is sent: as much, and then the faster one is taken."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate, predicted: *spec* is what `distribute` takes.

    *step_seconds* are those in which as many gradients are computed as there are workers:
    of asynchronous methods the mean over workers that are not equally fast, by their rates.
    *exposed_seconds* of them wait for the network. *bytes_sent*: by a worker, a step. *bound_ratio*: the step over the physical limit of an exact mean (below 1 where
    less is sent). *speedup* and *samples_per_second* (None: nobody knows a batch) are over, and as, those of one machine.
    *cut*: predicted in a short run alone, as hopeless in its class; or, where it is *hopeful*, as the
    budget had no time for a full one. *estimated_compressors*: the time of its compressor is estimated from bytes, and not measured. *steady_after*: steps of a training before those that
    it tells of (0: not known). *notes* are what the training said.
    """

    spec: str
    consistency: Consistency
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bytes_sent: float
    buckets: int
    bound_ratio: float = 0.0
    speedup: float = 0.0
    samples_per_second: float | None = None
    cut: bool = False
    hopeful: bool = False
    estimated_compressors: bool = False
    steady_after: int = 0
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether its class may be judged by it: a cheap run of what is slower says no more."""
        return self.hopeful or not self.cut


class Infeasible(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that cannot run there, and *why*."""

    spec: str
    consistency: Consistency
    why: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Every candidate on one cluster with one workload: *rows* from the fastest to the
    slowest.

    *batch*: samples of a worker's step, of all its passes (None: nobody knows it). *one_machine* is a worker
    alone, with its own part of the batch. *lower_bound_seconds*: no exact mean of
    all gradients makes a step shorter. *skipped*: how many candidates the budget left no
    time for; *spent_seconds* of it, of a core, is what predictions were counted as.
    """

    cluster: str
    workload: str
    workers: int
    batch: float | None
    one_machine: Estimate
    lower_bound_seconds: float
    rows: tuple[Estimate, ...]
    left_out: tuple[Infeasible, ...]
    skipped: int = 0
    spent_seconds: float = 0.0

    @property
    def best(self) -> dict[Consistency, Estimate]:
        """Of each class that has a row the fastest one that was not cut as hopeless, from the
        strongest promise to the weakest."""
        found: dict[Consistency, Estimate] = {}
        # Those that count first, else in their order.
        for row in sorted(self.rows, key=lambda row: not row.counts):
            found.setdefault(row.consistency, row)
        return {q: found[q] for q in CONSISTENCIES if q in found}

    @property
    def recommended(self) -> dict[Consistency, Estimate]:
        """Of each class the one to take: the fastest where nothing is lost. Elsewhere what is not sent
        is not learned from, or later: the one that sends most, of those that are `GENTLE` times as
        slow as the fastest at most."""
        found = self.best
        for consistency, best in found.items():
            if consistency in LOSSLESS:
                continue
            near: dict[tuple[str, object], Estimate] = {}
            for row in self.rows:
                if (
                    row.consistency == consistency
                    and row.counts >= best.counts
                    and row.step_seconds <= GENTLE * best.step_seconds
                ):
                    # Another collective or bucket rule sends the same in another way.
                    spec = parse(row.spec)
                    near.setdefault((spec.name, spec.values.get("compression")), row)
            most = max(row.bytes_sent for row in near.values())
            found[consistency] = next(
                row for row in near.values() if row.bytes_sent >= ABOUT * most
            )
        return found

    def row(self, spec: str) -> Estimate | None:
        """The row of that spec."""
        return next((row for row in self.rows if row.spec == spec), None)
