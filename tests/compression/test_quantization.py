"""Quantisers: where blocks lie, what they lose, what is not finite; and what papers say of them, in
float64.
"""

import math
from dataclasses import replace

import pytest
import torch

from paceline.compression import (
    QSGD,
    EFSign,
    GradientCompression,
    Int4,
    Int8,
    NoCompression,
)
from paceline.compression.quantization import (
    ELEMENTS_AT_ONCE,
    Blocks,
    CounterRng,
    blocks_of,
)
from paceline.testing.compressor_checks import Workers
from tests.compression.toys import SignAlone, mean_of, random, through

STOCHASTIC = Int8(rounding="stochastic")
SIZES = (1, 15, 16, 17, 255, 256, 257, 1000)


def in_blocks(code, block, levels=None):
    """*code* with another size of its blocks, and so many *levels*."""
    levels = levels or code.quantizer.levels
    values = {"block": block, "quantizer": replace(code.quantizer, levels=levels)}
    return type(f"{type(code).__name__}{block}", (type(code),), values)()


# ---- where they lie ----


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("code", [Int8(), Int4(), in_blocks(Int8(), 16)], ids=str)
def test_every_element_travels(code, workers):
    """Tensors of all sizes, some with strides: none is mixed up with another."""
    shapes = [(n,) for n in SIZES] + [(40, 30), (ELEMENTS_AT_ONCE + 300,), (3, 5)]
    parts = [random(*shape, seed=n) for n, shape in enumerate(shapes)]
    parts[8], parts[3] = random(30, 40).T, random(34)[::2]
    given = [[part.clone() for part in parts] for _ in range(workers)]
    given[0][8], given[0][3] = parts[8], parts[3]
    results = Workers(code, parts, workers).mean(given).results
    for own in results:
        for part, result in zip(parts, own, strict=True):
            error = (result - workers * part).abs().max()
            assert error <= workers * part.abs().max() / code.quantizer.levels


def test_a_bucket_is_as_few_bytes_as_blocks_make_it():
    grain = Int8.quantizer
    assert blocks_of([(25, 40), (512,)], 2, 256, grain).block == 256
    assert blocks_of([(3,), (5,)], 2, 256, grain).block == 16
    assert blocks_of([(33,)], 1, 256, grain).block == 64
    assert blocks_of([(1000,)], 1, 32, grain).block == 32


def test_an_accelerator_works_on_all_blocks_at_once():
    shapes = [(4 * ELEMENTS_AT_ONCE,)]
    for device, at_once in (("cpu", False), ("cuda", True)):
        blocks = blocks_of(shapes, 1, 256, Int8.quantizer, device)
        assert (blocks.at_once >= blocks.count) == at_once


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("code", "byte"),
    [(Int8(), 1), (in_blocks(Int8(), 64), 1), (in_blocks(Int4(), 512), 1 / 2)],
    ids=str,
)
def test_bytes_are_the_formula(code, byte, workers):
    """2 (n - 1) / n (1 + 4 / B) bytes an element leave a worker."""
    shapes = [(512, 96), (2048,)]
    elements = 512 * 96 + 2048
    exchange, gather = code.wire_bytes(shapes, torch.float32, workers)
    padded = -(-elements // (workers * code.block)) * workers * code.block
    assert exchange.size == workers * gather.size == padded * (byte + 4 / code.block)
    leaves = (workers - 1) * (exchange.size / workers + gather.size)
    expected = 2 * (workers - 1) / workers * (byte + 4 / code.block) * elements
    assert leaves == pytest.approx(expected, rel=0.05)


def test_a_small_tensor_is_not_lost_beside_a_large_one():
    large, small = random(100), 1e-6 * random(100, seed=1)
    result = Workers(Int8(), [large, small], 2).mean([[large, small]] * 2).results[0][1]
    assert (result - 2 * small).abs().max() <= 2 * small.abs().max() / 127


def test_blocks_are_those_of_shapes_alone():
    """A number that is sent is the same among however many workers."""
    values = random(1000)
    alone, among = (
        mean_of(Int8(), *[values, *[torch.zeros(1000)] * more]).results[0][0]
        for more in (0, 4)
    )
    assert torch.equal(alone, among)


# ---- what they lose ----


@pytest.mark.parametrize(("code", "levels"), [(Int8(), 127), (Int4(), 7)], ids=str)
def test_an_element_is_within_half_a_level(code, levels):
    values = torch.linspace(-1, 1, 1001)
    result = through(code, values)
    scales = values[:1000].view(-1, 8).abs().amax(1)  # of parts of blocks
    assert (result - values).abs().max() <= 0.5 / levels + 1e-6
    assert (result[0], result[-1]) == (-1, 1)
    assert (result[496:504] == 0).all() == (scales[62] < 0.5 / levels * 1.0)


@pytest.mark.parametrize("code", [Int8(), Int4(), STOCHASTIC], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_what_is_on_the_grid_travels_exactly(code, workers):
    """Where all is whole levels, as of gradients that all workers share, nothing is lost: the
    same as without compression."""
    levels = code.quantizer.levels
    values = torch.randint(-levels, levels + 1, (20, 256)).double()
    values[:, 7] = levels
    given = [values] * workers
    exact = mean_of(NoCompression(), *given).results[0][0]
    assert torch.equal(mean_of(code, *given).results[0][0], exact)
    assert not torch.equal(
        mean_of(code, *[values + 0.3] * workers).results[0][0], exact
    )


@pytest.mark.parametrize("code", [Int8(), Int4(), STOCHASTIC, QSGD()], ids=str)
@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1e-36, 1e-30, 1e20, 3e38])
def test_at_the_ends_of_float32(code, largest):
    values = torch.tensor([largest, -largest, 0.0])
    result = mean_of(code, values).results[0][0]
    assert result.isfinite().all()
    assert (result - values).abs().max() <= max(largest / 50, 2e-38)
    assert result[2] == 0


def test_float64_is_added_up_in_float64():
    """A sum of 2^40 and 1 has both: not in float32."""
    one, other = torch.zeros(2, 16, dtype=torch.float64)
    one[0], other[0] = 127 * 2.0**40, 127.0
    blocks = blocks_of([(16,)], 1, 16, Int8.quantizer)
    codes = torch.stack([blocks.encode([one]), blocks.encode([other])])
    code, lost = blocks.add_up(codes, torch.float64, 0, keep=True)
    result = torch.zeros(16, dtype=torch.float64)
    blocks.decode(code, [result])
    assert result[0] - lost[0] == 127 * 2.0**40 + 127


# ---- what is not finite ----


@pytest.mark.parametrize("code", [Int8(), Int4(), STOCHASTIC, QSGD()], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_block_with_an_overflow_is_none_for_everybody(code, bad, dtype):
    """And it leaves the others alone."""
    given = [
        [random(512, seed=rank, dtype=dtype), torch.ones(256)] for rank in range(3)
    ]
    given = [[part.to(dtype) for part in own] for own in given]
    given[1][0][300] = bad
    for one, other in Workers(code, given[0], 3).mean(given).results:
        first = 300 // code.block * code.block
        expected = torch.zeros(512, dtype=torch.bool)
        expected[first : first + code.block] = True
        assert torch.equal(one.isnan(), expected)
        assert not one.isinf().any()
        assert other.isfinite().all()


def test_a_sum_that_overflows_is_none_for_everybody():
    for (result,) in mean_of(Int8(), *[torch.full((20,), 2e38)] * 3).results:
        assert result.isnan().all()


# ---- owners ----


@pytest.mark.parametrize("code", [Int8(), Int4(), STOCHASTIC], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_an_owner_answers_for_what_its_rounding_loses(code, workers):
    """All that is sent adds up to the result; outside of its own part a worker has sent what its
    first code stands for."""
    given = [[random(3000, seed=rank, dtype=torch.float64)] for rank in range(workers)]
    mean = Workers(code, given[0], workers).mean(given)
    total = sum(own[0] for own in mean.sent)
    assert (total - mean.results[0][0]).abs().max() < 1e-12
    part = blocks_of([(3000,)], workers, code.block, code.quantizer).count * code.block
    for rank, (own,) in enumerate(mean.sent):
        state = code.init_state(own, "tensor 0", rank)
        first = torch.zeros_like(own)
        code.decode(code.encode(given[rank], [state]), [first])
        others = torch.ones(3000, dtype=torch.bool)
        others[rank * part : (rank + 1) * part] = False
        assert torch.equal(own[others], first[others])
        if workers > 1:  # what is on the grid of one code is on that of the next
            assert not torch.equal(own[~others], first[~others])


def test_without_the_owners_part_something_is_lost(monkeypatch):
    """The control of the above."""
    monkeypatch.setattr(Blocks, "add", lambda *ignored: None)
    given = [[random(3000, seed=rank, dtype=torch.float64)] for rank in range(3)]
    mean = Workers(Int8(), given[0], 3).mean(given)
    total = sum(own[0] for own in mean.sent)
    assert (total - mean.results[0][0]).abs().max() > 1e-3


# ---- chance ----

DRAWS = 10_000


def draws_of(code):
    """Of one block, many draws at once."""
    values = random(1, code.block, dtype=torch.float64)
    return values[0], through(code, values.expand(DRAWS, -1).contiguous())


@pytest.mark.parametrize("levels", [1, 4, 127])
@pytest.mark.parametrize("block", [16, 128])
def test_qsgd_errs_as_the_paper_says(levels, block):
    """Lemma 3.1: by min(B / s^2, sqrt(B) / s) of |v|^2 at most."""
    values, drawn = draws_of(in_blocks(QSGD(), block, levels))
    error = (drawn - values).square().sum(1).mean()
    bound = min(block / levels**2, math.sqrt(block) / levels)
    assert bound / 20 < error / values.square().sum() <= bound


def test_qsgd_keeps_two_numbers_and_a_count():
    """However large the tensor: whoever receives its codes keeps nothing."""
    state = QSGD().init_state(torch.zeros(10**6), "x", 0)
    assert state.keys() == {"stream", "common"}
    assert state["common"].keys() == {"stream", "draws"}


@pytest.mark.parametrize("code", [QSGD(), STOCHASTIC], ids=str)
def test_it_is_drawn_anew_each_time_and_on_each_worker(code):
    workers = Workers(code, [torch.zeros(200)], 2)
    values = torch.linspace(-1, 1, 200)
    first, second = (workers.mean([[values], [values]]).sent for _ in range(2))
    drawn = [sent[0] for sent in (*first, *second)]
    for number, one in enumerate(drawn):
        assert all(not torch.equal(one, other) for other in drawn[:number])


def numbers(key, count=2**16, begin=0):
    values = torch.zeros(count, dtype=torch.float64)
    CounterRng(key).add_to(values, begin)
    return values


def test_numbers_are_spread_evenly():
    """Between 0 and 1 without either; in each of 64 parts about as many, whatever the key; and
    neighbours, and keys that are, have nothing to do with each other."""
    for key in (0, 1, -1, 2**62 + 12345):
        drawn = numbers(key)
        assert 0 < drawn.min() < 2**-14
        assert 1 - 2**-14 < drawn.max() < 1
        counts = torch.bincount((64 * drawn).long(), minlength=64).double()
        chi_square = ((counts - 1024) ** 2 / 1024).sum()
        assert 63 - 5 * 126**0.5 < chi_square < 63 + 5 * 126**0.5
        centred = drawn - 0.5
        for other in (numbers(key + 1), drawn.roll(1), drawn.roll(4), drawn.roll(256)):
            assert abs((centred * (other - 0.5)).mean()) < 5 / 12 / 256


def test_numbers_are_those_of_their_places():
    assert torch.equal(numbers(7, 256)[64:], numbers(7, 192, begin=64))


# ---- signs ----


def shares(values):
    """|a|_1 over the root of N times |a|_2."""
    return values.abs().sum() / values.norm() / values.numel() ** 0.5


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 2**16 + 3])
def test_ef_sign_leaves_out_what_the_paper_says(size):
    values = random(size, dtype=torch.float64) ** 3
    values[size // 2] = 0.0
    if size == 1:
        values += 1
    left = (values - through(EFSign(), values)).square().sum() / values.square().sum()
    assert left == pytest.approx(float(1 - shares(values) ** 2), abs=1e-6)
    assert left < 1


def test_an_element_without_gradient_stays_near_zero():
    """Its bit says something; its residual takes that back."""
    values = random(100, dtype=torch.float64)
    values[50:] = 0.0
    workers, pure = (
        Workers(code, [values], 1)
        for code in (GradientCompression(EFSign(), error_feedback=True), EFSign())
    )
    total, drift = torch.zeros(2, 100, dtype=torch.float64)
    for _ in range(50):
        total += workers.mean([[values]]).results[0][0]
        drift += pure.mean([[values]]).results[0][0]
    scale = values.abs().mean()
    assert total[50:].abs().max() < 5 * scale
    assert drift[50:].min() > 49 * scale


def test_a_tensor_with_an_overflow_leaves_the_others_alone():
    for bad in (torch.nan, torch.inf):
        given = [
            [torch.ones(3), torch.tensor([1.0, bad])],
            [torch.ones(3), torch.ones(2)],
        ]
        for one, other in Workers(EFSign(), given[0], 2).mean(given).results:
            assert one.tolist() == [2, 2, 2]
            assert not other.isfinite().any()


# ---- where data differ ----


def distance(compressor, steps=120, rate=0.1):
    """From the optimum of a quadratic whose workers pull to places far apart."""
    centers = 10 * random(4, 50, dtype=torch.float64)
    x = torch.zeros(50, dtype=torch.float64)
    workers = Workers(compressor, [x], 4)
    for step in range(steps):
        if step > steps // 2:
            rate *= 0.92
        gradients = [[(x - center) / 4] for center in centers]
        x = x - rate * workers.mean(gradients).results[0][0]
    return float((x - centers.mean(0)).norm() / centers.norm())


@pytest.mark.parametrize(
    "compressor",
    [
        Int8(),
        GradientCompression(Int4(), error_feedback=True),
        GradientCompression(EFSign(), error_feedback=True),
    ],
    ids=str,
)
def test_codes_end_at_the_optimum(compressor):
    assert distance(compressor) < 0.02


@pytest.mark.parametrize("compressor", [SignAlone(), EFSign()], ids=str)
def test_signs_alone_end_at_a_distance(compressor):
    """The control of the above: no scale and no residual, or no residual."""
    assert distance(compressor) > 0.1
