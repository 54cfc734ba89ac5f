"""GSSP: SSP inside groups of workers that are about as fast, and updates between the groups.

Sun et al., "GSSP: eliminating stragglers through grouping synchronous for distributed deep
learning in heterogeneous cluster" (IEEE TCC 10(4), 2022). If some workers are always slower, SSP
runs at the pace of the slowest one, whatever its bound. Here each group has a server with the
whole model, and its workers wait only for each other. Servers send each other the updates that
they have applied, and apply received updates at once.

- `discipline`: the server's half; start here.
- `grouping`: step times, groups from them, and decisions.

    worker j of group q:  w from server q; push g; start step c when all of q have done c - s
    server q on a push:   w = w - lr w_j g; acc = acc + w_j g; every `period` pushes send acc to all
    server q on acc':     w = w - lr acc'

Groups
------
All workers begin in group 0. Servers measure steps: from the moment a worker goes on until its
next gradient has arrived. Once all step times are known well enough, server 0 forms the groups
(`grouping`). That takes 5 steps of each worker if they vary little, and at most `measure_steps`.
It forms `number_of_groups` groups. With 0 it forms as few as possible, at most `most_groups`, so
that no worker takes more than `ratio` times as long as another one of its group. Differences that
may be chance form no groups.

Later, server 0 decides again whenever all workers were measured for `measure_steps` more steps. A
worker moves if it was nearer to another group by 15 % in two decisions in a row. Two groups are
merged if they were alike in two decisions in a row. If all workers are about as fast, there is one
group; then this is ssp, and a message says so. ``members=0-3+4-7`` sets fixed groups.

Weights, momentum and learning rates
------------------------------------
A push has weight 1/n, which scales the learning rate. An update has the sum of its pushes'
weights. So n gradients move parameters as far as a step of bsp, with as much weight decay,
whatever the number of updates. A server applies n/k pushes of its own group, and each update that
it receives. Momentum does depend on the number of updates: its horizon in samples is shorter than
under bsp, as under ssp.

Pushes carry their hyperparameters. An update carries those of its last push, except learning
rates: each gradient is applied at the rate of its own step (`GradientSum`). So a schedule that
counts a worker's own steps is ahead in a fast group and behind in a slow one.
`DistributedOptimizer.steps_of_all` counts samples instead: gradients of all workers in the model,
divided by n. This makes a schedule follow it:

    while scheduler.last_epoch < int(optimizer.steps_of_all):
        scheduler.step()

Differences from the published code, which does not run as published:

- Pushes are counted, so that updates are sent.
- Groups follow measured times; the code takes ranks modulo 4.
- Servers release workers on events, and do not poll.
- BatchNorm's statistics are sent.
- Weight decay acts as often as under bsp, and not once in each update.
- Groups have no speed class before all workers were measured.
- There is no root server. One script of the code has one, which steps for all groups.

How groups are formed, and when workers move, is inferred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import UsageError
from paceline.interfaces import Bucket, Discipline, Groups, MethodSummary, ServerRun
from paceline.methods.group_members import read_members
from paceline.methods.gssp.discipline import (
    BoundedGate,
    Gate,
    GroupDiscipline,
    RoundGate,
)
from paceline.methods.gssp.grouping import (
    DECISIONS,
    MARGIN,
    Hysteresis,
    Merging,
    Regrouping,
    WorkerReport,
    encode,
    read_groups,
    read_worker_notice,
)
from paceline.methods.push_pull import PushPull, PushPullWorker

__all__ = ["GSSP"]


@dataclass(frozen=True, kw_only=True)
class GroupMethod(PushPull):
    """Base class of methods whose groups have one server each, and whose workers may change groups.

    A worker pushes to its group's server, and pulls from it.

    Attributes:
        members: Fixed groups as ranges of ranks, such as ``0-3+4-7``. Empty: the groups of the cluster file, else the method forms groups.
    """

    members: str = ""

    def groups(self, workers: int) -> Groups:
        return read_members(self.members, workers)

    def start(self, run: ServerRun) -> GroupWorker:
        return GroupWorker(run, self)


class GroupWorker(PushPullWorker):
    """Runs one worker of a `GroupMethod`: pushes, pulls, and follows the server's groups.

    Attributes:
        groups_version: The version of the groups that this worker has received last.
        encoded_groups: These groups as bytes. The worker reports them, since a restarted server may
            not know them.
        steps_of_all: Steps of all workers in this worker's model: gradients, divided by the number of
            workers.
    """

    def __init__(self, run: ServerRun, method: GroupMethod) -> None:
        """Create the worker. All ranks must call this together."""
        super().__init__(run, method)
        self.groups_version, self.encoded_groups = 0, b""
        self.steps_of_all = 0.0
        self._read_notices()

    def after_update(self) -> None:
        super().after_update()
        self._read_notices()

    def _report(self, bucket: Bucket) -> bytes:
        """Return the report for the server, which goes with the first bucket only."""
        if bucket.index:
            return b""
        return encode(WorkerReport(self.encoded_groups, self.steps_of_all))

    def _read_notices(self) -> None:
        """Adopt the groups and steps that the server has sent, and move if this worker's group changed."""
        remote = self.run.remote
        for received in remote.notices(0):
            if not received.notice:
                continue
            notice = read_worker_notice(received.notice)
            self.steps_of_all = max(self.steps_of_all, notice.steps)
            groups = read_groups(notice.groups) if notice.groups else None
            if groups is None or groups.version <= self.groups_version:
                continue
            self.groups_version, self.encoded_groups = groups.version, notice.groups
            mine = groups.of[self.run.comm.rank]
            if mine != remote.group:
                remote.move(mine, self.step)
            if groups.speeds:
                remote.set_speed_class(groups.speeds[mine])
            self._on_new_groups(groups)

    def _on_new_groups(self, groups: Groups) -> None:
        """Handle new groups or speed classes; subclasses may report them."""

    def metrics(self) -> dict[str, float]:
        """Return the number of this worker's group, as ``group``."""
        return {"group": self.run.remote.group}

    # ---- checkpoints ----

    def save_state(self) -> dict[str, Any]:
        return {"steps_of_all": self.steps_of_all}

    def load_state(self, saved: dict[str, Any]) -> None:
        self.steps_of_all = max(self.steps_of_all, saved["steps_of_all"])

    def redistribute_state(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {"steps_of_all": max(part["steps_of_all"] for part in parts)}


@dataclass(frozen=True, kw_only=True)
class GSSP(GroupMethod):
    """SSP inside groups of workers of similar speed, and updates between the groups.

    Attributes:
        number_of_groups: Number of groups; 0: as few as *ratio* allows.
        most_groups: Largest number of groups.
        ratio: Largest ratio of the step times of two workers in a group.
        staleness: Steps that a worker may be ahead of the slowest worker of its group.
        period: Pushes after which a server sends an update to the other servers; 0: the number of workers in its group.
        measure_steps: Number of steps whose median time is a worker's step time.
        regroup: Let workers change groups after the first decision.
    """

    name: ClassVar[str] = "gssp"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Runs ssp inside groups of similar speed, whose servers exchange updates.",
        source="Sun et al., GSSP (IEEE TCC 10(4), 2022)",
        use_when=(
            "workers always differ in speed, and their batches must be equal, or their speeds are "
            "unknown or change"
        ),
        waits_for="workers of its own group more than `staleness` steps behind",
        sends=(
            "the whole gradient to its group's server, and receives all parameters; servers send each "
            "other a gradient of all parameters after `period` pushes"
        ),
        guarantees=(
            "Inside a group the staleness bound of ssp holds. Every server applies every gradient "
            "once, at the script's learning rate times the gradient's weight, 1/n. Staleness between groups has no bound."
        ),
        limits=(
            "Each group has a server with the whole model.",
            "If all workers are equally fast, they form one group, which trains as ssp.",
            "Our rule that forms groups is a guess. The published code groups workers by rank modulo 4.",
        ),
    )
    steady_state_keys: ClassVar[Mapping[str, str]] = {"measure_steps": "2"}

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
                    f"number_of_groups={number}: expected the same number. Leave one of them out"
                )
            return groups
        if number > workers:
            raise UsageError(
                f"gssp:number_of_groups={number}: expected at most the {workers} workers. Lower it, or "
                "take 0: as few groups as step times need"
            )
        return Groups((0,) * workers, number or min(self.most_groups, workers))

    def server(self, workers: int) -> Discipline:
        gate: Gate = BoundedGate(self.staleness) if self.staleness else RoundGate()
        regroup = None
        if not self.members:
            hysteresis = merging = None
            if self.regroup:
                hysteresis = Hysteresis(MARGIN, DECISIONS)
                merging = Merging(self.ratio, DECISIONS)
            regroup = Regrouping(
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
    """Runs one worker of GSSP, and reports if all workers are in one group."""

    method: GSSP

    def _on_new_groups(self, groups: Groups) -> None:
        if len(set(groups.of)) == 1:
            again = " again" if groups.version > 1 else ""
            self.run.report(
                f"gssp: all workers are about as fast{again}, within a factor of "
                f"{self.method.ratio:g} or the error of measurement. They form one group, for which "
                "this is ssp"
            )
