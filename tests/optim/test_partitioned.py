"""The optimizer applied piece by piece: torch's bits, torch's checkpoints."""

import copy
import random

import pytest
import torch
from torch import optim

from paceline.errors import UsageError
from paceline.optim.partitioned import (
    ELEMENTWISE,
    REFUSED,
    WHOLE_TENSOR,
    PartitionedOptimizer,
    Piece,
    check_applicable,
    check_splittable,
    split_pieces,
    whole_pieces,
)

# A schedule complains unless its own optimizer steps; here an updater does.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")

STEPS = 10
SHAPES = [(37, 53), (1000,), (), (3, 5, 7), (1,), (129,)]
SPLIT_AT = 3
"""Parameters before this one are in the first group, the others in the second."""

# Optimizer, its hyperparameters, what the second group has instead, what moves beside lr.
ELEMENTWISE_CASES = {
    "sgd": (optim.SGD, {}, {"weight_decay": 0.1}),
    "sgd-momentum": (optim.SGD, {"momentum": 0.9}, {"weight_decay": 0.1}),
    "sgd-nesterov": (
        optim.SGD,
        {"momentum": 0.9, "nesterov": True},
        {"nesterov": False},
    ),
    "sgd-dampening": (optim.SGD, {"momentum": 0.9, "dampening": 0.3}, {"dampening": 0}),
    "sgd-maximize": (
        optim.SGD,
        {"momentum": 0.9, "maximize": True, "weight_decay": 0.1},
        {"maximize": False},
    ),
    "adam": (optim.Adam, {}, {"eps": 1e-6}),
    "adam-decay": (optim.Adam, {"weight_decay": 0.1, "maximize": True}, {"eps": 1e-6}),
    "adam-amsgrad": (optim.Adam, {"amsgrad": True}, {"amsgrad": False}),
    "adamw": (optim.AdamW, {}, {"weight_decay": 0.3}),
    "adamw-amsgrad": (optim.AdamW, {"amsgrad": True}, {"maximize": True}),
    "nadam": (optim.NAdam, {}, {"weight_decay": 0.1}),
    "nadam-decoupled": (
        optim.NAdam,
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"momentum_decay": 0.01},
    ),
    "radam": (optim.RAdam, {}, {"weight_decay": 0.1}),
    "adamax": (optim.Adamax, {}, {"weight_decay": 0.1}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1}, {"weight_decay": 0.1}),
    "adadelta": (optim.Adadelta, {}, {"weight_decay": 0.1, "rho": 0.8}),
    "rmsprop": (optim.RMSprop, {}, {"weight_decay": 0.1}),
    "rmsprop-centered": (
        optim.RMSprop,
        {"centered": True, "momentum": 0.9},
        {"centered": False},
    ),
    "rprop": (optim.Rprop, {}, {"etas": (0.4, 1.3)}),
    "asgd": (optim.ASGD, {"t0": 4}, {"weight_decay": 0.1, "lambd": 0.01}),
}
FUSED = {optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad}
WHOLE_TENSOR_CASES = {
    "muon": (optim.Muon, {}, {"nesterov": False}),
    "adafactor": (optim.Adafactor, {}, {"weight_decay": 0.1}),
}


CASES = [
    (name, way)
    for name, (kind, *_) in ELEMENTWISE_CASES.items()
    for way in ("", "foreach", *(["fused"] if kind in FUSED else []))
]


def cases(law):
    """All, for law 0, 1 or 2; each is fast under one of the three."""
    return [
        pytest.param(
            name,
            {way: True} if way else {},
            id=f"{name}-{way}" if way else name,
            marks=[pytest.mark.slow] if number % 3 != law else [],
        )
        for number, (name, way) in enumerate(CASES)
    ]


class Trainee:
    """Parameters, their optimizer and its schedule, without a model."""

    def __init__(self, name, extra, shapes=SHAPES, dtype=torch.float32):
        kind, first, second = {**ELEMENTWISE_CASES, **WHOLE_TENSOR_CASES}[name]
        generator = torch.Generator().manual_seed(0)
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape in shapes
        ]
        groups = [
            {"params": self.parameters[:SPLIT_AT]},
            {"params": self.parameters[SPLIT_AT:], **second},
        ]
        self.optimizer = kind(groups, **first, **extra)
        moves = "betas" in self.optimizer.defaults or first.get("momentum")
        self.schedule = optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            max_lr=[0.03, 0.01],
            total_steps=STEPS + 1,
            cycle_momentum=bool(moves),
        )

    def saved(self):
        """Everything, as a user saves it."""
        parameters = [parameter.detach().clone() for parameter in self.parameters]
        return parameters, self.optimizer.state_dict(), self.schedule.state_dict()

    def restore(self, saved):
        parameters, optimizer, schedule = copy.deepcopy(saved)
        for mine, theirs in zip(self.parameters, parameters, strict=True):
            mine.data.copy_(theirs)
        self.optimizer.load_state_dict(optimizer)
        self.schedule.load_state_dict(schedule)

    def step(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()
        self.schedule.step()


def gradients_of(step, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def odd_pieces(trainee, seed=0):
    """Every parameter cut at odd places, so that vector loops leave elements over.

    Fused kernels on a CPU allow cuts at multiples of 64 bytes only.
    """
    rng = random.Random(seed)
    unit = 16 if trainee.optimizer.defaults.get("fused") else 1
    pieces = []
    for number, parameter in enumerate(trainee.parameters):
        size = parameter.numel()
        places = range(unit, size, unit)
        cuts = sorted(rng.sample(places, min(len(places), 4)))
        pieces += [
            Piece(number, start, stop)
            for start, stop in zip([0, *cuts], [*cuts, size], strict=True)
        ]
    return pieces


def cut(gradients, piece):
    return gradients[piece.parameter].reshape(-1)[piece.start : piece.stop]


def same_bits(one, other):
    """Equal, down to types, shapes and the sign of zero."""
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert torch.equal(torch.signbit(one), torch.signbit(other))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same_bits(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same_bits(*pair)
    else:
        assert one == other


def apply_step(updater, pieces, gradients, **options):
    parts = [cut(gradients, piece) for piece in pieces]
    return updater.apply(pieces, parts, updater.hyperparameters(), **options)


@pytest.mark.parametrize(("name", "extra"), cases(0))
def test_split_application_is_one_step(name, extra):
    plain, split = Trainee(name, extra), Trainee(name, extra)
    pieces = odd_pieces(split)
    updater = PartitionedOptimizer(split.optimizer, pieces)
    rng = random.Random(1)
    for step in range(STEPS):
        gradients = gradients_of(step)
        plain.step(gradients)
        order = rng.sample(pieces, len(pieces))
        for part in (order[:1], order[1:8], order[8:]):
            apply_step(updater, part, gradients)
        split.schedule.step()
        same_bits(split.parameters, plain.parameters)
    same_bits(split.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.mark.parametrize(("name", "extra"), cases(1))
def test_deferred_application_is_one_step(name, extra):
    plain, split = Trainee(name, extra), Trainee(name, extra)
    pieces = odd_pieces(split)
    updater = PartitionedOptimizer(split.optimizer, pieces)
    kept = []
    for step in range(STEPS):
        gradients = gradients_of(step)
        plain.step(gradients)
        kept.append((gradients, updater.hyperparameters()))
        split.schedule.step()
    for part in (pieces[8:], pieces[:8]):  # the second part is 10 steps behind
        for gradients, hyperparameters in kept:
            updater.apply(part, [cut(gradients, p) for p in part], hyperparameters)
    same_bits(split.parameters, plain.parameters)
    same_bits(split.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.mark.parametrize(("name", "extra"), cases(2))
def test_a_tentative_step_changes_nothing_and_foretells_the_real_one(name, extra):
    trainee = Trainee(name, extra)
    pieces = odd_pieces(trainee)
    updater = PartitionedOptimizer(trainee.optimizer, pieces)
    for step in range(3):
        gradients = gradients_of(step)
        some = pieces[1::2]
        before = copy.deepcopy([trainee.parameters, updater.state(pieces)])
        foretold = apply_step(updater, some, gradients, commit=False)
        same_bits([trainee.parameters, updater.state(pieces)], before)
        apply_step(updater, pieces, gradients)
        trainee.schedule.step()
        same_bits(gradients, gradients_of(step))  # they were only read
        for piece, values in zip(some, foretold, strict=True):
            same_bits(cut(trainee.parameters, piece).detach(), values.reshape(-1))
        moved = [
            not torch.equal(values.reshape(-1), cut(before[0], piece))
            for piece, values in zip(some, foretold, strict=True)
        ]
        assert sum(moved) > len(some) / 2  # Rprop rests where a gradient's sign turns


@pytest.mark.parametrize("name", WHOLE_TENSOR_CASES)
def test_whole_tensor_optimizers_go_tensor_by_tensor(name):
    shapes = [(8, 5), (6, 6), (7, 3), (4, 9)]
    plain, whole = Trainee(name, {}, shapes), Trainee(name, {}, shapes)
    pieces = split_pieces(whole.optimizer, 16)
    assert pieces == whole_pieces(whole.optimizer)
    updater = PartitionedOptimizer(whole.optimizer, pieces)
    for step in range(STEPS):
        gradients = gradients_of(step, shapes)
        plain.step(gradients)
        for part in (pieces[2:], pieces[:1], pieces[1:2]):
            apply_step(updater, part, gradients)
        whole.schedule.step()
    same_bits(whole.parameters, plain.parameters)
    same_bits(whole.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.mark.parametrize("extra", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("name", ["sgd-momentum", "adam-amsgrad"])
def test_where_threads_meet_inside_a_tensor_bits_are_the_same(name, extra):
    shapes = [(100_003,), (3,), (2,), (70_001,)]
    plain, split = Trainee(name, extra, shapes), Trainee(name, extra, shapes)
    pieces = odd_pieces(split)
    updater = PartitionedOptimizer(split.optimizer, pieces)
    for step in range(3):
        gradients = gradients_of(step, shapes)
        plain.step(gradients)
        apply_step(updater, pieces, gradients)
        split.schedule.step()
    same_bits(split.parameters, plain.parameters)


# ---- checkpoints: torch's own form ----


@pytest.mark.parametrize(
    ("name", "extra"),
    [*((name, {}) for name in ELEMENTWISE_CASES), ("adam-amsgrad", {"fused": True})],
)
def test_checkpoints_go_to_plain_torch_and_back(name, extra):
    plain, split, last = (Trainee(name, extra) for _ in range(3))
    pieces = odd_pieces(split)
    updater = PartitionedOptimizer(split.optimizer, pieces)
    apply_step(updater, pieces[:3], gradients_of(99))  # what loading must replace

    for step in range(3):
        plain.step(gradients_of(step))
    split.restore(plain.saved())
    same_bits(split.optimizer.state_dict(), plain.optimizer.state_dict())
    for step in range(3, 6):
        plain.step(gradients_of(step))
        apply_step(updater, pieces, gradients_of(step))
        split.schedule.step()
    saved = split.saved()
    same_bits(saved, plain.saved())
    before = copy.deepcopy(saved)
    apply_step(updater, pieces, gradients_of(6))
    same_bits(saved, before)  # a checkpoint does not change with later steps

    last.restore(saved)
    plain.step(gradients_of(6))
    last.step(gradients_of(6))
    same_bits(last.parameters, plain.parameters)
    same_bits(split.parameters, plain.parameters)


def test_loading_a_fresh_optimizer_forgets_the_state():
    trainee = Trainee("adam", {})
    fresh = trainee.saved()
    pieces = odd_pieces(trainee)
    updater = PartitionedOptimizer(trainee.optimizer, pieces)
    apply_step(updater, pieces, gradients_of(0))
    assert trainee.optimizer.state_dict()["state"].keys() == set(range(len(SHAPES)))
    trainee.restore(fresh)
    same_bits(trainee.saved(), fresh)


@pytest.mark.parametrize("name", ["sgd-momentum", "adam-amsgrad", "asgd"])
def test_an_updater_takes_the_state_over_and_gives_it_back(name):
    plain, split = Trainee(name, {}), Trainee(name, {})
    pieces = odd_pieces(split)
    for step in range(6):
        plain.step(gradients_of(step))
    split.step(gradients_of(0))
    for seed in (0, 1):  # two updaters in turn, with other pieces
        pieces = odd_pieces(split, seed)
        updater = PartitionedOptimizer(split.optimizer, pieces)
        assert not split.optimizer.state
        for step in (1 + 2 * seed, 2 + 2 * seed):
            apply_step(updater, pieces, gradients_of(step))
            split.schedule.step()
        updater.close()
    split.step(gradients_of(5))
    same_bits(split.saved(), plain.saved())


def test_a_state_dict_in_the_middle_of_a_step_is_refused():
    trainee = Trainee("adam", {})
    pieces = odd_pieces(trainee)
    updater = PartitionedOptimizer(trainee.optimizer, pieces)
    apply_step(updater, pieces[:1], gradients_of(0))
    with pytest.raises(UsageError, match=r"parameter 0 .* only some have taken"):
        trainee.optimizer.state_dict()
    apply_step(updater, pieces[1:], gradients_of(0))
    assert trainee.optimizer.state_dict()["state"][0]["step"] == 1
    apply_step(updater, pieces[:1], gradients_of(1))
    with pytest.raises(UsageError, match=r"differ in 'step'"):
        trainee.optimizer.state_dict()


def test_the_state_of_another_model_is_refused():
    trainee, other = Trainee("adam", {}), Trainee("adam", {}, [(2,)] * len(SHAPES))
    other.step(gradients_of(0, [(2,)] * len(SHAPES)))
    PartitionedOptimizer(trainee.optimizer, odd_pieces(trainee))
    with pytest.raises(UsageError, match=r"'exp_avg' to have its shape \(37, 53\)"):
        trainee.optimizer.load_state_dict(other.optimizer.state_dict())


def test_loading_fused_onto_pieces_that_it_cannot_have_is_refused():
    trainee, other = Trainee("adam", {}), Trainee("adam", {"fused": True})
    other.step(gradients_of(0))
    PartitionedOptimizer(trainee.optimizer, odd_pieces(trainee))
    with pytest.raises(UsageError, match=r"fused=True on a CPU .* multiples of 16"):
        trainee.optimizer.load_state_dict(other.optimizer.state_dict())


def test_frozen_parameters_keep_what_state_they_have():
    trainee = Trainee("adam", {})
    trainee.step(gradients_of(0))
    trainee.parameters[0].requires_grad_(False)
    before = copy.deepcopy(trainee.optimizer.state_dict()["state"][0])
    pieces = split_pieces(trainee.optimizer, 400)
    assert {piece.parameter for piece in pieces} == {1, 2, 3, 4, 5}
    updater = PartitionedOptimizer(trainee.optimizer, pieces)
    apply_step(updater, pieces, gradients_of(1))
    saved = trainee.optimizer.state_dict()["state"]
    same_bits(saved[0], before)
    assert saved[1]["step"] == 2


# ---- state and hyperparameters ----


def test_state_is_live_and_writable():
    trainee = Trainee("sgd-momentum", {})
    pieces = odd_pieces(trainee)
    updater = PartitionedOptimizer(trainee.optimizer, pieces)
    apply_step(updater, pieces, gradients_of(0))
    for state in updater.state(pieces):
        state["momentum_buffer"].zero_()
    before = copy.deepcopy(trainee.parameters)
    gradients = gradients_of(1)
    apply_step(updater, pieces, gradients)
    lr = trainee.optimizer.param_groups[0]["lr"]
    expected = before[0] - lr * gradients[0]  # no momentum, no decay in this group
    torch.testing.assert_close(trainee.parameters[0], expected)


def test_state_written_before_the_first_step_is_used():
    trainee = Trainee("sgd-momentum", {})
    (first, *_) = pieces = whole_pieces(trainee.optimizer)
    updater = PartitionedOptimizer(trainee.optimizer, pieces)
    updater.state([first])[0]["momentum_buffer"] = torch.ones(SHAPES[0])
    (values,) = apply_step(updater, [first], gradients_of(0), commit=False)
    group = trainee.optimizer.param_groups[0]
    moved = group["momentum"] * 1 + gradients_of(0)[0]
    expected = trainee.parameters[0] - group["lr"] * moved
    torch.testing.assert_close(values, expected.detach())


def test_a_snapshot_is_of_its_moment():
    lr = torch.tensor(0.1)
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = optim.AdamW([("weight", parameter)], lr=lr, weight_decay=0.5)
    updater = PartitionedOptimizer(optimizer, [Piece(0, 0, 2), Piece(0, 2, 5)])
    (snapshot,) = updater.hyperparameters()
    lr.fill_(0.7)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert snapshot["lr"] == torch.tensor(0.1)
    assert snapshot["weight_decay"] == 0.5
    assert snapshot["betas"] == (0.9, 0.999)
    assert not {"params", "param_names", "foreach", "fused"} & snapshot.keys()


def test_the_users_hooks_do_not_run_for_every_call():
    trainee = Trainee("sgd", {})
    calls = []
    trainee.optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    pieces = whole_pieces(trainee.optimizer)
    updater = PartitionedOptimizer(trainee.optimizer, pieces)
    apply_step(updater, pieces, gradients_of(0))
    assert calls == []


# ---- storage ----


@pytest.mark.parametrize("extra", [{}, {"foreach": True}, {"fused": True}])
def test_parameters_that_are_not_contiguous_go_whole(extra):
    def make():
        torch.manual_seed(0)
        turned = torch.nn.Parameter(torch.randn(17, 33).t())
        last = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
        return [turned, torch.nn.Parameter(last)]

    plain, whole = make(), make()
    reference = optim.Adam(plain, lr=0.1, **extra)
    optimizer = optim.Adam(whole, lr=0.1, **extra)
    pieces = split_pieces(optimizer, 64)
    assert pieces == [Piece(0, 0, 561), Piece(1, 0, 300)]
    updater = PartitionedOptimizer(optimizer, pieces)
    for _ in range(3):
        flat = [torch.randn(561), torch.randn(300)]
        for parameter, gradient in zip(plain, flat, strict=True):
            parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(gradient.view(parameter.shape))
        reference.step()
        updater.apply(pieces, flat, updater.hyperparameters())
    same_bits(whole, plain)
    same_bits(optimizer.state_dict(), reference.state_dict())
    updater.close()
    with pytest.raises(UsageError, match=r"shape \(33, 17\)\) is not contiguous"):
        PartitionedOptimizer(optimizer, [Piece(0, 0, 9), Piece(0, 9, 561), pieces[1]])


def test_pieces_follow_a_parameter_whose_storage_was_replaced():
    trainee, plain = Trainee("adam", {}), Trainee("adam", {})
    pieces = odd_pieces(trainee)
    updater = PartitionedOptimizer(trainee.optimizer, pieces)
    for step in range(2):
        plain.step(gradients_of(step))
        apply_step(updater, pieces, gradients_of(step))
        trainee.schedule.step()
        for parameter in trainee.parameters:
            parameter.data = parameter.data.clone()
    same_bits(trainee.parameters, plain.parameters)
    trainee.parameters[1].data = trainee.parameters[1].data.double()
    with pytest.raises(
        UsageError, match=r"is torch.float64 on cpu: expected torch.float32 on cpu"
    ):
        apply_step(updater, pieces, gradients_of(2))


# ---- pieces ----


def optimizer_over(*shapes, kind=optim.SGD, dtype=torch.float32, **options):
    parameters = [torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes]
    return kind(parameters, lr=0.1, **options)


def sizes(pieces):
    return [piece.stop - piece.start for piece in pieces]


def test_pieces_are_as_equal_as_elements_allow():
    optimizer = optimizer_over((10,), (3, 3), (), (0,))
    pieces = split_pieces(optimizer, 16)
    assert sizes(pieces) == [3, 3, 4, 3, 3, 3, 1]
    assert pieces[:2] == [Piece(0, 0, 3), Piece(0, 3, 6)]
    assert sizes(whole_pieces(optimizer)) == [10, 9, 1]
    assert sizes(split_pieces(optimizer, 4)) == [1] * 20
    with pytest.raises(UsageError, match="expected 4 bytes or more"):
        split_pieces(optimizer, 3)


def test_what_must_not_be_cut_anywhere_is_not():
    fused = optimizer_over((100,), fused=True)
    assert sizes(split_pieces(fused, 150)) == [16, 32, 32, 20]
    with pytest.raises(UsageError, match="expected 64 bytes or more"):
        split_pieces(fused, 63)
    short = optimizer_over((100,), dtype=torch.bfloat16)
    assert sizes(split_pieces(short, 1)) == [100]
    with pytest.raises(UsageError, match=r"is torch.bfloat16 on a CPU"):
        PartitionedOptimizer(short, [Piece(0, 0, 64), Piece(0, 64, 100)])
    muon = optimizer_over((10, 10), kind=optim.Muon)
    assert sizes(split_pieces(muon, 1)) == [100]
    with pytest.raises(UsageError, match="Muon"):
        PartitionedOptimizer(muon, [Piece(0, 0, 50), Piece(0, 50, 100)])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 0, 4), (0, 6, 10), (1, 0, 5)], r"\[4, 6\) of parameter 0 in none"),
        ([(0, 0, 7), (0, 5, 10), (1, 0, 5)], r"\[5, 7\) of parameter 0 in two"),
        (
            [(0, 0, 9), (0, 2, 3), (0, 9, 10), (1, 0, 5)],
            r"\[2, 3\) of parameter 0 in two",
        ),
        ([(0, 0, 10), (0, 0, 10), (1, 0, 5)], r"\[0, 10\) of parameter 0 in two"),
        ([(0, 0, 10)], r"\[0, 5\) of parameter 1 in none"),
        ([(0, 0, 10), (1, 0, 3)], r"\[3, 5\) of parameter 1 in none"),
        ([(0, 0, 10), (1, 1, 5)], r"\[0, 1\) of parameter 1 in none"),
        ([(1, i, i + 1) for i in (0, 2, 4)], r"in none, .* in none, .* in none"),
        ([(0, 0, 11), (1, 0, 5)], r"0 <= start < stop <= 10"),
        ([(0, 0, 10), (1, 0, 0), (1, 0, 5)], r"0 <= start < stop <= 5"),
        ([(0, 0, 10), (1, 0, 5), (2, 0, 1)], r"parameter=2.* trainable parameter"),
    ],
)
def test_pieces_that_do_not_tile_are_refused(pieces, message):
    with pytest.raises(UsageError, match=message):
        PartitionedOptimizer(optimizer_over((2, 5), (5,)), [Piece(*p) for p in pieces])


class OwnSGD(optim.SGD):
    """A subclass may do anything in its step."""


def test_optimizers_that_only_a_worker_can_run_are_refused():
    cases = [
        (optimizer_over((2,), kind=optim.LBFGS), "LBFGS .* line"),
        (optimizer_over((2,), kind=optim.SparseAdam), "SparseAdam .* sparse"),
        (optimizer_over((2,), kind=OwnSGD), "OwnSGD is not known"),
        (optimizer_over((2,), differentiable=True), "differentiable=True"),
    ]
    for optimizer, reason in cases:
        for check in (check_applicable, check_splittable):
            with pytest.raises(UsageError, match=f"{reason}.*whose worker updates"):
                check(optimizer)
        with pytest.raises(UsageError, match=reason):
            PartitionedOptimizer(optimizer, [Piece(0, 0, 2)])


def test_every_optimizer_of_torch_is_in_one_table():
    tables = [*ELEMENTWISE, *WHOLE_TENSOR, *REFUSED]
    known = {
        kind
        for kind in vars(optim).values()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    } - {optim.Optimizer}
    assert sorted(map(str, tables)) == sorted(map(str, known))
    assert {kind for kind, *_ in ELEMENTWISE_CASES.values()} == ELEMENTWISE


def test_an_optimizer_has_one_updater():
    trainee = Trainee("sgd", {})
    pieces = whole_pieces(trainee.optimizer)
    PartitionedOptimizer(trainee.optimizer, pieces)
    with pytest.raises(UsageError, match="another PartitionedOptimizer"):
        PartitionedOptimizer(trainee.optimizer, pieces)


# ---- what a call refuses ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pieces": [Piece(0, 0, 3)]},
            r"Piece\(.*\).* 2 pieces",
        ),
        ({"pieces": [Piece(0, 0, 4)] * 2}, "2 pieces, 1 different ones"),
        ({"gradients": [torch.ones(4)]}, "2 pieces, 2 different ones, and 1 gradients"),
        (
            {"gradients": [torch.ones(4), torch.ones(4)]},
            r"shape \(6,\) .* shape \(4,\)",
        ),
        (
            {"gradients": [torch.ones(4), torch.ones(6).double()]},
            "got .* torch.float64",
        ),
        ({"gradients": [torch.ones(4), torch.ones(6).to_sparse()]}, "torch.sparse_coo"),
        ({"hyperparameters": []}, "of 1 parameter groups, got 0"),
        ({"hyperparameters": [{"lr": 1.0}]}, "dampening, maximize, momentum"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_and_changes_nothing(change, message):
    optimizer = optimizer_over((2, 5), momentum=0.9)
    pieces = [Piece(0, 0, 4), Piece(0, 4, 10)]
    updater = PartitionedOptimizer(optimizer, pieces)
    arguments = {
        "pieces": pieces,
        "gradients": [torch.ones(4), torch.ones(6)],
        "hyperparameters": updater.hyperparameters(),
    }
    with pytest.raises(UsageError, match=message):
        updater.apply(**{**arguments, **change})
    assert updater.state(pieces) == [{}, {}]
    assert not optimizer.param_groups[0]["params"][0].any()
    updater.apply(**arguments)
    assert optimizer.param_groups[0]["params"][0].all()


def test_gradients_come_flat_or_shaped():
    optimizer = optimizer_over((2, 5), momentum=0.9)
    (piece,) = whole_pieces(optimizer)
    updater = PartitionedOptimizer(optimizer, [piece])
    gradient = torch.arange(1.0, 11.0)
    flat, shaped = (
        updater.apply([piece], [g], updater.hyperparameters(), commit=False)[0]
        for g in (gradient, gradient.view(2, 5))
    )
    same_bits(flat, shaped)
    torch.testing.assert_close(flat, -0.1 * gradient.view(2, 5))
