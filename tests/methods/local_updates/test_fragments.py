"""The outer step, and what belongs to a parameter: its learning rate, moments and anchor."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import UsageError, WorkerFailedError
from paceline.methods.local_updates.fragments import (
    by_parameter,
    flatten_moments,
    learning_rates,
    optimizer_state_names,
)
from paceline.methods.model_averaging import ModelAverager
from paceline.testing.problems import Counting
from tests.methods.local_updates.helpers import (
    CLOSE,
    adam,
    apart,
    count,
    double,
    momentum,
    sgd,
    train,
)
from tests.support.training import flat, loss_of, network

# ---- the outer step ----


def alone(every, workers, steps, outer, make=double, optimizer=momentum):
    """The same program in plain torch, in one process: *outer* is given the anchors and the
    mean change of each, and moves the anchors. Returns the first worker's parameters."""
    models = [make() for _ in range(workers)]
    inner = [optimizer(model.parameters()) for model in models]
    anchors = [p.detach().clone() for p in models[0].parameters()]
    for step in range(steps):
        for rank, (model, own) in enumerate(zip(models, inner, strict=True)):
            own.zero_grad()
            loss_of(model, rank, step).backward()
            own.step()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            changes = []
            for number, anchor in enumerate(anchors):
                theirs = [list(model.parameters())[number] for model in models]
                changes.append(sum((anchor - p) * (1 / workers) for p in theirs))
            outer(anchors, changes)
            for model in models:
                for parameter, anchor in zip(model.parameters(), anchors, strict=True):
                    parameter.copy_(anchor)
    return flat(models[0])


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
    """To the bit, over 5 rounds of Adam."""

    def make():
        return network(dtype)

    options += f",outer_learning_rate={keys['lr']}"
    options += f",outer_momentum={keys.get('momentum', 0)}"
    method = f"diloco:sync_every=2{options}"
    plain = alone(2, workers, 10, torch_outer(**keys), make=make, optimizer=adam)
    for one in train(method, workers, 10, make=make, optimizer=adam):
        assert torch.equal(one.steps[-1], plain)


def test_an_outer_learning_rate_of_nought_never_moves_the_model():
    (one, other) = train("diloco:sync_every=2,outer_learning_rate=0", 2, 6)
    start = flat(double())
    assert torch.equal(one.steps[5], start)
    assert torch.equal(other.end, start)
    assert not torch.equal(one.steps[4], start)


COUNTS = {"make": lambda: Counting().double(), "loss": count, "optimizer": sgd}


def test_a_lasting_change_moves_the_model_seven_times_as_far_in_the_end():
    """eta (1 - b^(t+1)) / (1 - b) in round t: 1.33, 1.897, 2.407, ..."""
    rounds = 80
    one, _ = train("diloco:sync_every=2", 2, 2 * rounds, **COUNTS)
    places = [0.0] + [one.steps[2 * t - 1][0].item() for t in range(1, rounds + 1)]
    moved = [(before - after) / 0.2 for before, after in pairwise(places)]
    for t, gain in enumerate(moved, 1):
        assert gain == pytest.approx(0.7 * (1 - 0.9 ** (t + 1)) / 0.1, rel=1e-9)
    assert moved[-1] == pytest.approx(7.0, rel=1e-3)


def test_slowmo_is_heavy_ball_while_the_learning_rate_is_constant():
    rescaled = train("slowmo:sync_every=3", 3, 12)
    heavy = train("slowmo:sync_every=3,rescale=false", 3, 12)
    plain = train("local-sgd:sync_every=3", 3, 12)
    assert apart([rescaled[0].end], [heavy[0].end]) < CLOSE
    assert apart([rescaled[0].end], [plain[0].end]) > 1e-3


def test_slowmo_keeps_its_momentum_in_units_of_the_learning_rate_of_the_moment():
    """Each step moves a worker by the learning rate, so D/lr is 2 in a round of two steps;
    u is 2, 3, 3.5, and moves x by as many learning rates of then."""
    rates = [0.1, 0.1, 0.05, 0.05, 0.01, 0.01]
    one, _ = train("slowmo:sync_every=2", 2, 6, rates=rates, **COUNTS)
    expected = -(0.1 * 2 + 0.05 * 3 + 0.01 * 3.5)
    assert one.steps[-1][0].item() == pytest.approx(expected, rel=1e-12)


def test_each_parameter_group_has_its_own_unit():
    def two_rates(parameters):
        first, *others = parameters
        return torch.optim.SGD(
            [{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.01}], lr=1.0
        )

    (one,) = train("slowmo:sync_every=1", 1, 2, **COUNTS | {"optimizer": two_rates})
    moved = [0.1 * 2.5] * 12 + [0.01 * 2.5] * 6
    expected = -torch.tensor(moved, dtype=torch.float64)
    assert apart([one.steps[-1]], [expected]) < CLOSE


def test_a_learning_rate_that_ends_at_nought_gives_no_infinity(capsys):
    """The last round began before it was nought: what was moved stays, plainly."""
    rates = [0.1, 0.1, 0.1, 0.0, 0.0, 0.0]
    one, _ = train("slowmo:sync_every=2", 2, 6, rates=rates, **COUNTS)
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

    size = 2.0**-7
    keys = {"make": make, "loss": count}
    keys["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=size)
    outer = "outer_learning_rate=0.01,outer_momentum=0,nesterov=false"
    one, _ = train(f"diloco:sync_every=1,{outer}", 2, 100, **keys)
    assert one.steps[0][0].item() == 1.0
    assert one.steps[-1][0].item() == pytest.approx(1.0 - size, rel=1e-6)
    assert next(one.model.parameters()).dtype == torch.bfloat16


# ---- the inner optimizer's state ----


def moments_after_each_step(method, optimizer):
    """By rank and step, what the optimizer keeps of the first parameter."""
    seen = {}

    def watch(rank, step, model, wrapped):
        state = wrapped.state[next(iter(model.parameters()))]
        seen[rank, step] = {
            name: value.clone()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }

    train(method, 2, 4, optimizer=optimizer, watch=watch)
    return seen


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [(adam, {"exp_avg", "exp_avg_sq"}), (momentum, {"momentum_buffer"})],
)
def test_moments_are_each_worker_s_own_unless_they_are_averaged_in_rounds(
    optimizer, names
):
    own = moments_after_each_step("local-sgd:sync_every=2", optimizer)
    method = "local-sgd:sync_every=2,state=average"
    seen = moments_after_each_step(method, optimizer)
    for name in names:
        equal = [torch.equal(seen[0, n][name], seen[1, n][name]) for n in range(4)]
        assert equal == [False, True, False, True]
        assert not torch.equal(own[0, 1][name], own[1, 1][name])
        mean = (own[0, 1][name] + own[1, 1][name]) / 2
        assert apart([seen[0, 1][name]], [mean]) < CLOSE


def test_who_has_not_trained_yet_has_moments_of_nought_and_weighs_nothing():
    ends = train("local-sgd:sync_every=2,state=average", 2, (4, 0), optimizer=adam)
    (alone,) = train("local-sgd:sync_every=2", 1, 4, optimizer=adam)
    assert apart([ends[1].end], [alone.end]) < CLOSE


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [(sgd, "SGD keeps none of"), (torch.optim.LBFGS, "LBFGS cannot be tried")],
)
def test_an_optimizer_without_moments_is_refused(optimizer, words):
    with pytest.raises(WorkerFailedError, match=words) as caught:
        train("local-sgd:state=average", 2, 1, optimizer=optimizer)
    assert isinstance(caught.value.__cause__, UsageError)


def test_what_belongs_to_a_parameter_is_found_by_it_wherever_its_memory_is():
    """Two parameters that begin at one address, in groups of their own."""
    memory = torch.arange(6.0)
    first, second = (torch.nn.Parameter(memory[:size]) for size in (6, 2))
    assert first.data_ptr() == second.data_ptr()
    groups = [
        {"params": [first], "lr": 0.5, "momentum": 0.9},
        {"params": [second], "lr": 0.25, "momentum": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    run = SimpleNamespace(optimizer=optimizer, parameters=[first, second])
    model = ModelAverager([[second, first]])
    assert learning_rates(run, model.parameters[0].of) == [0.25, 0.5]
    names = {id(first): ["momentum_buffer"], id(second): []}
    assert optimizer_state_names(optimizer) == names
    first.grad = torch.ones(6)
    optimizer.step()
    (moments,) = flatten_moments(model, run)
    assert [moment.tolist() for moment in moments.of] == [[1.0] * 6]
    assert [len(value) for value in by_parameter(run, model.parameters)] == [6, 2]
