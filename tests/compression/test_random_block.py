"""What is particular about random blocks, in float64."""

from dataclasses import dataclass

import pytest
import torch

from paceline.compression import RandomBlock, Residuals, keys_of, make
from paceline.errors import UsageError
from paceline.spec import nested
from paceline.testing import COMPRESSOR_CHECKS, CheckFailedError, check_compressor
from paceline.testing.lockstep import Workers

SHAPES = (40, 30), (24, 5, 12), (7,)


def drawn(workers, step=0):
    generator = torch.Generator().manual_seed(step)
    return [
        [torch.randn(s, generator=generator, dtype=torch.double) for s in SHAPES]
        for _ in range(workers)
    ]


def sums(given):
    return [torch.stack(parts).sum(0) for parts in zip(*given, strict=True)]


def residuals(workers):
    return [[state["residual"] for state in own] for own in workers.states]


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_density_one_is_the_sum(workers):
    given = drawn(workers)
    for density, exact in ((1.0, True), (0.999, False)):
        group = Workers(Residuals(RandomBlock(density=density)), given[0], workers)
        for step in range(3):
            given = drawn(workers, step)
            pairs = zip(group.mean(given).results[0], sums(given), strict=True)
            equal = [torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs]
            assert equal == [exact, exact, True]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_all_results_and_all_residuals_are_all_gradients(workers):
    group = Workers(Residuals(RandomBlock(density=0.1)), drawn(1)[0], workers)
    owed = [torch.zeros(shape, dtype=torch.double) for shape in SHAPES]
    for step in range(20):
        given = drawn(workers, step)
        results = group.mean(given).results[0]
        for due, new, result in zip(owed, sums(given), results, strict=True):
            due += new - result
        close(sums(residuals(group)), owed)
    assert owed[0].any()
    assert not owed[2].any()


def test_a_run_is_one_piece_round_the_end_and_nothing_is_left_of_it():
    workers = Workers(Residuals(RandomBlock(density=0.25)), drawn(1)[0], 1)
    wrapped = set()
    for step in range(20):
        mean = workers.mean(drawn(1, step))
        for number, count in ((0, 300), (1, 360)):
            sent, left = (
                one[0][number].reshape(-1) != 0
                for one in (mean.sent, residuals(workers))
            )
            assert sent.sum() == count
            assert not (sent & left).any()
            edges = sent.long() - sent.roll(1).long()
            assert (edges == 1).sum() == (edges == -1).sum() == 1
            wrapped.add(bool(sent[0] and sent[-1]))
    assert wrapped == {True, False}


def test_starts_are_spread():
    """Each element is in as many runs as chance makes it, within 5 standard errors."""
    values = torch.ones(50, 40)
    workers = Workers(RandomBlock(density=0.05), [values], 1)
    draws, seen = 2000, torch.zeros(50, 40)
    for _ in range(draws):
        seen += workers.mean([[values]]).results[0][0]
    expected, error = 0.05 * draws, (0.05 * 0.95 * draws) ** 0.5
    assert (seen - expected).abs().max() < 5 * error


def test_scaled_is_right_in_the_mean():
    check_compressor(RandomBlock(density=0.3, scaled=True, small=0))
    unbiased = COMPRESSOR_CHECKS["codes_are_unbiased"]
    with pytest.raises(CheckFailedError, match="the mean of 400 results"):
        unbiased.law(RandomBlock(density=0.3, small=0))


def test_a_power_of_two_changes_nothing_else():
    one, scaled = (Workers(Residuals(RandomBlock()), drawn(1)[0], 2) for _ in "ab")
    for step in range(4):
        given = drawn(2, step)
        large = [[part * 2.0**40 for part in own] for own in given]
        pairs = zip(
            one.mean(given).results[0], scaled.mean(large).results[0], strict=True
        )
        assert all(torch.equal(a * 2.0**40, b) for a, b in pairs)


def test_averaged_residuals_change_no_later_result():
    code = Residuals(RandomBlock(density=0.2))
    apart, alike = (Workers(code, drawn(1)[0], 3) for _ in "ab")
    for step in range(5):
        close(*(w.mean(drawn(3, step)).results[0] for w in (apart, alike)))
    for number, total in enumerate(sums(residuals(alike))):
        for own in alike.states:
            own[number]["residual"] = total / 3
    for step in range(5, 10):
        close(*(w.mean(drawn(3, step)).results[0] for w in (apart, alike)))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_shows_wherever_it_is(bad):
    """In a run, or outside of it."""
    values = torch.ones(40, 30)
    values[20, 3] = bad
    workers = Workers(RandomBlock(density=0.01), [values], 2)
    for _ in range(5):
        results = workers.mean([[values], [torch.ones(40, 30)]]).results
        assert all((own[0].isnan() | own[0].isinf()).sum() == 12 for own in results)


@pytest.mark.parametrize(
    ("spec", "elements"),
    [
        ("random-block", 12 + 14 + 7),
        ("random-block:density=0.25", 300 + 360 + 7),
        ("random-block:density=0.25,small=1300", 1200 + 360 + 7),
        ("random-block:density=0.25,small=0", 300 + 360 + 2),
        ("random-block:density=1e-9,small=0", 3),
    ],
)
def test_bytes_of_runs(spec, elements):
    code = make(spec)
    said = [leg.size for leg in code.traffic(SHAPES, torch.double, 2)]
    assert said == [8 * elements]
    assert Workers(code, drawn(1)[0], 2).mean(drawn(2)).bytes == 8 * elements


@dataclass(frozen=True, kw_only=True)
class Unshared(RandomBlock):
    """Each worker draws its own starts."""

    def init(self, like, name, rank):
        return super().init(like, f"{name} {rank}", rank)


@dataclass(frozen=True, kw_only=True)
class Still(RandomBlock):
    """Each step begins where the first did."""

    def average(self, parts, states, place, sent=None):
        for state in states:
            if state:
                state["common"]["steps"] = 0
        yield from super().average(parts, states, place, sent)


def test_starts_are_shared_and_drawn_anew():
    for code, alike, anew in (
        (RandomBlock(), True, True),
        (RandomBlock(seed=1), True, True),
        (Unshared(), False, True),
        (Still(), True, False),
    ):
        workers = Workers(code, drawn(1)[0], 2)
        (one, other), (again, _) = (workers.mean(drawn(2)).results for _ in range(2))
        assert torch.equal(one[0], other[0]) == alike
        assert torch.equal(one[0], again[0]) != anew
    with pytest.raises(CheckFailedError, match="different results"):
        COMPRESSOR_CHECKS["all_workers_end_with_the_same_bits"](Unshared(density=0.1))
    seeds = [Workers(RandomBlock(seed=seed), drawn(1)[0], 1) for seed in (0, 0, 1)]
    same, also, another = (workers.mean(drawn(1)).results[0][0] for workers in seeds)
    assert torch.equal(same, also)
    assert not torch.equal(same, another)


def test_residuals_are_there_unless_refused():
    assert make("random-block:density=0.1") == Residuals(RandomBlock(density=0.1))
    scaled = make("random-block:scaled=true,residuals=false")
    assert scaled == RandomBlock(scaled=True)
    chosen, _ = nested("compression", keys_of(scaled))
    assert make(chosen) == scaled


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("random-block:density=0", "density: expected"),
        ("random-block:density=1.1", "above 0 and at most 1, got 1.1"),
        ("random-block:density=nan", "above 0 and at most 1, got nan"),
        ("random-block:small=-1", "small: expected 0 elements or more, got -1"),
        ("random-block:scaled=true", "takes none.*add residuals=false"),
    ],
)
def test_what_is_out_of_range_is_refused(spec, said):
    with pytest.raises(UsageError, match=said):
        make(spec)
