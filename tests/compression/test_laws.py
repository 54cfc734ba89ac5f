"""Every compressor, with residuals and without, under every law that says something
about it."""

import pytest

from paceline.compression import COMPRESSORS, Identity, Later, Residuals, make
from paceline.testing import COMPRESSOR_CHECKS, check_compressor
from tests.compression.toys import Halves, RankOne, TopK

PURE = [*map(make, COMPRESSORS), make("int8:rounding=nearest"), TopK(), RankOne()]
PURE += [Halves(), Halves(small=0)]
ALL = PURE + [
    Residuals(code) for code in PURE if code.takes_residuals and code != Identity()
]
ALL += [Later(TopK(), 2), Later(Residuals(RankOne()), 2)]


@pytest.mark.parametrize(
    ("check", "compressor"),
    [
        pytest.param(check, compressor, id=f"{compressor}-{check.name}")
        for compressor in ALL
        for check in COMPRESSOR_CHECKS.values()
        if check.applies(compressor)
    ],
)
def test_law(check, compressor):
    check(compressor)


def test_every_law_says_something_about_some():
    for check in COMPRESSOR_CHECKS.values():
        assert any(check.applies(compressor) for compressor in ALL), check.name


def test_all_laws_are_one_call():
    check_compressor(make("int8:residuals=true"))
