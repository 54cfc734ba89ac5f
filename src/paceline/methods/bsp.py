"""BSP: bulk-synchronous parallel training, gradients averaged in every step.

Valiant, "A bridging model for parallel computation" (1990) gave the name. The worker does what PyTorch
DDP does (Li et al., VLDB 2020, section 3.2): it averages buckets of gradients while backward still
runs, and ``.grad`` holds the mean when backward ends.

One difference from DDP: a rank reports unused parameters and the end of its data only in steps in
which there is something to report (`Run.mean`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import (
    EVERY_STEP,
    Bucket,
    Clips,
    Consistency,
    GradientSeen,
    MethodSummary,
    Pending,
    Rounds,
    Run,
    UpdatesOn,
)


@dataclass(frozen=True, kw_only=True)
class BSP:
    """Average every gradient over all workers in every step.

    Attributes:
        overlap: Send while backward still runs. If false, send after backward, as the textbook
            form that papers compare with.

    Example:
        ::

            optimizer = paceline.distribute(model, optimizer)  # bsp is the default
            optimizer = paceline.distribute(model, optimizer, method="bsp:overlap=false")
    """

    name: ClassVar[str] = "bsp"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages every gradient over all workers in every step, as DDP does.",
        source="Valiant (CACM 1990); Li et al., PyTorch Distributed (VLDB 2020)",
        use_when="you need DDP's result; start here",
        waits_for="every worker, in every step",
        sends="the whole gradient",
        guarantees="All workers hold the same parameters after every step.",
        limits=("Every step waits for the slowest worker and the slowest link.",),
    )
    rounds: ClassVar[Rounds] = EVERY_STEP
    consistency: ClassVar[Consistency] = "exact"
    updates_on: ClassVar[UpdatesOn] = "worker"
    visible_gradient: ClassVar[GradientSeen] = "mean"
    clips: ClassVar[Clips] = "mean"
    symmetric: ClassVar[bool] = True

    overlap: bool = True

    def start(self, run: Run) -> BSPWorker:
        """Create the worker."""
        return BSPWorker(run, self)


class BSPWorker:
    """Sends each bucket once it is ready, and waits for all means when backward ends."""

    def __init__(self, run: Run, method: BSP) -> None:
        """Create the worker, with no means under way."""
        self.run, self.method = run, method
        self.pending: list[Pending] = []
        """Means under way, in bucket order; none between steps."""

    def bucket_ready(self, bucket: Bucket) -> None:
        """Send the bucket, with *overlap*."""
        if self.method.overlap:
            self.pending.append(self.run.mean(bucket))

    def backward_ended(self) -> None:
        """Wait for all means; without *overlap* after sending all buckets."""
        if not self.method.overlap:
            self.pending += [self.run.mean(bucket) for bucket in self.run.buckets]
        for pending in self.pending:
            pending.wait()
        self.pending.clear()

    def finish(self) -> None:
        """Participate until all are out of data, then take the model of the worker that trained longest."""
        source = self.run.participate_until_all_finish()
        if source is not None:
            self.run.broadcast_model(source)
