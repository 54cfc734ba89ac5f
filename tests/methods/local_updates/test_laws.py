"""What the mean and the outer step are, to the last bit where that can be."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import paceline
from paceline.testing.problems import Counting, Quadratic, centers_of
from tests.methods.local_updates.helpers import (
    adam,
    alone,
    double,
    mean,
    momentum,
    nesterov,
    sgd,
    spread,
    train,
)
from tests.support.tables import crossed
from tests.support.training import flat, loss_of, network, simulate

CLOSE = 1e-12


def apart(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


# ---- means (laws 1 to 4) ----


@pytest.mark.parametrize("optimizer", [sgd, momentum, nesterov])
@pytest.mark.parametrize("workers", [2, 3])
def test_with_a_mean_in_each_step_and_a_linear_optimizer_it_is_bsp(workers, optimizer):
    local = train("local-sgd:sync_every=1", workers, 6, optimizer=optimizer)
    bsp = train("bsp", workers, 6, optimizer=optimizer)
    for mine, theirs in zip(local, bsp, strict=True):
        assert apart(mine.steps, theirs.steps) < CLOSE
        assert torch.equal(mine.end, local[0].end)


def test_with_adam_it_is_not():
    local = train("local-sgd:sync_every=1", 2, 3, optimizer=adam)
    bsp = train("bsp", 2, 3, optimizer=adam)
    assert apart(local[0].steps, bsp[0].steps) > 1e-4


def test_nor_where_each_worker_clips_its_own_gradient():
    local = train("local-sgd:sync_every=1", 2, 3, optimizer=sgd, clip_norm=0.1)
    bsp = train("bsp", 2, 3, optimizer=sgd, clip_norm=0.1)
    assert apart(local[0].steps, bsp[0].steps) > 1e-6


def quadratic():
    return Quadratic((torch.float64,) * 3)


def to_own_center(model, rank, step):
    return model(centers_of(rank, step + 1))


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("optimizer", [sgd, momentum])
def test_with_equal_curvatures_the_mean_of_models_is_that_of_bsp(every, optimizer):
    """Whatever the length of rounds: gradients are linear in parameters there."""
    keys = {"make": quadratic, "loss": to_own_center, "optimizer": optimizer}
    local = train(f"local-sgd:sync_every={every}", 3, 8, **keys)
    bsp = train("bsp", 3, 8, **keys)
    assert spread(local, 0) > 0.01
    for step in range(8):
        assert (mean(local, step) - bsp[0].steps[step]).abs().max() < CLOSE


def test_a_round_leaves_the_mean_of_all_models_where_it_is():
    together = train("local-sgd:sync_every=4", 3, 4)
    apart_still = train("local-sgd:sync_every=100", 3, 4)
    assert spread(apart_still, 3) > 1e-3
    assert spread(together, 3) == 0
    assert (mean(together, 3) - mean(apart_still, 3)).abs().max() < CLOSE


@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_workers_with_the_same_data_are_one_worker(optimizer):
    """Bit by bit: there are a power of two of them."""

    def same(model, rank, step):
        return loss_of(model, 0, step)

    four = train("local-sgd:sync_every=3", 4, 9, loss=same, optimizer=optimizer)
    model = double()
    plain = optimizer(model.parameters())
    for step in range(9):
        plain.zero_grad()
        loss_of(model, 0, step).backward()
        plain.step()
    assert all(torch.equal(one.end, flat(model)) for one in four)


# ---- the outer step (laws 5 and 6) ----


def torch_outer(**keys):
    """An outer step as torch's SGD does it."""
    optimizers = []

    def step(anchors, changes):
        if not optimizers:
            optimizers.append(torch.optim.SGD(anchors, **keys))
        for anchor, change in zip(anchors, changes, strict=True):
            anchor.grad = change
        optimizers[0].step()

    return step


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"lr": 0.7, "momentum": 0.9, "nesterov": True}, ""),
        ({"lr": 0.5, "momentum": 0.3}, ",nesterov=false"),
        ({"lr": 0.3}, ",nesterov=false"),
    ],
)
def test_the_outer_step_is_that_of_torch(dtype, workers, keys, options):
    """With a difference of 0.0, over 5 rounds of Adam."""

    def make():
        return network(dtype)

    options += f",outer_learning_rate={keys['lr']}"
    options += f",outer_momentum={keys.get('momentum', 0)}"
    ours = train(
        f"diloco:sync_every=2{options}", workers, 10, make=make, optimizer=adam
    )
    plain = alone(2, workers, 10, torch_outer(**keys), make=make, optimizer=adam)
    for one in ours:
        assert (one.steps[-1] - plain).abs().max().item() == 0.0


def test_an_outer_learning_rate_of_nought_never_moves_the_model():
    (one, other) = train("diloco:sync_every=2,outer_learning_rate=0", 2, 6)
    start = flat(double())
    assert torch.equal(one.steps[5], start)
    assert torch.equal(other.end, start)
    assert not torch.equal(one.steps[4], start)


def counting():
    return Counting().double()


def count(model, rank, step):
    return model()


def test_a_lasting_change_moves_the_model_seven_times_as_far_in_the_end():
    """eta (1 - b^(t+1)) / (1 - b) in round t: 1.33, 1.897, 2.407, ..."""
    rounds = 80
    keys = {"make": counting, "loss": count, "optimizer": sgd}
    one, _ = train("diloco:sync_every=2", 2, 2 * rounds, **keys)
    places = [0.0] + [one.steps[2 * t - 1][0].item() for t in range(1, rounds + 1)]
    moved = [(before - after) / 0.2 for before, after in pairwise(places)]
    for t, gain in enumerate(moved, 1):
        assert gain == pytest.approx(0.7 * (1 - 0.9 ** (t + 1)) / 0.1, rel=1e-9)
    assert moved[:3] == pytest.approx([1.33, 1.897, 2.4073])
    assert moved[-1] == pytest.approx(7.0, rel=1e-3)


def test_slowmo_is_heavy_ball_while_the_learning_rate_is_constant():
    rescaled = train("slowmo:sync_every=3", 3, 12)
    heavy = train("slowmo:sync_every=3,rescale=false", 3, 12)
    plain = train("local-sgd:sync_every=3", 3, 12)
    assert apart([rescaled[0].end], [heavy[0].end]) < CLOSE
    assert apart([rescaled[0].end], [plain[0].end]) > 1e-3


def test_bmuf_is_slowmo_with_a_momentum_of_one_minus_one_nth():
    """Chen and Huo's block momentum, written down here once more."""
    velocity = []

    def block(anchors, changes):
        if not velocity:
            velocity.extend(torch.zeros_like(anchor) for anchor in anchors)
        for x, change, v in zip(anchors, changes, velocity, strict=True):
            v.mul_(0.75).sub_(change)
            x.add_(v)

    ours = train("slowmo:sync_every=2,outer_momentum=0.75", 4, 10)
    assert apart([ours[0].steps[-1]], [alone(2, 4, 10, block)]) < CLOSE


def test_slowmo_keeps_its_momentum_in_units_of_the_learning_rate_of_the_moment():
    """Each step moves a worker by the learning rate, so D/lr is 2 in a round of two steps;
    u is 2, 3, 3.5, and moves x by as many learning rates of then."""
    keys = {"make": counting, "loss": count, "optimizer": sgd}
    rates = [0.1, 0.1, 0.05, 0.05, 0.01, 0.01]
    one, _ = train("slowmo:sync_every=2", 2, 6, rates=rates, **keys)
    expected = -(0.1 * 2 + 0.05 * 3 + 0.01 * 3.5)
    assert one.steps[-1][0].item() == pytest.approx(expected, rel=1e-12)


def test_each_parameter_group_has_its_own_unit():
    def two_rates(parameters):
        first, *others = parameters
        return torch.optim.SGD(
            [{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.01}], lr=1.0
        )

    keys = {"make": counting, "loss": count, "optimizer": two_rates}
    (one,) = train("slowmo:sync_every=1", 1, 2, **keys)
    moved = [0.1 * 2.5] * 12 + [0.01 * 2.5] * 6
    expected = -torch.tensor(moved, dtype=torch.float64)
    assert (one.steps[-1] - expected).abs().max() < CLOSE


def test_a_learning_rate_that_ends_at_nought_gives_no_infinity(capsys):
    """The last round began before it was nought: what was moved stays, plainly."""
    keys = {"make": counting, "loss": count, "optimizer": sgd}
    rates = [0.1, 0.1, 0.1, 0.0, 0.0, 0.0]
    one, _ = train("slowmo:sync_every=2", 2, 6, rates=rates, **keys)
    assert one.end[0].item() == pytest.approx(-(0.1 * 2 + 0.1), rel=1e-12)
    assert capsys.readouterr().err.count("a learning rate is 0") == 1


def test_half_precision_weights_have_anchors_that_small_changes_move():
    """Each round moves the anchor by a hundredth of what bfloat16 can tell there."""

    def make():
        model = Counting().bfloat16()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        return model

    def steps_of(size):
        return lambda parameters: torch.optim.SGD(parameters, lr=size)

    method = (
        "diloco:sync_every=1,outer_learning_rate=0.01,outer_momentum=0,nesterov=false"
    )
    size = 2.0**-7
    one, _ = train(method, 2, 100, make=make, loss=count, optimizer=steps_of(size))
    assert one.steps[0][0].item() == 1.0
    assert one.steps[-1][0].item() == pytest.approx(1.0 - size, rel=1e-6)
    assert next(one.model.parameters()).dtype == torch.bfloat16


# ---- who weighs how much (law 15) ----


class Samples(nn.Module):
    """A loss that is a mean over samples, each with a target of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2).double()

    def forward(self, samples):
        x = torch.stack([inputs(n) for n in samples])
        return (self.layer(x).tanh() - x[:, :2]).square().sum(1).mean()


def inputs(sample):
    generator = torch.Generator().manual_seed(sample)
    return torch.randn(3, generator=generator).double()


@pytest.mark.parametrize("method", ["local-sgd:sync_every=3", "diloco:sync_every=3"])
def test_a_worker_with_twice_the_samples_is_two_workers(method):
    def on(workers, shares, own):
        def body(rank):
            sampler = paceline.Sampler(range(21), 3, shares=shares, shuffle=False)
            model = Samples()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = paceline.distribute(
                model, inner, method=method, sampler=sampler
            )
            for number, batch in enumerate(sampler):
                optimizer.zero_grad()
                model(own(rank, number, batch)).backward()
                optimizer.step()
            optimizer.finish()
            return flat(model)

        return simulate(workers, body)

    def doubled(rank, number, batch):
        """The first worker's two samples are one, twice."""
        assert len(batch) == 2 - rank
        return [2 * number + rank] * len(batch)

    def in_three(rank, number, batch):
        assert len(batch) == 1
        return [2 * number + rank // 2]

    (two, _), (three, *_) = on(2, (2, 1), doubled), on(3, None, in_three)
    assert apart([two], [three]) < CLOSE


def test_who_is_out_of_data_weighs_what_it_has_done_since_the_last_round():
    """A round after step 4; one with 4 and 1 more; the rest is the first worker's own."""
    keys = {"make": Counting, "loss": count}
    keys["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    for one in train("local-sgd:sync_every=4", 2, (10, 5), **keys):
        assert one.end.tolist() == pytest.approx([-((8 * 4 + 5 * 1) / 5 + 2)] * 18)


METHODS = [
    "local-sgd:sync_every=3",
    "post-local-sgd:sync_every=3,sync_each_step_until=2",
    "hierarchical-local-sgd:sync_every=4,group=2,group_every=2",
    "slowmo:sync_every=3",
    "diloco:sync_every=3",
    "diloco:sync_every=4,group=2,group_every=2",
    "streaming-diloco:sync_every=4,fragments=2,delay=1",
    "streaming-diloco:sync_every=4,fragments=1,delay=2,keep_local=0,nesterov=false,"
    "outer_learning_rate=1,outer_momentum=0",
    "streaming-diloco:sync_every=4,fragments=4,delay=0,keep_local=0.3",
]


@pytest.mark.parametrize(
    ("method", "steps"),
    crossed(2, METHODS, [(12, 12, 12), (7, 12, 3), (0, 0, 0), (0, 5, 1)]),
)
def test_all_end_with_one_model(method, steps):
    ends = [one.end for one in train(method, 3, steps)]
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert torch.equal(ends[0], flat(double())) == (max(steps) == 0)
