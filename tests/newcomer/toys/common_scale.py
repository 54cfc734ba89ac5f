"""A code of two rounds: workers first agree on a scale, then send whole numbers on it.

Round 1: s = the sum of all workers' largest elements. Round 2: the sum of round(32767 a / s).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.interfaces import Coding, Compressor, State, StateKind, Sum

LEVELS = 32767


@dataclass(frozen=True, kw_only=True)
class CommonScale(Compressor):
    """Whole numbers times a scale that is the same on all workers."""

    name: ClassVar[str] = "common-scale"
    linear: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    rounds: ClassVar[int] = 2
    state: ClassVar[StateKind] = "none"

    def passes(self, workers: int) -> tuple[float, float]:
        return 2.0, 8.0

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        workers: int,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        full = [place for place, part in enumerate(parts) if part.numel()]
        if not full:
            return
        largest = torch.stack([parts[place].abs().max().double() for place in full])
        scales = ((yield Sum(largest)) / LEVELS).tolist()
        for place, scale in zip(full, scales, strict=True):
            part = parts[place]
            finite = torch.isfinite(torch.tensor(scale))
            code = part.double() / scale if scale and finite else part.double() * 0.0
            code = code.round().nan_to_num(0.0).to(torch.int32).view(-1)
            if sent is not None:
                sent[place].copy_((code * scale).view(part.shape))
            total = yield Sum(code)
            part.copy_((total * scale).view(part.shape))
