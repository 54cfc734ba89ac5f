"""Identities of papers on sparse codes, in float64, beside controls that must fail."""

from itertools import pairwise

import pytest
import torch

from paceline.compression import make
from paceline.errors import UsageError
from paceline.testing.compressor_checks import Workers, gradients

SHAPES = ((6, 5), (40, 30), (7,), (2, 9, 70))
SPARSE = ("top-k", "gd-top-k", "dgc", "ef21")


def doubles(workers, seed=0, shapes=SHAPES):
    given = gradients(workers, seed=seed, shapes=shapes)
    return [[part.double() for part in own] for own in given]


def group(spec, workers=3):
    return Workers(make(spec), doubles(1)[0], workers)


def sums(given):
    return [torch.stack(parts).sum(0) for parts in zip(*given, strict=True)]


def apart(some, others):
    """The largest difference."""
    pairs = zip(some, others, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def kept(workers, key):
    """The sum of what all workers keep of each tensor under *key*."""
    return [
        sum(_find(own[number], key, shape) for own in workers.states)
        for number, shape in enumerate(SHAPES)
    ]


def _find(state, key, shape):
    while key not in state and "code" in state:
        state = state["code"]
    return state.get(key, torch.zeros(shape, dtype=torch.float64)).view(shape)


# ---- momentum ----


def momentum_of(results, m):
    """What SGD with momentum *m* makes of these gradients: torch's own formula."""
    buffers = [torch.zeros_like(part) for part in results[0]]
    for step in results:
        buffers = [m * b + g for b, g in zip(buffers, step, strict=True)]
        yield buffers


def test_it_has_momentum_only_where_it_is_dense():
    """What has been sent has none: at density 1 that is plain SGD."""
    dgc, given = group("dgc:density=1"), [doubles(3, seed) for seed in range(4)]
    expected = list(momentum_of([sums(own) for own in given], 0.9))
    for own, momentum in zip(given, expected, strict=True):
        results, plain = dgc.mean(own).results[0], sums(own)
        for number, shape in enumerate(SHAPES):
            small = len(shape) == 1 or shape == (6, 5)
            exact = momentum if small else plain
            assert apart([results[number]], [exact[number]]) <= 1e-12
    assert apart(results, momentum) > 1e-3


def test_one_worker_with_dgc_keeps_nothing_back():
    dgc, given = group("dgc", 1), [doubles(1, seed) for seed in range(4)]
    expected = momentum_of([sums(own) for own in given], 0.9)
    for own, step in zip(given, expected, strict=True):
        assert apart(dgc.mean(own).results[0], step) <= 1e-12


# ---- law 2: what is not sent is kept ----


def owed(spec, key, steps=20, workers=3):
    """How far at its worst what was applied and what is *key* are from all gradients."""
    code, due, worst = group(spec, workers), None, 0.0
    for step in range(steps):
        given = doubles(workers, step)
        results, new = code.mean(given).results[0], sums(given)
        due = new if due is None else [a + b for a, b in zip(due, new, strict=True)]
        due = [a - b for a, b in zip(due, results, strict=True)]
        worst = max(worst, apart(due, kept(code, key)))
    return worst


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ("dgc:momentum=0", "velocity"),
        ("dgc:momentum=0,warm_up_steps=0,small=0", "velocity"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_all_that_was_applied_and_what_is_kept_are_all_gradients(spec, key, workers):
    assert owed(spec, key, workers=workers) <= 1e-11


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ("top-k:error_feedback=false", "residual"),
        ("top-k:decay=0.9", "residual"),
        ("dgc:momentum=0.9", "velocity"),
        ("ef21", "estimate"),
    ],
)
def test_not_so_without_residuals_or_with_momentum(spec, key):
    assert owed(spec, key) > 1e-3


# ---- laws 3, 4 and 7: what top-k keeps and leaves ----


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_sent_and_what_is_left_do_not_meet(density, seed):
    shapes, generator = ((70, 80),), torch.Generator().manual_seed(seed)
    (given,) = doubles(1, seed, shapes)[0]
    given *= torch.rand(given.shape, generator=generator, dtype=torch.float64) ** 4
    workers = Workers(make(f"top-k:density={density}").code, [given], 1)
    (sent,) = workers.mean([[given]]).sent[0]
    left, count = given - sent, round(density * given.numel())
    assert not (sent * left).any()
    assert sent.count_nonzero() == count
    assert left.abs().max() <= sent[sent != 0].abs().min()
    whole = given.square().sum()
    assert torch.allclose(whole, sent.square().sum() + left.square().sum())
    assert left.square().sum() <= (1 - count / given.numel()) * whole


# ---- law 14: EF21 ----


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_all_have_is_the_sum_of_estimates(workers):
    ef21 = group("ef21:density=0.05,small=0", workers)
    for step in range(10):
        results = ef21.mean(doubles(workers, step)).results[0]
        assert apart(kept(ef21, "estimate"), results) <= 1e-12


def distances(spec, steps=12):
    """From the sum of gradients that stay as they are, after a first step of others, step by
    step."""
    code, given = group(spec), doubles(3, 7)
    code.mean(doubles(3, 8))
    found = []
    for _ in range(steps):
        pairs = zip(code.mean(given).results[0], sums(given), strict=True)
        found.append(sum((a - b).square().sum().item() for a, b in pairs) ** 0.5)
    return found


def test_a_gradient_that_stays_is_approached_step_by_step():
    found = distances("ef21:density=0.1,small=0")
    assert all(b < a for a, b in pairwise(found) if a)
    assert found[-1] <= 1e-12
    others = distances("top-k:density=0.1,small=0")
    assert not all(b < a for a, b in pairwise(others))


# ---- law 15: what is kept is sent in the end ----


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ("top-k:density=0.05", "residual"),
        ("top-k:density=0.05,chunk=100", "residual"),
        ("dgc:density=0.05,momentum=0,warm_up_steps=0", "velocity"),
    ],
)
def test_residuals_drain_where_nothing_new_comes(spec, key):
    """In as many steps as there are codes in a tensor. One element speaks: a tensor that is zero
    everywhere was not used, and keeps what it has."""
    code = group(spec)
    for step in range(3):
        code.mean(doubles(3, step))
    before = kept(code, key)
    assert max(part.abs().max() for part in before) > 0.01
    code.mean([[torch.zeros_like(part) for part in own] for own in doubles(3)])
    assert apart(before, kept(code, key)) == 0
    for _ in range(20):
        quiet = [[torch.zeros_like(part) for part in own] for own in doubles(3)]
        for part in (part for own in quiet for part in own):
            part.view(-1)[0] = 1e-300
        code.mean(quiet)
    assert max(part.abs().max() for part in kept(code, key)) <= 1e-250


def test_a_residual_is_gone_at_the_end_of_an_epoch():
    code = group("gd-top-k:epoch_steps=4")
    for step in range(8):
        code.mean(doubles(3, step))
        left = max(part.abs().max() for part in kept(code, "residual"))
        assert (left == 0) == (step % 4 == 3)


# ---- law 17: a quadratic whose optimum no worker shares ----


def optimized(spec, learning_rate, steps=300):
    """How far from the optimum workers end whose own optima differ."""
    generator = torch.Generator().manual_seed(0)
    count, shape = 4, (10, 12)
    centers = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    centers *= torch.logspace(-1, 1, count, dtype=torch.float64).view(-1, 1, 1)
    point = torch.zeros(shape, dtype=torch.float64)
    workers = Workers(
        make(f"{spec}{',' if ':' in spec else ':'}density=0.1,small=0"), [point], count
    )
    for _ in range(steps):
        given = [[(point - center) / count] for center in centers]
        point -= learning_rate * workers.mean(given).results[0][0]
    return (point - centers.mean(0)).abs().max().item()


@pytest.mark.slow
def test_top_k_without_residuals_stays_away():
    """And those that make up for it come as near as a step of one element is long."""
    assert optimized("top-k:error_feedback=false", 0.02) > 2
    assert optimized("ef21", 0.1) < 1e-6
    far, near = (optimized("top-k:chunk=0", rate) for rate in (0.08, 0.02))
    assert 0 < near < far / 2 < 1
    assert optimized("dgc:warm_up_steps=0,momentum=0", 0.02) < 0.5


# ---- law 18: bytes ----


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("top-k", 12 * (4 + 2)),
        ("top-k:density=0.001", 4 + 2),
        ("top-k:chunk=256,density=0.125", (4 * 32 + 22) * (4 + 1)),
        ("top-k:bits=2,density=0.1", 4 * 4 + 120 // 4 + 120 * 2),
        ("dgc:warm_up_steps=0", 4 + 2),
        ("gd-top-k:speed=slowest", 1 + 18 * (4 + 2)),
        ("ef21", 12 * (4 + 2)),
    ],
)
def test_bytes_of_a_code(spec, size):
    """Of a matrix of 1,200 elements; and of one of 60, and 5 in a row, as they are."""
    given = gradients(2, shapes=((30, 40), (6, 10), (5,)))
    mean = Workers(make(spec).steady_state(), given[0], 2).mean(given)
    assert {(leg.kind, leg.size) for leg in mean.legs} == {
        ("sum", 260),
        ("gather", size),
    }


@pytest.mark.parametrize(
    ("steps", "count"), [(0, 379), (10, 120), (20, 38), (30, 12), (40, 4), (50, 1)]
)
def test_dgc_sends_less_in_each_stage_of_its_warm_up(steps, count):
    given = gradients(2, shapes=((30, 40),))
    dgc = Workers(make("dgc:warm_up_steps=50"), given[0], 2)
    for states in dgc.states:
        states[0]["code"]["common"]["steps"] = steps
    assert dgc.mean(given).legs[0].size == count * 6


@pytest.mark.parametrize(
    ("options", "ratios"),
    [
        ("speed=fastest", (0.35, 0.25, 0.0625, 0.015625, 0.004, 0.004)),
        ("speed=middle", (0.35, 0.30, 0.09, 0.027, 0.0081, 0.0081)),
        ("speed=slowest", (0.35, 0.35, 0.1225, 0.042875, 0.015, 0.015)),
    ],
)
def test_the_table_of_ratios(options, ratios):
    given = gradients(2, shapes=((100, 100),))
    code = Workers(make(f"gd-top-k:epoch_steps=3,{options}"), given[0], 2)
    for ratio in ratios:
        kinds = [code.mean(given).legs for _ in range(3)]
        sizes = [1 + round(ratio * 10_000) * 6] * 2 + [40_000]
        assert [legs[0].size for legs in kinds] == sizes
        assert [legs[0].kind for legs in kinds] == ["gather", "gather", "sum"]


def test_whoever_decodes_need_not_know_the_class():
    """A server has groups of all of them; codes of an epoch's end, and broken ones, too."""
    given = doubles(1)[0]
    server = make("gd-top-k:speed=fastest").code
    for speed in ("fastest", "middle", "slowest"):
        worker = make(f"gd-top-k:speed={speed},epoch_steps=2").code
        states = [worker.init_state(part, "", 0) for part in given]
        for step in range(4):
            code, decoded = worker.encode(given, states), doubles(1, 1)[0]
            server.decode(code, decoded)
            assert (apart(decoded, given) == 0) == (step % 2 == 1)
            assert apart(decoded, given) < max(part.abs().max() for part in given)
    dense_bytes = 8 * (6 * 5 + 7)
    code[dense_bytes] = 200
    with pytest.raises(UsageError, match="with ratio number 200: expected one below"):
        server.decode(code, decoded)


def test_a_group_may_change_its_class_on_the_way():
    """Nothing of it is in the states: epochs and residuals go on."""
    code, due = group("gd-top-k:epoch_steps=3"), None
    for step in range(12):
        if step == 5:
            code.compression = code.compression.for_speed("fastest")
        given = doubles(3, step)
        pairs = list(zip(code.mean(given).results[0], sums(given), strict=True))
        new = [exact - result for result, exact in pairs]
        due = new if due is None else [a + b for a, b in zip(due, new, strict=True)]
        assert apart(due, kept(code, "residual")) <= 1e-11
