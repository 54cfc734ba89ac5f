"""Compressors by name."""

from pathlib import Path

import pytest
import torch

import paceline
from paceline.compression import (
    BF16,
    COMPRESSORS,
    CONTRIB,
    QSGD,
    EFSign,
    ErrorFeedback,
    Exactly,
    Identity,
    Int4,
    Int8,
    Later,
    PowerSGD,
    TopK,
    as_by_default,
    contrib,
    keys_of,
    make,
)
from paceline.errors import UsageError
from paceline.methods.bsp import BSP
from paceline.methods.local_updates.sparse_loco import SparseLoCo
from paceline.runtimes.join import join_runtime
from paceline.spec import Spec, nested
from tests.support.simulations import run


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("none", Identity()),
        ("bf16", BF16()),
        ("bf16:error_feedback=false", BF16()),
        ("bf16:error_feedback=true", ErrorFeedback(BF16())),
        ("int8:rounding=stochastic", Int8(rounding="stochastic")),
        ("int4", Int4()),
        ("ef-sign", ErrorFeedback(EFSign())),
        ("ef-sign:error_feedback=false", EFSign()),
        ("int8:error_feedback=true", ErrorFeedback(Int8())),
        ("bf16:error_feedback=true,decay=0.9", ErrorFeedback(BF16(), 0.9)),
        ("bf16:warmup_steps=9", Later(BF16(), 9)),
        ("int8:warmup_steps=9,error_feedback=true", Later(ErrorFeedback(Int8()), 9)),
    ],
)
def test_make(text, compressor):
    made = make(text)
    assert made == compressor
    chosen, rest = nested("compression", keys_of(made) | {"buckets": "ddp"})
    assert rest == {"buckets": "ddp"}
    assert made == (Identity() if chosen is None else make(chosen))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int9", "unknown compression 'int9'. Did you mean 'int8'? Known: bf16, "),
        (
            "int8:bits=4",
            "compression 'int8': unknown key 'bits'. Known: decay, error_feedback, rounding, warmup_steps",
        ),
        (
            "qsgd:error_feedback=true",
            "compression 'qsgd': error_feedback=true, but it takes no resid",
        ),
        ("none:error_feedback=true", "unknown key 'error_feedback'. Known: none."),
        ("int8:rounding=up", "compression 'int8': unknown value for rounding 'up'"),
        (
            "int8:error_feedback=yes",
            "error_feedback: expected true or false, got 'yes'",
        ),
        ("powersgd:rank=x", "rank: expected a whole number, got 'x'"),
        ("bf16:decay=0.9", "decay=0.9 is of residuals, and there are none"),
        (
            "bf16:error_feedback=true,decay=2",
            "expected a part of a residual, 0 to 1, got 2.0",
        ),
        ("bf16:warmup_steps=-1", "warmup_steps: expected 0 or more, got -1"),
    ],
)
def test_what_is_unknown_is_refused_with_what_there_is(text, said):
    with pytest.raises(UsageError) as caught:
        make(text)
    assert said in str(caught.value)


def test_rows_are_under_their_names():
    assert all(name == cls().name for name, cls in COMPRESSORS.items())


def test_contrib_is_a_folder():
    folder = Path(contrib.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {name.replace("-", "_") for name in CONTRIB} == files


def test_nested_keys():
    values = {"compression": "powersgd", "compression.rank": "3", "buckets": "ddp"}
    assert nested("compression", values) == (
        Spec("powersgd", {"rank": "3"}),
        {"buckets": "ddp"},
    )
    assert nested("collective", values) == (None, values)
    with pytest.raises(UsageError) as caught:
        nested("compression", {"compression.rank": "3"})
    assert str(caught.value) == (
        "key 'compression.rank' without 'compression': expected compression=NAME beside it"
    )


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_an_object_has_what_its_name_has_by_default(name):
    assert as_by_default(COMPRESSORS[name]()) == make(name)


def test_wrappers_of_an_object_say_what_it_has():
    assert as_by_default(TopK(density=0.1)) == ErrorFeedback(TopK(density=0.1))
    assert as_by_default(Exactly(TopK())) == make("top-k:error_feedback=false")
    fading = ErrorFeedback(TopK(), 0.5)
    assert as_by_default(fading) is fading
    late = Later(PowerSGD(), 3)
    assert as_by_default(late) is late
    assert as_by_default(Exactly(PowerSGD())) == PowerSGD()
    # What takes none has none.
    unbiased = QSGD()
    assert as_by_default(unbiased) is unbiased


@pytest.mark.parametrize("given", [TopK, 3])
def test_what_is_no_object_is_refused(given):
    with pytest.raises(UsageError, match="compression") as caught:
        as_by_default(given)
    assert repr(given) in str(caught.value)


def test_distribute_takes_objects_as_names():
    """By every way in which one can be given: the training says what it has."""

    def method_of(rank, **given):
        model = torch.nn.Linear(40, 40)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, buckets="single", **given)
        optimizer.finish()
        return join_runtime().recorder.method

    def told(**given):
        first, second = run(2, lambda rank: method_of(rank, **given))
        assert first == second
        return first

    for name, code in (
        ("top-k", TopK()),
        ("powersgd", PowerSGD()),
        ("top-k:error_feedback=false", Exactly(TopK())),
        ("int8:error_feedback=true,decay=0.5", ErrorFeedback(Int8(), 0.5)),
    ):
        expected = told(compression=name)
        assert told(compression=code) == expected
        assert told(method=BSP(), compression=code) == expected
        assert told(method="bsp", compression=code) == expected
    assert "compression.decay=0.95" in told(method=SparseLoCo())
