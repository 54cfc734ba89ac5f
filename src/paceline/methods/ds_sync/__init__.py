"""DS-Sync: divide-and-shuffle synchronization.

Wang et al., "DS-Sync: Addressing Network Bottlenecks with Divide-and-Shuffle Synchronization
for Distributed DNN Training" (arXiv 2007.03298, 2020 and 2022). In each step every worker takes an
optimizer step of its own, then averages its parameters with a small group. Most groups avoid the
network's bottleneck (divide). They change from step to step, so that all workers reach each other
over a period of steps (shuffle).

The paper's first version (four workers, alternating pairs) is known from the authors' code. Of the
second version only the design was available. How groups are chosen is a reconstruction (`plan`,
`divide`, `adjust`). Differences from the authors' code:

- Workers average buckets, not single tensors.
- A period continues through epochs.
- All workers average their models after the last step.

The modules:

- `options`: the hyperparameters.
- `worker`: the steps of one worker; start here.
- `plan`: the groups of every step, as data.
- `divide`: designs of groups, for equal links and for uneven networks.
- `cost`: a plan's time on a cluster, and how fast its workers agree.
- `adjust`: new plans after workers leave, or from the measured times of groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.interfaces import (
    Clips,
    Consistency,
    GradientSeen,
    MethodSummary,
    Rounds,
    Run,
    UpdatesOn,
)
from paceline.methods.ds_sync.options import DSSyncOptions
from paceline.methods.ds_sync.worker import DSSyncWorker


@dataclass(frozen=True, kw_only=True)
class DSSync(DSSyncOptions):
    """Averages parameters inside small groups, which change from step to step."""

    name: ClassVar[str] = "ds-sync"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages parameters in small groups, which change from step to step.",
        source="Wang et al., DS-Sync (arXiv 2007.03298)",
        use_when="racks share a thin uplink, or one host is slow",
        waits_for="the workers of its group, in every step",
        sends="the parameters, to its group",
        guarantees=(
            "Every average preserves the mean of all models. All workers hold that mean after the "
            "last step."
        ),
        limits=(
            (
                "Workers hold different models between two steps. So accuracy is lower than bsp's at "
                "large learning rates, or if workers' data differ."
            ),
            "With `adjust_every` two runs may differ, since groups follow measured times.",
            "How it forms groups on uneven networks is our design, since the paper's text could not be read.",
        ),
    )
    rounds: ClassVar[Rounds] = Rounds(groups=True)
    consistency: ClassVar[Consistency] = "local"
    updates_on: ClassVar[UpdatesOn] = "worker"
    visible_gradient: ClassVar[GradientSeen] = "local"
    clips: ClassVar[Clips] = "own"
    consolidates_together: ClassVar[bool] = True
    averages_buffers: ClassVar[bool] = True

    def compressed_by(self, compressor: str) -> DSSync:
        """Refuse compression.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"compression {compressor!r} with method 'ds-sync': parameters are never compressed, only "
            "changes since a common model, and workers of a group have none. Leave "
            "compression out, or use local-sgd or diloco"
        )

    def start(self, run: Run) -> DSSyncWorker:
        return DSSyncWorker(run, self)
