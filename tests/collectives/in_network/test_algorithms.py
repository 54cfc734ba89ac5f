"""Sums that are formed as integers: the same bits on all ranks, within the bound of fixed point, wherever
means are formed; in virtual time.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.collectives.communicator import Communicator
from paceline.collectives.in_network import algorithms
from paceline.collectives.in_network.algorithms import BLOCK
from paceline.collectives.in_network.fixed_point import (
    SMALLEST,
    FixedPoint,
    exponents_of,
)
from paceline.collectives.registry import attach, make
from paceline.collectives.timing import seconds
from paceline.errors import UsageError, WorkerFailedError
from paceline.interfaces.buckets import stand_in_for
from paceline.runtimes.join import join_runtime
from tests.collectives.in_network.test_pricing import LAYOUTS, cluster_of, placed
from tests.support.profiles import examples
from tests.support.simulations import run
from tests.support.tables import sampled

ROWS = ("rina", "switchml")


def summed(layout, name, held, operation="sum"):
    """What each rank has of *held* (a tensor each), and how long it took."""

    def body(rank):
        runtime = join_runtime()
        comm = attach(make(name), runtime, Communicator(runtime))
        mine, start = held[rank].clone(), runtime.clock.now()
        comm.all_reduce(mine, operation).wait()
        return mine, runtime.clock.now() - start

    return zip(*run(cluster_of(layout), body), strict=True)


def some(generator, size, spread=6):
    """Numbers whose blocks are of very different sizes."""
    scale = torch.exp2(torch.randint(-spread, spread + 1, (size,), generator=generator))
    return torch.randn(size, generator=generator) * scale


def blocks(size):
    """Where each begins and ends: the last number is one by itself."""
    cuts = sorted({*range(0, size, BLOCK), size - 1, size})
    return list(pairwise(cuts))


def bound_of(held):
    """By how much each number of the sum may be off: N / (2 f), and the result's rounding."""
    bounds = []
    for start, stop in blocks(len(held[0])):
        block = torch.stack([one[start:stop].float() for one in held])
        exponent = exponents_of(block.numpy()).max(keepdims=True)
        off = FixedPoint(len(held)).bound(exponent)[0]
        largest = block.abs().max().item() * len(held)
        bounds += [off + largest * 2.0**-23] * block.shape[1]
    return torch.tensor(bounds, dtype=torch.float64)


@settings(max_examples=examples(12))
@given(LAYOUTS, st.integers(1, 900), st.integers(0, 2**31), st.sampled_from(ROWS))
def test_sums_are_within_the_bound_and_equal_on_all(layout, size, seed, name):
    ranks = sum(n for n, _ in layout)
    generator = torch.Generator().manual_seed(seed)
    held = [some(generator, size) for _ in range(ranks)]
    found, _ = summed(layout, name, held)
    exact = torch.stack(held).double().sum(0)
    assert all(torch.equal(one, found[0]) for one in found)
    assert ((found[0].double() - exact).abs() <= bound_of(held)).all()
    whole = [torch.randint(-(2**27), 2**27, (size,)).int() for _ in range(ranks)]
    found, _ = summed(layout, name, whole)
    total = sum(one.long() for one in whole).int()
    assert all(torch.equal(one, total) for one in found)


def test_the_bound_is_not_there_for_nothing():
    """With a digit less of headroom to each worker sums are further off than it allows."""
    layout = [(3, True), (2, True)]
    held = [some(torch.Generator().manual_seed(i), 720) for i in range(5)]
    exact = torch.stack(held).double().sum(0)
    off = (next(iter(summed(layout, "rina", held)))[0].double() - exact).abs()
    assert (off <= bound_of(held)).all()
    assert (off > bound_of(held) / 256).any()  # and integers it is


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**127])
def test_what_no_integer_can_stand_for_is_nan_in_its_block_alone(bad, name):
    size = 3 * BLOCK + 7
    held = [torch.ones(size) for _ in range(5)]
    held[3][BLOCK + 5] = bad
    held[1][size - 3] = bad
    found, _ = summed([(3, True), (1, True), (1, False)], name, held)
    spoilt = torch.zeros(size, dtype=torch.bool)
    spoilt[BLOCK : 2 * BLOCK] = True
    spoilt[3 * BLOCK : -1] = True
    for one in found:
        assert torch.equal(one.isnan(), spoilt)
        assert torch.allclose(one[~spoilt], torch.tensor(5.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("buffer", "operation"),
    [
        (torch.tensor([2.5, -1.0]), "max"),
        (torch.tensor([2.0**40 + 1, 3.0], dtype=torch.float64), "sum"),
        (torch.tensor([2**40, 3]), "sum"),
        (torch.tensor([2.5, -1.0], dtype=torch.bfloat16), "sum"),
        (torch.tensor([2.5, -1.0], dtype=torch.float16), "sum"),
    ],
    ids=["maxima", "double precision", "whole numbers", "bfloat16", "float16"],
)
def test_everything_else_goes_around_the_ring(buffer, operation):
    held = [buffer + rank for rank in range(4)]
    stacked = torch.stack(held)
    expected = stacked.amax(0) if operation == "max" else stacked.sum(0)
    for name in ROWS:
        found, took = summed([(4, True)], name, held, operation)
        assert all(torch.equal(one, expected) for one in found)
        _, ring = summed([(4, True)], "ring", held, operation)
        assert took == ring


def test_where_nothing_adds_up_it_has_the_ring_s_bits_and_time():
    held = [some(torch.Generator().manual_seed(rank), 5000) for rank in range(5)]
    layout = [(3, False), (2, False)]
    ring, seconds = summed(layout, "ring", held, "mean")
    for name in ROWS:
        found, took = summed(layout, name, held, "mean")
        assert all(torch.equal(a, b) for a, b in zip(found, ring, strict=True))
        assert took == seconds


def test_the_last_number_is_a_block_by_itself():
    """Who has something to tell makes it NaN: every other one must get through."""
    held = [torch.ones(2 * BLOCK) for _ in range(4)]
    held[2][-1] = float("nan")
    found, _ = summed([(4, True)], "rina", held)
    for one in found:
        assert torch.equal(one[:-1], torch.full((2 * BLOCK - 1,), 4.0))
        assert one[-1].isnan()


def test_slabs_are_all_of_it_in_order():
    slab = BLOCK * algorithms.SLAB
    for size in (1, 2, BLOCK, BLOCK + 1, BLOCK + 2, slab, slab + 1, 2 * slab + 3):
        values = np.arange(size)
        found = list(algorithms._slabs(values))
        assert np.array_equal(np.concatenate([v.ravel() for _, v in found]), values)
        firsts = [row[0] for _, rows in found for row in rows]
        assert firsts == [start for start, _ in blocks(size)]
        assert len(firsts) == algorithms.blocks_of(size)
        numbers = [first + i for first, rows in found for i in range(len(rows))]
        assert numbers == list(range(len(firsts)))


@pytest.mark.parametrize("play", [False, True], ids=["priced", "played"])
def test_a_sum_takes_what_its_two_schedules_are_priced_at(play):
    layout, size = [(3, True), (2, False), (2, True)], 20_000
    where = cluster_of(layout)
    at = placed(layout)

    def body(rank):
        runtime = join_runtime()
        comm = attach(make("rina"), runtime, Communicator(runtime))
        start = runtime.clock.now()
        comm.all_reduce(torch.ones(size), "sum").wait()
        return runtime.clock.now() - start

    rina = make("rina")
    expected = sum(
        seconds(schedule, where, play=play)
        for schedule in (rina.agreement(size, at), rina.schedule(4 * size, at))
    )
    found = max(run(where, body, play=play))
    # Who has agreed before the others begins before them, where messages are played.
    assert found == pytest.approx(expected, rel=0.02 if play else 1e-9)


@pytest.mark.parametrize("name", [*ROWS, "atp"])
def test_what_stands_for_more_is_moved_at_the_price_of_that(name):
    size = 720_720

    def took(elements, dtype=torch.float32, name=name):
        def body(rank):
            runtime = join_runtime()
            comm = attach(make(name), runtime, Communicator(runtime))
            buffer = stand_in_for(size, torch.ones(elements, dtype=dtype))
            start = runtime.clock.now()
            comm.all_reduce(buffer, "sum").wait()
            return runtime.clock.now() - start

        return max(run(cluster_of([(3, True), (2, True)]), body))

    real = took(size // 4)
    assert took(2) == took(100) == real
    # 16-bit numbers go around the ring, with the bytes that they have.
    half, ring = (took(100, torch.bfloat16, row) for row in (name, "ring"))
    assert half == ring


def test_what_needs_halves_is_refused_in_words():
    with pytest.raises(WorkerFailedError, match=r"'rina' has no halves.*use 'native'"):
        trained("dear:collective=rina", LAYOUT)


# ---- wherever means are formed ----

SPECS = (
    "bsp:collective=rina,buckets=2+2",
    "bsp:collective=rina,buckets=wfbp,clip_norm=1",
    "bsp:collective=switchml",
    "bsp:collective=rina,compression=powersgd,compression.rank=2",
    "local-sgd:sync_every=2,collective=rina",
    "diloco:sync_every=2,collective=rina",
    "ds-sync:collective=rina",
    "osp:collective=rina",
)
LAYOUT = [(3, True), (2, False), (2, True)]


def trained(spec, layout):
    """All ranks' parameters at the end."""

    def body(rank):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)
        )
        optimizer = paceline.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.05), method=spec
        )
        data = torch.Generator().manual_seed(rank)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=data)).square().mean().backward()
            optimizer.step()
        optimizer.finish()
        with optimizer.consolidated():
            return torch.cat([p.detach().view(-1).clone() for p in model.parameters()])

    return run(cluster_of(layout), body)


@pytest.mark.parametrize("spec", sampled(3, SPECS))
def test_trainings_are_native_s_up_to_rounding(spec):
    mine = trained(spec, LAYOUT)
    assert all(torch.equal(one, mine[0]) for one in mine)
    theirs = trained(
        spec.replace("=rina", "=native").replace("=switchml", "=native"), LAYOUT
    )[0]
    coded = "compression" in spec
    assert torch.allclose(mine[0], theirs, rtol=0, atol=2e-3 if coded else 2e-6)
    assert not torch.equal(mine[0], theirs)  # else nothing was summed as integers


@pytest.mark.parametrize("name", [*ROWS, "atp"])
@pytest.mark.parametrize("code", ["bf16", "fp16"])
def test_16_bit_numbers_are_the_ring_s_and_it_is_said_once(name, code, capsys):
    """At switches they would be 4 bytes a number: more than a ring sends."""
    spec = f"bsp:buckets=wfbp,compression={code},collective="
    mine = trained(spec + name, LAYOUT)
    (told,) = [
        line for line in capsys.readouterr().err.splitlines() if "16 buf" in line
    ]
    assert f"collective={name}" in told
    assert {"bf16": "bfloat16", "fp16": "float16"}[code] in told
    for one, ring in zip(mine, trained(spec + "ring", LAYOUT), strict=True):
        assert torch.equal(one, ring)
    assert "16 buf" not in capsys.readouterr().err


LAW = settings(max_examples=examples(100))
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def summed_as_integers(fixed, blocks, exponents):
    """The sum that an aggregator forms, with room to see an overflow."""
    integers = [fixed.to_integers(block, exponents) for block in blocks]
    return np.sum(integers, axis=0, dtype=np.int64)


@LAW
@given(
    values=st.lists(FLOATS, min_size=1, max_size=8),
    workers=st.integers(1, 1 << 16),
)
def test_no_sum_overflows_when_all_have_the_largest_values(values, workers):
    block = np.array([values], np.float32)
    exponents = exponents_of(block)
    fixed = FixedPoint(workers)
    each = fixed.to_integers(block, exponents).astype(np.int64)
    assert (np.abs(each) * workers < 2**31).all()


def test_the_published_factor_overflows():
    """The control: roundings of n values exceed (2^31 - 1)/(n 2^e)."""
    peak = np.array([[np.nextafter(np.float32(1), np.float32(0))]], np.float32)
    exponents = exponents_of(peak)
    assert exponents == [0]
    many = range(2, 2000)
    assert any(n * round((2**31 - 1) / n * float(peak[0, 0])) >= 2**31 for n in many)
    assert not any(
        n * int(FixedPoint(n).to_integers(peak, exponents)[0, 0]) >= 2**31 for n in many
    )


@LAW
@given(
    seed=st.integers(0, 999),
    workers=st.integers(1, 20),
    spread=st.integers(0, 60),
)
def test_a_sum_is_off_by_no_more_than_the_bound(seed, workers, spread):
    random = np.random.default_rng(seed)
    scale = np.exp2(random.integers(-spread, spread + 1, (workers, 3, 5)))
    blocks = (random.standard_normal((workers, 3, 5)) * scale).astype(np.float32)
    exponents = np.max([exponents_of(block) for block in blocks], axis=0)
    fixed = FixedPoint(workers)
    sums = summed_as_integers(fixed, blocks, exponents)
    assert (np.abs(sums) < 2**31).all()
    numbers = fixed.to_numbers(sums.astype(np.int32), exponents)
    exact = blocks.sum(axis=0, dtype=np.float64)
    bound = fixed.bound(exponents)[:, None] * (1 + 1e-9)
    assert (np.abs(numbers - exact) <= bound + np.abs(numbers) * 2.0**-24).all()
    # the figure of the published code's formula, a bit more for the headroom of roundings
    figure = workers**2 * np.exp2(exponents.astype(float)) / 2**32
    assert (fixed.bound(exponents) <= figure * (1 + 2.0**-26)).all()


def test_an_exponent_is_that_of_a_power_above_the_peak():
    blocks = np.array([[1.0, -0.5], [0.0, -2.0], [0.75, 0.1]], np.float32)
    assert exponents_of(blocks).tolist() == [1, 2, 0]


def test_blocks_of_zeros_and_of_the_smallest_numbers():
    blocks = np.array([[0.0, 0.0], [1e-45, 0.0]], np.float32)
    exponents = exponents_of(blocks)
    assert exponents.tolist() == [SMALLEST, SMALLEST]
    fixed = FixedPoint(4)
    numbers = fixed.to_numbers(fixed.to_integers(blocks, exponents), exponents)
    assert (numbers == blocks).all()


def test_too_many_workers_are_refused():
    with pytest.raises(UsageError, match="65537 workers"):
        FixedPoint((1 << 16) + 1)


SIZE = 3000


def racks_of(aggregating, servers):
    racks = [
        Rack(workers=n, link=25e6, latency=50e-6, aggregates=i in aggregating)
        for i, n in enumerate((3, 2, 1))
    ]
    return Cluster(tuple(racks), servers=(ServerHost(rack=1),) * servers)


def means(cluster, name):
    """What each rank has, and when the last has it."""

    def body(rank):
        runtime = join_runtime()
        comm = attach(make(name), runtime, Communicator(runtime))
        numbers = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))
        start = runtime.clock.now()
        comm.all_reduce(numbers).wait()
        return numbers, runtime.clock.now() - start

    found, ends = zip(*run(cluster, body), strict=True)
    return found, max(ends)


@pytest.mark.parametrize("servers", [0, 2], ids=["shards", "dedicated"])
@pytest.mark.parametrize("aggregating", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_means_have_the_bits_that_rina_s_have(aggregating, servers):
    cluster = racks_of(aggregating, servers)
    rinas, _ = means(cluster, "rina")
    found, _ = means(cluster, "atp")
    assert all(torch.equal(one, rinas[0]) for one in (*rinas, *found))


def test_switches_help_a_dedicated_server():
    seconds = [
        means(racks_of(aggregating, 1), "atp")[1]
        for aggregating in ((), (0,), (0, 1, 2))
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3


def test_without_switches_and_servers_of_their_own_it_is_the_ring(capsys):
    cluster = racks_of((), 0)
    ring, _ = means(cluster, "ring")
    found, _ = means(cluster, "atp")
    assert all(torch.equal(one, ring[0]) for one in found)
    assert "the plain ring" in capsys.readouterr().err
