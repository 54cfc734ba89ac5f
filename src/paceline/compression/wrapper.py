"""What wraps a code, and is a compressor itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.interfaces import Compressor, Leg, Shape, SpeedClass, State


@dataclass(frozen=True)
class Wrapper(Compressor):
    """Any lossy compressor (*code*), and as it; subclasses say what is different. Each
    tensor's state has the code's own under ``"code"``."""

    code: Compressor

    @property
    def name(self) -> str:
        return self.code.name

    @property
    def linear(self) -> bool:
        return self.code.linear

    @property
    def unbiased(self) -> bool:
        return self.code.unbiased

    @property
    def rounds(self) -> int:
        return self.code.rounds

    @property
    def decodes_per_worker(self) -> bool:
        return self.code.decodes_per_worker

    @property
    def contributes_without_data(self) -> bool:
        return self.code.contributes_without_data

    @property
    def modifies_gradients(self) -> bool:
        return self.code.modifies_gradients

    def passes(self, workers: int) -> tuple[float, float]:
        return self.code.passes(workers)

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        return self.code.traffic(shapes, dtype, workers)

    def warm_up_traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[tuple[int, Sequence[Leg]]]:
        return self.code.warm_up_traffic(shapes, dtype, workers)

    def in_epochs(self, steps: int | None) -> Compressor:
        return replace(self, code=self.code.in_epochs(steps))

    def suits(self, optimizer: torch.optim.Optimizer) -> None:
        self.code.suits(optimizer)

    def suits_differences(self) -> None:
        self.code.suits_differences()

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        self.code.inherit(state["code"], [old["code"] for old in former], workers)

    def settled(self) -> Compressor:
        return replace(self, code=self.code.settled())

    def for_speed(self, speed: SpeedClass) -> Compressor:
        return replace(self, code=self.code.for_speed(speed))

    def for_replies(self) -> Compressor:
        """Answers have a memory of their own, and no first steps."""
        return self.code.for_replies()


def pure(compressor: Compressor) -> Compressor:
    """The code in all its wrappers."""
    while isinstance(compressor, Wrapper):
        compressor = compressor.code
    return compressor
