"""A lossy code that is gathered, with residuals: the larger half of each tensor's elements.

With a = g + e: send the larger half of a; e = a without it (error feedback).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.interfaces import Coding, Compressor, Gather, State, StateKind


@dataclass(frozen=True, kw_only=True)
class Largest(Compressor):
    """The larger half of a tensor's elements, and where they are."""

    name: ClassVar[str] = "largest"
    linear: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    rounds: ClassVar[int] = 1
    state: ClassVar[StateKind] = "own"

    def passes(self, workers: int) -> tuple[float, float]:
        return 20.0, 2.0 * workers

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        return {"residual": torch.zeros_like(like)}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        workers: int,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        for place, (part, state) in enumerate(zip(parts, states, strict=True)):
            if not part.numel():
                continue
            given = part.add_(state["residual"]).view(-1)
            where = given.abs().topk(-(-given.numel() // 2)).indices
            values = given[where]
            state["residual"] = part.clone()
            state["residual"].view(-1)[where] = 0.0
            if sent is not None:
                sent[place].copy_(part - state["residual"])
            code = torch.cat([where.view(torch.uint8), values.view(torch.uint8)])
            part.zero_()
            for theirs in (yield Gather(code)):
                indices = theirs[: 8 * len(where)].clone().view(torch.int64)
                added = theirs[8 * len(where) :].clone().view(part.dtype)
                part.view(-1).index_add_(0, indices, added)
