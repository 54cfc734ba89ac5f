"""Residuals (error feedback): what a lossy code left out is added to the next gradient.

Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); analysed by
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes"
(ICML 2019), algorithm 2. Per tensor, with g this worker's share of the mean and C its code:

    a = g + e;  send C(a);  e = a - decoded C(a)

so that at every step the sum of all results plus the sum of all residuals is the sum of all
gradients: what is sent late is not lost.

How this differs from the paper stands in docs/compressors.md (`compression.docs_table`).

With a *decay* below 1 the residual fades, e = decay * (a - decoded C(a)), as where it stands in for
momentum (local updates with sparse differences): then the sums above no longer agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from paceline.compression.packing import extremes
from paceline.compression.wrapper import Wrapper
from paceline.errors import UsageError
from paceline.interfaces import (
    Coding,
    PerWorkerCompressor,
    Place,
    Shape,
    State,
    StateKind,
)


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Any lossy compressor (*code*), with a residual for each tensor: as many elements
    again, in float32 at least. *decay*: what of a residual is kept from one step to the
    next."""

    decay: float = 1.0

    unbiased: ClassVar[bool] = False
    state: ClassVar[StateKind] = "own"

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise UsageError(
                f"decay: expected a part of a residual, 0 to 1, got {self.decay}"
            )
        if not self.code.takes_error_feedback:
            raise UsageError(
                f"residuals: {self.code.name!r}, as it is here, takes none: it has a memory of "
                "its own, or its codes are right in the mean; add error_feedback=false"
            )

    @property
    def name(self) -> str:
        return f"{self.code.name}+error feedback"

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
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        if sent is None:
            sent = [torch.empty_like(part) for part in parts]
        given = _Given(parts, states)
        codes = [state["code"] for state in states]
        yield from self.code.average(parts, codes, place, sent)  # C(a)
        given.keep(sent, parts, self.decay)

    def code_bytes(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """See `PerWorkerCompressor.code_bytes`."""
        return cast(PerWorkerCompressor, self.code).code_bytes(shapes, dtype)

    def encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        """See `PerWorkerCompressor.encode`."""
        code = cast(PerWorkerCompressor, self.code)
        whole = [part.clone() for part in parts]
        given = _Given(whole, states)
        encoded = code.encode(whole, [state["code"] for state in states])
        sent = [torch.empty_like(part) for part in parts]
        code.decode(encoded, sent)
        given.keep(sent, sent, self.decay)
        return encoded

    def decode(
        self, code: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool = False
    ) -> None:
        """See `PerWorkerCompressor.decode`."""
        cast(PerWorkerCompressor, self.code).decode(code, parts, add=add)

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """The sum of all residuals stays what it was: each worker has an equal part."""
        super().inherit(state, former, workers)
        if "residual" in state:
            for old in former:
                state["residual"].add_(old["residual"].to(state["residual"]) / workers)


class _Given:
    """*parts* (g) become what is to be sent (a = g + e)."""

    def __init__(self, parts: Sequence[torch.Tensor], states: Sequence[State]) -> None:
        self._rows: list[tuple[State, torch.Tensor, Truth, int]] = []
        for number, (part, state) in enumerate(zip(parts, states, strict=True)):
            if "residual" not in state:
                continue
            speaks = _truth(extremes(part).any())
            whole = state["residual"]
            if speaks is not False:
                whole = whole + part
                part.copy_(whole)
            if not isinstance(speaks, bool):
                part.mul_(speaks)
            self._rows.append((state, whole, speaks, number))

    def keep(
        self,
        sent: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        decay: float,
    ) -> None:
        """What is left of it after *sent*: e = a - decoded C(a). Of what nothing was to be sent
        (a = e) there may have been something all the same: an owner's rounding."""
        if not self._rows:
            return
        every = torch.stack([extremes(part) for part in results])
        finite = _truth(every.isfinite().all())
        if finite is False:
            return
        for state, whole, speaks, number in self._rows:
            if speaks is False:
                left = whole - sent[number]
            else:
                left = whole.sub_(sent[number])
                if decay != 1.0:
                    left.mul_(
                        decay if speaks is True else torch.where(speaks, decay, 1)
                    )
            if finite is not True:
                left = torch.where(finite, left, state["residual"])
            state["residual"] = left


Truth = bool | torch.Tensor


def _truth(value: torch.Tensor) -> Truth:
    """*value* for Python to decide by, where nobody waits for a device then."""
    return bool(value) if value.device.type == "cpu" else value


def _is_lossy(like: torch.Tensor) -> bool:
    return like.is_floating_point() or like.is_complex()


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Residuals are small beside what they are added to: 16 bits would lose them."""
    return torch.promote_types(dtype, torch.float32)
