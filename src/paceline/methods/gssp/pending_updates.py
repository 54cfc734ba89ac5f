"""What a server owes the others: the mean of the gradients that it has applied, by weight."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.interfaces import HeldPush, Parcel, Shard
from paceline.methods.gssp.gradient_sum import GradientSum


@dataclass
class _Owed:
    """Of one bucket, since it was last passed on: so many *gradients*."""

    total: GradientSum
    gradients: int


class Outbox:
    """Adds up, bucket by bucket."""

    def __init__(self) -> None:
        self._owed: dict[int, _Owed] = {}

    def add(self, shard: Shard, push: HeldPush, gradients: int) -> None:
        """This was applied, and stands for so many. Its memory is used up."""
        its = push.gradient, push.weight, push.used, push.hyperparameters
        owed = self._owed.get(push.bucket)
        if owed is None:
            self._owed[push.bucket] = _Owed(GradientSum(*its), gradients)
            return
        owed.total.add(shard, push.bucket, *its)
        owed.gradients += gradients

    def take(self, least: int) -> list[Parcel]:
        """What is owed of the buckets of which that is at least so many gradients. Nobody owes
        it any more."""
        due = [b for b, owed in self._owed.items() if owed.gradients >= least]
        return [self._parcel(bucket) for bucket in due]

    def _parcel(self, bucket: int) -> Parcel:
        owed = self._owed.pop(bucket)
        total = owed.total
        return Parcel(
            bucket=bucket,
            gradients=owed.gradients,
            weight=total.weight,
            used=total.used,
            hyperparameters=total.hyperparameters,
            values=total.mean(),
        )
