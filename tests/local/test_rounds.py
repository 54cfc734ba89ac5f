"""When workers meet, what they send then, and what becomes of it later."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError, WorkerFailedError
from paceline.methods import METHODS
from paceline.methods.local import LocalSGD, LocalUpdates, StreamingDiLoCo
from paceline.methods.local.groups import places_of
from paceline.methods.local.parts import deal_out
from paceline.methods.local.whole import settle
from paceline.network import Cluster, Rack
from paceline.optimizer import training_of
from paceline.tensors import stand_in_for
from paceline.testing.task import Counting
from tests.local.helpers import adam, double, momentum, sgd, simulate, spread, train
from tests.local.test_laws import CLOSE, apart, count, counting
from tests.osp.helpers import flat, loss_of

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
    for own in sent(f"{name}:every=4", 2, 8):
        assert own == [0, 0, 0, MODEL + WEIGHTS] * 2


def test_what_has_moved_may_be_compressed():
    """Differences are small, so half of the bits will do; parameters are sent as they are."""
    for own in sent("diloco:every=4", 2, 8, compression="bf16"):
        assert own[:3] == [0, 0, 0]
        assert MODEL / 2 <= own[3] < MODEL / 2 + 3 * WEIGHTS
    exact, coarse = (
        train("diloco:every=4", 2, 8, compression=c) for c in ("none", "bf16")
    )
    difference = apart([exact[0].end], [coarse[0].end])
    assert 0 < difference < 0.01 * (exact[0].end - flat(double())).abs().max()


def test_post_local_sgd_has_rounds_in_each_step_at_first():
    for own in sent("post-local-sgd:every=3,each_until=2", 2, 8):
        assert [count > 0 for count in own] == [1, 1, 0, 0, 1, 0, 0, 1]


def test_a_fragment_travels_in_its_turn():
    """Of 12, 5 and 1 elements."""
    method = "streaming-diloco:every=6,fragments=3,delay=0,mixing=0"
    for own in sent(method, 2, 12):
        assert own[::2] == [0] * 6
        small = [one - WEIGHTS for one in own[1::2]]
        # With each round all say who still trains: that waits for nobody.
        said = small[0] - 4 * 12
        assert small == [4 * n + said for n in (12, 5, 1)] * 2
        assert 0 < said <= 16


def test_means_of_a_group_stay_in_it():
    """Only every fourth step is anything sent to the other rack."""
    method = "hierarchical-local-sgd:every=4,group=rack,group_every=2"
    trained = train(method, two_racks(), 8)
    rows = [spread(trained[:2], step) for step in range(8)]
    across = [spread(trained, step) for step in range(8)]
    assert [row == 0 for row in rows] == [0, 1] * 4
    assert [row == 0 for row in across] == [0, 0, 0, 1] * 2


@pytest.mark.parametrize("group", ["rack", "host", "2"])
def test_groups_are_racks_or_hosts_or_so_many_workers(group):
    cluster = two_racks(4, workers_per_host=2)
    method = f"hierarchical-local-sgd:every=4,group={group},group_every=1"
    trained = train(method, cluster, 1)
    size = 4 if group == "rack" else 2
    for first in range(0, 8, size):
        assert spread(trained[first : first + size], 0) == 0
    assert spread(trained[size - 1 : size + 1], 0) > 0


def test_a_group_that_averages_in_each_step_is_one_worker():
    """Two racks of two under SGD: local SGD of two, each with the data of both."""

    def of_both(model, rank, step):
        return (loss_of(model, 2 * rank, step) + loss_of(model, 2 * rank + 1, step)) / 2

    racks = train("hierarchical-local-sgd:every=3,group=rack", two_racks(), 8)
    two = train("local-sgd:every=3", 2, 8, loss=of_both)
    assert apart(racks[0].steps, two[0].steps) < CLOSE
    assert apart([racks[0].end], [two[0].end]) < CLOSE


# ---- fragments, delay, mixing (laws 7 and 8) ----


def test_one_fragment_without_delay_and_mixing_is_diloco():
    outer = "outer_learning_rate=0.7,outer_momentum=0.9"
    streaming = train(
        f"streaming-diloco:every=3,fragments=1,delay=0,mixing=0,{outer}", 3, 8
    )
    diloco = train(f"diloco:every=3,{outer}", 3, 8)
    for one, other in zip(streaming, diloco, strict=True):
        assert apart([*one.steps, one.end], [*other.steps, other.end]) == 0


def test_who_mixes_in_nothing_is_never_synchronised():
    mixing = train("streaming-diloco:every=2,fragments=2,delay=0,mixing=1", 2, 6)
    never = train("local-sgd:every=100", 2, 6)
    for one, other in zip(mixing, never, strict=True):
        assert apart(one.steps, other.steps) == 0


def test_each_parameter_is_synchronised_once_in_a_round():
    """Four tensors, two of them in a fragment; each is equal on both workers just after its
    turn, and at no other time."""
    method = "streaming-diloco:every=4,fragments=2,delay=0,mixing=0"
    first, second = train(method, 2, 12)
    sizes = [p.numel() for p in first.model.parameters()]
    equal = [
        [torch.equal(x, y) for x, y in zip(a.split(sizes), b.split(sizes), strict=True)]
        for a, b in zip(first.steps, second.steps, strict=True)
    ]
    times = [tuple(n + 1 for n in range(12) if equal[n][i]) for i in range(4)]
    assert set(times) == {(2, 6, 10), (4, 8, 12)}


def test_fragments_are_of_about_one_size_and_neighbours_in_different_ones():
    method = StreamingDiLoCo(every=4, fragments=2, delay=0)

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
        "streaming-diloco:every=4,fragments=1,delay=2,mixing=0.5,"
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
    waits = train("streaming-diloco:every=4,fragments=1,delay=0", 2, steps, **keys)
    late = train("streaming-diloco:every=4,fragments=1,delay=3", 2, steps, **keys)
    never = train("local-sgd:every=100", 2, steps, **keys)
    assert late[0].seconds == pytest.approx(never[0].seconds, rel=1e-6)
    assert waits[0].seconds > never[0].seconds + 4 * 0.015
    assert sum(late[0].sent) >= 4 * 2_000_000 * 0.99


# ---- ends, restarts, loads (laws 13 and 17) ----


@pytest.mark.parametrize(
    "method",
    [
        "local-sgd:every=3",
        "post-local-sgd:every=3,each_until=3",
        "hierarchical-local-sgd:every=6,group=2,group_every=2",
        "slowmo:every=3",
        "diloco:every=3",
        "streaming-diloco:every=3,fragments=1,delay=0,mixing=0",
    ],
)
def test_where_nobody_has_trained_since_the_last_mean_the_end_moves_nothing(method):
    for one in train(method, 2, 6):
        assert torch.equal(one.end, one.steps[-1])


@pytest.mark.parametrize("method", ["slowmo:every=4", "diloco:every=4"])
def test_a_last_round_that_is_not_full_is_a_plain_mean(method):
    first, second = train(method, 2, 7)
    plain = (first.steps[-1] + second.steps[-1]) / 2
    assert (first.end - plain).abs().max() < CLOSE


def test_what_is_under_way_at_the_end_is_used():
    """Sent after step 4, it would be there after step 7; training ends after step 5."""
    method = "streaming-diloco:every=4,fragments=1,delay=3,mixing=0"
    gone_on = train(method, 2, 7)
    for ended in train(method, 2, 5):
        assert not torch.equal(ended.end, ended.steps[-1])
        assert torch.equal(ended.end, gone_on[0].steps[6])


def test_to_settle_twice_is_to_settle_once():
    method = StreamingDiLoCo(every=4, fragments=2, delay=0)
    seen = {}

    def watch(rank, step, model, optimizer):
        if step != 4:
            return
        training = training_of(optimizer)
        with torch.no_grad():
            for number in range(2):
                settle(method, training.state, training.run)
                seen[rank, number] = flat(model)

    train(method, 2, 5, watch=watch)
    assert all(torch.equal(one, seen[0, 0]) for one in seen.values())


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(
    "method",
    [
        "diloco:every=4",
        "local-sgd:every=3,state=average,state_every=2",
        "streaming-diloco:every=6,fragments=2,delay=2",
    ],
)
def test_a_restart_anywhere_in_a_round_changes_no_bit(method, at, tmp_path):
    """Also with a mean under way. Statistics of BatchNorm, and half-precision weights, among
    what is trained."""

    def body(rank, first, last, folder):
        # Two workers' sums are the same whatever the buckets are, and so are restarts.
        fusion = "wfbp" if first else "ddp"
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3).bfloat16()
        )
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = paceline.distribute(model, inner, method=method, fusion=fusion)
        if first:
            paceline.load(folder)
        for step in range(first, last):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * rank + step)
            x = torch.randn(8, 6, generator=generator)
            hidden = model[1](model[0](x)).bfloat16()
            (model[2](hidden).float() - x[:, :3]).square().mean().backward()
            optimizer.step()
        if last < 9:
            paceline.save(folder)
        optimizer.finish()
        return [t.clone() for t in model.state_dict().values()]

    folder = tmp_path / "checkpoint"
    straight = simulate(2, lambda rank: body(rank, 0, 9, folder))
    simulate(2, lambda rank: body(rank, 0, at, folder))
    resumed = simulate(2, lambda rank: body(rank, at, 9, folder))
    for one, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for a, b in zip(*straight, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "method",
    [
        "diloco:every=2",
        "local-sgd:every=3",
        "streaming-diloco:every=4,fragments=1,delay=2,mixing=0",
    ],
)
def test_another_number_of_workers_goes_on_from_the_anchor_with_its_momentum(
    method, tmp_path
):
    """Three workers with equal data continue what two began as two would."""

    def body(rank, first, last):
        model = counting()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method=method)
        if first:
            paceline.load(tmp_path / "checkpoint")
        for _ in range(first, last):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        if last == 4:
            paceline.save(tmp_path / "checkpoint")
        optimizer.finish()
        return flat(model)

    straight = simulate(2, lambda rank: body(rank, 0, 8))
    simulate(2, lambda rank: body(rank, 0, 4))
    for one in simulate(3, lambda rank: body(rank, 4, 8)):
        assert (one - straight[0]).abs().max() < CLOSE


@pytest.mark.parametrize(
    "other", ["local-sgd:every=2", "local-sgd:every=4,fragments=2"]
)
def test_a_checkpoint_of_another_program_is_refused(other, tmp_path):
    """It has the same name, and other options."""

    def body(method, loads):
        model = counting()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method=method)
        if loads:
            paceline.load(tmp_path / "checkpoint")
        else:
            paceline.save(tmp_path / "checkpoint")
        optimizer.finish()

    simulate(2, lambda rank: body("local-sgd:every=2,outer_learning_rate=0.5", False))
    with pytest.raises(WorkerFailedError, match="with the options with which it was"):
        simulate(2, lambda rank: body(other, True))


def test_parameters_that_a_script_loads_begin_a_round():
    """The anchor is theirs, and there is no momentum from before."""
    after = {}

    def watch(rank, step, model, optimizer):
        if step == 4:
            model.load_state_dict(double().state_dict())
            after[rank] = flat(model)

    loaded = train("diloco:every=2", 2, 8, watch=watch, optimizer=sgd)
    assert torch.equal(after[0], flat(double()))

    def later(model, rank, step):
        return loss_of(model, rank, step + 5)

    # Steps 6 and 8 hold rounds: the first of these after one step.
    with_one = train("diloco:every=2", 2, 1, loss=later, optimizer=sgd)
    moved = (with_one[0].steps[0] + with_one[1].steps[0]) / 2 - flat(double())
    expected = flat(double()) + 0.7 * 1.9 * moved
    assert (loaded[0].steps[5] - expected).abs().max() < CLOSE


def test_an_evaluation_sees_the_anchor_whoever_looks_alone():
    """Where the outer optimizer keeps one; and the statistics of its round."""
    seen = {}

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()

    def watch(rank, step, model, optimizer):
        if step == 3:
            seen[rank, "round"] = [t.clone() for t in model.state_dict().values()]
        if step == 5 and rank == 1:
            before = flat(model)
            with optimizer.consolidated():
                seen[rank, "shown"] = [t.clone() for t in model.state_dict().values()]
            assert torch.equal(flat(model), before)

    train("diloco:every=4", 2, 6, make=make, watch=watch)
    shown, there = seen[1, "shown"], seen[0, "round"]
    *floating, counter = range(len(there))
    assert all(torch.equal(shown[i], there[i]) for i in floating)
    assert shown[counter] == 6


def test_without_an_anchor_an_evaluation_sees_the_mean_of_all():
    seen = {}

    def watch(rank, step, model, optimizer):
        if step == 5:
            seen[rank] = flat(model)
            with optimizer.consolidated():
                seen[rank, "shown"] = flat(model)

    train("local-sgd:every=4", 2, 7, watch=watch)
    assert not torch.equal(seen[0], seen[1])
    for rank in range(2):
        assert (seen[rank, "shown"] - (seen[0] + seen[1]) / 2).abs().max() < CLOSE


# ---- statistics, and what optimizers keep ----


def with_statistics(buffers, steps=4):
    def body(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(
            model, inner, method="local-sgd:every=2", buffers=buffers
        )
        own = []
        for step in range(steps - rank):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step == 1:
                own.append(model[1].running_mean.clone())
            optimizer.step()
            own.append(model[1].running_mean.clone())
        optimizer.finish()
        return own, model[1].running_mean, model[1].num_batches_tracked.item()

    return simulate(2, body)


def test_statistics_of_batchnorm_are_averaged_in_rounds_and_counters_are_the_largest():
    (first, end, steps), (second, other_end, other_steps) = with_statistics("rank0")
    assert not torch.equal(first[0], second[0])
    mean = (first[1] + second[1]) / 2
    assert (first[2] - mean).abs().max() < CLOSE
    assert torch.equal(first[2], second[2])
    assert torch.equal(end, other_end)
    assert steps == other_steps == 4


def test_they_stay_each_workers_own_where_that_is_wanted():
    (first, *_), (second, *_) = with_statistics("local")
    assert torch.equal(first[1], first[2])
    assert not torch.equal(first[2], second[2])


def moments_after_each_step(method, optimizer, steps=4):
    seen = {}

    def watch(rank, step, model, wrapped):
        state = wrapped.state[next(iter(model.parameters()))]
        seen[rank, step] = {
            name: value.clone()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }

    train(method, 2, steps, optimizer=optimizer, watch=watch)
    return seen


def test_what_adam_keeps_stays_each_workers_own():
    seen = moments_after_each_step("local-sgd:every=2", adam)
    assert not torch.equal(seen[0, 1]["exp_avg"], seen[1, 1]["exp_avg"])


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [(adam, {"exp_avg", "exp_avg_sq"}), (momentum, {"momentum_buffer"})],
)
def test_or_is_averaged_too_at_a_period_of_its_own(optimizer, names):
    method = "local-sgd:every=1,state=average,state_every=2"
    seen = moments_after_each_step(method, optimizer)
    own = moments_after_each_step("local-sgd:every=1", optimizer)
    for name in names:
        equal = [torch.equal(seen[0, n][name], seen[1, n][name]) for n in range(4)]
        assert equal == [False, True, False, True]
        mean = (own[0, 1][name] + own[1, 1][name]) / 2
        assert (seen[0, 1][name] - mean).abs().max() < CLOSE


def test_an_optimizer_that_keeps_nothing_has_nothing_to_average():
    with pytest.raises(WorkerFailedError, match="SGD keeps none of") as caught:
        train("local-sgd:state=average", 2, 1, optimizer=sgd)
    assert isinstance(caught.value.__cause__, UsageError)


def test_who_has_not_trained_yet_has_moments_of_nought_and_weighs_nothing():
    ends = train("local-sgd:every=2,state=average", 2, (4, 0), optimizer=adam)
    alone = train("local-sgd:every=2", 1, 4, optimizer=adam)
    assert (ends[1].end - alone[0].end).abs().max() < CLOSE


# ---- rounds by speed ----


def test_who_is_fast_does_more_steps_in_a_round():
    """Three times as fast: 6 steps and 2 in a round of 4 in the mean, of one length; what
    each has moved counts alike."""
    rack = Rack(workers=2, link=125e6, latency=50e-6, speed=(1.5, 0.5))
    keys = {"make": counting, "loss": count, "optimizer": sgd}
    fast, slow = train(
        "local-sgd:every=4,uneven=speed", Cluster((rack,)), (12, 4), **keys
    )
    assert fast.steps[5][0].item() == slow.steps[1][0].item() == pytest.approx(-0.4)
    assert fast.end[0].item() == slow.end[0].item() == pytest.approx(-0.8)


# ---- what is said, and what is refused ----


def test_the_gain_is_said_and_what_would_be_safer(capsys):
    train("diloco:every=10", 2, 1)
    said = capsys.readouterr().err
    assert (
        "1.33 times as far as plain averaging in the first round, and 7 times" in said
    )
    assert "outer_learning_rate=0.3 would make it 3" in said
    train("diloco", 2, 1)
    assert "would make it" not in capsys.readouterr().err
    train("local-sgd", 2, 1)
    assert "times as far" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"every": 0}, "every=0: expected 1 or more"),
        ({"state_every": 0}, "state_every=0: expected 1 or more"),
        ({"each_until": -1}, "each_until=-1: expected 0 or more"),
        ({"outer_learning_rate": -0.1}, "outer_learning_rate=-0.1: expected 0 or more"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0: .* less than 1"),
        ({"outer_momentum": -0.5}, "outer_momentum=-0.5: expected 0 or more"),
        ({"nesterov": True}, "nesterov=True: expected an outer_momentum above 0"),
        ({"rescale": True}, "rescale=True: expected an outer_momentum above 0"),
        ({"fragments": 3}, "fragments=3: expected a divisor of every=8"),
        ({"fragments": 0}, "fragments=0: expected 1 or more"),
        ({"fragments": 2, "delay": 4}, "delay=4: expected less than 4 steps"),
        ({"delay": 8}, "delay=8: expected less than 8 steps"),
        ({"mixing": 1.5}, "mixing=1.5: expected 0"),
        ({"mixing": -0.1}, "mixing=-0.1: expected 0"),
        ({"delay": 2, "state": "average"}, "state=average: .* undo the steps"),
        ({"group": "2", "group_every": 3}, "group_every=3: expected a divisor of"),
        ({"group_every": 2}, "group_every=2: expected a group"),
        ({"group": "1"}, "group=1: a group of one"),
        ({"group": "row"}, "group=row: expected rack, host, or a number"),
        ({"group": "2", "fragments": 2}, "group=2: expected neither fragments nor"),
        ({"each_until": 3, "group": "2"}, "each_until=3: expected neither"),
        ({"uneven": "speed", "delay": 2}, "uneven=speed: .* expected neither"),
    ],
)
def test_what_cannot_be_is_refused(keys, told):
    with pytest.raises(UsageError, match=f"local-sgd:{told}"):
        LocalSGD(**keys)


def refused_in_training(method, cluster=2):
    with pytest.raises(WorkerFailedError) as caught:
        train(method, cluster, 1)
    assert isinstance(caught.value.__cause__, UsageError)
    return str(caught.value)


def test_more_fragments_than_tensors_are_refused():
    told = refused_in_training("streaming-diloco:every=10,fragments=5,delay=0")
    assert "fragments=5: the model has 4 parameters" in told


def test_a_group_of_which_nobody_knows_is_refused():
    """In a world that tells no network there are no racks; here one of other workers."""
    method = METHODS["hierarchical-local-sgd"]
    comm = SimpleNamespace(size=4, racks=None)
    run = SimpleNamespace(comm=comm, cluster=None)
    for group in ("rack", "host"):
        with pytest.raises(UsageError, match=f"in which {group} each worker is"):
            places_of(method(group=group), run)
    comm.racks = [0, 0, 1]
    with pytest.raises(UsageError, match="has 3 workers, and this job 4"):
        places_of(method(group="rack"), run)


PRESETS = [cls for cls in METHODS.values() if LocalUpdates in cls.__mro__]


@pytest.mark.parametrize("cls", PRESETS, ids=lambda cls: cls.name)
def test_a_name_is_a_preset_and_nothing_else(cls):
    """Local SGD with another one's options does what that one does."""
    options = {"every": 4, "each_until": 0} if cls().every > 16 else {}
    if cls().delay:
        options |= {"fragments": 2, "delay": 1}
    preset = cls(**options)
    named = {f.name: getattr(preset, f.name) for f in fields(preset)}
    if preset.has_groups:
        named["group"] = options["group"] = "2"
    one, other = (train(m, 2, 5) for m in (cls(**options), LocalSGD(**named)))
    assert apart([one[0].end], [other[0].end]) == 0
