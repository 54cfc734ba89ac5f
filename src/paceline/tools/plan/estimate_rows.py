"""Rows of a plan: a prediction, held against one machine and the limit."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.interfaces import Consistency
from paceline.tools.plan.estimates import Estimate
from paceline.tools.plan.predict import Prediction


@dataclass(frozen=True)
class Scale:
    """What rows are held against: the *workers*, each with its *batch* (None: nobody knows it); seconds
    of a step of *one* machine alone, and the *limit* of any exact mean."""

    workers: int
    batch: float | None
    one: float
    limit: float

    def row(
        self,
        spec: str,
        consistency: Consistency,
        found: Prediction,
        *,
        cut: bool,
        hopeful: bool,
    ) -> Estimate:
        """See `Estimate`."""
        step, workers = found.step_seconds, self.workers
        return Estimate(
            spec=spec,
            consistency=consistency,
            step_seconds=step,
            compute_seconds=found.compute_seconds,
            exposed_seconds=found.exposed_seconds,
            bytes_sent=found.bytes_sent,
            buckets=found.buckets,
            bound_ratio=step / self.limit,
            speedup=workers * self.one / step,
            samples_per_second=None
            if self.batch is None
            else workers * self.batch / step,
            cut=cut,
            hopeful=hopeful,
            estimated_compressors=found.estimated_compressors,
            steady_after=found.steady_after,
            notes=found.notes,
        )
