"""One gradient in place of several, which may have different learning rates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.interfaces import Hyperparameters, Shard


class GradientSum:
    """Adds up gradients of one bucket, to be applied at once at another place or time.

    One update by its `mean` and its `weight` moves parameters as far as updates by each of them,
    momentum and rounding aside. Where learning rates differ, as those of two steps may, each
    gradient counts by its weight times its learning rate; and `hyperparameters` has the mean
    of learning rates by weight, group by group of the optimizer. All else in it is of the last
    gradient.

    The first gradient's memory becomes the sum's.
    """

    def __init__(
        self,
        gradient: torch.Tensor,
        weight: float,
        used: Sequence[bool],
        hyperparameters: Hyperparameters,
    ) -> None:
        self._values, self._is_sum = gradient, False
        """The sum of gradients times their weights; while there is one alone, the gradient."""
        self.weight, self.used = weight, list(used)
        self.hyperparameters = hyperparameters

    def add(
        self,
        shard: Shard,
        bucket: int,
        gradient: torch.Tensor,
        weight: float,
        used: Sequence[bool],
        hyperparameters: Hyperparameters,
    ) -> None:
        """One more gradient, of the same *bucket* of *shard*; it is left as it is."""
        if not self._is_sum:
            self._values.mul_(self.weight)
            self._is_sum = True
        rates = [
            _rates(before["lr"], self.weight, new["lr"], weight)
            for before, new in zip(self.hyperparameters, hyperparameters, strict=True)
        ]
        if all(before == new == 1.0 for _, before, new in rates):
            self._values.add_(gradient, alpha=weight)
        else:
            sums = shard.units_of(bucket, self._values)
            news = shard.units_of(bucket, gradient)
            for (group, its_sum), (_, its_new) in zip(sums, news, strict=True):
                _, before, new = rates[group]
                its_sum.mul_(before).add_(its_new, alpha=weight * new)
        self.hyperparameters = [
            {**how, "lr": rate}
            for how, (rate, _, _) in zip(hyperparameters, rates, strict=True)
        ]
        self.weight += weight
        self.used = [a or b for a, b in zip(self.used, used, strict=True)]

    def mean(self) -> torch.Tensor:
        """By weight. Nothing can be added any more."""
        if self._is_sum and self.weight:
            self._values.mul_(1 / self.weight)
        return self._values


def _rates(
    before: float, weight_before: float, new: float, weight: float
) -> tuple[float, float, float]:
    """The mean of two learning rates, and how many times it each of them is."""
    whole = weight_before + weight
    if before == new or not whole:
        return new, 1.0, 1.0
    mean = (weight_before * before + weight * new) / whole
    return (mean, before / mean, new / mean) if mean else (mean, 1.0, 1.0)
