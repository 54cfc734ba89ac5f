"""Casts to 16 bits: half the bytes of a float32 gradient.

The same as PyTorch's DDP communication hooks `bf16_compress_hook` and `fp16_compress_hook`, with
two differences:

- A gradient is already divided when it is cast: it is this worker's share of the mean. So the sum
  overflows only if the mean does.
- Every backend can be used: PyTorch's bf16 hook needs NCCL.

Collectives sum in 16 bits. Servers decompress each push, and add it in their own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression.base import (
    CompressorSummary,
    Leg,
    PerWorkerCompressor,
    RankInfo,
    Reader,
    Rounds,
    Shape,
    State,
    Sum,
    dense,
    elements,
    flat,
    put,
    real_type,
    reals,
    sum_uncompressed,
    to_bytes,
    views_of,
)


class Cast(PerWorkerCompressor):
    """A cast to a type of 16 bits, which subclasses define."""

    to: ClassVar[torch.dtype]

    linear: ClassVar[bool] = True

    def memory_passes(self, workers: int) -> tuple[float, float]:
        # In units of a float32 gradient's bytes: compression reads 1 and writes 0.5,
        # decompression reads 0.5 and writes 1.
        return 1.5, 1.5

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        return dense(kept, self._type(kind))

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        parts = reals(parts)
        sent = None if sent is None else reals(sent)
        if not parts or self._type(parts[0].dtype) == parts[0].dtype:
            yield from sum_uncompressed(parts, sent)
            return
        code = flat(parts).to(self.to)
        if sent is not None:
            put(code, sent)
        total = yield Sum(code)
        put(total, parts)

    def _type(self, dtype: torch.dtype) -> torch.dtype:
        """The type on the network of tensors of type *dtype*."""
        is_cast = dtype.is_floating_point and dtype.itemsize > self.to.itemsize
        return self.to if is_cast else dtype

    # ---- compression of one worker's gradient ----

    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        return elements(shapes) * self._type(dtype).itemsize

    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        whole = flat(parts)
        return to_bytes(whole.to(self._type(whole.dtype), copy=True))

    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        reader = Reader(code)
        count = elements([part.shape for part in parts])
        whole = reader.take(self._type(dtype), count)
        reader.end()
        if not add:
            put(whole, parts)
            return
        for part, value in zip(parts, views_of(whole, parts), strict=True):
            part.add_(value)


@dataclass(frozen=True, kw_only=True)
class BF16(Cast):
    """Casts tensors to bfloat16, and sums them in it.

    Tensors of 16 bits or fewer, and integers, are summed uncompressed.
    """

    name: ClassVar[str] = "bf16"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Casts gradients to bfloat16 and sums them in it.",
        source="PyTorch's `bf16_compress_hook`",
        use_when="links have up to 10 Gbit/s; try it first",
        sends="2 bytes per element",
        loses="all but 8 significant bits of an element, and again at each addition",
        limits=(
            "It gains nothing with 16-bit gradients, which it sends as they are.",
            "Aggregators at switches do not add up its buffers: 16-bit buffers use the ring.",
        ),
    )
    to: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class FP16(Cast):
    """Casts tensors to float16, and sums them in it.

    Tensors of 16 bits or fewer, and integers, are summed uncompressed. An element of the mean above
    65,504 becomes infinite, which `check_finite` and a GradScaler detect. One below 6e-8 becomes
    zero without notice: scale the loss, or use bf16.
    """

    name: ClassVar[str] = "fp16"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Casts gradients to float16 and sums them in it.",
        source="PyTorch's `fp16_compress_hook`",
        use_when="gradients are scaled, and need 3 significant bits more than bf16 has",
        sends="2 bytes per element",
        loses="all but 11 significant bits of an element, and again at each addition; more below 6e-5",
        limits=(
            (
                "An element of the mean above 65,504 becomes infinite, which `check_finite` and a "
                "GradScaler detect."
            ),
            "An element below 6e-8 becomes zero without notice: scale the loss, or take bf16.",
            "Aggregators at switches do not add up its buffers: 16-bit buffers use the ring.",
        ),
    )
    to: ClassVar[torch.dtype] = torch.float16
