"""Compressors that take known times on a clock by hand, and lose what is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression import AllToAll, Compressor, Gather, Leg, Sum
from paceline.compression.base import elements, flat, put


class HandClock:
    """A `Stopwatch` on a clock that somebody turns."""

    def __init__(self) -> None:
        self.now = 7.0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, marks: list[float]) -> list[float]:
        return [mark - start for mark in marks]


CLOCK = HandClock()
SETTLED = {"gd-top-k": "gd-top-k:epoch_steps=1000000000"}
"""Whose codes are those of a mean step: one that ends an epoch is another."""
ENCODE, DECODE, PER_WORKER = 3.0, 2.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Slow(Compressor):
    """Exact, in parts: an exchange of rows, and a gather of their sums."""

    name: ClassVar[str] = "slow"
    unbiased: ClassVar[bool] = True
    rounds: ClassVar[int] = 2

    def memory_passes(self, workers):
        return 1.0, 1.0

    def wire_bytes(self, shapes, dtype, workers):
        row = -(-elements(shapes) // workers) * dtype.itemsize
        return Leg("all-to-all", workers * row), Leg("gather", row)

    def average(self, parts, states, place, sent=None):
        whole = flat(parts)
        padding = -whole.numel() % place.workers
        rows = torch.cat([whole, whole.new_zeros(padding)])
        CLOCK.now += ENCODE
        own = yield AllToAll(rows)
        CLOCK.now += DECODE
        everybodys = yield Gather(own.sum(0))
        CLOCK.now += PER_WORKER * place.workers
        put(everybodys.reshape(-1)[: whole.numel()].clone(), parts)


@dataclass(frozen=True, kw_only=True)
class Half(Compressor):
    """Sends half of each element: of what it is given the other half is lost."""

    name: ClassVar[str] = "half"
    linear: ClassVar[bool] = True

    def memory_passes(self, workers):
        return 1.0, 1.0

    def wire_bytes(self, shapes, dtype, workers):
        return (Leg("sum", 2 * elements(shapes)),)

    def average(self, parts, states, place, sent=None):
        code = flat(parts).mul(0.5).bfloat16()
        if sent is not None:
            put(code.float(), sent)
        total = yield Sum(code)
        put(total.float(), parts)
