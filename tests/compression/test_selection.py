"""Which elements are the largest, and how their places travel."""

import pytest
import torch

from paceline.compression.base import Reader
from paceline.compression.sparse import (
    add_at,
    decode_sparse,
    decode_values,
    encode_sparse,
    encode_values,
    largest,
    select,
    size_of_values,
    sparse_bytes,
    top_k_shape,
)
from paceline.errors import UsageError

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def draw(seed, size, dtype=torch.float32):
    """Some of many sizes, with ties: multiples of 1/8, of which many are zero."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(size, generator=generator, dtype=torch.float64)
    return ((8 * coarse).round() / 8 * (coarse > -0.5)).to(dtype)


def slowly(values, count):
    """The same by sorting in Python."""
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i].item()), i))
    return sorted(order[:count])


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("size", [1, 2, 100, 5000])
def test_the_largest_and_of_equal_ones_the_first(dtype, size):
    for count in {1, max(1, size // 100), max(1, size // 3), size}:
        values = draw(size + count, size, dtype)
        assert largest(values, count).tolist() == slowly(values, count)


@pytest.mark.parametrize("size", [30_000, 200_000, 70_001])
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1])
def test_a_sampled_threshold_finds_the_same(size, density):
    """Normal and heavy-tailed numbers, and numbers of which almost all are equal."""
    generator = torch.Generator().manual_seed(size)
    normal = torch.randn(size, generator=generator, dtype=torch.float64)
    count = max(1, round(size * density))
    step = (normal > 2).double()
    rows = torch.arange(size) % 64 == 0  # what a stride of 64 would see, or not at all
    for values in (normal, normal**5, step, torch.zeros(size), normal * rows):
        expected = values.abs().sort(descending=True, stable=True).indices[:count]
        assert torch.equal(largest(values, count), expected.sort().values)


def test_what_is_not_finite_comes_first():
    values = torch.linspace(-3, 3, 40_000)
    values[[17, 30_000]] = torch.tensor([torch.nan, -torch.inf])
    assert largest(values, 2).tolist() == [17, 30_000]
    assert largest(values, 1).tolist() == [17]


@pytest.mark.parametrize(("elements", "chunk"), [(60, 20), (70, 20), (19, 20), (41, 1)])
def test_chunks_are_tensors_by_themselves(elements, chunk):
    of = top_k_shape(elements, 0.25, chunk)
    values = draw(elements, elements)
    apart = [
        start + place
        for start in range(0, elements, chunk)
        for own in [values[start : start + chunk]]
        for place in slowly(own, max(1, round(len(own) * 0.25)))
    ]
    assert select(values, of).tolist() == apart
    assert len(apart) == of.count


def test_many_chunks():
    values = draw(1, 300_000)
    of = top_k_shape(300_000, 1 / 64, 4096)
    apart = [
        largest(own, 64 if len(own) == 4096 else round(len(own) / 64)) + 4096 * number
        for number, own in enumerate(values.split(4096))
    ]
    assert torch.equal(select(values, of), torch.cat(apart))


@pytest.mark.parametrize(
    ("elements", "density", "chunk", "width"),
    [
        *((1, 0.01, 0, 0), (100, 1.0, 0, 0)),  # all are sent
        *((2, 0.5, 0, 1), (256, 0.5, 0, 1), (257, 0.5, 0, 2)),
        *((2**16, 1e-3, 0, 2), (2**16 + 1, 1e-3, 0, 3)),
        *((2**24, 1e-3, 0, 3), (2**24 + 1, 1e-3, 0, 4), (2**32, 1e-3, 0, 4)),
        *((2**24, 1e-3, 4096, 2), (2**24, 1e-3, 256, 1)),
    ],
)
def test_places_take_as_few_bytes_as_they_can(elements, density, chunk, width):
    of = top_k_shape(elements, density, chunk)
    assert of.width == width
    assert sparse_bytes([of], torch.float32) == of.count * (4 + width)


@pytest.mark.parametrize("chunk", [0, 100])
@pytest.mark.parametrize("bits", [32, 2])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_a_code_is_what_it_was(dtype, bits, chunk):
    """Places always, values up to their bits; of the size that was said."""
    cuts = [top_k_shape(size, 0.1, chunk) for size in (7, 300, 70_000)]
    tensors = [draw(of.elements, of.elements, dtype) for of in cuts]
    places = [select(values, of) for values, of in zip(tensors, cuts, strict=True)]
    picked = [(at, values[at]) for at, values in zip(places, tensors, strict=True)]
    code = encode_sparse(picked, cuts, bits)
    assert code.numel() == sparse_bytes(cuts, dtype, bits)
    worst = {32: 0, 2: 0.5}[bits]
    for (at, values), (there, arrived) in zip(
        picked, decode_sparse(code, cuts, dtype, bits), strict=True
    ):
        assert torch.equal(at, there)
        off = (arrived.double() - values.double()).norm()
        assert off <= worst * values.double().norm()


def test_a_place_outside_is_refused():
    for chunk in (0, 100):
        of = top_k_shape(250, 0.1, chunk)
        values = torch.rand(250)
        places = select(values, of)
        good = encode_sparse([(places, values[places])], [of])
        assert decode_sparse(good, [of], torch.float32)
        for bad in (250 if not chunk else 100, 255):
            broken = good.clone()
            broken[-1] = bad
            with pytest.raises(UsageError, match="tensor of 250"):
                decode_sparse(broken, [of], torch.float32)
    last = top_k_shape(250, 0.1, 100)  # in the last chunk, of 50
    code = encode_sparse([(select(values, last), values[: last.count])], [last])
    code[-1] = 50
    with pytest.raises(UsageError, match="outside"):
        decode_sparse(code, [last], torch.float32)


def test_values_are_added_where_they_belong():
    part = torch.ones(3, 4).T  # not contiguous
    places = torch.tensor([1, 5])
    add_at(part, places, torch.tensor([2.0, 3.0]))
    assert part.reshape(-1)[[0, 1, 5]].tolist() == [1, 3, 4]
    add_at(part, places, torch.tensor([2.0, 3.0]), add=False)
    assert part.reshape(-1)[[0, 1, 5]].tolist() == [0, 2, 3]


# ---- bins ----


def binned(values, bits=2):
    code = torch.cat(encode_values(values, bits))
    assert code.numel() == size_of_values(len(values), values.dtype, bits)
    return decode_values(Reader(code), len(values), values.dtype, bits)


def test_a_bin_is_its_own_mean():
    """So less is left of it than there was, whatever the values."""
    for seed in range(20):
        values = draw(seed, 1 + 7 * seed).double() ** 3
        there = binned(values)
        assert len(there.unique()) <= 4
        for level in there.unique():
            own = values[there == level]
            assert own.mean().item() == pytest.approx(level.item(), abs=1e-9)
        assert (values - there).norm() <= values.norm() + 1e-12


def test_only_bins_lose_anything():
    values = draw(0, 1000).double()
    assert not torch.equal(binned(values), values)
    assert torch.equal(binned(values, 32), values)


def test_equal_values_are_exact():
    for value in (0.0, -2.5, 1e-40):
        assert (binned(torch.full((9,), value)) == value).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_bins(bad):
    assert not binned(torch.tensor([1.0, bad, 2.0, 3.0])).isfinite().any()
