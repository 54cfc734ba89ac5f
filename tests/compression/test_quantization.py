"""Quantisers against what their papers say of them, in float64."""

import math

import pytest
import torch

import paceline
from paceline.compression import QSGD, EFSign, GradientCompression, Int4, Int8
from paceline.compression.quantization import CounterRng
from paceline.testing import inspect
from paceline.testing.compressor_checks import Workers
from tests.compression.cases import random, through
from tests.compression.test_blocks import STOCHASTIC, in_blocks
from tests.compression.toys import SignAlone
from tests.support.simulations import run

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


# ---- in a training ----


class Given(torch.nn.Module):
    """Its gradients are what it is called with, whatever its parameters are."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            value = torch.zeros(shape, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, gradients):
        pairs = zip(self.parameters(), gradients, strict=True)
        return sum((parameter * own).sum() for parameter, own in pairs)


SHAPES = {"matrix": (40, 30), "vector": (7,), "other": (300,)}
STEPS = 6


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    "code", ["int8:error_feedback=true", "int4:error_feedback=true", "ef-sign"]
)
def test_a_training_applies_all_gradients_but_what_is_kept(code, workers):
    """With a learning rate of 1 parameters are minus the sum of all means that were formed."""
    own = [
        [
            [
                random(*shape, seed=97 * step + rank, dtype=torch.float64)
                for shape in SHAPES.values()
            ]
            for step in range(STEPS)
        ]
        for rank in range(workers)
    ]

    def body(rank):
        model = Given()
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, plain, compression=code, buckets="2+1")
        for gradients in own[rank]:
            optimizer.zero_grad()
            model(gradients).backward()
            optimizer.step()
        (kept,) = [
            state.save()
            for state in inspect(optimizer).worker_states
            if state.name.startswith("compression.")
        ]
        optimizer.finish()
        return model, kept

    ends = run(workers, body)
    for number, name in enumerate(SHAPES):
        applied = [-getattr(model, name).detach() for model, _ in ends]
        assert all(torch.equal(one, applied[0]) for one in applied)
        means = sum(one[number] for gradients in own for one in gradients) / workers
        left = sum(kept[name]["residual"] for _, kept in ends)
        assert left.any()
        assert (applied[0] + left - means).abs().max() < 1e-12
