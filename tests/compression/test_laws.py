"""Every compressor, with error feedback and without, under every law that says something
about it."""

import pytest
import torch

from paceline.compression import COMPRESSORS, GradientCompression, make
from paceline.testing import COMPRESSOR_CHECKS, check_compressor
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
