"""What is particular about each compressor."""

import pytest
import torch

from paceline.compression import (
    BF16,
    FP16,
    QSGD,
    EFSign,
    ErrorFeedback,
    Identity,
    Int4,
    Int8,
)
from paceline.compression.packing import flat, put
from paceline.interfaces import Place
from paceline.testing.compressor_checks import Workers


def mean_of(compressor, *values):
    """The mean that workers form, each of which has one tensor."""
    given = [[value] for value in values]
    return Workers(compressor, given[0], len(given)).mean(given)


TWENTY = 4 + 16
"""Bytes of the smallest block: a scale, and 16 elements."""


@pytest.mark.parametrize(
    ("compressor", "dtype", "size"),
    [
        (Identity(), torch.float32, 4 * 17),
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
        (ErrorFeedback(Int8()), torch.float32, 2 * TWENTY + TWENTY),
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
    asked = next(Identity().average(parts, [{}, {}], Place(0, 2)))
    assert asked.code.data_ptr() == buffer.data_ptr()
    assert asked.code.numel() == 6


def test_tensors_need_not_lie_side_by_side():
    parts = [torch.zeros(2, 2).T, torch.zeros(1), torch.zeros(2, 3)[:, ::2]]
    whole = torch.arange(9.0)
    put(whole, parts)
    assert torch.equal(flat(parts), whole)
    neighbours_apart = whole[:2], whole[3:5]
    assert flat(neighbours_apart).tolist() == [0, 1, 3, 4]


def test_a_share_is_cast_and_not_the_gradient():
    """Four workers' gradients of 60,000 are no overflow; as a sum they were one."""
    share = torch.full((3,), 60000.0 / 4)
    mean = mean_of(FP16(), *[share] * 4)
    assert mean.results[0][0].tolist() == [60000.0] * 3


def test_float16_overflow_is_infinite():
    mean = mean_of(FP16(), torch.tensor([1e5, 1.0]), torch.tensor([0.0, 1.0]))
    assert mean.results[1][0].tolist() == [torch.inf, 2.0]


def test_casts_leave_what_is_no_wider():
    """float16 has a range that bfloat16's numbers do not fit in."""
    large = torch.tensor([1e30], dtype=torch.bfloat16)
    assert torch.equal(mean_of(FP16(), large).results[0][0], large)


# ---- residuals ----


def residual_of(workers, rank=0):
    return workers.states[rank][0]["residual"]


def test_what_was_left_out_is_sent_later():
    """Elements too small for a code of their own add up until they are sent."""
    small = torch.tensor([1.0, 1e-3])
    pure = Workers(Int8(), [small], 1)
    practical = Workers(ErrorFeedback(Int8()), [small], 1)
    totals = [torch.zeros(2), torch.zeros(2)]
    for _ in range(100):
        for total, workers in zip(totals, (pure, practical), strict=True):
            total += workers.mean([[small]]).results[0][0]
    assert totals[0].tolist() == [100.0, 0.0]
    assert totals[1][1] == pytest.approx(0.1, abs=1 / 127)


def test_a_tensor_without_gradient_keeps_its_residual():
    workers = Workers(ErrorFeedback(BF16()), [torch.zeros(50)], 2)
    given = torch.linspace(-1, 1, 50)
    workers.mean([[given], [given]])
    before = residual_of(workers).clone()
    assert before.any()
    mean = workers.mean([[torch.zeros(50)], [given]])
    assert torch.equal(residual_of(workers), before)
    assert not mean.sent[0][0].any()


def test_a_step_that_a_grad_scaler_skips_leaves_residuals_alone():
    workers = Workers(ErrorFeedback(BF16()), [torch.zeros(50)], 2)
    given = torch.linspace(-1, 1, 50)
    workers.mean([[given], [given]])
    before = [residual_of(workers, rank).clone() for rank in (0, 1)]
    assert all(residual.any() for residual in before)
    workers.mean([[given], [given * torch.inf]])
    for rank in (0, 1):
        assert torch.equal(residual_of(workers, rank), before[rank])


def test_residuals_are_wider_than_16_bits():
    for dtype, wide in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ]:
        state = ErrorFeedback(Int8()).init(torch.zeros(3, dtype=dtype), "x", 0)
        assert state["residual"].dtype == wide


def test_the_sum_of_residuals_stays_where_workers_come_and_go():
    given = torch.linspace(-1, 1, 50)
    three = Workers(ErrorFeedback(BF16()), [given], 3)
    three.mean([[given], [2 * given], [3 * given]])
    two = Workers(ErrorFeedback(BF16()), [given], 2)
    two.inherit(three)
    before = sum(residual_of(three, rank) for rank in range(3))
    torch.testing.assert_close(sum(residual_of(two, rank) for rank in (0, 1)), before)


def test_passes_grow_with_the_codes_that_are_added_up():
    assert Identity().passes(8) == (0, 0)
    assert BF16().passes(2) == BF16().passes(8)
    (coding, few), (same, many) = QSGD().passes(2), QSGD().passes(8)
    assert coding == same > 0
    assert many > few > 0
    assert all(
        more > less
        for more, less in zip(
            ErrorFeedback(BF16()).passes(2), BF16().passes(2), strict=True
        )
    )
