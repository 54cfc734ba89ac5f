"""QSGD: stochastic rounding that is right in the mean, and needs nothing from the past.

Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding"
(NeurIPS 2017), section 3.1. Per block of a gradient v, with b = |v|_2 and s levels:

    Q(v_i) = b * sign(v_i) * l_i / s,  l_i = s |v_i| / b, rounded up with probability its fraction

so that E Q(v) = v, and E|Q(v) - v|^2 <= min(B / s^2, sqrt(B) / s) |v|^2 (lemma 3.1).

Differs from the paper in that levels travel in 8 bits each, without Elias coding. Blocks (the
paper's buckets) begin with tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression.base import (
    CompressorSummary,
    GatheredCompressor,
    State,
    StateKind,
)
from paceline.compression.quantization import (
    BlockCompressor,
    Quantizer,
    new_streams,
)


@dataclass(frozen=True, kw_only=True)
class QSGD(BlockCompressor, GatheredCompressor):
    """Elements become whole numbers times a block's norm, rounded up or down by chance, so that
    the expected result is exact. Tensors of 8 bits or fewer, and whole numbers, are summed as
    they are.

    Takes no residuals: what one code leaves out others add, in the mean. So it is right for
    pushes to servers, and for workers that come and go.
    """

    name: ClassVar[str] = "qsgd"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Rounds blocks of elements at random, so that the expected result is exact.",
        source="Alistarh et al., QSGD (NeurIPS 2017)",
        use_when="you compare compressors, or push to servers without error feedback",
        sends="1 byte per element and 4 per block, to every other worker",
        loses="up to 1/127 of a block's norm, in each element, and nothing in the mean",
        limits=(
            "Every worker receives the elements of all others.",
            "`plan` and `auto` do not search it.",
        ),
    )
    unbiased: ClassVar[bool] = True
    state: ClassVar[StateKind] = "own"
    takes_error_feedback: ClassVar[bool] = False
    quantizer: ClassVar[Quantizer] = Quantizer(levels=127, bits=8, norm="euclidean")
    """Its levels are the paper's s: as many as fit in 8 bits."""
    block: ClassVar[int] = 128

    def memory_passes(self, workers: int) -> tuple[float, float]:
        # Measured on one core of a CPU, beside a copy of a tensor (2 passes).
        return 16.0, 3.0 * workers

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        return new_streams(name, rank)
