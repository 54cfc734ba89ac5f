"""Who is in which group, and how that is decided.

Servers measure the steps of their workers (`step_times`). Server 0 is told by the others. When all
workers that train were measured anew it *looks*, and tells its decision to servers, which tell their
workers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.interfaces import Groups
from paceline.methods.gssp.grouping import BySpeed, speed_classes
from paceline.methods.gssp.step_times import Measured

MOST_VERSIONS = 1 << 40
"""A version beyond it is a mistake."""

MOST_ERROR = 1e4
"""So is such an error of a logarithm."""

MOST_STEPS = float(1 << 40)
"""So are so many steps of all."""


@dataclass
class Known:
    """What a server knows of groups and speeds. A load, at which the discipline begins anew,
    changes nothing of it: copies of a discipline share one."""

    groups: Groups
    number: int = 0
    """Of this server."""
    times: dict[int, Measured] = field(default_factory=dict)
    """By worker."""
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

    def measured(self, worker: int, times: Measured) -> None:
        self.times[worker] = times
        self.fresh.add(worker)


class Looks:
    """Server 0's decisions. Without *regroup* groups stay, and only their speeds are told."""

    def __init__(self, regroup: BySpeed | None) -> None:
        self._regroup = regroup

    def error_of(self, groups: Groups) -> float:
        """As `BySpeed.error`, while there are no groups yet; 0: not before all were measured
        for as long as may be."""
        return 0.0 if self._regroup is None or groups.version else self._regroup.error

    def look(self, known: Known, training: Collection[int]) -> bool:
        """Whether there is something new: there never is before all who train were measured."""
        if not training or not known.fresh.issuperset(training):
            return False
        known.fresh.clear()
        times = {worker: known.times[worker] for worker in training}
        before = known.groups
        of = before.of
        if self._regroup is not None:
            of = tuple(self._regroup.look(before, times))
        # Also of those that have left: who stays is no other class for that.
        seconds = {worker: its.seconds for worker, its in known.times.items()}
        speeds = speed_classes(of, before.servers, seconds)
        if (of, speeds) == (before.of, before.speeds):
            return False
        known.groups = Groups(of, before.servers, before.version + 1, speeds)
        return True


# ---- as bytes ----


class Words(msgspec.Struct, frozen=True, array_like=True):
    """What a server tells the others: the groups that it knows, new times by worker, and, if it is
    server 0, who waits where all meet."""

    groups: Groups
    times: dict[int, Measured] = {}
    meeting: list[int] = []


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tells its server: what it was told last, of which a server that was away has
    missed something; and how many steps of all are in its model."""

    groups: bytes = b""
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
    for worker, its in found.times.items():
        if not (
            0 <= worker < len(like.of)
            and 0 < its.seconds < math.inf
            and 0 <= its.error <= MOST_ERROR
        ):
            raise UsageError(f"step times of worker {worker} that make no sense: {its}")
    return found


def read_report(report: bytes) -> Report:
    """Raises `UsageError` for bytes that are none."""
    found: Report = _decoded(report, Report)
    if not 0 <= found.steps < MOST_STEPS:
        raise UsageError(f"steps of all that make no sense: {found}")
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
