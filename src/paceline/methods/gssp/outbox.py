"""What a server owes the others: the mean of the gradients that it has applied, by weight, or
its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.interfaces import HeldPush, Hyperparameters, Parcel, Shard


@dataclass
class _Owed:
    """Of one bucket, since it was last passed on. *values*: the sum of gradients times their
    weights; while there is one alone, the gradient itself."""

    values: torch.Tensor
    used: list[bool]
    hyperparameters: Hyperparameters
    weight: float
    gradients: int
    is_sum: bool = False


class Outbox:
    """Adds up, bucket by bucket. *models*: parameters are passed on, and no gradients."""

    def __init__(self, models: bool) -> None:
        self._models = models
        self._owed: dict[int, _Owed] = {}

    def add(self, push: HeldPush, gradients: int) -> None:
        """This was applied, and stands for so many. Its memory is used up."""
        owed = self._owed.get(push.bucket)
        if owed is None:
            self._owed[push.bucket] = _Owed(
                values=push.gradient[:0] if self._models else push.gradient,
                used=list(push.used),
                hyperparameters=push.hyperparameters,
                weight=push.weight,
                gradients=gradients,
            )
            return
        if not self._models:
            if not owed.is_sum:
                owed.values.mul_(owed.weight)
                owed.is_sum = True
            owed.values.add_(push.gradient, alpha=push.weight)
        owed.used = [a or b for a, b in zip(owed.used, push.used, strict=True)]
        owed.hyperparameters = push.hyperparameters
        owed.weight += push.weight
        owed.gradients += gradients

    def take(self, shard: Shard, least: int, versions: dict[int, int]) -> list[Parcel]:
        """What is owed of the buckets of which that is at least so many gradients. Nobody owes
        it any more."""
        due = [b for b, owed in self._owed.items() if owed.gradients >= least]
        return [self._parcel(shard, bucket, versions[bucket]) for bucket in due]

    def _parcel(self, shard: Shard, bucket: int, version: int) -> Parcel:
        owed = self._owed.pop(bucket)
        values = owed.values
        if self._models:
            values = shard.parameters(bucket)
        elif owed.is_sum and owed.weight:
            values.mul_(1 / owed.weight)
        return Parcel(
            bucket=bucket,
            gradients=owed.gradients,
            weight=owed.weight,
            used=owed.used,
            hyperparameters=owed.hyperparameters,
            values=values,
            version=version,
            is_model=self._models,
        )
