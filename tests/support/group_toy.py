"""A small method of groups: each server applies what comes, and passes on what it has applied
once each of its workers may have sent a gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from paceline.errors import UsageError
from paceline.interfaces import Groups, HeldPush, Parcel
from paceline.methods.group_members import read_members
from paceline.methods.push_pull import AppliesOnArrival, PushPull, without_gradient

NEVER = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Grouped(PushPull):
    """*period*: so many gradients are passed on together; 0: one of each worker."""

    name: ClassVar[str] = "grouped"

    members: str = ""
    period: int = 0

    def groups(self, workers):
        if self.members:
            return read_members(self.members, workers)
        return Groups((0,) * workers, 1)

    def server(self, workers):
        return PassesOn(self.groups(workers), self.period)


@dataclass
class Owed:
    """A bucket's gradients, times their weights, that were not passed on yet."""

    total: torch.Tensor
    used: list[bool]
    last: HeldPush
    gradients: int = 0
    weight: float = 0.0


@dataclass
class PassesOn(AppliesOnArrival):
    """The server's half: a `Meshed` discipline."""

    groups: Groups
    period: int = 0
    number: int = 0
    owes: dict[int, Owed] = field(default_factory=dict)

    def is_server(self, number):
        self.number = number

    def pushed(self, shard, push):
        if push.applied:
            shard.answer(push)
            return
        owed = self.owes.get(push.bucket)
        if owed is None:
            used = [False] * len(push.used)
            owed = Owed(torch.zeros_like(push.gradient), used, push)
            self.owes[push.bucket] = owed
        owed.total.add_(push.gradient, alpha=push.weight)
        owed.used = [a or b for a, b in zip(owed.used, push.used, strict=True)]
        owed.last = without_gradient(push)
        owed.gradients += 1
        owed.weight += push.weight
        shard.apply(push)
        shard.answer(push)

    def changed(self, shard):
        pass

    def first_step(self, shard):
        members = self.groups.members(self.number)
        return min((shard.clock(worker) for worker in members), default=0)

    def ended(self, shard):
        return self.first_step(shard)

    def outgoing(self, shard):
        enough = self.period or len(self.groups.members(self.number))
        return self._pass_on(shard, lambda owed: owed.gradients >= enough)

    def owed(self, shard):
        return self._pass_on(shard, lambda owed: True)

    def _pass_on(self, shard, is_due):
        due = [bucket for bucket, owed in self.owes.items() if is_due(owed)]
        parcels = []
        for bucket in due:
            owed = self.owes.pop(bucket)
            parcels.append(
                Parcel(
                    bucket=bucket,
                    gradients=owed.gradients,
                    weight=owed.weight,
                    used=owed.used,
                    hyperparameters=owed.last.hyperparameters,
                    values=owed.total.div_(owed.weight or 1.0),
                )
            )
        return parcels

    def incoming(self, shard, source, parcel):
        shard.apply(
            HeldPush(
                worker=-1 - source,
                step=0,
                bucket=parcel.bucket,
                weight=parcel.weight,
                used=parcel.used,
                hyperparameters=parcel.hyperparameters,
                gradient=parcel.values,
                number=-1,
            )
        )

    def words(self, shard):
        return b""

    def heard(self, shard, source, words):
        raise UsageError("words: these servers say nothing")
