"""Grouping-SGD: bsp inside groups, and no waiting between them.

Jiang et al. (CCGrid 2019), "GSP" in its code (github CGCL-codes/MXNet-G). Workers of a group wait
for each other in every step, and their mean gradient is one update. Groups come from a file that
is written by hand. The staler a group's gradient is, the less it counts.

    server q, all of q in:  w = w - lr (k/n) / (1 + tau) mean;  send mean and weight to all
    server q on a mean:     w = w - lr weight mean

tau is the number of gradients of other groups that were applied at the group's server since the
group's last mean, in steps of all n workers.

Differences from the authors' system: there all groups share one set of servers. Here each group
has a server with the whole model, as under gssp. The form of the weight is inferred. With tau as
it is counted here, a group that is as fast as the others has a tau below 1; 1/tau would let it
count for more than once. Two features are not here: the order of servers, by which fast ones own
lower layers; and shares of data by speed, which `paceline.Sampler(..., shares="speed")` deals out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import Discipline, Groups, MethodSummary
from paceline.methods.group_members import read_members
from paceline.methods.gssp import GroupMethod
from paceline.methods.gssp.discipline import GroupDiscipline, RoundGate


@dataclass(frozen=True, kw_only=True)
class GroupingSGD(GroupMethod):
    """Apply the mean gradient of each group; a stale one has less weight.

    Attributes:
        members: Groups as ranges of ranks, such as ``0-3+4-7``. Empty: the groups of the cluster file, else one group of all workers.
    """

    name: ClassVar[str] = "grouping-sgd"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Runs bsp inside groups that you name, and no group waits for another.",
        source="Jiang et al., Grouping-SGD (CCGrid 2019)",
        use_when="you know which workers are equally fast, and want no staleness inside a group",
        waits_for="all workers of its group, in every step",
        sends=(
            "the whole gradient to its group's server, and receives all parameters; servers send each "
            "other a gradient of all parameters after each step of their group"
        ),
        guarantees=(
            "No gradient is stale inside a group. Every server applies each group's mean once, at "
            "the script's learning rate times the mean's weight / (1 + its staleness)."
        ),
        limits=(
            "Without `members` all workers form one group, which trains as bsp on a server.",
            "Each group has a server with the whole model.",
            "The form of the staleness weight is our guess.",
        ),
    )

    def groups(self, workers: int) -> Groups:
        return (
            read_members(self.members, workers)
            if self.members
            else Groups((0,) * workers, 1)
        )

    def server(self, workers: int) -> Discipline:
        return GroupDiscipline(
            self.groups(workers),
            RoundGate(together=True),
            period=1,
            measure_steps=20,
            damps=True,
        )
