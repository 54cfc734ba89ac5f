"""Grouping-SGD: bsp inside groups, and nobody waits between them.

Jiang et al. (CCGrid 2019), "GSP" in its code (github CGCL-codes/MXNet-G). Workers of a group wait for each
other in every step, and their mean is one update. Groups come from a file that is written by hand.
A group's gradient counts for less, the staler it is.

    server q, all of q in:  w = w - lr (k/n) / (1 + tau) mean;  send that mean, and its weight, to all
    server q on a mean:     w = w - lr weight mean

tau is how many gradients of other groups were applied at its server since the group's last mean, in steps of all (n).

Differs from the authors' system, in which all groups share one set of servers: here each has a
server with the whole model, as under gssp, whose parts this is made of. Inferred: the form of the
weight; with tau counted as it is here, a group that is as fast as the others has a tau below 1, and 1/tau
would let it count for more than once. The order of servers, by which fast ones own lower layers, and
shares of data by speed are not here (`paceline.Sampler(..., shares="speed")` deals those out).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import Discipline, Groups, MethodSummary
from paceline.methods.group_members import read_members
from paceline.methods.gssp.discipline import GroupDiscipline
from paceline.methods.gssp.gates import Rounds
from paceline.methods.gssp.worker import InGroups


@dataclass(frozen=True, kw_only=True)
class GroupingSGD(InGroups):
    """Mean gradients of groups by hand, ``members=0-3+4-7``; without, all are one group, which
    is bsp on a server. A group's mean counts for less where it is stale."""

    name: ClassVar[str] = "grouping-sgd"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="all workers of its group, in every step",
        sends=(
            "the whole gradient, and receives all parameters, to and from its group's "
            "server; servers send each other a gradient of all parameters after each "
            "step of their group"
        ),
        guarantees=(
            "inside a group no gradient is stale; every group's mean is applied once "
            "on every server, at a learning rate of its weight (its part of all "
            "workers) times the script's, over 1 + its staleness"
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
            Rounds(together=True),
            period=1,
            measure_steps=20,
            damps=True,
        )
