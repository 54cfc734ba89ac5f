"""Top-k: the largest elements of each tensor, with their places.

Aji and Heafield, "Sparse communication for distributed gradient descent" (EMNLP 2017); with
residuals analysed by Stich et al., "Sparsified SGD with memory" (NeurIPS 2018). Per tensor:

    send the k elements of the largest magnitude, k = density * elements, and their places

Differs from the papers in that the result is the sum over all workers (of shares of a mean),
also where an element was sent by few of them. In chunks, with 2 bits a value, it is what
SparseLoCo sends (arXiv 2508.15706).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression.per_worker import Alone
from paceline.compression.selection import Cut, cut, pick, require_density
from paceline.compression.sparse import (
    add_at,
    coded,
    opened,
    passes_to_add_up,
    size_of,
)
from paceline.compression.value_bins import require_bits
from paceline.errors import UsageError
from paceline.interfaces import CompressorSummary, Shape, State, StateKind


@dataclass(frozen=True, kw_only=True)
class TopK(Alone):
    """The largest elements of each tensor, or of each chunk of it: at least one. Small tensors,
    those of one dimension, and whole numbers are summed as they are.

    Codes are gathered: fewer bytes than a dense ring's go on the network where density is below
    1 over the number of workers, about.
    """

    density: float = 0.01
    """The part of a tensor's elements that is sent."""

    chunk: int = 0
    """Elements that are a tensor by themselves; 0 for whole tensors."""

    bits: int = 32
    """Of a value: 32 for its own type, 2 for the mean of one of four bins around the tensor's
    mean."""

    small: int = 1024
    """Tensors with fewer elements, and those of one dimension, are summed as they are; 0 for
    none."""

    name: ClassVar[str] = "top-k"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        sends=(
            "the part `density` of the elements in their own type (or in `bits` each),"
            " and 1 to 4 bytes for the place of each (2 for a tensor or chunk up to "
            "65,536 elements), to every other worker"
        ),
        loses="all other elements, until residuals have made them large",
    )
    unbiased: ClassVar[bool] = False
    state: ClassVar[StateKind] = "none"
    error_feedback_by_default: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_density(self.density)
        require_bits(self.bits)
        if self.chunk < 0:
            raise UsageError(f"chunk: expected 0 or more elements, got {self.chunk}")

    def passes(self, workers: int) -> tuple[float, float]:
        return 27.0 if self.chunk else 14.0, passes_to_add_up(self.density, workers)

    def _cuts(self, shapes: Sequence[Shape]) -> list[Cut]:
        return [cut(math.prod(shape), self.density, self.chunk) for shape in shapes]

    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        return size_of(self._cuts(shapes), dtype, self.bits)

    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        cuts = self._cuts([part.shape for part in parts])
        picked = []
        for part, of in zip(parts, cuts, strict=True):
            values = part.reshape(-1)
            places = pick(values, of)
            picked.append((places, values.index_select(0, places)))
        return coded(picked, cuts, self.bits)

    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        cuts = self._cuts([part.shape for part in parts])
        picked = opened(code, cuts, dtype, self.bits)
        for part, (places, values) in zip(parts, picked, strict=True):
            add_at(part, places, values, add)
