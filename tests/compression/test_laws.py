"""Every compressor, with residuals and without, under every law that says something
about it."""

import pytest

from paceline.compression import COMPRESSORS, ErrorFeedback, Identity, Later, make, pure
from paceline.testing import COMPRESSOR_CHECKS, check_compressor
from tests.compression.toys import Halves, RankOne, TopK

OTHERS = [
    *("int8:rounding=stochastic", "int4:rounding=stochastic"),
    "top-k:density=0.2,chunk=100,bits=2,small=0",
    *("dgc:small=0", "dgc:momentum=0", "ef21:start=code,small=0"),
    "gd-top-k:epoch_steps=2,speed=fastest,small=0",
    "powersgd:sides=both",
    "powersgd:rank=1,small=0",
]
TURNS = {"gd-top-k": "gd-top-k:epoch_steps=4"}
"""Codes take turns; laws look at four steps."""

PURE = [pure(make(TURNS.get(spec, spec))) for spec in [*COMPRESSORS, *OTHERS]]
PURE += [TopK(), RankOne(), Halves(), Halves(small=0)]
CORRECTED = [
    ErrorFeedback(code)
    for code in PURE
    if code.takes_error_feedback and code != Identity()
]
ALL = PURE + CORRECTED + [Later(TopK(), 2), Later(ErrorFeedback(RankOne()), 2)]


def marks(compressor, number):
    """All laws of each registered compressor are fast. Options change little, and residuals
    are the same whatever they correct: each such compressor has a third of the laws, and each
    law a third of these compressors."""
    turn = ALL.index(compressor)
    fast = turn < len(COMPRESSORS) or (turn + number) % 3 == 0
    return [] if fast else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("check", "compressor"),
    [
        pytest.param(
            check,
            compressor,
            id=f"{compressor}-{check.name}",
            marks=marks(compressor, number),
        )
        for compressor in ALL
        for number, check in enumerate(COMPRESSOR_CHECKS.values())
        if check.applies(compressor)
    ],
)
def test_law(check, compressor):
    check(compressor)


def test_every_law_says_something_about_some():
    for check in COMPRESSOR_CHECKS.values():
        assert any(check.applies(compressor) for compressor in ALL), check.name


def test_all_laws_are_one_call():
    check_compressor(make("int8:error_feedback=true"))
