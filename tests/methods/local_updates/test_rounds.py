"""When workers meet, what they send then, and what becomes of it later."""

import pytest
import torch
from torch import nn

from paceline.cluster import Cluster, Rack
from paceline.interfaces.buckets import stand_in_for
from paceline.methods.local_updates import StreamingDiLoCo
from paceline.methods.local_updates.state import deal_out
from paceline.testing.problems import Counting
from tests.methods.local_updates.helpers import double, sgd, spread, train
from tests.methods.local_updates.test_laws import CLOSE, apart, count, counting
from tests.support.training import flat, loss_of

WEIGHTS = 16
"""Bytes that each of two workers sends to say what it weighs, and whether it trains."""
MODEL = 4 * 18
"""Bytes that each of two sends to form a mean of the model of `Counting`."""


def two_racks(each=2, **keys):
    rack = Rack(workers=each, link=125e6, latency=50e-6, uplink=62.5e6, **keys)
    return Cluster((rack, rack))


def sent(method, cluster, steps, **keys):
    keys = {"make": Counting, "loss": count, "optimizer": sgd} | keys
    return [one.sent for one in train(method, cluster, steps, **keys)]


# ---- bytes (law 16) ----


@pytest.mark.parametrize("name", ["local-sgd", "diloco", "slowmo"])
def test_a_round_costs_one_mean_of_the_model_and_steps_in_between_nothing(name):
    for own in sent(f"{name}:sync_every=4", 2, 8):
        assert own == [0, 0, 0, MODEL + WEIGHTS] * 2


def test_what_has_moved_may_be_compressed():
    """Differences are small, so half of the bits will do; parameters are sent as they are."""
    for own in sent("diloco:sync_every=4", 2, 8, compression="bf16"):
        assert own[:3] == [0, 0, 0]
        assert MODEL / 2 <= own[3] < MODEL / 2 + 3 * WEIGHTS
    exact, coarse = (
        train("diloco:sync_every=4", 2, 8, compression=c) for c in ("none", "bf16")
    )
    difference = apart([exact[0].end], [coarse[0].end])
    assert 0 < difference < 0.01 * (exact[0].end - flat(double())).abs().max()


def test_post_local_sgd_has_rounds_in_each_step_at_first():
    for own in sent("post-local-sgd:sync_every=3,sync_each_step_until=2", 2, 8):
        assert [count > 0 for count in own] == [1, 1, 0, 0, 1, 0, 0, 1]


def test_a_fragment_travels_in_its_turn():
    """Of 12, 5 and 1 elements."""
    method = "streaming-diloco:sync_every=6,fragments=3,delay=0,keep_local=0"
    for own in sent(method, 2, 12):
        assert own[::2] == [0] * 6
        small = [one - WEIGHTS for one in own[1::2]]
        # With each round all say who still trains: that waits for nobody.
        said = small[0] - 4 * 12
        assert small == [4 * n + said for n in (12, 5, 1)] * 2
        assert 0 < said <= 16


def test_means_of_a_group_stay_in_it():
    """Only every fourth step is anything sent to the other rack."""
    method = "hierarchical-local-sgd:sync_every=4,group=rack,group_every=2"
    trained = train(method, two_racks(), 8)
    rows = [spread(trained[:2], step) for step in range(8)]
    across = [spread(trained, step) for step in range(8)]
    assert [row == 0 for row in rows] == [0, 1] * 4
    assert [row == 0 for row in across] == [0, 0, 0, 1] * 2


@pytest.mark.parametrize("group", ["rack", "host", "2"])
def test_groups_are_racks_or_hosts_or_so_many_workers(group):
    cluster = two_racks(4, workers_per_host=2)
    method = f"hierarchical-local-sgd:sync_every=4,group={group},group_every=1"
    trained = train(method, cluster, 1)
    size = 4 if group == "rack" else 2
    for first in range(0, 8, size):
        assert spread(trained[first : first + size], 0) == 0
    assert spread(trained[size - 1 : size + 1], 0) > 0


def test_a_group_that_averages_in_each_step_is_one_worker():
    """Two racks of two under SGD: local SGD of two, each with the data of both."""

    def of_both(model, rank, step):
        return (loss_of(model, 2 * rank, step) + loss_of(model, 2 * rank + 1, step)) / 2

    racks = train("hierarchical-local-sgd:sync_every=3,group=rack", two_racks(), 8)
    two = train("local-sgd:sync_every=3", 2, 8, loss=of_both)
    assert apart(racks[0].steps, two[0].steps) < CLOSE
    assert apart([racks[0].end], [two[0].end]) < CLOSE


# ---- fragments, delay, mixing (laws 7 and 8) ----


def test_one_fragment_without_delay_and_mixing_is_diloco():
    outer = "outer_learning_rate=0.7,outer_momentum=0.9"
    streaming = train(
        f"streaming-diloco:sync_every=3,fragments=1,delay=0,keep_local=0,{outer}", 3, 8
    )
    diloco = train(f"diloco:sync_every=3,{outer}", 3, 8)
    for one, other in zip(streaming, diloco, strict=True):
        assert apart([*one.steps, one.end], [*other.steps, other.end]) == 0


def test_who_mixes_in_nothing_is_never_synchronised():
    mixing = train(
        "streaming-diloco:sync_every=2,fragments=2,delay=0,keep_local=1", 2, 6
    )
    never = train("local-sgd:sync_every=100", 2, 6)
    for one, other in zip(mixing, never, strict=True):
        assert apart(one.steps, other.steps) == 0


def test_each_parameter_is_synchronised_once_in_a_round():
    """Four tensors, two of them in a fragment; each is equal on both workers just after its
    turn, and at no other time."""
    method = "streaming-diloco:sync_every=4,fragments=2,delay=0,keep_local=0"
    first, second = train(method, 2, 12)
    sizes = [p.numel() for p in first.model.parameters()]
    equal = [
        [torch.equal(x, y) for x, y in zip(a.split(sizes), b.split(sizes), strict=True)]
        for a, b in zip(first.steps, second.steps, strict=True)
    ]
    times = [tuple(n + 1 for n in range(12) if equal[n][i]) for i in range(4)]
    assert set(times) == {(2, 6, 10), (4, 8, 12)}


def test_fragments_are_of_about_one_size_and_neighbours_in_different_ones():
    method = StreamingDiLoCo(sync_every=4, fragments=2, delay=0)

    def dealt(*sizes):
        order = [nn.Parameter(torch.zeros(size)) for size in sizes]
        number = {id(parameter): n for n, parameter in enumerate(order)}
        return [[number[id(p)] for p in part] for part in deal_out(method, order)]

    assert dealt(8, 8, 8, 8, 8, 8) == [[0, 2, 4], [1, 3, 5]]
    sizes = (90, 10, 40, 20, 30, 10)
    assert [sum(sizes[n] for n in part) for part in dealt(*sizes)] == [100, 100]


def test_a_mean_is_used_so_many_steps_after_it_was_sent():
    """Workers walk by 0.1 and 0.3 a step. After step 4 both have sent what they have moved;
    the mean is there after step 6, and a half of each one's own stays."""

    def loss(model, rank, step):
        return model() * (1 + 2 * rank)

    method = (
        "streaming-diloco:sync_every=4,fragments=1,delay=2,keep_local=0.5,"
        "outer_learning_rate=1,outer_momentum=0,nesterov=false"
    )
    keys = {"make": counting, "loss": loss, "optimizer": sgd}
    slow, fast = train(method, 2, 6, **keys)
    assert [p[0].item() for p in slow.steps[:5]] == pytest.approx(
        [-0.1 * n for n in range(1, 6)]
    )
    anchor = -(0.4 + 1.2) / 2
    assert slow.steps[5][0].item() == pytest.approx((anchor - 0.6) / 2)
    assert fast.steps[5][0].item() == pytest.approx((anchor - 1.8) / 2)


def test_nobody_waits_for_a_mean_that_has_time():
    """A model of 2 MB takes about 17 ms to be averaged at 1 Gbit/s, and a step 10 ms."""

    def make():
        model = Counting()
        for parameter in model.parameters():
            stand_in_for(2_000_000 * parameter.numel() // 18, parameter)
        return model

    keys = {"make": make, "loss": count, "optimizer": sgd, "pace": 0.01}
    steps = 16
    waits = train("streaming-diloco:sync_every=4,fragments=1,delay=0", 2, steps, **keys)
    late = train("streaming-diloco:sync_every=4,fragments=1,delay=3", 2, steps, **keys)
    never = train("local-sgd:sync_every=100", 2, steps, **keys)
    assert late[0].seconds == pytest.approx(never[0].seconds, rel=1e-6)
    assert waits[0].seconds > never[0].seconds + 4 * 0.015
    assert sum(late[0].sent) >= 4 * 2_000_000 * 0.99
