"""Every compressor, with error feedback and without, under every law that says something
about it; and compressors that break one law each.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch

from paceline.compression import (
    BF16,
    COMPRESSORS,
    FP16,
    Gather,
    GDTopK,
    GradientCompression,
    Int8,
    NoCompression,
    Sum,
    make,
)
from paceline.testing import COMPRESSOR_CHECKS, CheckFailedError, check_compressor
from paceline.testing.compressor_checks import Workers, gradients
from tests.compression.toys import Halves, RankOne, TopK

OTHERS = [
    *("int8:rounding=stochastic", "int4:rounding=stochastic"),
    "top-k:density=0.2,chunk=100,bits=2,small=0",
    *("dgc:small=0", "dgc:momentum=0", "ef21:small=0"),
    "gd-top-k:epoch_steps=2,speed=fastest,small=0",
    "powersgd:rank=1,small=0",
]
TURNS = {"gd-top-k": "gd-top-k:epoch_steps=4"}
"""Codes take turns; laws look at four steps."""

CODES = [make(TURNS.get(spec, spec)).code for spec in [*COMPRESSORS, *OTHERS]]
CODES += [TopK(), RankOne(), Halves(), Halves(small=0)]
ALL = [
    *map(GradientCompression, CODES),
    *(
        GradientCompression(code, error_feedback=True)
        for code in CODES
        if code.takes_error_feedback
    ),
    GradientCompression(TopK(), warmup_steps=2),
    GradientCompression(RankOne(), error_feedback=True, warmup_steps=2),
]


def marks(compression, number):
    """All laws of each registered compressor are fast. Options change little, and residuals
    are the same whatever they correct: each such compression has a third of the laws, and each
    law a third of these."""
    turn = ALL.index(compression)
    fast = turn < len(COMPRESSORS) or (turn + number) % 3 == 0
    return [] if fast else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("check", "compression"),
    [
        pytest.param(
            check,
            compression,
            id=f"{compression}-{check.name}",
            marks=marks(compression, number),
        )
        for compression in ALL
        for number, check in enumerate(COMPRESSOR_CHECKS.values())
        if check.applies(compression)
    ],
)
def test_law(check, compression):
    check(compression)


def scales(compression, factor):
    """Whether gradients times *factor* have results that are times that, to the bit."""
    like = gradients(1)[0]
    ordinary, scaled = Workers(compression, like, 3), Workers(compression, like, 3)
    for step in range(4):
        given = gradients(seed=step)
        larger = [[part * factor for part in own] for own in given]
        results = ordinary.mean(given).results[0], scaled.mean(larger).results[0]
        if not all(torch.equal(a * factor, b) for a, b in zip(*results, strict=True)):
            return False
    return True


@pytest.mark.parametrize("factor", [2.0**20, 2.0**-20])
@pytest.mark.parametrize("spec", [*COMPRESSORS, *OTHERS])
def test_a_loss_scale_changes_nothing_else(spec, factor):
    """Not in float16, whose range is too narrow; and no other factor passes through rounding."""
    assert scales(make(spec), factor) == (spec != "fp16")
    if spec in ("int8", "int4", "bf16"):
        assert not scales(make(spec), 1.1 * factor)


def test_every_law_says_something_about_some():
    for check in COMPRESSOR_CHECKS.values():
        assert any(check.applies(compression) for compression in ALL), check.name


def test_all_laws_are_one_call():
    check_compressor(make("int8:error_feedback=true"))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compressor", "law"),
    [
        (WritesMemoryAsItLies(), "tensors with other strides have different results"),
        (SaysLess(), "but sends"),
        (CallsItCommon(), "under the key 'common' differs between workers"),
        (TakesAnything(), "decode accepts [0-9]+ bytes: expected UsageError"),
        (OneRoundMore(), "declares 2 rounds, but needs 1"),
        (GathersAll(), "declares linear = True, but yields other"),
        (DividesByZero(), "gradients are zero on all workers, but the result is not"),
        (SendsEmpty(), "yields Sum of float32 .0,.: expected a tensor that is flat"),
        (CountsWorkers(), "zero changes the others' result"),
        (OwnScale(), "is not their compressed sum"),
        (SaysItSentAll(), "not the sum of the contributions"),
        (RoundsDown(), "declares unbiased = True, but the mean of 400"),
        (
            LeavesMore(),
            r"error of a gradient of norm [\d.]+ has norm [\d.]+: expected less",
        ),
        (KeepsItsOwn(), "workers end with different results"),
        (HidesState(), "some state is kept elsewhere"),
        (OwnButCommon(rounding="stochastic"), "common state differs between workers"),
        (KeepsAGenerator(), "a state holds a Generator"),
        (ForgetsTheType(), "a sum of torch.int64 numbers is not exact"),
        (HidesOverflow(), "element inf, but the result is finite"),
        (UsesTheScriptsChance(), "draws from torch's global random generator"),
        (
            ForgetsHalf(Int8(), error_feedback=True),
            "results and residuals do not add up",
        ),
        (
            DropsWhereWorkersChange(Int8(), error_feedback=True),
            "results and residuals do not add up",
        ),
        (CountsAnew(), "is lost when the number of workers changes"),
        (
            SendsUnused(BF16(), error_feedback=True),
            "a tensor without a gradient is sent",
        ),
        (
            KeepsAnOverflow(BF16(), error_feedback=True),
            "result is not finite changes residuals",
        ),
        (OutOfStep(), "workers yield different requests: Sum of float32 .1,.; Sum"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_broken_law_is_caught(compressor, law):
    with pytest.raises(CheckFailedError, match=law):
        check_compressor(compressor)
