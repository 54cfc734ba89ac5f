"""Compressors by name."""

import pytest

from paceline.compression import (
    BF16,
    COMPRESSORS,
    EFSign,
    Identity,
    Int4,
    Int8,
    Later,
    Residuals,
    keys_of,
    make,
)
from paceline.errors import UsageError
from paceline.spec import Spec, nested


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("none", Identity()),
        ("bf16", BF16()),
        ("bf16:residuals=false", BF16()),
        ("bf16:residuals=true", Residuals(BF16())),
        ("int8:rounding=stochastic,seed=3", Int8(rounding="stochastic", seed=3)),
        ("int4:block=64", Int4(block=64)),
        ("ef-sign", Residuals(EFSign())),
        ("ef-sign:residuals=false", EFSign()),
        ("int8:seed=3,residuals=true", Residuals(Int8(seed=3))),
        ("bf16:residuals=true,decay=0.9", Residuals(BF16(), 0.9)),
        ("bf16:dense_steps=9", Later(BF16(), 9)),
        ("int8:dense_steps=9,residuals=true", Later(Residuals(Int8()), 9)),
    ],
)
def test_make(text, compressor):
    made = make(text)
    assert made == compressor
    chosen, rest = nested("compression", keys_of(made) | {"fusion": "ddp"})
    assert rest == {"fusion": "ddp"}
    assert made == (Identity() if chosen is None else make(chosen))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int9", "unknown compression 'int9'. Did you mean 'int8'? Known: bf16, "),
        (
            "int8:bits=4",
            "compression 'int8': unknown key 'bits'. Known: block, decay, dense_steps, residuals",
        ),
        (
            "int8:block=100",
            "compression 'int8': block: expected a power of two from 16 to",
        ),
        ("qsgd:levels=200", "compression 'qsgd': levels: expected 1 to 127, which fit"),
        (
            "qsgd:residuals=true",
            "compression 'qsgd': residuals=true, but it takes no resid",
        ),
        ("none:residuals=true", "unknown key 'residuals'. Known: none."),
        ("int8:rounding=up", "compression 'int8': unknown value for rounding 'up'"),
        ("int8:residuals=yes", "residuals: expected true or false, got 'yes'"),
        ("int8:seed=x", "seed: expected a whole number, got 'x'"),
        ("bf16:decay=0.9", "decay=0.9 is of residuals, and there are none"),
        (
            "bf16:residuals=true,decay=2",
            "expected a part of a residual, 0 to 1, got 2.0",
        ),
        ("bf16:dense_steps=-1", "dense_steps: expected 0 or more, got -1"),
    ],
)
def test_what_is_unknown_is_refused_with_what_there_is(text, said):
    with pytest.raises(UsageError) as caught:
        make(text)
    assert said in str(caught.value)


def test_rows_are_under_their_names():
    assert all(name == cls().name for name, cls in COMPRESSORS.items())


def test_nested_keys():
    values = {"compression": "int8", "compression.seed": "3", "fusion": "ddp"}
    assert nested("compression", values) == (
        Spec("int8", {"seed": "3"}),
        {"fusion": "ddp"},
    )
    assert nested("collective", values) == (None, values)
    with pytest.raises(UsageError) as caught:
        nested("compression", {"compression.seed": "3"})
    assert str(caught.value) == (
        "key 'compression.seed' without 'compression': expected compression=NAME beside it"
    )
