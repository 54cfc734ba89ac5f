"""Grains: how a block of elements becomes whole numbers times a scale, and elements again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from paceline.compression.counter_random import Chance

SCALE = 4
"""Bytes of a scale: a float32."""
TINY = torch.finfo(torch.float32).tiny
"""The smallest scale: its reciprocal is still a float32."""


@dataclass(frozen=True)
class Grain:
    """How finely a block is rounded: whole numbers from minus *levels* to *levels*, of so
    many *bits*; the largest stands for the block's *norm*. All tensors are of shape (rows, blocks,
    elements), scales without the last."""

    levels: int
    bits: Literal[4, 8]
    norm: Literal["largest", "euclidean"]

    def bytes(self, block: int) -> int:
        """Of a code of one block."""
        return SCALE + block * self.bits // 8

    def scale(
        self, values: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """*scales* of blocks of *values*, and *levels*: values over scales."""
        if self.norm == "largest":
            norms = torch.abs(values, out=levels).amax(-1)
        else:  # squares of float32 overflow
            norms = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
        scales.copy_(norms.div_(self.levels).clamp_min_(TINY))
        torch.mul(values, scales.reciprocal().unsqueeze(-1), out=levels)

    def round(
        self,
        levels: torch.Tensor,
        numbers: torch.Tensor,
        chance: Chance | None,
        begin: int,
    ) -> None:
        """*levels* as whole *numbers*."""
        if chance is None:
            levels.round_()
        else:
            chance.add_to(levels, begin)
            most = self.levels
            levels.floor_().clamp_(-most, most)
        if self.bits == 4:  # of each two one is the upper half of a byte
            low, high = levels.chunk(2, -1)
            levels = low.add_(high, alpha=16)
        numbers.copy_(levels)

    def read(
        self, numbers: torch.Tensor, scales: torch.Tensor, values: torch.Tensor
    ) -> None:
        """*values*: numbers times scales."""
        if self.bits == 4:
            low, high = values.chunk(2, -1)
            low.copy_(numbers)
            torch.mul(low, 1 / 16, out=high).round_()
            low.sub_(high, alpha=16)
        else:
            values.copy_(numbers)
        values.mul_(scales.unsqueeze(-1))


def mark(scales: torch.Tensor) -> None:
    """What is infinite is not a number from now on: 0 times it is none either."""
    scales.add_(scales * 0)
