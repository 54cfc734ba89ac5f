"""A lossy code that is gathered, with residuals: the larger half of each bucket's elements.

With a = g + e: send the larger half of a; e = a without it (error feedback).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression import Compressor, Gather, Leg, RankInfo, Rounds, Shape, State
from paceline.compression.base import (
    dense,
    elements,
    flat,
    put,
    real_type,
    reals,
    sum_uncompressed,
)


@dataclass(frozen=True, kw_only=True)
class Largest(Compressor):
    """The larger half of a bucket's elements, and where they are."""

    name: ClassVar[str] = "largest"
    state: ClassVar[str] = "own"

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 20.0, 2.0 * workers

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        if not kept or not kind.is_floating_point:
            return dense(kept, kind)
        return (Leg("gather", 16 * -(-elements(kept) // 2)),)

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        return {"residual": torch.zeros_like(like)}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        kept = reals([state["residual"] for state in states])
        parts, sent = reals(parts), None if sent is None else reals(sent)
        if not parts or not parts[0].is_floating_point():
            yield from sum_uncompressed(parts, sent)
            return
        given = (flat(parts) + flat(kept)).double()
        where = given.abs().topk(-(-given.numel() // 2)).indices
        code = torch.cat([where.double(), given[where]])
        own = self._opened(code, given)
        if sent is not None:
            put(own, sent)
        put((given - own).nan_to_num(), kept)
        codes = yield Gather(code)
        put(sum(self._opened(one, given) for one in codes), parts)

    def _opened(self, code: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        where, values = code.chunk(2)
        return torch.zeros_like(like).index_add_(0, where.long(), values)
