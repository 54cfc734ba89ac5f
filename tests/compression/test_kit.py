"""The kit itself: compressors that break one law each are caught."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch

from paceline.compression import (
    BF16,
    FP16,
    Gather,
    GDTopK,
    GradientCompression,
    Int8,
    NoCompression,
    Sum,
)
from paceline.testing import CheckFailedError, check_compressor
from tests.compression.toys import Halves


@dataclass(frozen=True, kw_only=True)
class OneRoundMore(BF16):
    rounds: ClassVar[int] = 2


@dataclass(frozen=True, kw_only=True)
class GathersAll(BF16):
    """Declares to be linear."""

    def average(self, parts, states, place, sent=None):
        codes = yield Gather(torch.cat([part.reshape(-1) for part in parts]))
        for part, own in zip(
            parts, codes.sum(0).split([p.numel() for p in parts]), strict=True
        ):
            part.copy_(own.view(part.shape))


@dataclass(frozen=True, kw_only=True)
class DividesByZero(BF16):
    def average(self, parts, states, place, sent=None):
        yield from super().average(parts, states, place, sent)
        for part in parts:
            part.copy_(part / part.abs().max() if part.numel() else part)


@dataclass(frozen=True, kw_only=True)
class SendsEmpty(BF16):
    def average(self, parts, states, place, sent=None):
        if not any(part.numel() for part in parts):
            yield Sum(torch.empty(0))
        yield from super().average(parts, states, place, sent)


@dataclass(frozen=True, kw_only=True)
class CountsWorkers(BF16):
    def average(self, parts, states, place, sent=None):
        yield from super().average(parts, states, place, sent)
        for part in parts:
            part.mul_(place.workers)


@dataclass(frozen=True, kw_only=True)
class OwnScale(BF16):
    """Sums of codes that mean different things on different workers."""

    def average(self, parts, states, place, sent=None):
        for part in parts:
            part.div_(part.norm() + 1e-6)
        yield from super().average(parts, states, place, sent)


@dataclass(frozen=True, kw_only=True)
class SaysItSentAll(Int8):
    def average(self, parts, states, place, sent=None):
        for part, own in zip(parts, sent, strict=True):
            own.copy_(part)
        yield from super().average(parts, states, place)


@dataclass(frozen=True, kw_only=True)
class RoundsDown(Int8):
    """Takes no chance, and says it did."""

    unbiased: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class LeavesMore(FP16):
    def average(self, parts, states, place, sent=None):
        for part in parts:
            part.mul_(-1)
        yield from super().average(parts, states, place, sent)


@dataclass(frozen=True, kw_only=True)
class KeepsItsOwn(FP16):
    """Each worker's result is its own part of the sum."""

    def average(self, parts, states, place, sent=None):
        own = [part.clone() for part in parts]
        yield from super().average(parts, states, place, sent)
        for part, mine in zip(parts, own, strict=True):
            part.add_(1e-6 * mine)


@dataclass(frozen=True, kw_only=True)
class HidesState(FP16):
    seen: list[int] = field(default_factory=list)

    def average(self, parts, states, place, sent=None):
        self.seen.append(1)
        yield from super().average(parts, states, place, sent)
        for part in parts:
            if part.is_floating_point():
                part.mul_(1 + 1e-6 * len(self.seen))


@dataclass(frozen=True, kw_only=True)
class OwnButCommon(Int8):
    state: ClassVar[str] = "common"


@dataclass(frozen=True, kw_only=True)
class KeepsAGenerator(NoCompression):
    state: ClassVar[str] = "own"

    def init_state(self, like, name, rank):
        return {"generator": torch.Generator()}


@dataclass(frozen=True, kw_only=True)
class ForgetsTheType(NoCompression):
    def average(self, parts, states, place, sent=None):
        yield from super().average(parts, states, place, sent)
        for part in parts:
            if not part.is_floating_point():
                part.zero_()


@dataclass(frozen=True, kw_only=True)
class HidesOverflow(FP16):
    def average(self, parts, states, place, sent=None):
        yield from super().average(parts, states, place, sent)
        for part in parts:
            part.nan_to_num_()


@dataclass(frozen=True, kw_only=True)
class UsesTheScriptsChance(FP16):
    def average(self, parts, states, place, sent=None):
        torch.rand(1)
        yield from super().average(parts, states, place, sent)


@dataclass(frozen=True)
class ForgetsHalf(GradientCompression):
    def average(self, parts, states, place, sent=None):
        yield from super().average(parts, states, place, sent)
        for state in states:
            if "residual" in state:
                state["residual"].mul_(0.5)


@dataclass(frozen=True)
class DropsWhereWorkersChange(GradientCompression):
    def inherit_state(self, state, former, workers):
        """Each begins anew."""


@dataclass(frozen=True, kw_only=True)
class CountsAnew(GDTopK):
    """Forgets in which epoch it is."""

    def inherit_state(self, state, former, workers):
        pass


@dataclass(frozen=True)
class SendsUnused(GradientCompression):
    def average(self, parts, states, place, sent=None):
        for part in parts:
            if part.numel() and not part.any() and any(p.any() for p in parts):
                part.view(-1)[0] = 1e-30
        yield from super().average(parts, states, place, sent)


@dataclass(frozen=True)
class KeepsAnOverflow(GradientCompression):
    def average(self, parts, states, place, sent=None):
        yield from super().average(parts, states, place, sent)
        if not all(part.isfinite().all() for part in parts):
            for state in states:
                state["residual"] = torch.zeros_like(state["residual"])


@dataclass(frozen=True, kw_only=True)
class OutOfStep(NoCompression):
    def average(self, parts, states, place, sent=None):
        if parts and parts[0][0, 0] > 0:
            yield Sum(torch.ones(1))
        yield from super().average(parts, states, place, sent)


@dataclass(frozen=True, kw_only=True)
class SaysLess(FP16):
    def wire_bytes(self, shapes, dtype, workers):
        return [
            replace(leg, size=leg.size - 2)
            for leg in super().wire_bytes(shapes, dtype, workers)
        ]


@dataclass(frozen=True, kw_only=True)
class CallsItCommon(NoCompression):
    state: ClassVar[str] = "own"

    def init_state(self, like, name, rank):
        return {"common": {"rank": rank}}


@dataclass(frozen=True, kw_only=True)
class TakesAnything(Halves):
    """Of a code that is too long, too."""

    def _decode(self, code, parts, dtype, add):
        super()._decode(
            code[: self._size([p.shape for p in parts], dtype)], parts, dtype, add
        )


@dataclass(frozen=True, kw_only=True)
class WritesMemoryAsItLies(FP16):
    """Reads elements in the order of their indices, and writes them in that of memory."""

    def average(self, parts, states, place, sent=None):
        flat = [part.reshape(-1).clone() for part in parts]
        own = None if sent is None else [part.reshape(-1).clone() for part in sent]
        yield from super().average(flat, states, place, own)
        for values, into in ((flat, parts), (own, sent)):
            for value, part in zip(values or (), into or (), strict=True):
                part.as_strided((part.numel(),), (1,)).copy_(value)


@pytest.mark.parametrize(
    ("compressor", "law"),
    [
        (WritesMemoryAsItLies(), "tensors with other strides have another result"),
        (SaysLess(), "and sends"),
        (CallsItCommon(), "under the key 'common' differs between workers"),
        (TakesAnything(), "takes [0-9]+ bytes for a code of"),
        (OneRoundMore(), "declares 2 rounds, and takes 1"),
        (GathersAll(), "declares to be linear, and gathers"),
        (DividesByZero(), "zeros on all workers have become something else"),
        (SendsEmpty(), "flat, contiguous and not empty, not Sum of float32 .0,."),
        (CountsWorkers(), "zero changes the others' result"),
        (OwnScale(), "do not add up to the code of their sum"),
        (SaysItSentAll(), "not the sum of what workers take for sent"),
        (RoundsDown(), "declares to be unbiased, and the mean of 400"),
        (LeavesMore(), r"of a gradient of norm [\d.]+ [\d.]+ is left out"),
        (KeepsItsOwn(), "workers end with different results"),
        (HidesState(), "something is kept elsewhere"),
        (OwnButCommon(rounding="stochastic"), "common state differs between workers"),
        (KeepsAGenerator(), "a state holds a Generator"),
        (ForgetsTheType(), "a sum of torch.int64 numbers is not exact"),
        (HidesOverflow(), "inf is hidden: the result is finite"),
        (UsesTheScriptsChance(), "draws from torch's global generator"),
        (
            ForgetsHalf(Int8(), error_feedback=True),
            "gradients are neither sent nor residual",
        ),
        (
            DropsWhereWorkersChange(Int8(), error_feedback=True),
            "gradients are neither sent nor residual",
        ),
        (CountsAnew(), "begins anew where the number of"),
        (SendsUnused(BF16(), error_feedback=True), "sent of a tensor without"),
        (KeepsAnOverflow(BF16(), error_feedback=True), "a step with an overflow"),
        (OutOfStep(), "workers are not in step, they yield: Sum of float32 .1,.; Sum"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_broken_law_is_caught(compressor, law):
    with pytest.raises(CheckFailedError, match=law):
        check_compressor(compressor)
