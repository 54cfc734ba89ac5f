"""Methods that go past backward give bsp's result, to the bit."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.errors import WorkerFailedError
from tests.methods.forward_overlap.helpers import (
    adamw,
    perceptron,
    same,
    sgd,
    squares,
    train,
)
from tests.support.tables import crossed
from tests.support.training import simulate

METHODS = ["priority", "dear"]


def plain(method):
    """What adds up in the same order, and waits where backward ends."""
    return "bsp:collective=ring" if method == "dear" else "bsp"


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)


def accumulates(step, model, optimizer, x):
    with optimizer.no_sync():
        squares(model, x).backward()
    squares(model, x + 1).backward()


@pytest.mark.parametrize(
    ("method", "of"),
    [
        *crossed(
            2,
            METHODS,
            [
                (1, sgd, one_cycle),
                (2, adamw, one_cycle),
                (3, sgd, None),
                (4, adamw, None),
            ],
        ),
    ],
)
def test_50_steps_end_with_the_bits_of_bsp(method, of):
    workers, optimizer, schedule = of
    keys = {"steps": 50, "optimizer": optimizer, "schedule": schedule}
    keys["backward"] = accumulates if workers == 3 else None
    assert same(train(method, workers, **keys), train(plain(method), workers, **keys))


def evaluates(rank, step, model, optimizer, schedule):
    with torch.no_grad():
        return model(torch.ones(1, 6))


def reads_weights(rank, step, model, optimizer, schedule):
    return [p.detach().clone() for p in model.parameters()]


def reads_one_weight(rank, step, model, optimizer, schedule):
    return model[2].weight.norm()


def reads_state(rank, step, model, optimizer, schedule):
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()["state"]
    return kept, {i: one["momentum_buffer"].clone() for i, one in state.items()}


def writes(rank, step, model, optimizer, schedule):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)
        model[0].bias.data.mul_(0.5)


def calls_a_part(rank, step, model, optimizer, schedule):
    return model[2](torch.ones(8)).detach()


def flat(seen):
    if isinstance(seen, torch.Tensor):
        return [seen]
    values = seen.values() if isinstance(seen, dict) else seen or ()
    return [tensor for value in values for tensor in flat(value)]


@pytest.mark.parametrize(
    ("around", "method"),
    crossed(
        2,
        [evaluates, reads_weights, reads_one_weight, reads_state, writes, calls_a_part],
        METHODS,
    ),
)
def test_whoever_looks_after_a_step_sees_what_bsp_shows(method, around):
    mine = train(method, 2, around=around)
    theirs = train(plain(method), 2, around=around)
    assert same(mine, theirs)
    for (_, seen), (_, expected) in zip(mine, theirs, strict=True):
        pairs = list(zip(flat(seen), flat(expected), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs)
        assert pairs or around is writes


def clips(step, model, optimizer, x):
    squares(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def without_zeroing(step, model, optimizer, x):
    squares(model, x).backward()
    optimizer.zero_grad = lambda *_: None


def skips_steps(step, model, optimizer, x):
    """As a GradScaler does: a pass whose step never comes."""
    if step % 3 == 1:
        squares(model, 2 * x).backward()
        optimizer.unwrapped.zero_grad()
    squares(model, x).backward()


def penalizes(step, model, optimizer, x):
    penalty = sum(p.square().sum() for p in model.parameters())
    (squares(model, x) + penalty).backward()


@pytest.mark.parametrize(
    ("backward", "method"),
    crossed(
        2,
        [
            *(clips, without_zeroing, skips_steps, penalizes),
        ],
        METHODS,
    ),
)
def test_what_a_script_does_between_is_done_as_under_bsp(method, backward):
    keys = {"workers": 2, "backward": backward}
    assert same(train(method, **keys), train(plain(method), **keys))


def scaled(method):
    """Ends of a training with a GradScaler, whose gradients are infinite in two steps."""

    def body(rank):
        model = perceptron()
        optimizer = paceline.distribute(
            model, sgd(model), method=method, buckets="wfbp"
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        generator = torch.Generator().manual_seed(rank)
        for step in range(10):
            x = torch.randn(4, 6, generator=generator)
            if rank == 1 and step in (3, 4):
                x = x * torch.inf
            scaler.scale(squares(model, x)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.finish()
        return [p.detach().clone() for p in model.parameters()], scaler.get_scale()

    return simulate(2, body)


@pytest.mark.parametrize("method", METHODS)
def test_a_grad_scaler_skips_the_same_steps(method):
    mine, theirs = scaled(method), scaled("bsp")
    assert same(mine, theirs)
    assert [scale for _, scale in mine] == [scale for _, scale in theirs]
    assert all(parameter.isfinite().all() for parameter in mine[0][0])


class Tied(nn.Module):
    """A weight that is used twice, once without its module, and a module nobody calls."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.middle = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = self.middle(self.first(x)).relu() * self.scale
        return nn.functional.linear(x, self.first.weight)


def tied():
    torch.manual_seed(0)
    return Tied()


class InATwist(Tied):
    """Weights are used in another order in each pass, some without their module."""

    def forward(self, x):
        if x[0, 0] > 0:
            x = nn.functional.linear(x, self.middle.weight)
        else:
            x = self.unused(x)
        return super().forward(x)


def in_a_twist():
    torch.manual_seed(0)
    return InATwist()


@pytest.mark.parametrize(
    ("make", "workers", "method"), crossed(2, [tied, in_a_twist], [2, 3], METHODS)
)
def test_shared_and_unused_weights(method, make, workers):
    keys = {"workers": workers, "make": make, "optimizer": adamw}
    assert same(train(method, **keys), train(plain(method), **keys))


@pytest.mark.parametrize("method", METHODS)
def test_workers_whose_data_end_early(method):
    keys = {"workers": 3, "steps": [4, 9, 6], "make": in_a_twist}
    assert same(train(method, **keys), train(plain(method), **keys))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keys", [{"clip_norm": 0.1}, {"check_finite": True}])
def test_options_that_need_all_gradients_wait_for_them(method, keys):
    assert same(train(method, 2, **keys), train(plain(method), 2, **keys))


@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_that_takes_whole_tensors_and_has_groups(method):
    def muon_like(model):
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.01}, {"params": others, "lr": 0.1}]
        return torch.optim.Adafactor(groups)

    keys = {"workers": 2, "optimizer": muon_like}
    assert same(train(method, **keys), train(plain(method), **keys))


@pytest.mark.parametrize("method", METHODS)
def test_a_backward_pass_that_adds_to_gradients_under_way_is_refused(method):
    def two_passes(step, model, optimizer, x):
        one, two = squares(model, x), squares(model, -x)
        one.backward()
        two.backward()

    with pytest.raises(WorkerFailedError, match="forward pass"):
        train(method, 2, backward=two_passes)


class Scripted(nn.Module):
    """A part of it is code of torch.jit, which nothing sees into."""

    def __init__(self):
        super().__init__()
        self.first = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU()))
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        return self.second(self.first(x))


class Recurrent(nn.Module):
    """A module that hands all its weights to torch at once, and one that computes twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTM(6, 8), nn.TransformerEncoderLayer(8, 2, 8, 0)

    def forward(self, x):
        return checkpoint(self.second, self.first(x)[0], use_reentrant=False)


def compiled(part):
    def make():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = perceptron()
        if part == "whole":
            return torch.compile(model, backend="eager")
        if part == "in place":
            model.compile(backend="eager")
        elif part == "a block":
            model[2] = torch.compile(model[2], backend="eager")
        elif part == "a block in place":
            model[2].compile(backend="eager")
        return model

    return make


def seeded(kind):
    def make():
        torch.manual_seed(0)
        return kind()

    return make


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "make",
    [
        *(seeded(Scripted), seeded(Recurrent)),
        *(
            pytest.param(compiled(part), marks=pytest.mark.slow)
            for part in ("whole", "in place", "a block", "a block in place")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_models_that_use_weights_in_other_ways(method, make):
    assert same(train(method, 2, make=make), train(plain(method), 2, make=make))


@pytest.mark.parametrize("method", METHODS)
def test_copies_and_pickles_of_a_model_are_plain(method):
    def copied(rank, step, model, optimizer, schedule):
        twin = copy.deepcopy(model)
        thawed = pickle.loads(pickle.dumps(list(model.parameters())))
        kinds = {type(p) for p in [*twin.parameters(), *thawed]}
        assert kinds == {nn.Parameter}
        return [p.detach() for p in twin.parameters()] + [p.detach() for p in thawed]

    mine, theirs = (
        train(method, 2, around=copied),
        train(plain(method), 2, around=copied),
    )
    for (_, seen), (_, expected) in zip(mine, theirs, strict=True):
        pairs = zip(flat(seen), flat(expected), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_parameters_are_plain_again_after_finish():
    def kinds(model):
        return {type(parameter) for parameter in model.parameters()}

    def body(rank):
        model = perceptron()
        optimizer = paceline.distribute(
            model, sgd(model), method="priority", buckets="wfbp"
        )
        squares(model, torch.ones(4, 6)).backward()
        optimizer.step()
        watched = kinds(model)
        optimizer.finish()
        return watched, kinds(model)

    for watched, after in simulate(2, body):
        assert watched != {nn.Parameter}
        assert after == {nn.Parameter}
