"""What ranks agree on: sums over all of them, and rank 0's numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.interfaces import Comm, ReduceOperation


class Ranks:
    """All ranks of *comm*, which call each of these together."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def from_rank_0(self, values: Sequence[int]) -> list[int]:
        """Rank 0's *values*, as many as each rank's own. A sum with zeros, not a broadcast:
        all ranks leave it together, and the next steps are not skewed by who sat where in a
        tree."""
        numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
        if self._comm.rank != 0:
            numbers.zero_()
        self._comm.all_reduce(numbers, "sum").wait()
        agreed: list[int] = numbers.tolist()
        return agreed

    def told_by_rank_0(self, values: Sequence[int]) -> list[int]:
        """The same, where only rank 0 knows how many."""
        (count,) = self.from_rank_0([len(values)])
        mine = values if self._comm.rank == 0 else [0] * count
        return self.from_rank_0(mine) if count else []

    def sums(self, *values: float) -> list[float]:
        """Each value's sum over ranks."""
        return self._all(values, "sum")

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over ranks."""
        return self._all(values, "max")

    def _all(self, values: Sequence[float], operation: ReduceOperation) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._comm.all_reduce(numbers, operation).wait()
        agreed: list[float] = numbers.tolist()
        return agreed
