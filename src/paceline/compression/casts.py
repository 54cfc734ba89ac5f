"""Casts to 16 bits: half of what a float32 gradient is on the network.

What PyTorch's `bf16_compress_hook` and `fp16_compress_hook` do (torch.distributed's DDP
communication hooks), with two differences. A gradient is divided before it is cast: it is
this worker's share of the mean already, so that a sum of many cannot overflow where the
mean does not. And every backend may be used: PyTorch's bf16 hook wants NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression.identity import summed
from paceline.compression.packing import dense, flat, put, real_type, reals
from paceline.interfaces import (
    Coding,
    Compressor,
    Leg,
    Place,
    Shape,
    State,
    StateKind,
    Sum,
)


@dataclass(frozen=True, kw_only=True)
class BF16(Compressor):
    """Tensors are cast to bfloat16, and summed in it. Those of 16 bits or fewer, and whole
    numbers, are summed as they are.

    Sends: 2 bytes an element. Loses: all but 8 significant bits of an element, and again at
    each addition.
    """

    name: ClassVar[str] = "bf16"
    linear: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    rounds: ClassVar[int] = 1
    state: ClassVar[StateKind] = "none"

    def passes(self, workers: int) -> tuple[float, float]:
        return _PASSES

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        return _traffic(shapes, dtype)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        yield from _summed_as(torch.bfloat16, parts, sent)


@dataclass(frozen=True, kw_only=True)
class FP16(Compressor):
    """Tensors are cast to float16, and summed in it. Those of 16 bits or fewer, and whole
    numbers, are summed as they are.

    An element of the mean above 65,504 becomes infinite, which `check_finite` and a
    GradScaler see; one below 6e-8 becomes zero, which nobody sees: scale the loss, or take
    bf16.

    Sends: 2 bytes an element. Loses: all but 11 significant bits of an element, and again at
    each addition; fewer are left below 6e-5.
    """

    name: ClassVar[str] = "fp16"
    linear: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    rounds: ClassVar[int] = 1
    state: ClassVar[StateKind] = "none"

    def passes(self, workers: int) -> tuple[float, float]:
        return _PASSES

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        return _traffic(shapes, dtype)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        yield from _summed_as(torch.float16, parts, sent)


_PASSES = 1.5, 1.5
"""Of a float32 gradient's bytes: 1 is read and 0.5 written for a code, 0.5 read and 1 written
for a result."""


def _is_cast(kind: torch.dtype) -> bool:
    return kind.is_floating_point and kind.itemsize > 2


def _traffic(shapes: Sequence[Shape], dtype: torch.dtype) -> Sequence[Leg]:
    kept, kind = real_type(shapes, dtype)
    return dense(kept, torch.float16 if _is_cast(kind) else kind)


def _summed_as(
    dtype: torch.dtype,
    parts: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor] | None,
) -> Coding:
    parts = reals(parts)
    sent = None if sent is None else reals(sent)
    kind = parts[0].dtype if parts else dtype
    if not _is_cast(kind):
        yield from summed(parts, sent)
        return
    code = flat(parts).to(dtype)
    if sent is not None:
        put(code, sent)
    total = yield Sum(code)
    put(total, parts)
