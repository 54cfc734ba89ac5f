"""What is particular about each compressor."""

import pytest
import torch

from paceline.compression import (
    BF16,
    FP16,
    QSGD,
    EFSign,
    GradientCompression,
    Int4,
    Int8,
    NoCompression,
    RankInfo,
)
from paceline.compression.base import flat, put
from paceline.testing.compressor_checks import Workers
from tests.compression.cases import mean_of

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
