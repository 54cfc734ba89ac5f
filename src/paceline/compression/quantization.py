"""int8 and int4: blocks of elements as whole numbers times a scale, added up by their owners.

Per block, with s = max|a| / 127 (int4: 7): send round(a / s), and s. Block by block as in
ZeRO++ (Wang et al., 2023), whose qgZ is the same collective: codes do not add up, so workers
add up what they stand for, each its own part of a bucket. An all-to-all takes everybody's
codes of a part to the part's owner, who decodes them, adds them up in float32 (float64, where
gradients are), and codes the sum; these codes are gathered. Among n workers each sends
2 (n - 1) / n codes of a bucket, as a ring does.

All workers, owners too, end with what the second codes stand for, so with the same bits. What
an owner's second rounding has lost counts as not sent by the owner: residuals hold it.

With stochastic rounding this is QSGD's quantizer (Alistarh et al., NeurIPS 2017, section 3.1)
with the maximum for the norm, as the paper's section 4 does in practice; without Elias coding.

Differs from qgZ in that numbers are rounded to the nearest, that there is one exchange and not
one in a host and one between hosts, and that tensors of all shapes are coded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from paceline.compression import counter_random
from paceline.compression.blocks import Blocks, blocks_of
from paceline.compression.no_compression import summed
from paceline.compression.packing import dense, is_lossy, real_type
from paceline.compression.per_worker import Alone
from paceline.compression.quantizer import Grain
from paceline.interfaces import (
    Coding,
    CompressorSummary,
    Exchange,
    Gather,
    Leg,
    Place,
    Shape,
    State,
    StateKind,
)


@dataclass(frozen=True, kw_only=True)
class Int8(Alone):
    """Blocks of elements become 8-bit whole numbers times a scale, and are added up by their
    owners. Tensors of 8 bits or fewer, and whole numbers, are summed as they are.

    A block with a number that is not finite is not a number at all in the result.
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest, which sends elements below 1/254 of a block's largest (int4: 1/14) as
    zero in every step, unless there are residuals; or up or down by chance, so that the
    expected result is exact."""

    name: ClassVar[str] = "int8"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        sends="1 byte an element and 4 a block, to the owners and from them",
        loses=(
            "up to 1/254 of a block's largest element, in each element, and as much "
            "again of the sum's (twice that where rounding is stochastic)"
        ),
    )
    grain: ClassVar[Grain] = Grain(levels=127, bits=8, norm="largest")
    block: ClassVar[int] = 256
    """Elements with one scale, at most: a power of two."""
    decoding: ClassVar[float] = 5.5

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def rounds(self) -> int:
        return 2

    @property
    def state(self) -> StateKind:
        return "own" if self.rounding == "stochastic" else "none"

    def passes(self, workers: int) -> tuple[float, float]:
        # Measured on one core of a CPU, beside a copy of a tensor (2 passes).
        first, second = (5.0, 3.0) if self.rounding == "nearest" else (16.0, 11.0)
        return first, self.decoding + second / workers

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        if not is_lossy(kind):
            return dense(kept, kind)
        if not kept:
            return ()
        row = blocks_of(kept, workers, self.block, self.grain).row
        return Leg("exchange", workers * row), Leg("gather", row)

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        if self.rounding == "nearest":
            return {}
        return counter_random.stream(name, rank)

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """Numbers that were drawn are not drawn again."""
        if state:
            counter_random.go_on(state, former)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        exact, coded, own = self._sorted(parts, states)
        exact_sent, coded_sent = None, None
        if sent is not None:
            exact_sent, coded_sent, _ = self._sorted(sent, states)
        yield from summed(exact, exact_sent)
        if not coded:
            return
        blocks = self._blocks(coded, place.workers)
        mine, shared = counter_random.draw(own) if own[0] else (None, None)
        code = blocks.encode(coded, mine)

        theirs = yield Exchange(code)

        total, lost = blocks.add_up(
            theirs, coded[0].dtype, place.rank, shared, keep=coded_sent is not None
        )
        everyone = yield Gather(total)

        blocks.decode(everyone.view(-1), coded)
        if coded_sent is not None:
            blocks.decode(code, coded_sent)
            blocks.add(lost, place.rank, coded_sent)

    def _blocks(self, parts: Sequence[torch.Tensor], workers: int) -> Blocks:
        shapes = [part.shape for part in parts]
        return blocks_of(shapes, workers, self.block, self.grain, parts[0].device.type)

    # ---- one worker's code ----

    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        mine = counter_random.draw(states)[0] if states[0] else None
        return self._blocks(parts, 1).encode(parts, mine)

    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        self._blocks(parts, 1).decode(code, parts, add)

    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        return blocks_of(shapes, 1, self.block, self.grain).row


@dataclass(frozen=True, kw_only=True)
class Int4(Int8):
    """As int8, in 4 bits: whole numbers from -7 to 7, two in a byte."""

    name: ClassVar[str] = "int4"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        sends="half a byte an element and 4 a block, to the owners and from them",
        loses=(
            "up to 1/14 of a block's largest element, in each element, and as much "
            "again of the sum's (twice that where rounding is stochastic)"
        ),
    )
    grain: ClassVar[Grain] = Grain(levels=7, bits=4, norm="largest")
    decoding: ClassVar[float] = 8.5
