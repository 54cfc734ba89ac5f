"""Top-k: the largest elements of each tensor, with their indices.

Aji and Heafield, "Sparse communication for distributed gradient descent" (EMNLP 2017); with error
feedback analysed by Stich et al., "Sparsified SGD with memory" (NeurIPS 2018). Per tensor:

    send the k elements of the largest magnitude, k = density * elements, and their indices

Unlike in the papers, the result is the sum over all workers (of shares of a mean), even if few of
them have sent an element. In chunks, with 2 bits per value, it is the compressor of SparseLoCo
(arXiv 2508.15706).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression.base import (
    CompressorSummary,
    GatheredCompressor,
    Shape,
    SkipsSmallTensors,
    State,
    require_at_least,
)
from paceline.compression.sparse import (
    TopKShape,
    add_at,
    decode_sparse,
    encode_sparse,
    passes_of_gathered,
    require_bits,
    require_density,
    select_largest,
    sparse_bytes,
    top_k_shape,
)


@dataclass(frozen=True, kw_only=True)
class TopK(SkipsSmallTensors, GatheredCompressor):
    """Sends the largest elements of each tensor, or of each chunk of it: at least one.

    Small tensors, those of one dimension, and integers are summed uncompressed. Compressed gradients
    are gathered: that sends fewer bytes than a dense ring if the density is below about 1 over the
    number of workers.

    Attributes:
        density: Share of a tensor's elements that is sent.
        chunk: Elements of a chunk; the largest elements of each chunk are selected. 0: the largest of whole tensors.
        bits: Bits of a value: 32 for its own type, 2 for the mean of one of four bins around the
            tensor's mean.
    """

    density: float = 0.01

    chunk: int = 0

    bits: int = 32

    name: ClassVar[str] = "top-k"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Sends the largest elements of each tensor, with their indices.",
        source="Aji and Heafield (EMNLP 2017); Stich et al., Sparsified SGD with memory (NeurIPS 2018)",
        use_when="links are below 1 Gbit/s, and workers are few",
        sends=(
            "the share `density` of the elements, the largest, each in its own type (in 2 bits with "
            "`bits=2`), and 1 to 4 bytes for its index, to every other worker"
        ),
        loses="all other elements, until error feedback has made them large",
        limits=(
            (
                "Every worker receives the selected elements of all others. So with n workers it saves "
                "bytes only below a density of about 1/n."
            ),
            "Trainings with Adam lose accuracy.",
        ),
    )
    error_feedback_by_default: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_density(self.density)
        require_bits(self.bits)
        require_at_least(0, "chunk", self.chunk)

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 27.0 if self.chunk else 14.0, passes_of_gathered(self.density, workers)

    def _cuts(self, shapes: Sequence[Shape]) -> list[TopKShape]:
        return [
            top_k_shape(math.prod(shape), self.density, self.chunk) for shape in shapes
        ]

    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        return sparse_bytes(self._cuts(shapes), dtype, self.bits)

    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        top_ks = self._cuts([part.shape for part in parts])
        return encode_sparse(select_largest(parts, top_ks), top_ks, self.bits)

    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        top_ks = self._cuts([part.shape for part in parts])
        selected = decode_sparse(code, top_ks, dtype, self.bits)
        for part, (indices, values) in zip(parts, selected, strict=True):
            add_at(part, indices, values, add)
