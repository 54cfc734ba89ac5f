"""A sum over workers that does not depend on who is fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.interfaces.buckets import stand_alike, wire_bytes


class Sum:
    """Adds up one tensor per worker in the order of ranks, so that the bits are the same in all
    runtimes. It holds a tensor that is early until those before it have come. *operation* ``"max"``
    takes the element-wise maximum instead.
    """

    def __init__(self, operation: str = "sum") -> None:
        self._operation = operation
        self._early: dict[int, torch.Tensor] = {}
        self._total: torch.Tensor | None = None
        self.ranks: list[int] = []
        """Whose tensors are in."""
        self.added_bytes = 0

    def add(self, rank: int, tensor: torch.Tensor, expected: Sequence[int]) -> None:
        """*tensor* is used up. *expected*: all who are to come, or have, in rank order."""
        self.ranks.append(rank)
        self._early[rank] = tensor
        self.settle(expected)

    def settle(self, expected: Sequence[int]) -> None:
        """Add what can be added, now that these are *expected*."""
        missing = [rank for rank in expected if rank not in self.ranks]
        first = min(missing, default=None)
        for rank in sorted(self._early):
            if first is not None and rank > first:
                return
            self._put(self._early.pop(rank))

    def is_complete(self, expected: Sequence[int]) -> bool:
        """Whether everybody's tensor is in."""
        return all(rank in self.ranks for rank in expected)

    def result(self) -> torch.Tensor:
        """The sum. Call when complete; the first rank's tensor has become it."""
        assert self._total is not None, "nothing was added"
        assert not self._early, "the sum is not complete"
        return self._total

    def _put(self, tensor: torch.Tensor) -> None:
        if self._total is None:
            self._total = tensor
            return
        size = wire_bytes(tensor)
        self.added_bytes += size
        if self._operation == "max":
            torch.maximum(self._total, tensor, out=self._total)
        else:
            self._total.add_(tensor)
        stand_alike(self._total, tensor)
