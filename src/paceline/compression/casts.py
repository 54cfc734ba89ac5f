"""Casts to 16 bits: half of what a float32 gradient is on the network.

What PyTorch's `bf16_compress_hook` and `fp16_compress_hook` do (torch.distributed's DDP
communication hooks), with two differences. A gradient is divided before it is cast: it is
this worker's share of the mean already, so that a sum of many cannot overflow where the
mean does not. And every backend may be used: PyTorch's bf16 hook wants NCCL.

Means are summed in 16 bits on the way. What is pushed is decoded by itself, and added up in
whatever type it is added to.
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
    """Subclasses say to which type."""

    to: ClassVar[torch.dtype]

    linear: ClassVar[bool] = True

    def memory_passes(self, workers: int) -> tuple[float, float]:
        # Of a float32 gradient's bytes: 1 is read and 0.5 written for a code, 0.5 read and 1
        # written for a result.
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
        """In which tensors of type *dtype* are sent."""
        is_cast = dtype.is_floating_point and dtype.itemsize > self.to.itemsize
        return self.to if is_cast else dtype

    # ---- one worker's code ----

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
    """Tensors are cast to bfloat16, and summed in it. Those of 16 bits or fewer, and whole
    numbers, are summed as they are.
    """

    name: ClassVar[str] = "bf16"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Casts gradients to bfloat16 and sums them in it.",
        source="PyTorch's `bf16_compress_hook`",
        use_when="links have up to 10 Gbit/s: the first compressor to try",
        sends="2 bytes per element",
        loses="all but 8 significant bits of an element, and again at each addition",
        limits=(
            "No gain with 16-bit gradients, which are sent as they are.",
            "No gain from switches: 16-bit buffers use the ring.",
        ),
    )
    to: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class FP16(Cast):
    """Tensors are cast to float16, and summed in it. Those of 16 bits or fewer, and whole
    numbers, are summed as they are.

    An element of the mean above 65,504 becomes infinite, which `check_finite` and a
    GradScaler see; one below 6e-8 becomes zero, which nobody sees: scale the loss, or take
    bf16.
    """

    name: ClassVar[str] = "fp16"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Casts gradients to float16 and sums them in it.",
        source="PyTorch's `fp16_compress_hook`",
        use_when="gradients are scaled, and 3 more bits than those of bf16 matter",
        sends="2 bytes per element",
        loses="all but 11 significant bits of an element, and again at each addition; more below 6e-5",
        limits=(
            (
                "An element of the mean above 65,504 becomes infinite, which `check_finite` and a "
                "GradScaler detect."
            ),
            "An element below 6e-8 becomes zero without notice: scale the loss, or take bf16.",
            "No gain from switches: 16-bit buffers use the ring.",
        ),
    )
    to: ClassVar[torch.dtype] = torch.float16
