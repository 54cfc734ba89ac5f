"""Who is in which group, and how that is decided: step times, measured by servers.

A step of a worker lasts from when its server has let it go on until all of its next gradient is
in: pull, compute and push, without the gate. Each server takes the median of so many steps of a
worker, so that an evaluation in between counts for nothing, and smooths it as the published code
does (0.7 of what is new). Server 0 is told by the others. When all workers that train were measured
anew it *looks*, and tells its decision to servers, which tell their workers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import msgspec

from paceline.errors import UsageError
from paceline.interfaces import Groups
from paceline.methods.gssp.grouping import speed_classes

NEW = 0.7
"""The weight of a new time: the published code's."""

MOST_VERSIONS = 1 << 40
"""A version beyond it is a mistake."""

MOST_STEPS = float(1 << 40)
"""So are so many steps."""


@dataclass
class Known:
    """What a server knows of groups and speeds. A load, at which the discipline begins anew,
    changes nothing of it: copies of a discipline share one."""

    groups: Groups
    number: int = 0
    """Of this server."""
    seconds: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """By worker: what was measured of its steps."""
    fresh: set[int] = field(default_factory=set)
    """Workers that were measured anew since the last look."""
    steps: float = 0.0
    """Of all workers: gradients that are in the model, divided by how many workers there are."""

    def __deepcopy__(self, memo: object) -> Known:
        return self

    def adopt(self, groups: Groups) -> bool:
        """Whether they are newer than those that were known."""
        newer = groups.version > self.groups.version
        if newer:
            self.groups = groups
        return newer

    def measured(self, worker: int, seconds: tuple[float, ...]) -> None:
        self.seconds[worker] = seconds
        self.fresh.add(worker)


class StepTimes:
    """Measures the steps of those who push here: medians of *steps* each. What a worker itself
    tells of a step may come with it."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began: dict[int, float] = {}
        self._times: defaultdict[int, list[tuple[float, ...]]] = defaultdict(list)

    def goes_on(self, worker: int, now: float) -> None:
        self._began[worker] = now

    def step_is_in(
        self, worker: int, now: float, computed: float | None = None
    ) -> tuple[float, ...] | None:
        """The median of its last steps, where there are enough: seconds of a step; with
        *computed*, those of computing and all others."""
        began = self._began.pop(worker, None)
        if began is None or now <= began:
            return None
        whole = now - began
        times = self._times[worker]
        if computed is None:
            times.append((whole,))
        else:
            # Neither is nothing: they are compared by their ratios.
            part = min(max(computed, 0.01 * whole), 0.99 * whole)
            times.append((part, whole - part))
        if len(times) < self._steps:
            return None
        del self._times[worker]
        return tuple(median(column) for column in zip(*times, strict=True))

    def forget(self, worker: int) -> None:
        """It pushes elsewhere, or nowhere."""
        self._began.pop(worker, None)
        self._times.pop(worker, None)


def smoothed(
    before: tuple[float, ...] | None, now: tuple[float, ...]
) -> tuple[float, ...]:
    """T = 0.3 T + 0.7 T_new; the first time T_new."""
    if before is None or len(before) != len(now):
        return now
    return tuple((1 - NEW) * a + NEW * b for a, b in zip(before, now, strict=True))


class Regroup(Protocol):
    """How groups follow from what was measured: server 0's."""

    def look(
        self, groups: Groups, seconds: Mapping[int, tuple[float, ...]]
    ) -> Sequence[int]:
        """The groups by rank, as they are from now on. *seconds*: of those that train."""
        ...


class Looks:
    """Server 0's decisions. Without *regroup* groups stay, and only their speeds are told."""

    def __init__(self, regroup: Regroup | None) -> None:
        self._regroup = regroup

    def look(self, known: Known, training: Collection[int]) -> bool:
        """Whether there is something new: there never is before all who train were measured."""
        if not training or not known.fresh.issuperset(training):
            return False
        known.fresh.clear()
        seconds = {worker: known.seconds[worker] for worker in training}
        before = known.groups
        of = before.of
        if self._regroup is not None:
            of = tuple(self._regroup.look(before, seconds))
        # Also of those that have left: who stays is no other class for that.
        wholes = {worker: math.fsum(its) for worker, its in known.seconds.items()}
        speeds = speed_classes(of, before.servers, wholes)
        if (of, speeds) == (before.of, before.speeds):
            return False
        known.groups = Groups(of, before.servers, before.version + 1, speeds)
        return True


# ---- as bytes ----


class Words(msgspec.Struct, frozen=True, array_like=True):
    """What a server tells the others: the groups that it knows, new times by worker, and, if it is
    server 0, who waits where all meet."""

    groups: Groups
    seconds: dict[int, tuple[float, ...]] = {}
    meeting: list[int] = []


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tells its server: what it was told last, of which a server that was away has
    missed something; and how long it has computed for a step, where it says so."""

    groups: bytes = b""
    computed: float | None = None
    steps: float = 0.0


class News(msgspec.Struct, frozen=True, array_like=True):
    """What a server tells its workers: the groups, as bytes, where they are not the first ones;
    and how many steps of all are in the model (`Known.steps`)."""

    groups: bytes
    steps: float


def written(words: Words | Report | News | Groups) -> bytes:
    return msgspec.msgpack.encode(words)


def read_words(words: bytes, like: Groups) -> Words:
    """Raises `UsageError` for what makes no sense where groups are *like* these."""
    found: Words = _decoded(words, Words)
    _check(found.groups, like)
    if not all(0 <= worker < len(like.of) for worker in found.meeting):
        raise UsageError(f"workers that there are not: {found.meeting}")
    for worker, its in found.seconds.items():
        if not (
            0 <= worker < len(like.of)
            and 1 <= len(its) <= 2
            and all(0 < one < math.inf for one in its)
        ):
            raise UsageError(f"step times of worker {worker} that make no sense: {its}")
    return found


def read_report(report: bytes) -> Report:
    """Raises `UsageError` for bytes that are none."""
    found: Report = _decoded(report, Report)
    if not (0 <= (found.computed or 0) < math.inf and 0 <= found.steps < MOST_STEPS):
        raise UsageError(f"a time, or steps of all, that make no sense: {found}")
    return found


def read_news(words: bytes) -> News:
    """Raises `UsageError` for bytes that are none."""
    found: News = _decoded(words, News)
    return found


def read_groups(words: bytes, like: Groups | None = None) -> Groups:
    """Raises `UsageError` for what makes no sense where groups are *like* these."""
    found: Groups = _decoded(words, Groups)
    if like is not None:
        _check(found, like)
    return found


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"bytes that groups of workers do not say: {error}") from None


def _check(groups: Groups, like: Groups) -> None:
    if (
        len(groups.of) != len(like.of)
        or groups.servers != like.servers
        or not all(0 <= group < like.servers for group in groups.of)
        or not 0 <= groups.version <= MOST_VERSIONS
        or len(groups.speeds) not in (0, like.servers)
    ):
        raise UsageError(
            f"expected {like.servers} groups of {len(like.of)} workers, got {groups}"
        )
