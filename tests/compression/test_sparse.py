"""Sparse compressed gradients: which elements, how their places travel, identities of papers in float64
beside controls that must fail, and whole trainings in virtual time.
"""

from itertools import pairwise

import pytest
import torch

import paceline
from paceline.compression import make
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
from paceline.testing.compressor_checks import Workers, gradients
from tests.support.simulations import run

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


SHAPES = ((6, 5), (40, 30), (7,), (2, 9, 70))


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
        ("dgc:momentum=0,warmup_steps=0,small=0", "velocity"),
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
        ("dgc:density=0.05,momentum=0,warmup_steps=0", "velocity"),
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
    assert optimized("dgc:warmup_steps=0,momentum=0", 0.02) < 0.5


# ---- law 18: bytes ----


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("top-k", 12 * (4 + 2)),
        ("top-k:density=0.001", 4 + 2),
        ("top-k:chunk=256,density=0.125", (4 * 32 + 22) * (4 + 1)),
        ("top-k:bits=2,density=0.1", 4 * 4 + 120 // 4 + 120 * 2),
        ("dgc:warmup_steps=0", 4 + 2),
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
    dgc = Workers(make("dgc:warmup_steps=50"), given[0], 2)
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
    with pytest.raises(UsageError, match="ratio number 200, expected"):
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


class Model(torch.nn.Module):
    """A matrix that is large enough for a code, a vector, and a matrix that is used only where
    *both*."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(40, 30).double())
        self.vector = torch.nn.Parameter(torch.zeros(20).double())
        self.second = torch.nn.Parameter(torch.zeros(50, 40).double())

    def forward(self, target, both=True):
        loss = (self.first - target).square().sum() / 2
        loss = loss + (self.vector - target.mean()).square().sum() / 2
        return loss + (self.second - 1).square().sum() / 2 if both else loss


def target(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(40, 30, generator=generator, dtype=torch.float64)


def begin(compression, **sgd):
    model = Model()
    plain = torch.optim.SGD(model.parameters(), **({"lr": 0.1} | sgd))
    return model, paceline.distribute(
        model, plain, compression=compression, buckets="wfbp", buffers="local"
    )


def step(model, optimizer, *inputs):
    optimizer.zero_grad()
    model(*inputs).backward()
    optimizer.step()


def trained(compression, workers, steps=6, **sgd):
    """All workers' final parameters, one after the other."""

    def body(rank):
        model, optimizer = begin(compression, **sgd)
        for number in range(steps):
            step(model, optimizer, target(rank, number))
        optimizer.finish()
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    return run(workers, body)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("compression", "sgd"),
    [
        ("top-k:density=1", {}),
        ("top-k:density=1,chunk=64,small=0", {}),
        ("top-k:density=1,error_feedback=false", {}),
        ("gd-top-k:epoch_steps=1", {"momentum": 0.9}),
        ("ef21:density=1", {"momentum": 0.9, "nesterov": True}),
        ("ef21:density=1,small=0", {}),
        ("dgc:density=1,momentum=0", {}),
    ],
)
def test_settings_that_lose_nothing_are_bsp(compression, sgd, workers):
    exact = trained("none", workers, **sgd)[0]
    for parameters in trained(compression, workers, **sgd):
        torch.testing.assert_close(parameters, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "compression",
    ["dgc:density=1", "dgc:density=0.99,momentum=0", "top-k:density=0.5", "ef21"],
)
def test_others_are_not(compression):
    exact, lossy = (trained(one, 2)[0] for one in ("none", compression))
    assert (exact - lossy).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("compression", "momentum"), [("dgc", 0.9), ("dgc:warmup_steps=3", 0.5)]
)
def test_momentum_twice_is_refused(compression, momentum):
    def body(rank):
        with pytest.raises(UsageError, match=r"compression\.momentum=0") as caught:
            begin(compression, momentum=momentum)
        assert str(momentum) in str(caught.value)

    run(2, body)


def test_whose_momentum_it_is():
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    dgc = make("dgc").code
    dgc.check_optimizer(torch.optim.SGD(parameters, lr=1.0))
    dgc.check_optimizer(torch.optim.RMSprop(parameters))
    make("dgc:momentum=0").code.check_optimizer(torch.optim.AdamW(parameters))
    with pytest.raises(UsageError, match=r"AdamW.*0.9"):
        dgc.check_optimizer(torch.optim.AdamW(parameters))


def test_an_estimate_of_a_worker_without_data_goes_to_zero():
    """Else its last gradient were in all means that follow, and means of those who still train
    twice as long."""

    def body(rank):
        model, optimizer = begin("ef21:density=0.25", lr=0.0)
        norms = []
        with optimizer.join():
            for _ in range(3 if rank else 12):
                step(model, optimizer, target(rank, 0))
                norms.append(model.first.grad.clone())
        return norms

    longer = run(2, body)[0]
    own = -target(0, 0)
    assert (longer[2] - own).norm() > 0.3 * own.norm()
    torch.testing.assert_close(longer[-1], own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compression", ["top-k:density=0.3", "dgc:density=0.3"])
def test_what_is_not_used_moves_nothing_and_keeps_what_waits(compression):
    def body(rank):
        model, optimizer = begin(compression)
        step(model, optimizer, target(rank, 0))
        before = model.second.detach().clone()
        step(model, optimizer, target(rank, 1), False)
        unmoved = torch.equal(before, model.second), model.second.grad is None
        for number in range(2, 30):
            step(model, optimizer, target(rank, number))
        return unmoved, (model.second - 1).abs().max().item()

    for unmoved, distance in run(2, body):
        assert unmoved == (True, True)
        assert distance < 0.5


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        ("dgc:density=0.1", ("momentum", "velocity")),
        ("ef21:density=0.1", ("estimate",)),
    ],
)
def test_a_step_that_a_grad_scaler_skips_changes_no_memory(spec, keys):
    shapes = ((40, 30), (7,), (50, 40))
    workers = Workers(make(spec), gradients(1, shapes=shapes)[0], 2)
    for number in range(3):
        workers.mean(gradients(2, seed=number, shapes=shapes))
    before = [
        states[0]["code"][key].clone() for states in workers.states for key in keys
    ]
    common = workers.states[0][0]["code"]["common"]
    shared = {key: one.clone() for key, one in common.items() if hasattr(one, "clone")}
    given = gradients(2, seed=9, shapes=shapes)
    given[1][0][3, 3] = torch.inf
    results = workers.mean(given).results
    assert not results[0][0].isfinite().all()
    after = [states[0]["code"][key] for states in workers.states for key in keys]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(one, common[key]) for key, one in shared.items())
