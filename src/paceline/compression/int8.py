"""int8: each tensor as whole numbers from -127 to 127 times a scale of its own.

Per tensor, with s = max|a| / 127: send round(a / s) and s. With stochastic rounding this is
QSGD's quantizer (Alistarh et al., NeurIPS 2017, section 3.1) with the maximum for the norm,
as the paper's section 4 does in practice.

Differs from the paper in that scales are per tensor, and not per 512 elements, and whole
numbers travel in 8 bits each, without Elias coding. Codes have different scales, so they are
gathered, and every worker adds up all of them: a worker receives n - 1 codes. Fewer bytes
than a float32 ring's go on the network up to 7 workers, than bf16's up to 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from paceline.compression.identity import summed
from paceline.compression.packing import (
    blocks,
    dense,
    elements,
    extremes,
    is_lossy,
    places,
    real_type,
    reals,
)
from paceline.interfaces import (
    Coding,
    Compressor,
    Gather,
    Leg,
    Place,
    Shape,
    State,
    StateKind,
)

LEVELS = 127


@dataclass(frozen=True, kw_only=True)
class Int8(Compressor):
    """Tensors become 8-bit whole numbers times a scale. Tensors of 8 bits or fewer, and whole
    numbers, are summed as they are.

    A tensor with a number that is not finite is not a number at all in the result.

    Sends: 1 byte an element and 4 a tensor (8 where it is float64), to every other worker.
    Loses: up to 1/127 of a tensor's largest element, in each element (half of that where
    rounding is to the nearest).
    """

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Up or down by chance, so that the expected result is exact; or to the nearest, which
    sends elements below 1/254 of the largest as zero in every step: then have residuals."""

    seed: int = 0
    """Of the numbers that stochastic rounding draws; nothing else draws from them."""

    name: ClassVar[str] = "int8"
    linear: ClassVar[bool] = False
    rounds: ClassVar[int] = 1

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def state(self) -> StateKind:
        return "own" if self.rounding == "stochastic" else "none"

    def passes(self, workers: int) -> tuple[float, float]:
        # Measured on one core of a CPU, beside a copy of a tensor (2 passes). Drawing is
        # dear: torch's generator takes 2 ns an element.
        coding = 39.0 if self.rounding == "stochastic" else 9.0
        return coding, 4.0 * workers

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        if not is_lossy(kind):
            return dense(kept, kind)
        scale = torch.promote_types(kind, torch.float32).itemsize
        size = elements(kept) + scale * len(kept)
        return (Leg("gather", size),) if kept else ()

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        if self.rounding == "nearest":
            return {}
        text = f"{self.seed} {name} {rank}".encode()
        digest = hashlib.blake2b(text, digest_size=4).digest()
        return {"stream": int.from_bytes(digest, "big"), "draws": 0}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        states = [s for part, s in zip(parts, states, strict=True) if part.numel()]
        parts = reals(parts)
        sent = None if sent is None else reals(sent)
        if not parts or not is_lossy(parts[0].dtype):
            yield from summed(parts, sent)
            return
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        scales = torch.stack([extremes(part).abs().max() for part in parts])
        scales = scales.to(wide) / LEVELS
        code, values = _room(scales, parts)
        for part, scale, value, state in zip(
            parts, scales, values, states, strict=True
        ):
            self._round(part, scale, value, state)
        if sent is not None:
            for own, value, scale in zip(sent, values, scales, strict=True):
                own.copy_(value.to(wide) * scale)

        everyone = yield Gather(code)

        rows = [_opened(code, scales.dtype, parts) for code in everyone]
        for number, part in enumerate(parts):
            theirs = [(scales[number], values[number]) for scales, values in rows]
            _add_up(theirs, part)

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """Numbers that were drawn are not drawn again."""
        if "draws" in state:
            state["draws"] = max(old["draws"] for old in former)

    def _round(
        self,
        part: torch.Tensor,
        scale: torch.Tensor,
        value: torch.Tensor,
        state: State,
    ) -> None:
        """*value* becomes *part* over *scale*, in whole numbers: zeros where *scale* is too
        small to divide by."""
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        generator = torch.Generator(part.device)
        if self.rounding == "stochastic":
            # A seed for each draw, and no generator that lives on: the state stays two
            # numbers.
            seed = (state["stream"] + state["draws"] * 0x9E3779B9) % 2**32
            generator.manual_seed(seed)
            state["draws"] += 1
        for given, whole in blocks(part.contiguous(), value):
            levels = given / divisor
            if self.rounding == "nearest":
                levels.round_()
            else:
                chance = torch.empty_like(levels).uniform_(generator=generator)
                levels.add_(chance).floor_()
            whole.copy_(levels.clamp_(-LEVELS, LEVELS))


def _add_up(
    codes: Sequence[tuple[torch.Tensor, torch.Tensor]], part: torch.Tensor
) -> None:
    """*part* becomes the sum of all workers' scales times their numbers, in rank order."""
    result = part if part.is_contiguous() else torch.empty_like(part).contiguous()
    for target, *values in blocks(result, *(values for _, values in codes)):
        total = torch.zeros_like(target, dtype=codes[0][0].dtype)
        for (scale, _), value in zip(codes, values, strict=True):
            total.add_(value.to(total.dtype).mul_(scale))
        target.copy_(total)
    if result is not part:
        part.copy_(result)


def _room(
    scales: torch.Tensor, parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A code that begins with *scales*, and its places for the numbers of *parts*."""
    head = scales.view(torch.int8)
    size = sum(part.numel() for part in parts)
    code = torch.empty(head.numel() + size, dtype=torch.int8, device=head.device)
    code[: head.numel()] = head
    return code, places(code[head.numel() :], parts)


def _opened(
    code: torch.Tensor, wide: torch.dtype, parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A code's scales and numbers."""
    head = len(parts) * wide.itemsize
    scales = code[:head].clone().view(wide)  # a copy: bytes in a code are not aligned
    return scales, places(code[head:], parts)
