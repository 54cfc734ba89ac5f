"""A code of two rounds: workers first agree on a scale, then send whole numbers on it.

Round 1: s = the sum of all workers' largest elements. Round 2: the sum of round(32767 a / s).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression import Compressor, Leg, RankInfo, Rounds, Shape, State, Sum
from paceline.compression.base import (
    dense,
    elements,
    flat,
    put,
    real_type,
    reals,
    sum_uncompressed,
)

LEVELS = 32767


@dataclass(frozen=True, kw_only=True)
class CommonScale(Compressor):
    """Whole numbers times a scale that is the same on all workers."""

    name: ClassVar[str] = "common-scale"
    linear: ClassVar[bool] = True
    rounds: ClassVar[int] = 2

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 2.0, 8.0

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        if not kept or not kind.is_floating_point:
            return dense(kept, kind)
        return Leg("sum", 8), Leg("sum", 4 * elements(kept))

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        parts, sent = reals(parts), None if sent is None else reals(sent)
        if not parts or not parts[0].is_floating_point():
            yield from sum_uncompressed(parts, sent)
            return
        whole = flat(parts).double()
        scale = (yield Sum(whole.abs().max().view(1))) / LEVELS
        code = (whole / scale).round().nan_to_num(0.0).to(torch.int32)
        if sent is not None:
            put(code * scale, sent)
        put((yield Sum(code)) * scale, parts)
