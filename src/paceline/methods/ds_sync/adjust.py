"""Adjusts the plan when contention on links changes, from the measured times of groups.

- `CurrentPlan`: the plan in use, and its changes; start here.
- `GroupTimes`: measures the groups' averages, and exchanges the times.
- `decide`, `for_members`: the next plan, from times or for fewer workers.

Theory of operation
-------------------
The times are summed over all workers. So all have the same times, and compute the same plan from
them without further messages. A group's time gives a lower bound of the bandwidth of each of its
links. A link is judged by the largest bandwidth that any of its groups had, relative to the largest
that these groups would have on a free link. A slow group does not make all its workers count as slow,
since each of them is in other groups too.

Only ratios between groups count, so the cluster's bandwidths need to be right only in proportion. A
link becomes contended at `ENTERS`, and free again at `LEAVES`. In between, its contention is updated
only if it has changed by `CHANGES`. So noise does not make plans oscillate.

If the current plan sends little over an uplink, only that little is known of its bandwidth. So the
plan may continue to avoid an uplink whose contention is over. Trying it now and then would make plans
oscillate.
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
"""A link becomes contended if this share of its bandwidth is left, or less."""
LEAVES = 0.8
"""A contended link is free again if this share is left, or more."""
CHANGES = 2.0
"""The share of a contended link is updated if it changes by this factor, up or down."""
LEAST = 1e-3
"""The smallest share that a link counts as having left, whatever was measured."""
Times = Sequence[Sequence[float]]
"""Seconds of each group of each phase, in the order of `Plan.phases`.

A group that was not measured has 0, or a number that is not finite.
"""


def decide(
    plan: Plan,
    times: Times,
    cluster: Cluster | None,
    bytes: float,  # noqa: A002 - as in the interfaces
    *,
    begins: int = 0,
) -> Plan | None:
    """Return the next plan, for the contention that measured times show.

    Only ``auto`` and ``topology`` plans change. The design ``digits`` stays.

    Args:
        plan: The current plan.
        times: Seconds of each group since its last member arrived; the same on all workers.
        cluster: The network. None if it is not known; then all links count as equal.
        bytes: Bytes that each worker averages in each step.
        begins: The step of the new plan's first phase.

    Returns:
        The plan; None if nothing changes.

    Raises:
        UsageError: The times are those of other phases and groups.
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
    """Return the next plan, for the workers that remain.

    It has the options of *plan*, but no group is larger than the number of workers.

    Args:
        plan: The current plan.
        members: The workers that remain.
        cluster: The network; None if it is not known.
        bytes: Bytes that each worker averages in each step.
        begins: The step of the new plan's first phase.

    Raises:
        UsageError: See `make_plan`.
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
    """Return a cluster of one rack with equal hosts, for a network that is not known."""
    return Cluster((Rack(workers=max(members) + 1, link=1e9, latency=0.0),))


class _Group(NamedTuple):
    """A group of a phase, and the bandwidth of its workers.

    Attributes:
        phase: Number of the phase.
        workers: Its ranks.
        measured: Bytes per second that each worker sent.
        free: Bytes per second that each would send on a network without other traffic.
    """

    phase: int
    workers: tuple[int, ...]
    measured: float
    free: float


def _groups(plan: Plan, times: Times, cluster: Cluster, payload: float) -> list[_Group]:
    """Return the groups that were measured, except those that send nothing over a link."""
    found = []
    seconds = group_seconds(plan, cluster, payload)
    for phase, groups in enumerate(plan.phases):
        for number, workers in enumerate(groups):
            took, free = times[phase][number], seconds[phase][number]
            if 0 < took < math.inf and free > 0:
                sent = ring_bytes(len(workers), payload)
                found.append(_Group(phase, workers, sent / took, sent / free))
    # The whole network may be faster or slower than the cluster file says. Contention only slows groups
    # down, so the faster groups show the network's own speed.
    slower = sorted(group.free / group.measured for group in found)
    scale = slower[len(slower) // 4] if slower else 1.0
    return [group._replace(measured=group.measured * scale) for group in found]


# Cached, since simulated workers of one process decide by the same numbers.
@lru_cache(maxsize=4)
def _contention(
    plan: Plan, times: tuple[tuple[float, ...], ...], cluster: Cluster, payload: float
) -> Contention:
    """Return the contention that explains the times."""
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
    # A contended uplink explains why groups over it are slow, and a slow host why its groups are. Such
    # groups are no evidence against their other hosts.
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
    """Return the share that is left of each contended link.

    Args:
        groups: The measured groups.
        links_of: Returns the links of a group.
        before: The shares of the contended links so far.
        capacities: Bandwidth of links in bytes per second. For a link without one, the share is relative
            to the bandwidth that its groups would have on a free link.
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
        elif seen < LEAVES * free:
            # Groups could have sent more, so this is all that the link has left.
            left[link] = was if 1 / CHANGES < part / was < CHANGES else part
        elif part < LEAVES:
            # The link has at least this left. It may have more, which no group needed.
            left[link] = part if part >= CHANGES * was else was
    return left


def _most(groups: Sequence[_Group], rate: Callable[[_Group], float]) -> float:
    """Return the largest sum of the groups' *rate* in one phase, in bytes per second."""
    of_phase: dict[int, float] = {}
    for group in groups:
        of_phase[group.phase] = of_phase.get(group.phase, 0.0) + rate(group)
    return max(of_phase.values())


def _check(plan: Plan, times: Times) -> None:
    shape = [len(groups) for groups in plan.phases]
    if [len(row) for row in times] != shape:
        raise UsageError(
            f"times: expected seconds of each group of {len(shape)} phases, {shape} groups, "
            f"got {[len(row) for row in times]}. Pass the times of this plan"
        )


NO_VERSION = -1
"""The version of no plan."""


class GroupTimes:
    """Measures the seconds of groups' averages, and exchanges them among all workers.

    Each worker times the averages of its own groups. At the end of an interval, an all-reduce on a
    separate channel sums the times. Workers use the sums one interval later. So no worker waits for
    them, and all decide by the same numbers in the same step.
    """

    def __init__(self, run: Run, every: int) -> None:
        """Start timing; all ranks must call this together.

        Args:
            run: The training.
            every: Steps of an interval, from one exchange to the next.
        """
        self._run, self._every = run, every
        self._channel = run.comm.channel("adjust")
        self._measured: list[tuple[int, list[Any]]] = []
        """For each average, its phase, and the marks of its start and end."""
        self._measured_version = NO_VERSION
        """The version of the plan whose averages were measured."""
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
        """Start exchanging this interval's times, and return those of the previous interval.

        All ranks must call this together. None waits for the exchange that it starts.

        Args:
            plan: The current plan.

        Returns:
            The times of *plan* that all workers have; None in steps without an exchange, and after a
            change of plan.
        """
        if self._run.step % self._every or not self._run.step:
            return None
        self.wait()
        times = self._times(plan) if self._sums_version == plan.version else None
        self._send(plan)
        return times

    def _times(self, plan: Plan) -> Times:
        """Return the smallest time of each group's workers; 0 if none of them measured it.

        The last worker to arrive waits only for the network, so its time is the smallest.
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
        """Start summing this worker's times with those of the others."""
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
                # Take the lower quartile: in some steps the group waits for slower workers.
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
        """Return the state of the last exchange for a checkpoint."""
        self.wait()
        return {"sums": self._sums, "version": self._sums_version}

    def load(self, saved: dict[str, Any]) -> None:
        """Load the state that `save` returned."""
        self.wait()
        self._measured.clear()
        self._sums = saved["sums"].to(self._sums.device)
        self._sums_version = saved["version"]


_make_once, _describe_once = lru_cache(16)(make_plan), lru_cache(16)(describe)
"""Cached, so that the simulated workers of a process share one plan."""


class CurrentPlan:
    """Holds the current plan, which all workers change in the same step.

    Attributes:
        plan: The current plan.
    """

    def __init__(self, run: Run, options: DSSyncOptions) -> None:
        self._run, self._options = run, options
        self._bytes = sum(bucket.bytes for bucket in run.buckets)
        self.plan = self._make(tuple(range(run.comm.size)), 0)
        self._report("")

    @property
    def largest(self) -> int:
        """Number of workers of the largest group."""
        return max(len(group) for groups in self.plan.phases for group in groups)

    def renew(self) -> bool:
        """Make a plan of the active workers if they have changed; return whether they have."""
        run, members = self._run, tuple(self._run.participants)
        if members == self.plan.members or not members:
            return False
        self.plan = for_members(
            self.plan, members, run.cluster, self._bytes, begins=run.step
        )
        self._report(f"of the active workers, from step {run.step} on, ")
        return True

    def adjust(self, times: Times) -> bool:
        """Make a plan from measured times if contention has changed; return whether it has."""
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
        # There may be fewer active workers than the requested size of a group.
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
        """Return the plan and its options for a checkpoint."""
        return {"requested": self._requested, "plan": self.plan.save()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the saved plan; make a new one if the options have changed."""
        self.plan = Plan.load(saved["plan"])
        if saved["requested"] != self._requested:
            plan = self.plan
            self.plan = self._make(plan.members, plan.version + 1, plan.contention)
