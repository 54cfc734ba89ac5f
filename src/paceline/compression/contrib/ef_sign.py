"""ef-sign: the sign of each element, and one scale per tensor.

Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes" (ICML
2019), section 4: per tensor a of N elements

    C(a) = (|a|_1 / N) * sign(a)

Error feedback, which it has unless ``error_feedback=false``, adds the compression error to the next
gradient. The error's share of |a|^2 is 1 - q^2, with q = |a|_1 / (sqrt(N) |a|_2): always less than 1.
(With the root of the mean square as the scale, as in 1-bit Adam's code, it is 2 - 2q: more than 1 if
few elements are large.)

The sign of 0 is 1, since one bit has no third value. So an element that is always zero gets the scale
in one step, and its residual subtracts that in the next. A tensor of zeros alone has the scale 0.
Without error feedback such elements drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from paceline.compression.base import (
    CPU_CHUNK,
    CompressorSummary,
    GatheredCompressor,
    Reader,
    Shape,
    State,
    at_least_float32,
    elements,
    to_bytes,
)


@dataclass(frozen=True, kw_only=True)
class EFSign(GatheredCompressor):
    """Sends the sign of each element, and the mean magnitude of each tensor.

    Tensors of 8 bits or fewer, and integers, are summed uncompressed.
    """

    name: ClassVar[str] = "ef-sign"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Sends the sign of each element, and one scale per tensor.",
        source="Karimireddy et al., Error feedback fixes SignSGD (ICML 2019)",
        use_when="you compare compressors; no measurement recommends it for training",
        sends="1 bit per element and 4 bytes per tensor, to every other worker",
        loses="all but the sign of each element, until error feedback brings it back",
        limits=(
            "Every worker receives the signs of all others.",
            "`plan` and `auto` do not try it.",
        ),
    )
    error_feedback_by_default: ClassVar[bool] = True

    def memory_passes(self, workers: int) -> tuple[float, float]:
        # Measured on one core of a CPU, relative to a copy of a tensor (2 passes).
        return 12.0, 5.5 * workers

    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        return sum(4 + _bytes(elements([shape])) for shape in shapes)

    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        sizes = [_bytes(part.numel()) for part in parts]
        bits = torch.empty(sum(sizes), dtype=torch.uint8, device=parts[0].device)
        places = zip(parts, bits.split(sizes), strict=True)
        scales = [_pack(part.reshape(-1), place) for part, place in places]
        return to_bytes(torch.stack(scales).float(), bits)

    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        reader = Reader(code)
        scales = reader.take(torch.float32, len(parts))
        for part, scale in zip(parts, scales, strict=True):
            bits = reader.take(torch.uint8, _bytes(part.numel()))
            target = part if part.is_contiguous() else part.contiguous()
            _unpack(bits, scale, target.view(-1), add)
            if target is not part:
                part.copy_(target)
        reader.end()


def _bytes(count: int) -> int:
    """Bytes of *count* bits."""
    return -(-count // 8)


def _at_once(tensor: torch.Tensor) -> int:
    return CPU_CHUNK if tensor.device.type == "cpu" else tensor.numel()


_TO_ONE_BYTE = 0x0102040810204080
"""A word of eight bytes, each 0 or 1, times this factor has them as the bits of its highest byte."""


def _pack(flat: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """Write a bit for each element of *flat* into *code*: 1 for negative elements.

    Returns the mean magnitude, in 64 bits.
    """
    size = min(_at_once(flat), 8 * code.numel())
    negative = torch.zeros(size, dtype=torch.bool, device=flat.device)
    room = torch.empty(size, dtype=at_least_float32(flat.dtype), device=flat.device)
    sums = []
    pieces = flat.split(size), code.split(size // 8)
    for given, place in zip(*pieces, strict=True):
        count = given.numel()
        sums.append(room[:count].copy_(given).abs_().sum(dtype=torch.float64))
        some = negative[: 8 * place.numel()]
        if some.numel() > count:
            some.zero_()
        torch.lt(given, 0, out=some[:count])
        words = some.view(torch.int64) * _TO_ONE_BYTE
        place.copy_(words.bitwise_right_shift_(56).bitwise_and_(255))
    return torch.stack(sums).sum() / flat.numel()


def _unpack(
    code: torch.Tensor, scale: torch.Tensor, flat: torch.Tensor, add: bool
) -> None:
    """Write *scale* or -*scale* into *flat* for each bit of *code*, or *add* it."""
    table = _signs(code.device) * scale.to(at_least_float32(flat.dtype))
    size = _at_once(flat)
    for bits, target in zip(code.split(-(-size // 8)), flat.split(size), strict=True):
        values = table.index_select(0, bits.int()).view(-1)[: target.numel()]
        target.add_(values) if add else target.copy_(values)


@cache
def _signs(device: torch.device) -> torch.Tensor:
    """The signs that the bits of each byte stand for, lowest bit first: shape (256, 8)."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(
        8, device=device
    )
    return 1.0 - 2.0 * (bits & 1)
