"""Shares of batches: whole, fair in the long run, equal in number of steps; parts that go round."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.cluster import parse_cluster
from paceline.core.sampler import _cut, _normalized, _stride
from paceline.errors import UsageError
from paceline.runtimes.simulated import ComputeModel, Simulation
from tests.support.profiles import examples
from tests.support.training import simulate


def deal(workers, length, batch_size, **options):
    """What each worker's sampler yields in two epochs."""
    dealt = {}

    def body(rank):
        paceline.init()
        sampler = paceline.Sampler(range(length), batch_size, **options)
        dealt[rank] = [list(sampler), list(sampler)]

    simulate(workers, body)
    return dealt


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    st.lists(st.integers(6, 40), min_size=1, max_size=30),
)
@settings(max_examples=examples(60))
def test_batches_are_cut_whole_and_nobody_is_left_out(shares, sizes):
    counts = _cut(sizes, _normalized(shares, len(shares)))
    assert [sum(batch) for batch in counts] == sizes
    assert min(min(batch) for batch in counts) >= 1


def test_odd_samples_go_round():
    # 8 samples for 3 equal workers: 3 3 2, and it is never twice the same one that is short
    counts = _cut([8] * 6, [1 / 3] * 3)
    assert all(sorted(batch) == [2, 3, 3] for batch in counts)
    assert [sum(column) for column in zip(*counts, strict=True)] == [16, 16, 16]


def test_shares_hold_in_the_long_run():
    counts = _cut([10] * 100, _normalized([4, 2, 1], 3))
    totals = [sum(column) for column in zip(*counts, strict=True)]
    assert totals == pytest.approx([4000 / 7, 2000 / 7, 1000 / 7], abs=1)


def test_workers_cover_the_data_once_an_epoch_in_equal_numbers_of_steps():
    dealt = deal(3, 100, 16)
    for epoch in range(2):
        assert {len(dealt[rank][epoch]) for rank in range(3)} == {7}
        seen = [i for rank in range(3) for batch in dealt[rank][epoch] for i in batch]
        assert sorted(seen) == list(range(100))
    assert dealt[0][0] != dealt[0][1]


def test_a_last_batch_smaller_than_the_job_is_left_out():
    assert {len(epochs[0]) for epochs in deal(3, 20, 9).values()} == {2}
    assert {len(epochs[0]) for epochs in deal(3, 21, 9).values()} == {3}
    assert {len(e[0]) for e in deal(3, 21, 9, drop_last=True).values()} == {2}


def test_the_same_epoch_is_the_same_shuffle():
    def body(rank):
        paceline.init()
        sampler = paceline.Sampler(range(40), 8)
        sampler.set_epoch(3)
        assert list(sampler) == list(sampler)

    simulate(2, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 1}, "batch_size: expected 2"),
        ({"batch_size": 41}, "batch_size: expected 2 .* to 40"),
        ({"batch_size": 8, "shares": [1.0]}, "shares: expected 2 numbers"),
        ({"batch_size": 8, "shares": [1.0, 0.0]}, "shares: expected numbers above"),
    ],
)
def test_bad_shares_are_refused(arguments, message):
    def body(rank):
        paceline.init()
        with pytest.raises(UsageError, match=message):
            paceline.Sampler(range(40), **arguments)

    simulate(2, body)


def test_shares_by_speed_even_out_a_slow_worker():
    """Two workers, one half as fast: equal shares take the slow one's time, shares by
    speed 2/3 of that: 12 and 6 of 18 samples instead of 9 and 9."""
    cluster = parse_cluster(
        '[[rack]]\nworkers = 2\nlink = "100 Gbit/s"\nlatency = "0 us"\nspeed = [1, 0.5]'
    )
    seconds = {}
    for shares in (None, "speed"):

        def body(rank, shares=shares):
            paceline.init()
            model = torch.nn.Linear(4, 1)
            data = torch.randn(180, 4)
            sampler = paceline.Sampler(data, 18, shares=shares)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = paceline.distribute(model, optimizer, sampler=sampler)
            for batch in sampler:
                optimizer.zero_grad()
                model(data[batch]).mean().backward()
                optimizer.step()
            optimizer.finish()

        simulation = Simulation(
            cluster, compute=ComputeModel(forward=0.1, backward=0.2)
        )
        recorder = simulation.run(body).recorders[0]
        seconds[shares] = recorder.steps[5].step_seconds
    assert seconds[None] == pytest.approx(0.6, rel=1e-4)
    assert seconds["speed"] == pytest.approx(0.4, rel=1e-4)


# ---- parts that go round ----


def rotated(workers, length, batch_size, passes, **options):
    """What each worker's sampler yields, pass by pass: each as many as it has *passes*."""
    dealt = {}

    def body(rank):
        paceline.init()
        sampler = paceline.Sampler(range(length), batch_size, rotate=True, **options)
        dealt[rank] = [list(sampler) for _ in range(passes[rank])]

    simulate(workers, body)
    return [dealt[rank] for rank in range(workers)]


def seen_in(passes):
    return Counter(i for batches in passes for batch in batches for i in batch)


@given(
    workers=st.integers(1, 5),
    per_worker=st.integers(1, 4),
    length=st.integers(20, 61),
    rounds=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=examples(25))
def test_in_n_passes_each_worker_sees_each_sample_once(
    workers, per_worker, length, rounds, shuffle, drop_last
):
    """At whatever pace the others go: each in as many rounds of n passes as it likes."""
    passes = [workers * rounds[rank] for rank in range(workers)]
    options = {"shuffle": shuffle, "drop_last": drop_last}
    dealt = rotated(workers, length, workers * per_worker, passes, **options)
    left_out = length % (workers * per_worker)
    if left_out >= workers and not drop_last:
        left_out = 0
    for rank, mine in enumerate(dealt):
        for number in range(rounds[rank]):
            seen = seen_in(mine[number * workers : (number + 1) * workers])
            assert set(seen.values()) == {1}
            assert len(seen) == length - left_out
            assert left_out or set(seen) == set(range(length))


def test_without_rotation_each_worker_keeps_its_own_samples():
    """The law's control."""
    for epochs in deal(3, 24, 6, shuffle=False).values():
        assert epochs[0] == epochs[1]
        assert len(seen_in(epochs)) == 8


def test_a_pass_of_all_workers_is_the_data_once():
    dealt = rotated(3, 23, 6, [4, 4, 4])
    for number in range(4):
        seen = seen_in([passes[number] for passes in dealt])
        assert seen == Counter(range(23))
    # A worker has other samples in its next pass, and after three a new shuffle.
    first = [sorted(seen_in([one])) for one in dealt[0]]
    assert not set(first[0]) & set(first[1])
    assert first[0] != first[3]


def test_batches_that_go_round_are_weighed_as_they_are():
    """10 samples for 3 workers: 4 3 3, of which each pass has another part."""

    def body(rank):
        paceline.init()
        sampler = paceline.Sampler(range(30), 10, rotate=True)
        for _ in range(4):
            for number, batch in enumerate(sampler):
                assert sampler.weight(number) == len(batch) / 10

    simulate(3, body)


def test_a_pass_may_be_chosen_and_goes_on_after_a_load():
    def body(rank):
        paceline.init()
        straight = paceline.Sampler(range(40), 8, rotate=True)
        every = [list(straight) for _ in range(5)]
        chosen = paceline.Sampler(range(40), 8, rotate=True)
        chosen.set_epoch(3)
        assert list(chosen) == every[3]
        begun = paceline.Sampler(range(40), 8, rotate=True)
        for _ in range(3):
            list(begun)
        fresh = paceline.Sampler(range(40), 8, rotate=True)
        fresh.load_state_dict(begun.state_dict())
        assert [list(fresh), list(fresh)] == every[3:]

    simulate(2, body)


def test_shares_do_not_go_round():
    def body(rank):
        paceline.init()
        with pytest.raises(UsageError, match="Leave one"):
            paceline.Sampler(range(40), 8, shares=[1, 2], rotate=True)

    simulate(2, body)


@pytest.mark.parametrize("workers", range(1, 33))
def test_a_worker_comes_to_all_parts(workers):
    stride = _stride(workers)
    assert len({stride * passes % workers for passes in range(workers)}) == workers


def test_few_passes_of_neighbours_are_spread_over_all_parts():
    """A class of 4 slow workers of 16 has made 8 passes: each part was seen about twice. One
    part further in each pass, some had been seen 4 times, and others never."""

    def seen_by(stride):
        parts = [(rank + stride * p) % 16 for rank in range(12, 16) for p in range(8)]
        return Counter(parts)

    assert set(seen_by(_stride(16)).values()) == {1, 2, 3}
    assert len(seen_by(_stride(16))) == 16
    assert set(seen_by(1).values()) == {1, 2, 3, 4}
    assert len(seen_by(1)) == 11
