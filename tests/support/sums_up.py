"""The smallest discipline of group servers: what the laws of their mesh are tried with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.interfaces import Groups, HeldPush, Parcel, Shard


class SumsUp:
    """The smallest `Meshed`: applies and answers what comes, and passes on the sum of each
    *period* pushes of a bucket. *taken* is told the element of each gradient."""

    def __init__(
        self,
        groups: Groups,
        period: int,
        taken: Callable[[int, int], None],
    ) -> None:
        self._groups, self._period, self._taken = groups, period, taken
        self.number = -1
        self._sums: dict[int, list[HeldPush]] = {}
        self._told = 0
        self.words_heard: dict[int, list[bytes]] = {}

    def __deepcopy__(self, memo: object) -> SumsUp:
        fresh = SumsUp(self._groups, self._period, self._taken)
        fresh.number = self.number
        return fresh

    def pushed(self, shard: Shard, push: HeldPush) -> None:
        if push.applied:
            shard.answer(push)
            return
        self._taken(int(push.gradient.argmax()), push.bucket)
        shard.apply(push)
        shard.answer(push)
        self._sums.setdefault(push.bucket, []).append(push)

    def changed(self, shard: Shard) -> None:
        pass

    def first_step(self, shard: Shard) -> int:
        return shard.slowest()

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return True

    def ended(self, shard: Shard) -> int | None:
        return shard.slowest()

    def resume(self, shard: Shard, step: int) -> None:
        pass

    @property
    def groups(self) -> Groups:
        return self._groups

    def is_server(self, number: int) -> None:
        self.number = number

    def outgoing(self, shard: Shard) -> list[Parcel]:
        full = [b for b, pushes in self._sums.items() if len(pushes) >= self._period]
        return [self._parcel(bucket) for bucket in full]

    def owed(self, shard: Shard) -> list[Parcel]:
        return [self._parcel(bucket) for bucket in list(self._sums)]

    def _parcel(self, bucket: int) -> Parcel:
        pushes = self._sums.pop(bucket)
        weight = sum(push.weight for push in pushes)
        values = sum(push.gradient * push.weight for push in pushes) / weight
        assert isinstance(values, torch.Tensor)
        return Parcel(
            bucket=bucket,
            gradients=len(pushes),
            weight=weight,
            used=[True],
            hyperparameters=pushes[-1].hyperparameters,
            values=values,
        )

    def incoming(self, shard: Shard, source: int, parcel: Parcel) -> None:
        applied = HeldPush(
            worker=-1 - source,
            step=0,
            bucket=parcel.bucket,
            weight=parcel.weight,
            used=parcel.used,
            hyperparameters=parcel.hyperparameters,
            gradient=parcel.values,
            number=-1,
        )
        shard.apply(applied)

    def words(self, shard: Shard) -> bytes:
        if shard.fastest() <= self._told:
            return b""
        self._told = shard.fastest()
        return b"%d" % self._told

    def heard(self, shard: Shard, source: int, words: bytes) -> None:
        self.words_heard.setdefault(source, []).append(words)
