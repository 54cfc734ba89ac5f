"""Compressors by name: their specs, options and defaults, and what is particular about each."""

from pathlib import Path

import pytest
import torch

import paceline
from paceline.compression import (
    BF16,
    COMPRESSORS,
    CONTRIB,
    DGC,
    FP16,
    QSGD,
    Compressor,
    EFSign,
    GradientCompression,
    Int4,
    Int8,
    NoCompression,
    PowerSGD,
    RankInfo,
    TopK,
    contrib,
    keys_of,
    make,
)
from paceline.compression.base import flat, put
from paceline.errors import UsageError
from paceline.methods.bsp import BSP
from paceline.methods.local_updates.presets import SparseLoCo
from paceline.runtimes.join import join_runtime
from paceline.spec import Spec, nested
from paceline.testing.compressor_checks import Workers
from tests.compression.toys import mean_of
from tests.support.simulations import run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", NoCompression()),
        ("bf16", BF16()),
        ("bf16:error_feedback=false", BF16()),
        ("bf16:error_feedback=true", GradientCompression(BF16(), error_feedback=True)),
        ("int8:rounding=stochastic", Int8(rounding="stochastic")),
        ("int4", Int4()),
        ("ef-sign", GradientCompression(EFSign(), error_feedback=True)),
        ("ef-sign:error_feedback=false", EFSign()),
        ("int8:error_feedback=true", GradientCompression(Int8(), error_feedback=True)),
        (
            "bf16:error_feedback=true,decay=0.9",
            GradientCompression(BF16(), error_feedback=True, decay=0.9),
        ),
        ("bf16:warmup_steps=9", GradientCompression(BF16(), warmup_steps=9)),
        (
            "int8:warmup_steps=9,error_feedback=true",
            GradientCompression(Int8(), error_feedback=True, warmup_steps=9),
        ),
    ],
)
def test_make(text, expected):
    made = make(text)
    assert made == (
        GradientCompression(expected) if isinstance(expected, Compressor) else expected
    )
    chosen, rest = nested("compression", keys_of(made) | {"buckets": "ddp"})
    assert rest == {"buckets": "ddp"}
    assert made == (GradientCompression() if chosen is None else make(chosen))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int9", "unknown compression 'int9' 'int8' bf16"),
        ("int8:bits=4", "'int8' 'bits' error_feedback rounding warmup_steps"),
        ("qsgd:error_feedback=true", "'qsgd' error_feedback=true"),
        ("none:error_feedback=true", "unknown key 'error_feedback'"),
        ("int8:rounding=up", "'int8' rounding 'up'"),
        ("int8:error_feedback=yes", "error_feedback: true false 'yes'"),
        ("powersgd:rank=x", "rank: 'x'"),
        ("powersgd:rank=0", "rank: 1 0"),
        ("bf16:decay=0.9", "decay=0.9 error_feedback=true"),
        ("bf16:error_feedback=true,decay=2", "decay: 2.0"),
        ("bf16:warmup_steps=-1", "warmup_steps: 0 -1"),
        ("top-k:density=0", "density: 0.0"),
        ("top-k:density=1.5", "density: 1.5"),
        ("ef21:density=-1", "density: -1.0"),
        ("dgc:density=nan", "density: nan"),
        ("top-k:bits=8", "bits: 2 32 8"),
        ("top-k:chunk=-1", "chunk: 0 -1"),
        ("dgc:momentum=1", "momentum: 1.0"),
        ("dgc:warmup_steps=-1", "warmup_steps: 0 -1"),
        ("dgc:warm_up_steps=1", "unknown key 'warm_up_steps' warmup_steps"),
        ("dgc:small=-1", "small: 0 -1"),
        ("dgc:error_feedback=true", "'dgc' error_feedback=true"),
        ("gd-top-k:epoch_steps=-1", "epoch_steps: 0 -1"),
        ("gd-top-k:speed=quick", "speed 'quick'"),
    ],
)
def test_what_is_unknown_is_refused_with_key_and_value(text, words):
    with pytest.raises(UsageError) as caught:
        make(text)
    for word in words.split():
        assert word in str(caught.value)


def test_dgc_has_one_warmup():
    """Its own: the shared one, of uncompressed steps, would have the same name."""
    assert keys_of(make("dgc:warmup_steps=9"))["compression.warmup_steps"] == "9"
    with pytest.raises(UsageError, match="own warm-up"):
        GradientCompression(DGC(), warmup_steps=9)


def test_rows_are_under_their_names():
    assert all(name == cls().name for name, cls in COMPRESSORS.items())


def test_a_compressor_needs_a_name():
    others = dict.fromkeys(Compressor.__abstractmethods__ - {"name"})
    with pytest.raises(TypeError, match="abstract method name"):
        type("Nameless", (Compressor,), others)()
    assert type("Named", (Compressor,), others | {"name": "named"})().name == "named"


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
    with pytest.raises(UsageError, match=r"'compression\.rank' without 'compression'"):
        nested("compression", {"compression.rank": "3"})


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_an_object_has_what_its_name_has_by_default(name):
    assert GradientCompression.by_default(COMPRESSORS[name]()) == make(name)


@pytest.mark.parametrize("given", [TopK, 3])
def test_what_is_no_object_is_refused(given):
    def body(rank):
        model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match="compression") as caught:
            paceline.distribute(model, inner, compression=given)
        assert repr(given) in str(caught.value)

    run(1, body)


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
        ("top-k:error_feedback=false", GradientCompression(TopK())),
        (
            "int8:error_feedback=true,decay=0.5",
            GradientCompression(Int8(), error_feedback=True, decay=0.5),
        ),
    ):
        expected = told(compression=name)
        assert told(compression=code) == expected
        assert told(method=BSP(), compression=code) == expected
        assert told(method="bsp", compression=code) == expected
    assert "compression.decay=0.95" in told(method=SparseLoCo())


TWENTY = 4 + 16
"""Bytes of the smallest block: a scale, and 16 elements."""


@pytest.mark.parametrize(
    ("compressor", "dtype", "size"),
    [
        (NoCompression(), torch.float32, 4 * 17),
        (BF16(), torch.float32, 2 * 17),
        (FP16(), torch.float32, 2 * 17),
        (BF16(), torch.float64, 2 * 17),
        (BF16(), torch.float16, 2 * 17),
        (BF16(), torch.complex64, 4 * 17),
        (BF16(), torch.int32, 4 * 17),
        (Int8(), torch.float32, 2 * TWENTY + TWENTY),
        (Int8(), torch.bfloat16, 2 * TWENTY + TWENTY),
        (Int8(), torch.float64, 2 * TWENTY + TWENTY),
        (Int8(), torch.complex64, 4 * TWENTY + 2 * TWENTY),
        (Int8(), torch.int16, 2 * 17),
        (
            GradientCompression(Int8(), error_feedback=True),
            torch.float32,
            2 * TWENTY + TWENTY,
        ),
        (Int4(), torch.float32, 2 * 12 + 12),
        (QSGD(), torch.float32, 2 * TWENTY),
        (EFSign(), torch.float32, 2 * 4 + 2 + 1),
        (EFSign(), torch.float64, 2 * 4 + 2 + 1),
        (EFSign(), torch.int16, 2 * 17),
    ],
    ids=str,
)
def test_bytes_of_a_code(compressor, dtype, size):
    parts = [torch.ones(4, 4).to(dtype), torch.ones(()).to(dtype), torch.ones(0)]
    given = [[part.to(dtype) for part in parts]] * 2
    assert Workers(compressor, given[0], 2).mean(given).bytes == size


def test_a_bucket_is_sent_from_its_own_memory():
    buffer = torch.arange(6.0)
    parts = [part.view(3, 1) for part in buffer.split(3)]
    asked = next(NoCompression().average(parts, [{}, {}], RankInfo(0, 2)))
    assert asked.code.data_ptr() == buffer.data_ptr()
    assert asked.code.numel() == 6


def test_tensors_need_not_lie_side_by_side():
    parts = [torch.zeros(2, 2).T, torch.zeros(1), torch.zeros(2, 3)[:, ::2]]
    whole = torch.arange(9.0)
    put(whole, parts)
    assert torch.equal(flat(parts), whole)
    neighbours_apart = whole[:2], whole[3:5]
    assert flat(neighbours_apart).tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Shares are cast, not gradients: of four workers' 60,000 the sum would overflow.
        ([[60000.0 / 4]] * 4, [60000.0]),
        ([[1e5, 1.0], [0.0, 1.0]], [torch.inf, 2.0]),
    ],
)
def test_float16_overflows_where_the_mean_does(values, expected):
    for (result,) in mean_of(FP16(), *map(torch.tensor, values)).results:
        assert result.tolist() == expected


def test_casts_leave_what_is_no_wider():
    """float16 has a range that bfloat16's numbers do not fit in."""
    large = torch.tensor([1e30], dtype=torch.bfloat16)
    assert torch.equal(mean_of(FP16(), large).results[0][0], large)


def test_passes_grow_with_the_codes_that_are_added_up():
    assert NoCompression().memory_passes(8) == (0, 0)
    assert BF16().memory_passes(2) == BF16().memory_passes(8)
    (coding, few), (same, many) = QSGD().memory_passes(2), QSGD().memory_passes(8)
    assert coding == same > 0
    assert many > few > 0
    assert all(
        more > less
        for more, less in zip(
            GradientCompression(BF16(), error_feedback=True).memory_passes(2),
            BF16().memory_passes(2),
            strict=True,
        )
    )
