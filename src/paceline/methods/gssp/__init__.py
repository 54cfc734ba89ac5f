"""GSSP: SSP inside groups of workers that are about as fast, and parcels of gradients between them.

Sun et al., "GSSP: eliminating stragglers through grouping synchronous for distributed deep learning in
heterogeneous cluster" (IEEE TCC 10(4), 2022). Where some workers are slower for good, SSP ends at the
slowest one's pace, whatever its bound. Here each group has a server with the whole model, of which
only that group's workers wait for each other; what servers have applied they pass on to each
other, and apply what comes at once.

    worker j of group q:  w from server q;  push g;  goes on at step c when all of q have done c - s
    server q on a push:   w = w - lr w_j g;  acc = acc + w_j g;  after `period` pushes send acc to all
    server q on acc':     w = w - lr acc'

Groups
------
All begin in group 0. Servers measure steps: from the moment at which a worker goes on until its next
gradient is in. When that is known well enough of all, after 5 steps of each where they vary
little and `measure_steps` at most (`step_times`), server 0 forms `number_of_groups` groups, or with 0 as few
as let nobody take more than `ratio` times as long as another one of its group, at most
`most_groups` (`grouping`); what may be chance parts nobody. Later it looks whenever `measure_steps`
of each were measured anew. A worker moves to another group when it has been nearer to it by
15 %, at two looks in a row, and groups that were alike as often become one. If all are
about as fast there is one group: this is ssp then, and says so. ``members=0-3+4-7`` gives groups by hand,
which stay.

What a step is to the optimizer
-------------------------------
A push has weight 1/n, and scales the learning rate; a parcel has the sum of its pushes' weights. So
n gradients move parameters as far as a step of bsp does, and weight decay takes as much, however
many updates that is: n/k of its own pushes and one for each parcel. What does depend on the number of
updates is momentum: its horizon in samples is shorter than under bsp, as it is under ssp.

Pushes carry their hyperparameters. A parcel carries those of its last push, except learning rates: each
gradient is applied at the rate of its own step (`GradientSum`). So a schedule that counts a worker's
own steps is ahead in a fast group and behind in a slow one. `DistributedOptimizer.steps_of_all` counts
samples instead: gradients of all that are in the model, divided by n. A schedule follows it so:

    while scheduler.last_epoch < int(optimizer.steps_of_all):
        scheduler.step()

Differs from the published code, which does not run as it is: the push counter counts, so that
parcels are sent; groups follow measured times, where the code takes ranks modulo 4; the gate does not
poll; BatchNorm's statistics travel; weight decay acts as often as under bsp and not once an update; groups
have no speed class before all were measured. There is no root: one script of the code has it, whose
server steps for all groups. Groups and hysteresis are inferred.

- `worker`: the worker's half.
- `discipline`: the server's half; start here.
- `gates`: when gradients inside a group are applied, and when its workers go on.
- `clocks`: the pushes that each worker has made.
- `pending_updates`, `gradient_sum`: what a server owes the others, added up.
- `group_assignment`, `grouping`, `step_times`: groups, from measured step times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.interfaces import Discipline, Groups, MethodSummary, ServerRun
from paceline.methods.group_members import read_members
from paceline.methods.gssp.discipline import GroupDiscipline
from paceline.methods.gssp.gates import Bounded, Gate, Rounds
from paceline.methods.gssp.grouping import (
    LOOKS,
    MARGIN,
    BySpeed,
    Hysteresis,
    Merging,
)
from paceline.methods.gssp.worker import GroupWorker, InGroups

__all__ = ["GSSP"]


@dataclass(frozen=True, kw_only=True)
class GSSP(InGroups):
    """Let no worker be more than *staleness* steps ahead of another one of its group."""

    name: ClassVar[str] = "gssp"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="workers of its own group more than `staleness` steps behind",
        sends=(
            "the whole gradient, and receives all parameters, to and from its group's "
            "server; servers send each other a gradient of all parameters after "
            "`period` pushes"
        ),
        guarantees=(
            "inside a group what ssp guarantees; every gradient is applied once on "
            "every server, at a learning rate of its weight (1/n) times the script's; "
            "how stale those of other groups are is not bounded"
        ),
    )
    in_the_long_run: ClassVar[Mapping[str, str]] = {"measure_steps": "2"}

    number_of_groups: int = 0
    most_groups: int = 4
    ratio: float = 1.25
    staleness: int = 3
    period: int = 0
    measure_steps: int = 20
    regroup: bool = True

    def __post_init__(self) -> None:
        for name, least, what in (
            ("number_of_groups", 0, "0 or more groups; 0: as many as step times show"),
            ("most_groups", 1, "1 or more groups"),
            ("ratio", 1.0, "a ratio of step times, 1 or more"),
            ("staleness", 0, "a bound of 0 or more steps"),
            ("period", 0, "0 or more pushes; 0: as many as the group has workers"),
            ("measure_steps", 1, "1 or more steps"),
        ):
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise UsageError(f"gssp:{name}={value}: expected {what}")

    @property
    def learns_for(self) -> int:
        """Steps until workers are in groups of their speed."""
        return self.measure_steps

    def groups(self, workers: int) -> Groups:
        number = self.number_of_groups
        if self.members:
            groups = read_members(self.members, workers)
            if number not in (0, groups.servers):
                raise UsageError(
                    f"gssp:members={self.members} are {groups.servers} groups, and "
                    f"number_of_groups={number}: expected the same, or one of both"
                )
            return groups
        if number > workers:
            raise UsageError(
                f"gssp:number_of_groups={number}: there are only {workers} workers"
            )
        return Groups((0,) * workers, number or min(self.most_groups, workers))

    def server(self, workers: int) -> Discipline:
        gate: Gate = Bounded(self.staleness) if self.staleness else Rounds()
        regroup = None
        if not self.members:
            hysteresis = merging = None
            if self.regroup:
                hysteresis = Hysteresis(MARGIN, LOOKS)
                merging = Merging(self.ratio, LOOKS)
            regroup = BySpeed(
                self.number_of_groups,
                self.most_groups,
                self.ratio,
                hysteresis,
                merging,
            )
        return GroupDiscipline(
            self.groups(workers),
            gate,
            self.period,
            self.measure_steps,
            regroup,
        )

    def start(self, run: ServerRun) -> GSSPWorker:
        workers = run.comm.size
        if workers > 1 and self.groups(workers).servers == 1:
            run.report("gssp: there is one group, for which this is ssp")
        return GSSPWorker(run, self)


class GSSPWorker(GroupWorker):
    """One worker, which says so where all are in one group."""

    method: GSSP

    def _groups_changed(self, groups: Groups) -> None:
        if len(set(groups.of)) == 1:
            again = " again" if groups.version > 1 else ""
            self.run.report(
                f"gssp: all workers are about as fast{again} (within a factor of "
                f"{self.method.ratio:g}, or of what can be told): they are one group, for "
                "which this is ssp"
            )
