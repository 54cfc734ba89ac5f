"""What the cases share."""

from __future__ import annotations

import torch

import paceline

BUCKETS = 6


def buffers(rank: int) -> list[torch.Tensor]:
    """Large ones first: gloo moves two at a time, so that small ones overtake them."""
    sizes = [200_000, 10, 50_000, 3, 100_000, 1]
    return [torch.full((size,), float(rank + i)) for i, size in enumerate(sizes)]


def skew(rank: int, step: int) -> None:
    """Workers come in another order each time."""
    paceline.pace(0.002 * ((rank + step) % 3))
