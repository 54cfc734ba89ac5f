"""`priority` and `dear`: whatever a script does between two steps, it has bsp's bits; their messages,
and what steps take in virtual time, by hand."""

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.errors import GradientError, WorkerFailedError
from paceline.interfaces import Message
from paceline.methods.forward_overlap import DeAR, HalvesWorker
from tests.support import forked
from tests.support.processes import SCRIPTS
from tests.support.simulations import LINK, cluster, rack
from tests.support.tables import crossed
from tests.support.training import sgd, train

METHODS = {"priority": "bsp", "dear": "bsp:collective=ring"}
"""Each with what adds up in the same order, and waits where backward ends."""


# ---- models: a script's forward is `squares` of them ----


def seeded(kind):
    def make():
        torch.manual_seed(0)
        return kind()

    return make


class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        )


class InATwist(nn.Module):
    """Weights are used in another order in each pass, one twice, some without their module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.middle, self.seldom = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        if x[0, 0] > 0:
            x = nn.functional.linear(x, self.middle.weight)
        else:
            x = self.seldom(x)
        x = self.middle(self.first(x)).relu() * self.scale
        return nn.functional.linear(x, self.first.weight)


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
        model = seeded(Perceptron)()
        if part == "whole":
            return torch.compile(model, backend="eager")
        if part == "in place":
            model.compile(backend="eager")
        elif part == "a block":
            model[2] = torch.compile(model[2], backend="eager")
        else:
            model[2].compile(backend="eager")
        return model

    return make


# ---- scripts: one step each ----


def squares(model, rank, step):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    return model(x).square().mean()


def plain(rank, step, model, optimizer):
    optimizer.zero_grad()
    squares(model, rank, step).backward()
    optimizer.step()


def clips(rank, step, model, optimizer):
    optimizer.zero_grad()
    squares(model, rank, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def never_zeroes(rank, step, model, optimizer):
    squares(model, rank, step).backward()
    optimizer.step()


def skips_steps(rank, step, model, optimizer):
    """As a GradScaler does: a pass whose step never comes."""
    if step % 3 == 1:
        (2 * squares(model, rank, step)).backward()
        optimizer.unwrapped.zero_grad()
    plain(rank, step, model, optimizer)


def penalizes(rank, step, model, optimizer):
    optimizer.zero_grad()
    penalty = sum(p.square().sum() for p in model.parameters())
    (squares(model, rank, step) + penalty).backward()
    optimizer.step()


def writes(rank, step, model, optimizer):
    plain(rank, step, model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)
        model[0].bias.data.mul_(0.5)


def ends(method, make=seeded(Perceptron), steps=9, optimizer=sgd, **settings):  # noqa: B008
    """What all workers end with; parameters are not looked at before, or they would be waited for."""
    keys = {"make": make, "optimizer": optimizer, "reads": False, "script": plain}
    workers = 2 if isinstance(steps, int) else len(steps)
    return torch.stack(
        [one.end for one in train(method, workers, steps, **keys | settings)]
    )


def assert_bits_of_bsp(method, **keys):
    mine = ends(method, **keys)
    assert torch.equal(mine, ends(METHODS[method], **keys))
    assert mine.isfinite().all()


@pytest.mark.parametrize(
    ("script", "method"),
    crossed(2, [clips, never_zeroes, skips_steps, penalizes, writes], METHODS),
)
def test_a_script_ends_with_the_bits_of_bsp(method, script):
    assert_bits_of_bsp(method, script=script)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "make",
    [
        *map(seeded, (InATwist, Scripted, Recurrent)),
        *(
            pytest.param(compiled(part), marks=pytest.mark.slow)
            for part in ("whole", "in place", "a block", "a block in place")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_uses_weights_in_its_own_way_ends_with_the_bits_of_bsp(
    method, make
):
    assert_bits_of_bsp(method, make=make)


def whole_tensors_in_groups(parameters):
    first, *others = parameters
    groups = [{"params": [first], "lr": 0.01}, {"params": others, "lr": 0.1}]
    return torch.optim.Adafactor(groups)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "keys",
    [
        {"steps": [4, 9, 6], "make": seeded(InATwist)},
        {"optimizer": whole_tensors_in_groups},
        {"clip_norm": 0.1},
        {"check_finite": True},
    ],
    ids=["uneven", "whole tensors", "clip_norm", "check_finite"],
)
def test_uneven_data_and_options_end_with_the_bits_of_bsp(method, keys):
    assert_bits_of_bsp(method, **keys)


def reads_one_weight(model, optimizer):
    return [model[2].weight.norm()]


def reads_state(model, optimizer):
    kept = [value.clone() for value in model.state_dict().values()]
    state = optimizer.state_dict()["state"].values()
    return kept + [one["momentum_buffer"].clone() for one in state]


def calls_a_part(model, optimizer):
    return [model[2](torch.ones(8)).detach()]


def copies(model, optimizer):
    twin = copy.deepcopy(model)
    thawed = pickle.loads(pickle.dumps(list(model.parameters())))
    copied = [*twin.parameters(), *thawed]
    assert {type(p) for p in copied} == {nn.Parameter}
    return [p.detach() for p in copied]


@pytest.mark.parametrize(
    ("look", "method"),
    crossed(2, [reads_one_weight, reads_state, calls_a_part, copies], METHODS),
)
def test_a_look_after_a_step_shows_what_bsp_shows(method, look):
    def seen_under(method):
        seen = [[], []]

        def watch(rank, step, model, optimizer):
            seen[rank] += look(model, optimizer)

        return ends(method, watch=watch), *map(torch.cat, map(_flattened, seen))

    for mine, theirs in zip(
        seen_under(method), seen_under(METHODS[method]), strict=True
    ):
        assert torch.equal(mine, theirs)


def _flattened(tensors):
    return [tensor.reshape(-1) for tensor in tensors]


@pytest.mark.parametrize("method", METHODS)
def test_a_backward_pass_that_adds_to_gradients_under_way_is_refused(method):
    def two_passes(rank, step, model, optimizer):
        one, two = squares(model, rank, step), squares(model, rank, step + 50)
        one.backward()
        two.backward()

    with pytest.raises(WorkerFailedError, match="forward pass") as caught:
        ends(method, script=two_passes)
    assert isinstance(caught.value.__cause__, GradientError)


def test_parameters_are_plain_again_after_finish():
    kinds = []

    def watch(rank, step, model, optimizer):
        kinds.append({type(parameter) for parameter in model.parameters()})

    for one in train("priority", 2, 1, watch=watch, reads=False):
        assert {type(p) for p in one.model.parameters()} == {nn.Parameter}
    assert {nn.Parameter} not in kinds


# ---- messages of dear ----

HALVES = [(0, "scatter"), (1, "scatter"), (0, "gather"), (1, "gather")]


@pytest.mark.parametrize(
    ("plan", "messages"),
    [
        ([Message(n) for n in range(3)], "0s 1s 2s 2g 1g 0g"),  # in the opposite order
        ([Message(number, half=half) for number, half in HALVES], "0s 1s 0g 1g"),
        (None, "0s 0g 1s 1g 2s 2g"),  # backward waits for both
    ],
    ids=["whole", "halves", "no plan"],
)
def test_messages_of_a_plan_are_sent_in_halves(plan, messages):
    buckets = [SimpleNamespace(index=number) for number in range(3)]
    run = SimpleNamespace(
        messages=plan, buckets=buckets, partition_optimizer=lambda most_bytes: None
    )
    sent = HalvesWorker(run)._messages()
    assert " ".join(f"{one.bucket}{one.half[0]}" for one in sent) == messages


class InPiecesWorker(HalvesWorker):
    """Sends unequal parts of buckets, which are gathered in another order."""

    def _messages(self):
        cuts = ((0.0, 0.25), (0.25, 1.0))
        for bucket in self.run.buckets:
            for cut in cuts:
                yield Message(bucket.index, *cut, half="scatter")
        for cut in reversed(cuts):
            for bucket in reversed(self.run.buckets):
                yield Message(bucket.index, *cut, half="gather")


@dataclass(frozen=True, kw_only=True)
class InPieces(DeAR):
    name: ClassVar[str] = "in-pieces"

    def start(self, run):
        return InPiecesWorker(run)


def test_parts_of_buckets_may_go_one_by_one():
    """Of two numbers the order does not matter: the bits are those of whole buckets."""
    keys = {"steps": [4, 9], "make": seeded(InATwist), "buckets": "single"}
    keys["optimizer"] = torch.optim.AdamW
    assert torch.equal(ends(InPieces(), **keys), ends("bsp", **keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"compression": "bf16"}, "compression 'bf16' with method 'dear'"),
        ({"collective": "parameter-server"}, "'parameter-server' has no halves"),
    ],
)
def test_what_has_no_halves_is_refused(keys, words):
    with pytest.raises(WorkerFailedError, match=words):
        ends("dear", **keys)


# ---- time ----

LAYERS, FORWARD, BACKWARD = 4, 0.02, 0.04
HALF = 0.04
"""Seconds of a layer's reduce-scatter, or all-gather, among four workers."""
ELEMENTS = round(HALF * LINK * 4 / 3 / 4)


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        paceline.pace(FORWARD)
        return x + weight.flatten()[0]

    @staticmethod
    def backward(ctx, gradient):
        paceline.pace(BACKWARD)
        return gradient, torch.ones_like(ctx.weight)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(LAYERS))

    def forward(self, x):
        for weight in self.weights:
            x = Layer.apply(x, weight + 0)
        return x


def step_seconds(method):
    moments = []

    def watch(rank, step, model, optimizer):
        if rank == 0:
            moments.append(paceline.now())

    train(
        method,
        cluster(rack(4)),
        5,
        make=Layers,
        loss=lambda model, rank, step: model(torch.zeros(())),
        reads=False,
        watch=watch,
    )
    return moments[-1] - moments[-2]


def test_second_halves_move_beside_the_next_forward_pass():
    """bsp: from when the first gradient is there, on the way without a pause. dear: scatters keep up
    with backward, and one is left when it ends; then come two pairs of gathers, and the two
    layers that use the second pair."""
    bsp = LAYERS * FORWARD + BACKWARD + 2 * LAYERS * HALF
    dear = LAYERS * BACKWARD + HALF + LAYERS * HALF + 2 * FORWARD
    assert step_seconds("bsp") == pytest.approx(bsp, rel=0.01)
    assert step_seconds("dear") == pytest.approx(dear, rel=0.01)


# ---- real processes ----


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_dies_under_way_is_named(method):
    """The other one waits for it in its next forward pass."""
    ranks = forked.together(2, [SCRIPTS / "dies.py", f"raise 1 training {method}"])
    try:
        status = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert status == [1, 1]
    assert "rank 1" in ranks[0].stderr
