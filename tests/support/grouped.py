"""The smallest method of groups: each server applies what comes, and sends the mean of what it has
applied after every *period* pushes of a bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from paceline.interfaces import (
    Groups,
    GroupServerDiscipline,
    GroupUpdate,
    PushedGradient,
    Shard,
)
from paceline.methods.group_members import read_members
from paceline.methods.push_pull import PushPull, without_gradient


@dataclass(frozen=True, kw_only=True)
class Grouped(PushPull):
    """*period*: see `SumsUp`."""

    name: ClassVar[str] = "grouped"

    members: str = ""
    period: int = 0

    def groups(self, workers: int) -> Groups:
        if self.members:
            return read_members(self.members, workers)
        return Groups((0,) * workers, 1)

    def server(self, workers: int) -> SumsUp:
        return SumsUp(self.groups(workers), self.period)


@dataclass
class Sum:
    """A bucket's gradients times their weights, since the last update."""

    total: torch.Tensor
    last: PushedGradient
    gradients: int = 0
    weight: float = 0.0


@dataclass
class SumsUp(GroupServerDiscipline):
    """The server's half. *period*: pushes in an update; 0: as many as the group has workers. *taken*
    is told the element and the bucket of each gradient."""

    known: Groups
    period: int = 0
    taken: Callable[[int, int], None] | None = None
    number: int = 0
    sums: dict[int, Sum] = field(default_factory=dict)
    notified: int = 0
    notices: dict[int, list[bytes]] = field(default_factory=dict)

    @property
    def groups(self) -> Groups:
        return self.known

    def serve_group(self, number: int) -> None:
        self.number = number

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        if push.applied:
            shard.reply(push)
            return
        if self.taken is not None:
            self.taken(int(push.gradient.argmax()), push.bucket)
        its = self.sums.setdefault(
            push.bucket, Sum(torch.zeros_like(push.gradient), push)
        )
        its.total.add_(push.gradient, alpha=push.weight)
        used = [a or b for a, b in zip(its.last.used, push.used, strict=True)]
        its.last = without_gradient(push)._replace(used=used)
        its.gradients += 1
        its.weight += push.weight
        shard.apply(push)
        shard.reply(push)

    def take_due_updates(self, shard: Shard) -> list[GroupUpdate]:
        period = self.period or len(self.groups.members(self.number))
        return self._take(period)

    def take_all_updates(self, shard: Shard) -> list[GroupUpdate]:
        return self._take(0)

    def _take(self, least: int) -> list[GroupUpdate]:
        due = [b for b, its in self.sums.items() if its.gradients >= least]
        sums = [(bucket, self.sums.pop(bucket)) for bucket in due]
        return [
            GroupUpdate(
                bucket=bucket,
                gradients=its.gradients,
                weight=its.weight,
                used=its.last.used,
                hyperparameters=its.last.hyperparameters,
                values=its.total.div_(its.weight or 1.0),
            )
            for bucket, its in sums
        ]

    def apply_update(self, shard: Shard, source: int, update: GroupUpdate) -> None:
        push = PushedGradient(
            worker=-1 - source,
            step=0,
            bucket=update.bucket,
            weight=update.weight,
            used=update.used,
            hyperparameters=update.hyperparameters,
            gradient=update.values,
            number=-1,
        )
        shard.apply(push)

    def encode_notice(self, shard: Shard) -> bytes:
        if shard.next_unstarted_step() <= self.notified:
            return b""
        self.notified = shard.next_unstarted_step()
        return b"%d" % self.notified

    def on_notice(self, shard: Shard, source: int, notice: bytes) -> None:
        self.notices.setdefault(source, []).append(notice)
