"""What is particular about low-rank factors: the papers' identities, in float64."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.compression import GradientCompression, PowerSGD
from paceline.compression import powersgd as module
from paceline.compression.powersgd import orthonormal
from paceline.testing.compressor_checks import Workers
from tests.support.simulations import run


@dataclass(frozen=True, kw_only=True)
class Every(PowerSGD):
    """Codes every matrix, whatever that saves."""

    min_rate: ClassVar[float] = 0.0


SHAPES = (40, 30), (24, 5, 12), (7,), (40, 30)


def drawn(workers, step=0, shapes=SHAPES):
    """Each worker's gradients, in float64; workers differ."""
    generator = torch.Generator().manual_seed(step)
    return [
        [
            torch.randn(shape, generator=generator, dtype=torch.double) + rank
            for shape in shapes
        ]
        for rank in range(workers)
    ]


def sums(given):
    return [torch.stack(parts).sum(0) for parts in zip(*given, strict=True)]


def residuals(workers):
    return [[state["residual"] for state in own] for own in workers.states]


def close(found, expected, allowed=1e-9):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=allowed)


def largest(parts):
    return max(part.abs().max().item() for part in parts)


# ---- nothing lost, nothing kept ----


def test_full_rank_is_the_sum_where_that_is_the_smaller_one():
    code = Every(rank=20, small=0)
    shapes = (50, 20), (20, 50)
    workers = Workers(code, drawn(1, shapes=shapes)[0], 2)
    for step in range(4):
        given = drawn(2, step, shapes)
        tall, wide = (
            largest([one - other]) < 1e-9
            for one, other in zip(
                workers.mean(given).results[0], sums(given), strict=True
            )
        )
        assert (tall, wide) == ((True, False) if step % 2 == 0 else (False, True))


def test_one_column_space_leaves_nothing():
    """Of matrices whose columns all lie in one space of *rank* dimensions."""
    generator = torch.Generator().manual_seed(0)
    space = torch.randn(40, 4, generator=generator, dtype=torch.double)

    def given(columns):
        return [
            [
                space[:, :columns]
                @ torch.randn(columns, 30, generator=generator).double()
            ]
            for _ in range(3)
        ]

    for rank, left in ((4, False), (3, True)):
        code = GradientCompression(PowerSGD(rank=rank), error_feedback=True)
        workers = Workers(code, given(4)[0], 3)
        workers.mean(given(4))
        workers.mean(given(4))  # its basis is the space, once a first step has found it
        assert all((largest(own) > 1e-9) == left for own in residuals(workers))


# ---- own and aggregated residuals ----


def aggregated(rank, first, steps, workers):
    """Algorithm 2 of the paper: each worker's residual is what the *mean* leaves. Returns the
    means of one matrix, and the residuals."""
    left, right = (first[name].T.clone() for name in ("left", "right"))
    errors = [torch.zeros(40, 30, dtype=torch.double) for _ in range(workers)]
    means = []
    for step in range(steps):
        own = [
            e + given[0] for e, given in zip(errors, drawn(workers, step), strict=True)
        ]
        whole = torch.stack(own).sum(0)
        if step % 2 == 0:
            basis = torch.linalg.qr(right)[0]
            left = whole @ basis
            mean = left @ basis.T
        else:
            basis = torch.linalg.qr(left)[0]
            right = whole.T @ basis
            mean = basis @ right.T
        errors = [one - mean / workers for one in own]
        means.append(mean)
    return means, errors


def test_own_residuals_give_the_papers_results_and_stay_smaller():
    rank, steps, count = 3, 12, 3
    workers = Workers(
        GradientCompression(PowerSGD(rank=rank), error_feedback=True),
        drawn(1)[0],
        count,
    )
    first = workers.states[0][0]["code"]["common"]
    means, errors = aggregated(rank, first, steps, count)
    for step, mean in enumerate(means):
        close([workers.mean(drawn(count, step)).results[0][0]], [mean], 1e-7)
    own = [parts[0] for parts in residuals(workers)]
    close([sum(own)], [sum(errors)], 1e-7)
    deviation = [torch.zeros(40, 30, dtype=torch.double) for _ in range(count)]
    for step in range(steps):
        given = [parts[0] for parts in drawn(count, step)]
        for total, gradient in zip(deviation, given, strict=True):
            total += gradient - sum(given) / count
    for kept, expected in ((errors, True), (own, False)):
        apart = [one - sum(kept) / count for one in kept]
        off = largest([a - b for a, b in zip(apart, deviation, strict=True)])
        assert (off < 1e-7) == expected
    assert largest(own) < largest(errors)


def test_averaged_residuals_change_no_later_result():
    apart, alike = (
        Workers(GradientCompression(PowerSGD(), error_feedback=True), drawn(1)[0], 3)
        for _ in "ab"
    )
    for step in range(5):
        close(*(w.mean(drawn(3, step)).results[0] for w in (apart, alike)))
    for number, total in enumerate(sums(residuals(alike))):
        for own in alike.states:
            own[number]["residual"] = total / 3
    for step in range(5, 10):
        close(*(w.mean(drawn(3, step)).results[0] for w in (apart, alike)))
    for own in alike.states:
        own[0]["residual"] = 2 * own[0]["residual"]
    one, other = (w.mean(drawn(3, 10)).results[0] for w in (apart, alike))
    assert largest([one[0] - other[0]]) > 0.1


# ---- columns ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rows_are_orthonormal_whatever_they_were(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    ordinary = scale * torch.randn(4, 50, generator=generator, dtype=dtype)
    repeated, zeros, some = (
        ordinary.clone(),
        torch.zeros_like(ordinary),
        ordinary.clone(),
    )
    repeated[1:] = repeated[0]
    some[2] = 0
    square = scale * torch.randn(4, 4, generator=generator, dtype=dtype)
    given = ordinary, repeated, square, zeros, some
    for before, after in zip(given, orthonormal(given), strict=True):
        close([after @ after.T], [torch.eye(4, dtype=dtype)], 1e-6)
        spanned = before / scale @ after.T @ after
        close([spanned], [before / scale], 1e-5)


def unsent(before):
    """Norms of what is left, over the gradient's, in 40 steps with one gradient, after the
    steps *before*."""
    workers = Workers(
        GradientCompression(PowerSGD(), error_feedback=True), drawn(1)[0], 2
    )
    for given in before:
        workers.mean([[given, *own[1:]] for own in drawn(2)])
    norms = []
    for _ in range(40):
        workers.mean(drawn(2, 2))
        norms.append(sums(residuals(workers))[0].norm() / sums(drawn(2, 2))[0].norm())
    return norms


def test_a_zero_tensor_stays_zero_and_loses_no_direction(monkeypatch):
    """Nobody used it for some steps; then it had a gradient of one direction only."""
    workers = Workers(
        GradientCompression(PowerSGD(), error_feedback=True), drawn(1)[0], 2
    )
    nothing = [[torch.zeros_like(part) for part in own] for own in drawn(2)]
    for _ in range(3):
        assert not any(part.any() for part in workers.mean(nothing).results[0])

    before = [torch.zeros(40, 30).double()] * 3 + [torch.ones(40, 30).double()] * 4
    norms = unsent(before)
    assert norms[-1] < 1.2 * norms[19]  # all directions are sent as fast as they come

    def guarded(factors):
        """Gram and Schmidt, who leave zeros where there is nothing to divide by."""
        results = []
        for factor in factors:
            rows = []
            for row in factor:
                row = row - sum((other * (other @ row) for other in rows), 0 * row)
                norm = row.norm()
                rows.append(row / norm if norm > 1e-9 else 0 * row)
            results.append(torch.stack(rows))
        return results

    monkeypatch.setattr(module, "orthonormal", guarded)
    monkeypatch.setattr(module, "_keep", lambda factor, known: known.copy_(factor))
    norms = unsent(before)
    assert norms[-1] > 1.8 * norms[19]


def test_matrices_of_one_shape_do_not_share_a_scale(monkeypatch):
    """Divided by one norm of all of them, those with small gradients would starve."""
    scales, shapes = (1.0, 0.3, 0.1, 0.03), [(40, 30)] * 4

    def left():
        code = GradientCompression(PowerSGD(rank=1), error_feedback=True)
        workers = Workers(code, drawn(1, shapes=shapes)[0], 1)
        for step in range(60):
            given = drawn(1, step, shapes)
            workers.mean([[s * part for s, part in zip(scales, given[0], strict=True)]])
        pairs = zip(scales, residuals(workers)[0], strict=True)
        return [residual.norm().item() / scale for scale, residual in pairs]

    sizes = left()
    assert max(sizes) < 1.1 * min(sizes)

    def jointly(factors):
        """epfml's batched form at rank one."""
        return list(torch.stack(factors) / torch.stack(factors).norm())

    monkeypatch.setattr(module, "orthonormal", jointly)
    sizes = left()
    assert max(sizes) > 1.5 * min(sizes)


# ---- types ----


def test_float16_rows_may_be_longer_than_its_range():
    """64 elements of 30,000 are a row of length 240,000."""
    given = [[torch.full((64, 64), 30000.0, dtype=torch.float16)]]
    workers = Workers(PowerSGD(), given[0], 1)
    workers.mean(given)  # finds the one direction
    result = workers.mean(given).results[0][0]
    torch.testing.assert_close(result, given[0][0], rtol=2**-9, atol=0)


def test_bfloat16_factors_are_computed_in_float32():
    given = [[part.to(torch.bfloat16) for part in own] for own in drawn(1)]
    wide = [[part.float() for part in own] for own in given]
    code = PowerSGD()
    half, single = (Workers(code, kind[0], 1).mean(kind) for kind in (given, wide))
    assert 2 * half.bytes == single.bytes
    for one, other in zip(half.results[0], single.results[0], strict=True):
        off = (one.float() - other).norm() / other.norm()
        assert off < 2**-7


# ---- who is coded, and what is sent ----


@pytest.mark.parametrize(
    ("code", "sent"),
    [
        (PowerSGD(rank=4), [4 * (70 / 2 + 84 / 2 + 70 / 2) + 7]),
        (PowerSGD(rank=18), [2 * 1200 + 1440 + 7]),
        (Every(rank=25), [2 * 25 * 70 / 2 + 1440 + 7]),
        (Every(rank=31), [2 * 1200 + 1440 + 7]),
        (PowerSGD(rank=4, small=1300), [4 * 84 / 2 + 2 * 1200 + 7]),
        (Every(rank=1, small=0), [(3 * 70 - 70 + 84 + 8) / 2]),
    ],
)
def test_bytes_of_factors(code, sent):
    said = [leg.size for leg in code.wire_bytes(SHAPES, torch.double, 2)]
    assert said == [8 * size for size in sent]
    workers = Workers(code, drawn(1)[0], 2)
    seen = [[leg.size for leg in workers.mean(drawn(2, n)).legs] for n in range(4)]
    assert [sum(sizes) / 4 for sizes in zip(*seen, strict=True)] == said


def test_factors_turn_towards_what_is_large():
    """One gradient, again and again: it ends with its best approximation."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(n, n, generator=generator))[0] for n in (40, 30)
    )
    values = 0.7 ** torch.arange(30.0)
    given = [[left[:, :30] @ torch.diag(values) @ right]]
    best = values[4:].norm().item()
    workers = Workers(PowerSGD(rank=4), given[0], 1)
    errors = []
    for _ in range(60):
        result = workers.mean(given).results[0][0]
        errors.append((result - given[0][0]).norm().item() / best)
    assert errors[0] > 1.2
    assert 0.999 < errors[-1] < 1.001


# ---- a whole training ----


def train(compression):
    def body(rank):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
        model.double()
        optimizer = paceline.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.05), compression=compression
        )
        generator = torch.Generator().manual_seed(rank)
        for _ in range(8):
            optimizer.zero_grad()
            inputs = torch.randn(16, 40, generator=generator, dtype=torch.double)
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
        optimizer.finish()
        return [parameter.detach().clone() for parameter in model.parameters()]

    return body


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_full_rank_trains_as_without_compression(workers):
    plain = run(workers, train("none"))[0]
    full = GradientCompression(Every(rank=40), error_feedback=True)
    close(run(workers, train(full))[0][:2], plain[:2])
    first, *others = run(workers, train("powersgd:rank=2,warmup_steps=0"))
    assert all(
        torch.equal(a, b) for own in others for a, b in zip(first, own, strict=True)
    )
    assert largest([first[0] - plain[0]]) > (1e-4 if workers > 1 else -1)
