"""Blocks of elements: where they lie, what they lose, what is not finite."""

from dataclasses import replace

import pytest
import torch

from paceline.compression import QSGD, Int4, Int8, NoCompression
from paceline.compression.quantization import ELEMENTS_AT_ONCE, Blocks, blocks_of
from paceline.testing.compressor_checks import Workers
from tests.compression.cases import mean_of, random, through

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
