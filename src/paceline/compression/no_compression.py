"""No compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression.packing import dense, flat, put, reals
from paceline.interfaces import (
    Coding,
    Compressor,
    CompressorSummary,
    Consistency,
    Leg,
    Place,
    Shape,
    State,
    StateKind,
    Sum,
)


@dataclass(frozen=True, kw_only=True)
class Identity(Compressor):
    """Tensors are summed as they are, whatever their type."""

    name: ClassVar[str] = "none"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        sends="every element in its own type",
        loses="nothing",
    )
    consistency: ClassVar[Consistency] = "exact"
    linear: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True
    rounds: ClassVar[int] = 1
    state: ClassVar[StateKind] = "none"

    def passes(self, workers: int) -> tuple[float, float]:
        return 0.0, 0.0

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        return dense(shapes, dtype)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        yield from summed(reals(parts), None if sent is None else reals(sent))


def summed(
    parts: Sequence[torch.Tensor], sent: Sequence[torch.Tensor] | None
) -> Coding:
    """One round without a code. *parts*: real, and not empty."""
    if not parts:
        return
    whole = flat(parts)
    if sent is not None:
        put(whole, sent)
    total = yield Sum(whole)
    put(total, parts)
