"""A lossy linear code: whole numbers on a grid that all workers share.

Sums of codes are codes of sums, so that they may be added up anywhere, by integer addition
alone: as in a switch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression import Compressor, Leg, RankInfo, Rounds, Shape, State, Sum
from paceline.compression.base import (
    dense,
    flat,
    put,
    real_type,
    reals,
    sum_uncompressed,
)

STEP = 2.0**-20
MOST, NOT_FINITE = 2**40, 2**60  # steps; the one is far beyond all sums of the other


@dataclass(frozen=True, kw_only=True)
class Grid(Compressor):
    """Each element, rounded to a multiple of a step."""

    name: ClassVar[str] = "grid"
    linear: ClassVar[bool] = True

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 4.0, 4.0

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        return dense(kept, torch.int64 if kind.is_floating_point else kind)

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
        whole = flat(parts)
        steps = torch.nan_to_num(whole.double() / STEP, nan=0.0).clamp(-MOST, MOST)
        code = steps.round().to(torch.int64)
        code[~whole.isfinite()] = NOT_FINITE // place.workers
        if sent is not None:
            put(code * STEP, sent)
        total = yield Sum(code)
        result = total * STEP
        result[total.abs() > NOT_FINITE // (2 * place.workers)] = torch.nan
        put(result, parts)
