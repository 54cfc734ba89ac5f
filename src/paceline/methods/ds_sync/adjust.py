"""Adjust: a new plan where contention has moved, from the seconds that groups took.

Theory of operation
-------------------
Every worker has the same times, as they were summed over all, and works out the same plan
from them: nothing else is sent. A group's time says what each of its links carried at
least, so a link is judged by the best that any of its groups got through it, against the
best that they would get through a free one. A worker in a slow group is not slow: one of
its other groups shows it.

What counts is how much slower a group is than others are: the cluster's rates need be right
only in proportion. Contention is taken up from `ENTERS` on and dropped from `LEAVES` on,
and taken anew only when it has changed by `CHANGES`, so that noise does not make plans flap.
Where the plan in use asks little of an uplink, only this little has been learnt: an uplink whose
contention is over may stay spared. Plans that tried it from time to time would flap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from paceline.cluster import Cluster, Rack
from paceline.errors import UsageError
from paceline.interfaces import Pending, Run
from paceline.methods.ds_sync.cost import describe, group_seconds, ring_bytes
from paceline.methods.ds_sync.divide import make_plan
from paceline.methods.ds_sync.options import DSSyncOptions
from paceline.methods.ds_sync.plan import NONE, Contention, Plan

ENTERS = 0.6
"""A link with this part left, or less, is contended."""
LEAVES = 0.8
"""A contended link with this part left, or more, is free again."""
CHANGES = 2.0
"""A contended link has changed when it has this many times more left, or less."""
LEAST = 1e-3
"""A link has no less than this part left, whatever was measured."""
Times = Sequence[Sequence[float]]
"""Seconds of each group of each phase, in the order of `Plan.phases`.

0, or a number that is not finite, where none were measured.
"""


def decide(
    plan: Plan,
    times: Times,
    cluster: Cluster | None,
    bytes: float,  # noqa: A002 - as in the interfaces
    *,
    begins: int = 0,
) -> Plan | None:
    """Return the next version of a plan, for the contention that times show; None for no change.

    Only ``auto`` and ``topology`` adjust: a design that was asked for by name stays.

    Args:
        plan: In force.
        times: Seconds of each group, from when its last member arrived. The same on all workers.
        cluster: The network; None where it is not known: all links then count as equal.
        bytes: Averaged in each step by each worker.
        begins: The step of the new plan's first phase.

    Raises:
        UsageError: For times of other phases and groups.
    """
    if plan.groups not in ("auto", "topology") or len(plan.members) < 2:
        return None
    _check(plan, times)
    network = cluster or _even(plan.members)
    measured = tuple(tuple(seconds) for seconds in times)
    contention = _contention(plan, measured, network, bytes)
    if contention == plan.contention:
        return None
    adjusted = _again(plan, plan.members, network, bytes, begins, contention)
    return None if adjusted.phases == plan.phases else adjusted


def for_members(
    plan: Plan,
    members: Sequence[int],
    cluster: Cluster | None,
    bytes: float,  # noqa: A002 - as in the interfaces
    *,
    begins: int = 0,
) -> Plan:
    """Return the next version of a plan, for the workers that remain.

    It is made as *plan* was, with groups no larger than there are workers. Raises as `make_plan`.
    """
    return _again(plan, members, cluster, bytes, begins, plan.contention)


def _again(
    plan: Plan,
    members: Sequence[int],
    cluster: Cluster | None,
    payload: float,
    begins: int,
    contention: Contention,
) -> Plan:
    if contention != NONE and cluster is None:
        cluster = _even(plan.members)
    return make_plan(
        members,
        groups=plan.groups,
        size=max(2, min(plan.size, len(members))),
        seed=plan.seed,
        cluster=cluster,
        bytes=payload,
        cross_rack_every=plan.cross_rack_every,
        version=plan.version + 1,
        begins=begins,
        contention=contention,
    )


def _even(members: Sequence[int]) -> Cluster:
    """One rack of equal hosts."""
    return Cluster((Rack(workers=max(members) + 1, link=1e9, latency=0.0),))


class _Group(NamedTuple):
    """A group of a phase, and the bytes a second that each of its workers sends.

    *measured*: as it was; *free*: on a network without other traffic.
    """

    phase: int
    workers: tuple[int, ...]
    measured: float
    free: float


def _groups(plan: Plan, times: Times, cluster: Cluster, payload: float) -> list[_Group]:
    """The groups that were measured, and that send anything through a link."""
    found = []
    seconds = group_seconds(plan, cluster, payload)
    for phase, groups in enumerate(plan.phases):
        for number, workers in enumerate(groups):
            took, free = times[phase][number], seconds[phase][number]
            if 0 < took < math.inf and free > 0:
                sent = ring_bytes(len(workers), payload)
                found.append(_Group(phase, workers, sent / took, sent / free))
    # The network may be faster or slower throughout than it is said to be. Contention only
    # slows: the faster groups say what the network is.
    slower = sorted(group.free / group.measured for group in found)
    scale = slower[len(slower) // 4] if slower else 1.0
    return [group._replace(measured=group.measured * scale) for group in found]


@lru_cache(maxsize=4)  # workers of one process decide by the same numbers
def _contention(
    plan: Plan, times: tuple[tuple[float, ...], ...], cluster: Cluster, payload: float
) -> Contention:
    groups = _groups(plan, times, cluster, payload)

    def hosts_of(group: _Group) -> set[int]:
        return {cluster.host_of(worker) for worker in group.workers}

    def uplinks_of(group: _Group) -> set[int]:
        racks = {cluster.rack_of_host(host) for host in hosts_of(group)}
        return racks & capacities.keys() if len(racks) > 1 else set()

    capacities = {
        number: rack.uplink
        for number, rack in enumerate(cluster.racks)
        if rack.uplink is not None
    }
    racks = _judged(groups, uplinks_of, dict(plan.contention.racks), capacities)
    # A busy uplink explains why groups on it are slow, and a slow host why those with it are:
    # they say nothing of the others in them.
    clear = [group for group in groups if racks.keys().isdisjoint(uplinks_of(group))]
    known = dict(plan.contention.hosts)
    hosts = {
        host: part
        for host, part in _judged(clear, hosts_of, known, {}).items()
        if host in known
    }
    while True:
        clear = [group for group in clear if hosts.keys().isdisjoint(hosts_of(group))]
        found = _judged(clear, hosts_of, {}, {})
        if not found:
            break
        slowest = min(found, key=lambda host: (found[host], host))
        hosts[slowest] = found[slowest]
    return Contention(tuple(sorted(hosts.items())), tuple(sorted(racks.items())))


def _judged(
    groups: Sequence[_Group],
    links_of: Callable[[_Group], set[int]],
    before: Mapping[int, float],
    capacities: Mapping[int, float],
) -> dict[int, float]:
    """The share that is left of each contended link.

    It is a share of *capacities*; without one, of what groups would send through a free link.
    *links_of*: the links of a group. *before*: the contention known so far.
    """
    through: dict[int, list[_Group]] = {}
    for group in groups:
        for link in links_of(group):
            through.setdefault(link, []).append(group)
    left = {link: part for link, part in before.items() if link not in through}
    for link, mine in through.items():
        seen = _most(mine, lambda group: group.measured)
        free = _most(mine, lambda group: group.free)
        part = min(1.0, max(LEAST, seen / capacities.get(link, free)))
        was = before.get(link)
        if was is None:
            if seen <= ENTERS * free:
                left[link] = part
        elif seen < LEAVES * free:  # so this is all that it has left
            left[link] = was if 1 / CHANGES < part / was < CHANGES else part
        elif part < LEAVES:  # it has this, and may have more: nothing asked for it
            left[link] = part if part >= CHANGES * was else was
    return left


def _most(groups: Sequence[_Group], rate: Callable[[_Group], float]) -> float:
    """The most that these groups send in one phase."""
    of_phase: dict[int, float] = {}
    for group in groups:
        of_phase[group.phase] = of_phase.get(group.phase, 0.0) + rate(group)
    return max(of_phase.values())


def _check(plan: Plan, times: Times) -> None:
    shape = [len(groups) for groups in plan.phases]
    if [len(row) for row in times] != shape:
        raise UsageError(
            f"times: expected seconds of each group of {len(shape)} phases, {shape} groups, "
            f"got {[len(row) for row in times]}"
        )


NO_VERSION = -1


class GroupTimes:
    """The seconds that groups take, exchanged among all workers.

    Each worker times the averages of its own groups. Every so many steps all add up what they
    measured, on a channel of its own, and use the sum one such interval later. So nobody waits for
    it, and all decide by the same numbers in the same step.
    """

    def __init__(self, run: Run, every: int) -> None:
        """Start timing. Collective.

        Args:
            run: The training.
            every: Steps from one exchange to the next.
        """
        self._run, self._every = run, every
        self._channel = run.comm.channel("adjust")
        self._measured: list[tuple[int, list[Any]]] = []
        """For each average: its phase, and the marks of its start and end."""
        self._measured_version = NO_VERSION
        """The version of the plan that they are of."""
        self._sums = torch.zeros(0, dtype=torch.float64)
        """The seconds of all workers, once the exchange is complete."""
        self._sums_version = NO_VERSION
        self._pending: Pending | None = None

    def begin(self, plan: Plan) -> Callable[[], None]:
        """Start timing this step's average; call the result when the average is complete."""
        if self._measured_version != plan.version:
            self._measured.clear()
            self._measured_version = plan.version
        stopwatch = self._run.stopwatch
        marks = [stopwatch.mark()]
        phase = (self._run.step - plan.begins) % len(plan.phases)
        self._measured.append((phase, marks))
        return lambda: marks.append(stopwatch.mark())

    def exchange(self, plan: Plan) -> Times | None:
        """Return the times of *plan* that all workers have; None in steps without an exchange.

        Collective, and waits for nobody.
        """
        if self._run.step % self._every or not self._run.step:
            return None
        self.wait()
        times = self._times(plan) if self._sums_version == plan.version else None
        self._send(plan)
        return times

    def _times(self, plan: Plan) -> Times:
        """The least time of a group's workers: the last to arrive waits for the network alone.

        0 where nobody has measured.
        """
        by_phase = self._sums.view(len(plan.phases), -1).tolist()
        return [
            [
                min((seconds[rank] for rank in group if seconds[rank] > 0), default=0.0)
                for group in groups
            ]
            for groups, seconds in zip(plan.phases, by_phase, strict=True)
        ]

    def _send(self, plan: Plan) -> None:
        run = self._run
        own = torch.zeros(len(plan.phases), run.comm.size, dtype=torch.float64)
        measured = self._measured if self._measured_version == plan.version else []
        for phase in range(len(plan.phases)):
            times = sorted(
                run.stopwatch.seconds(marks[0], marks[1:])[0]
                for of, marks in measured
                if of == phase and len(marks) > 1
            )
            if times:
                # In some steps it waits for slower workers, and not for the network.
                own[phase, run.comm.rank] = times[len(times) // 4]
        self._measured.clear()
        self._sums = own.view(-1).to(run.parameters[0].device)
        self._sums_version = plan.version
        self._pending = self._channel.all_reduce(self._sums, "sum")

    def wait(self) -> None:
        """Wait for the exchange that is under way."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def save(self) -> dict[str, Any]:
        """Return the last exchange, as a checkpoint keeps it."""
        self.wait()
        return {"sums": self._sums, "version": self._sums_version}

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what `save` gave."""
        self.wait()
        self._measured.clear()
        self._sums = saved["sums"].to(self._sums.device)
        self._sums_version = saved["version"]


_make_once, _describe_once = lru_cache(16)(make_plan), lru_cache(16)(describe)
"""The simulated workers of a process share one plan."""


class CurrentPlan:
    """The plan in force; all workers change it in the same step."""

    def __init__(self, run: Run, options: DSSyncOptions) -> None:
        self._run, self._options = run, options
        self._bytes = sum(bucket.bytes for bucket in run.buckets)
        self.plan = self._make(tuple(range(run.comm.size)), 0)
        self._report("")

    @property
    def largest(self) -> int:
        """The workers of the largest group."""
        return max(len(group) for groups in self.plan.phases for group in groups)

    def renew(self) -> bool:
        """Make a plan of the active workers where they have changed; return whether it did."""
        run, members = self._run, tuple(self._run.participants)
        if members == self.plan.members or not members:
            return False
        self.plan = for_members(
            self.plan, members, run.cluster, self._bytes, begins=run.step
        )
        self._report(f"of the active workers, from step {run.step} on, ")
        return True

    def adjust(self, times: Times) -> bool:
        """Make a plan from measured times where contention has moved; return whether it did."""
        run = self._run
        plan = decide(self.plan, times, run.cluster, self._bytes, begins=run.step)
        if plan is None:
            return False
        self.plan = plan
        self._report(f"by measured times of groups, from step {run.step} on, ")
        return True

    def _make(
        self,
        members: tuple[int, ...],
        version: int,
        contention: Contention = NONE,
    ) -> Plan:
        options = self._options
        # The active workers may be fewer than a group was asked to have.
        most = max(2, len(members)) if version else options.size
        return _make_once(
            members,
            groups=options.groups,
            size=min(options.size, most),
            seed=options.seed,
            cluster=self._run.cluster,
            bytes=self._bytes,
            cross_rack_every=options.cross_rack_every,
            version=version,
            begins=self._run.step,
            contention=contention,
        )

    def _report(self, why: str) -> None:
        run, plan = self._run, self.plan
        if len(plan.members) > 1:
            cluster = run.cluster and plan.contention.on(run.cluster)
            text = _describe_once(plan, cluster, self._bytes)
            run.report(f"ds-sync: {why}{text}")

    # ---- restarts ----

    @property
    def _requested(self) -> list[Any]:
        options = self._options
        return [options.groups, options.size, options.seed, options.cross_rack_every]

    def save(self) -> dict[str, Any]:
        """Return the plan, and the options that it was made from, as a checkpoint keeps them."""
        return {"requested": self._requested, "plan": self.plan.save()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on with the saved plan; with a new one where the options are others now."""
        self.plan = Plan.load(saved["plan"])
        if saved["requested"] != self._requested:
            plan = self.plan
            self.plan = self._make(plan.members, plan.version + 1, plan.contention)
