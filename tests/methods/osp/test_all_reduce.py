"""What scripts do beside training: looking, saving, writing; and models that are not plain."""

from __future__ import annotations

import pytest
import torch
from benchmarks.papers.osp_comparisons import compared
from torch import nn

import paceline
from paceline.errors import UsageError, WorkerFailedError
from paceline.testing import inspect
from tests.methods.osp.helpers import (
    ALL,
    FIRST_DEFERRED,
    HALF,
    MASKS,
    Gradients,
    decide_often,
)
from tests.support.tables import crossed
from tests.support.training import (
    STEPS,
    flat,
    inputs,
    loss_of,
    network,
    plain_sgd,
    sgd,
    simulate,
    train_alone,
    train_to_one_model,
)

SOME = ["0.5 random", "all"]
ALSO = [
    pytest.param(mask, marks=[] if mask in SOME else pytest.mark.slow) for mask in MASKS
]


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    decide_often(monkeypatch)


# ---- looking and saving ----


@pytest.mark.parametrize(
    "method", [*(MASKS[one] for one in SOME), compared("average", ALL)]
)
def test_looking_changes_nothing(method):
    """Evaluations, on all ranks or on one, and checkpoints in between."""

    def look(rank, step, model, optimizer):
        if step % 2 == rank % 2:
            before = flat(model)
            with optimizer.consolidated():
                with torch.no_grad():
                    model(inputs(9, step))
                optimizer.state_dict()
                with optimizer.consolidated():
                    pass
            with optimizer.consolidated():
                pass
            optimizer.state_dict()
            assert torch.equal(flat(model), before)

    expected = train_to_one_model(method, 3, optimizer=torch.optim.Adam)
    assert torch.equal(
        train_to_one_model(method, 3, optimizer=torch.optim.Adam, watch=look), expected
    )


@pytest.mark.parametrize(("mask", "kind"), crossed(2, SOME, [sgd, torch.optim.Adam]))
def test_consolidated_is_what_finish_would_give(mask, kind):
    """Parameters and the optimizer's state, on every rank."""
    seen = {}

    def watch(rank, step, model, optimizer):
        if step == 7:
            outside = optimizer.state_dict()["state"]
            with optimizer.consolidated():
                inside = optimizer.state_dict()["state"]
                seen[rank] = flat(model), inside
            _assert_equal(inside, outside)
            seen[f"tentative {rank}"] = flat(model)

    train_to_one_model(MASKS[mask], 3, optimizer=kind, watch=watch)

    def body(rank):
        model = network()
        optimizer = paceline.distribute(
            model, kind(model.parameters()), method=MASKS[mask], buckets="wfbp"
        )
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        optimizer.finish()
        return flat(model), optimizer.state_dict()["state"]

    for rank, (parameters, state) in enumerate(simulate(3, body)):
        assert torch.equal(seen[rank][0], parameters)
        _assert_equal(seen[rank][1], state)
        assert not torch.equal(seen[f"tentative {rank}"], parameters)


def _assert_equal(one, other):
    assert one.keys() == other.keys()
    for number, state in other.items():
        assert one[number].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(
                torch.as_tensor(one[number][name]), torch.as_tensor(value)
            )


def test_looking_between_backward_and_step_changes_nothing():
    def run(looks):
        def body(rank):
            model = network()
            optimizer = paceline.distribute(
                model, sgd(model.parameters()), method=HALF, buckets="wfbp"
            )
            for step in range(9):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                if looks:
                    with optimizer.consolidated():
                        pass
                optimizer.step()
            optimizer.finish()
            return flat(model)

        return simulate(2, body)[0]

    assert torch.equal(run(True), run(False))


def test_an_optimizer_goes_on_from_the_state_that_was_loaded():
    """Loading back what `state_dict` gave changes nothing, also while deferred."""

    def reload(rank, step, model, optimizer):
        optimizer.load_state_dict(optimizer.state_dict())

    for mask in SOME:
        plain = train_to_one_model(MASKS[mask], 2, optimizer=torch.optim.Adam)
        again = train_to_one_model(
            MASKS[mask], 2, optimizer=torch.optim.Adam, watch=reload
        )
        assert torch.equal(again, plain)


# ---- what is refused ----


def test_writing_into_what_is_deferred_is_refused():
    def write(rank, step, model, optimizer):
        if step == 5:
            with torch.no_grad():
                model[2].weight.mul_(2)

    with pytest.raises(WorkerFailedError, match=r"'2\.weight'"):
        train_to_one_model(ALL, 2, watch=write)


def test_what_is_not_deferred_may_be_written_to():
    def write(rank, step, model, optimizer):
        with torch.no_grad():
            model[0].bias.fill_(0.25)

    method = "osp:collective=native,defer=nothing"
    end = train_to_one_model(method, 2, watch=write)
    assert torch.equal(end, train_to_one_model("bsp", 2, watch=write))


def test_a_step_while_the_exact_parameters_are_looked_at_is_refused():
    def body(rank):
        model = network()
        optimizer = paceline.distribute(
            model, sgd(model.parameters()), method=ALL, buckets="wfbp"
        )
        with (
            optimizer.consolidated(),
            pytest.raises(UsageError, match=r"step\(\) inside consolidated"),
        ):
            optimizer.step()

    simulate(2, body)


def test_an_optimizer_that_cannot_be_applied_in_pieces_is_refused():
    with pytest.raises(WorkerFailedError, match=r"LBFGS.*piece by piece"):
        train_to_one_model(ALL, 1, optimizer=torch.optim.LBFGS)


def test_an_optimizer_of_whole_tensors_gets_whole_tensors():
    class Matrices(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(6, 7, bias=False)
            self.b = nn.Linear(7, 3, bias=False)

        def forward(self, x):
            return self.b(self.a(x).tanh())

    options = {
        "make": Matrices,
        "optimizer": lambda p: torch.optim.Muon(p, lr=0.05),
    }
    end = train_to_one_model(ALL, 2, same=True, **options)
    assert torch.equal(end, train_alone(**options))


# ---- parameters that are not used, or not trained ----


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 6)
        self.never = nn.Linear(6, 3)
        self.first = nn.Linear(6, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x, with_first):
        hidden = self.stem(x).tanh()
        return self.head(hidden) + (self.first(hidden) if with_first else 0)


def branch_loss(only_rank):
    def loss(model, rank, step):
        x = inputs(rank, step)
        with_first = only_rank is not None and rank == only_rank and step % 3 == 0
        return (model(x, with_first) - x[:, :3].sin()).square().mean()

    return loss


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("mask", ALSO)
def test_what_no_rank_uses_does_not_move(mask):
    """Neither momentum nor decay moves it; what is used somewhere in some steps is moved
    in those steps only."""
    gone = []

    def watch(rank, step, model, optimizer):
        gone.append(model.never.weight.grad is None)

    start = Branches()
    parts = [p.numel() for p in start.parameters()]
    for only_rank in (None, 0, 1):
        end = train_to_one_model(
            MASKS[mask],
            2,
            make=Branches,
            optimizer=decaying,
            loss=branch_loss(only_rank),
            watch=watch,
        ).split(parts)
        names = [name for name, _ in start.named_parameters()]
        moved = {
            name: not torch.equal(part, parameter.detach().double().reshape(-1))
            for name, part, parameter in zip(
                names, end, start.parameters(), strict=True
            )
        }
        assert not moved["never.weight"]
        assert not moved["never.bias"]
        assert moved["first.weight"] == (only_rank is not None)
        assert moved["head.weight"]
    assert all(gone)


@pytest.mark.parametrize("mask", MASKS)
def test_one_worker_uses_its_branches_as_in_plain_torch(mask):
    options = {"make": Branches, "optimizer": decaying, "loss": branch_loss(0)}
    assert torch.equal(
        train_to_one_model(MASKS[mask], 1, **options), train_alone(**options)
    )


def test_a_branch_of_one_rank_is_a_part_of_the_mean():
    """Nothing deferred: equal to bsp. All deferred on a plain optimizer: the start minus
    all mean gradients, with zeros from who did not use it."""
    options = {"make": Branches, "optimizer": decaying, "loss": branch_loss(1)}
    nothing = "osp:collective=native,defer=nothing"
    assert torch.equal(
        train_to_one_model(nothing, 3, **options),
        train_to_one_model("bsp", 3, **options),
    )
    options["optimizer"] = plain_sgd
    options["loss"] = loss = Gradients(3, 10, branch_loss(1))
    end = train_to_one_model(ALL, 3, steps=10, **options)
    expected = flat(Branches())
    for own in loss.own:
        expected = expected - 0.1 * torch.stack(own).mean(0)
    torch.testing.assert_close(end, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", SOME)
def test_a_step_without_a_loss_on_one_rank(mask):
    """Its gradients are zeros: the others' count in full weight of n."""

    def sometimes(model, rank, step):
        return None if rank == 1 and step % 4 == 3 else loss_of(model, rank, step)

    start, end = flat(network()), train_to_one_model(MASKS[mask], 2, loss=sometimes)
    assert torch.isfinite(end).all()
    assert not torch.equal(start, end)
    nothing = "osp:collective=native,defer=nothing"
    assert torch.equal(
        train_to_one_model(nothing, 2, loss=sometimes),
        train_to_one_model("bsp", 2, loss=sometimes),
    )


@pytest.mark.parametrize("mask", SOME)
def test_frozen_parameters_and_those_the_optimizer_does_not_have(mask):
    def frozen():
        model = Branches()
        model.stem.requires_grad_(False)
        return model

    loss = branch_loss(0)
    end = train_to_one_model(MASKS[mask], 2, make=frozen, loss=loss)
    stem = sum(p.numel() for p in Branches().stem.parameters())
    assert torch.equal(end[:stem], flat(Branches())[:stem])
    assert not torch.equal(end[-3:], flat(Branches())[-3:])

    def body(rank):
        """The stem is the model's, not the optimizer's: it stays, and its neighbours do
        as if it were frozen."""
        model = Branches()
        rest = [p for n, p in model.named_parameters() if not n.startswith("stem")]
        optimizer = paceline.distribute(
            model, sgd(rest), method=MASKS[mask], buckets="ddp"
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        optimizer.finish()
        return flat(model)

    for one in simulate(2, body):
        torch.testing.assert_close(one, end, rtol=0, atol=0)


# ---- kinds of tensors and models ----


class Mixed(nn.Module):
    """Three types, a convolution in another memory format, a transposed parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        conv = nn.Conv2d(2, 3, 3, bias=False)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.low = nn.Linear(6, 7).bfloat16()
        self.exact = nn.Linear(7, 3).double()
        self.turned = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x):
        image = x.reshape(1, 1, 5, 6).expand(1, 2, 5, 6)
        out = self.conv(image).mean((0, 2, 3))
        hidden = self.low(x.bfloat16()).tanh().double()
        return self.exact(hidden) + out.double() + self.turned.double().sum(1)


def mixed_loss(model, rank, step):
    return (model(inputs(rank, step)) - 0.5).square().mean()


@pytest.mark.parametrize(("mask", "kind"), crossed(2, SOME, [sgd, torch.optim.AdamW]))
def test_kinds_of_tensors(mask, kind):
    options = {"make": Mixed, "loss": mixed_loss, "optimizer": kind}
    model = Mixed()
    assert not model.turned.is_contiguous()
    assert not model.conv.weight.is_contiguous()
    expected = train_alone(**options)
    assert torch.equal(train_to_one_model(MASKS[mask], 1, **options), expected)
    assert torch.equal(
        train_to_one_model(MASKS[mask], 2, same=True, **options), expected
    )
    nothing = "osp:collective=native,defer=nothing"
    assert torch.equal(
        train_to_one_model(nothing, 2, **options),
        train_to_one_model("bsp", 2, **options),
    )
    plain = train_to_one_model(compared("plain", ALL), 2, **options)
    assert torch.isfinite(plain).all()


def test_a_parameter_that_is_used_twice_and_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
            self.other.weight = self.one.weight

        def forward(self, x):
            return self.other(self.one(self.one(x)).tanh())[:, :3]

    for mask in SOME:
        expected = train_alone(make=Tied)
        assert torch.equal(train_to_one_model(MASKS[mask], 1, make=Tied), expected)
        assert torch.equal(
            train_to_one_model(MASKS[mask], 4, make=Tied, same=True), expected
        )


def test_groups_have_their_own_rates():
    def grouped(parameters):
        several = list(parameters)
        return torch.optim.SGD(
            [
                {"params": several[:1], "lr": 0.3, "momentum": 0.5},
                {"params": several[1:], "weight_decay": 0.1},
            ],
            lr=0.05,
            momentum=0.9,
        )

    for mask in SOME:
        expected = train_alone(optimizer=grouped)
        assert torch.equal(
            train_to_one_model(MASKS[mask], 1, optimizer=grouped), expected
        )
        end = train_to_one_model(MASKS[mask], 4, optimizer=grouped, same=True)
        assert torch.equal(end, expected)


# ---- compression: each piece keeps its own error feedback ----

ROUNDS = 12
CODE = "int8:rounding=nearest,error_feedback=true"


class Sums(nn.Module):
    """Gradients are what it is called with, whatever the parameters are."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(12, 20, dtype=torch.float64))
        self.vector = torch.nn.Parameter(torch.zeros(30, dtype=torch.float64))

    def forward(self, matrix, vector):
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


def gradients_of(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((12, 20), (30,))
    ]


@pytest.mark.parametrize("mask", [HALF, ALL], ids=["half", "all"])
def test_what_was_applied_and_what_is_left_are_all_gradients(mask):
    """Also where a piece is late in one step and in time in the next one."""
    kept = {}

    def body(rank):
        model = Sums()
        optimizer = paceline.distribute(
            model, plain_sgd(model.parameters()), method=mask, compression=CODE
        )
        for step in range(ROUNDS):
            optimizer.zero_grad()
            model(*gradients_of(rank, step)).backward()
            optimizer.step()
        optimizer.finish()
        (own,) = [
            one
            for one in inspect(optimizer).worker_states
            if one.name.startswith("compression.")
        ]
        kept[rank] = own.save()
        return [parameter.detach().clone() for parameter in model.parameters()]

    (first, other) = simulate(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for number, name in enumerate(("matrix", "vector")):
        left = torch.zeros_like(first[number]).view(-1)
        for states in kept.values():
            for key, state in states.items():
                start, stop = 0, left.numel()
                if key.startswith(f"{name}["):
                    start, stop = map(int, key[len(name) + 1 : -1].split(":"))
                if key == name or key.startswith(f"{name}["):
                    left[start:stop] += state["residual"].view(-1)
        total = sum(
            gradients_of(r, s)[number] / 2 for r in (0, 1) for s in range(ROUNDS)
        )
        applied = -first[number] / 0.1
        assert left.any()
        assert ROUNDS > FIRST_DEFERRED
        torch.testing.assert_close(applied + left.view(applied.shape), total)
