"""Residuals (error feedback): what a lossy code left out is added to the next gradient.

Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); analysed by
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes"
(ICML 2019), algorithm 2. Per tensor, with g this worker's share of the mean and C its code:

    a = g + e;  send C(a);  e = a - decoded C(a)

so that at every step the sum of all results plus the sum of all residuals is the sum of all
gradients: what is sent late is not lost.

Differs from the paper in that the learning rate is outside the residual (as in PowerSGD): the
two are the same while it stays constant. Each worker subtracts what its own code stands for,
and not the mean: residuals then stay small where workers' data differ. A tensor whose gradient
is zero in every element sends nothing, and keeps its residual: it was not used in this step,
or its worker is out of data. Where a result is not finite residuals stay as they were, on all
workers, since a GradScaler skips that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression.packing import extremes
from paceline.interfaces import Coding, Compressor, State, StateKind


@dataclass(frozen=True)
class Residuals(Compressor):
    """Any lossy compressor (*code*), with a residual for each tensor: as many elements
    again, in float32 at least."""

    code: Compressor

    unbiased: ClassVar[bool] = False
    state: ClassVar[StateKind] = "own"

    @property
    def name(self) -> str:
        return f"{self.code.name}+residuals"

    @property
    def linear(self) -> bool:
        return self.code.linear

    @property
    def rounds(self) -> int:
        return self.code.rounds

    def passes(self, workers: int) -> tuple[float, float]:
        # Measured on one core of a CPU, beside a copy of a tensor (2 passes).
        coding, decoding = self.code.passes(workers)
        return coding + 10.0, decoding + 10.0

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        state: State = {"code": self.code.init(like, name, rank)}
        if _is_lossy(like):
            state["residual"] = torch.zeros_like(
                like, dtype=_precise(like.dtype), memory_format=torch.contiguous_format
            )
        return state

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        workers: int,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        if sent is None:
            sent = [torch.empty_like(part) for part in parts]
        given: list[torch.Tensor] = []  # a = g + e
        speaks: list[torch.Tensor] = []
        for part, state in zip(parts, states, strict=True):
            if "residual" in state:
                speaks.append(extremes(part).any())
                whole = (state["residual"] * speaks[-1]).add_(part)
                part.copy_(whole)
                given.append(whole)
        codes = [state["code"] for state in states]
        yield from self.code.average(parts, codes, workers, sent)  # C(a)
        if not given:
            return
        finite = torch.stack([extremes(part) for part in parts]).isfinite().all()
        rows = zip(states, given, speaks, sent, strict=True)
        for state, whole, speaks_now, own in rows:
            left, kept = whole.sub_(own), state["residual"]  # e = a - decoded C(a)
            torch.where(finite & speaks_now, left, kept, out=kept)

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """The sum of all residuals stays what it was: each worker has an equal part."""
        self.code.inherit(state["code"], [old["code"] for old in former], workers)
        if "residual" in state:
            for old in former:
                state["residual"].add_(old["residual"].to(state["residual"]) / workers)


def _is_lossy(like: torch.Tensor) -> bool:
    return like.is_floating_point() or like.is_complex()


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Residuals are small beside what they are added to: 16 bits would lose them."""
    return torch.promote_types(dtype, torch.float32)
