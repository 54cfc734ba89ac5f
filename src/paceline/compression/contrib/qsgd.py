"""QSGD: stochastic rounding, which is unbiased and needs no error feedback.

Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding"
(NeurIPS 2017), section 3.1. Per block of a gradient v, with b = |v|_2 and s levels:

    Q(v_i) = b * sign(v_i) * l_i / s,  l_i = s |v_i| / b, rounded up with probability its fraction

so that E Q(v) = v, and E|Q(v) - v|^2 <= min(B / s^2, sqrt(B) / s) |v|^2 (lemma 3.1).

Differences from the paper: levels are sent in 8 bits each, without Elias coding. Every tensor begins
a new block (the paper's bucket).
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
    """Quantizes blocks to integers times the block's norm, with stochastic rounding.

    The expected result is exact. Tensors of 8 bits or fewer, and integers, are summed uncompressed.
    It takes no error feedback, since errors cancel in the mean. So it suits pushes to servers, and
    workers that come and go.
    """

    name: ClassVar[str] = "qsgd"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Rounds blocks of elements at random, so that the expected result is exact.",
        source="Alistarh et al., QSGD (NeurIPS 2017)",
        use_when="you compare compressors, or push to servers without error feedback",
        sends="1 byte per element and 4 per block, to every other worker",
        loses="in each element up to 1/127 of its block's norm; on average over the random roundings nothing",
        limits=(
            "Every worker receives the elements of all others.",
            "`plan` and `auto` do not try it.",
        ),
    )
    unbiased: ClassVar[bool] = True
    state: ClassVar[StateKind] = "own"
    takes_error_feedback: ClassVar[bool] = False
    quantizer: ClassVar[Quantizer] = Quantizer(levels=127, bits=8, norm="euclidean")
    """The number of levels is the paper's s: as many as fit in 8 bits."""
    block: ClassVar[int] = 128

    def memory_passes(self, workers: int) -> tuple[float, float]:
        # Measured on one core of a CPU, relative to a copy of a tensor (2 passes).
        return 16.0, 3.0 * workers

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        return new_streams(name, rank)
