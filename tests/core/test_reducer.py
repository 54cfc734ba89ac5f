"""Gradients on their way into buckets: copied together, scaled once, whatever takes no part, and in the
order in memory that their parameters have.
"""

import copy
import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.errors import GradientError, ModelMismatchError, WorkerFailedError
from paceline.interfaces.buckets import make_buckets, strides_in_bucket
from paceline.methods.bsp import BSP, BSPWorker
from paceline.runtimes.simulated import Simulation
from paceline.testing import CASES
from paceline.testing.cases import Case
from paceline.testing.method_checks import strides_change_nothing
from tests.support.simulations import run

SIZES = (3, 40, 20_000, 7, 5, 30_000)
"""Small and large tensors, so that buckets have several copy groups."""


class Sums(nn.Module):
    """A parameter of each size; its gradient is *factor* in every element."""

    def __init__(self, matrices=False):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(size, 2) if matrices else torch.zeros(size))
            for size in SIZES
        )

    def forward(self, factor):
        return factor * sum(weight.sum() for weight in self.weights)


def wrap(model, buckets="single"):
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return paceline.distribute(model, inner, buckets=buckets)


@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("accumulate", ["fresh", "into-views", "some-fresh"])
def test_each_gradient_is_scaled_once_wherever_it_was(matrices, accumulate):
    """Whether ``.grad`` is new, or lies in its bucket already, or some are of each kind."""

    def body(rank):
        model = Sums(matrices)
        optimizer = wrap(model)
        seen = []
        for step in range(4):
            if accumulate == "into-views":
                optimizer.zero_grad(set_to_none=False)
            elif accumulate == "fresh":
                optimizer.zero_grad()
            else:
                for index, weight in enumerate(model.weights):
                    if index % 2:
                        weight.grad = None
                    elif weight.grad is not None:
                        weight.grad.zero_()
            model(float(rank + 1 + step)).backward()
            seen.append([weight.grad.unique().tolist() for weight in model.weights])
            optimizer.step()
        return seen

    for seen in run(2, body):
        assert seen == [[[1.5 + step]] * len(SIZES) for step in range(4)]


def clamp(parameter):
    parameter.grad.clamp_(max=0.4)


def test_hooks_of_the_script_change_gradients_before_they_are_sent():
    """As under DDP, also where they were registered after `distribute`."""

    def body(rank):
        model = Sums()
        early, *_, late = model.weights
        early.register_post_accumulate_grad_hook(clamp)
        optimizer = wrap(model)
        model(1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        late.register_post_accumulate_grad_hook(clamp)
        model(rank + 1.0).backward()
        return [weight.grad.unique().tolist() for weight in model.weights]

    for early, *between, late in run(2, body):
        assert between == [[1.5]] * (len(SIZES) - 2)
        torch.testing.assert_close(early + late, [0.4, 0.4])


def test_higher_derivatives_leave_no_graph_in_buckets():
    def body(rank):
        model = Sums()
        optimizer = wrap(model)
        factor = torch.tensor(float(rank), requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of the cycle that this makes
            model(factor).backward(create_graph=True)
        optimizer.step()
        return [weight.grad.requires_grad for weight in model.weights]

    assert not any(map(any, run(2, body)))


LAYERS = 6


class Model(nn.Module):
    """Layers, one that is computed again in backward, and one more that is used or not;
    counts the gradients of this pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.again = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.came = 0
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._count)

    def _count(self, _):
        self.came += 1

    def forward(self, x, extra=True, reentrant=None):
        for layer in self.layers:
            x = layer(x).tanh()
        if reentrant is None:
            x = self.again(x)
        else:
            x = checkpoint(self.again, x, use_reentrant=reentrant)
            # The first gradient is not the checkpoint's: that would be refused.
            x = x * self.extra.bias
        return (self.extra(x) if extra else x).square().sum()


@dataclass(frozen=True, kw_only=True)
class Watched(BSP):
    """Notes how many gradients there were when each bucket left."""

    name: ClassVar[str] = "watched"
    model: Model = None
    left: list[int] = field(default_factory=list)
    order: list[tuple[str, ...]] = field(default_factory=list)

    def start(self, run):
        return WatchedWorker(run, self)


class WatchedWorker(BSPWorker):
    def bucket_ready(self, bucket):
        self.method.left.append(self.method.model.came)
        self.method.order.append(bucket.names)
        super().bucket_ready(bucket)


def begin(buckets="wfbp"):
    model = Model()
    method = Watched(model=model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = paceline.distribute(model, inner, method=method, buckets=buckets)
    return model, optimizer, method


def step(model, optimizer, rank=0, **how):
    optimizer.zero_grad()
    model.came = 0
    x = torch.linspace(-1.0, 1.0, 8).view(2, 4) * (rank + 1)
    model(x, **how).backward()
    optimizer.step()


def test_buckets_leave_during_backward_whatever_takes_no_part():
    def body(rank):
        model, optimizer, method = begin()
        left = []
        for number in range(5):
            method.left.clear()
            step(model, optimizer, extra=number < 2)
            left.append(list(method.left))
        optimizer.finish()
        return left

    for _, all_used, first_time, *later in run(2, body):
        tensors = 2 * (LAYERS + 2)
        assert all_used == list(range(1, tensors + 1))
        # That some are unused is known when backward ends.
        assert set(first_time) == {tensors - 2}
        # The two that are unused leave with the first gradient.
        for left in later:
            assert left == [1, 1, *range(1, tensors - 1)]


def test_ranks_that_use_other_tensors_send_in_one_order_and_form_the_mean():
    def body(rank):
        model, optimizer, method = begin()
        for number in range(6):
            step(model, optimizer, rank, extra=(number + rank) % 2 == 0)
        optimizer.finish()
        return method.order, [p.detach() for p in model.parameters()]

    (order, first), (other_order, other) = run(2, body)
    assert order == other_order
    alone = Model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(6):
        plain.zero_grad()
        for rank in range(2):
            x = torch.linspace(-1.0, 1.0, 8).view(2, 4) * (rank + 1)
            (alone(x, extra=(number + rank) % 2 == 0) / 2).backward()
        plain.step()
    for ours, theirs, expected in zip(first, other, alone.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, expected.detach())


@pytest.mark.parametrize("buckets", ["wfbp", "single"])
def test_gradients_of_a_reentrant_checkpoint_are_waited_for(buckets):
    """They are in no graph but the checkpoint's own."""

    def trained(reentrant):
        def body(rank):
            model, optimizer, _ = begin(buckets)
            for number in range(6):
                step(model, optimizer, rank, extra=number < 2, reentrant=reentrant)
            optimizer.finish()
            return [p.detach() for p in model.parameters()]

        return run(2, body)

    for ours, theirs in zip(trained(True)[0], trained(False)[0], strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_after_its_bucket_has_left_is_an_error():
    def body(rank):
        model, optimizer, _ = begin()
        for number in range(3):
            step(model, optimizer, extra=number < 1)
        step(model, optimizer, extra=False, reentrant=True)

    with pytest.raises(WorkerFailedError) as caught:
        run(2, body)
    error = caught.value.__cause__
    assert isinstance(error, GradientError)
    assert "'again." in str(error)
    assert "use_reentrant=False" in str(error)


def test_a_gradient_that_was_not_expected_is_taken_while_its_bucket_is_here():
    """One bucket of all leaves last: nothing is lost."""

    def body(rank, reentrant):
        model, optimizer, _ = begin("single")
        for number in range(3):
            step(model, optimizer, rank, extra=number < 1)
        for _ in range(3):
            step(model, optimizer, rank, extra=False, reentrant=reentrant)
        optimizer.finish()
        return [p.detach() for p in model.parameters()]

    ours, theirs = (run(2, lambda rank, r=r: body(rank, r))[0] for r in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_gradient_that_the_script_sets_in_a_hook_is_not_lost_in_silence():
    """Autograd knows nothing of it, and its bucket has left."""

    def body(rank):
        model, optimizer, _ = begin()

        def set_by_hand(_):
            model.extra.weight.grad = torch.ones(4, 4)

        for number in range(4):
            if number == 3:
                weight = model.layers[3].weight
                weight.register_post_accumulate_grad_hook(set_by_hand)
            step(model, optimizer, rank, extra=number < 1)

    with pytest.raises(WorkerFailedError) as caught:
        run(2, body)
    assert isinstance(caught.value.__cause__, GradientError)
    assert "'extra.weight'" in str(caught.value.__cause__)


def test_gradients_of_some_inputs_alone_are_sent_at_once():
    def body(rank):
        model, optimizer, method = begin()
        wanted = [*model.extra.parameters(), *model.layers[0].parameters()]
        for number in range(4):
            optimizer.zero_grad()
            model.came = 0
            method.left.clear()
            inputs = wanted if number else list(model.parameters())
            model(torch.ones(2, 4)).backward(inputs=inputs)
            optimizer.step()
        left = list(method.left)
        optimizer.finish()
        return left, model.again.weight.grad

    for left, unused in run(2, body):
        assert left == [1, *[2] * (2 * LAYERS + 1), 3, 4]
        assert unused is None


def convolution(layout=torch.channels_last):
    torch.manual_seed(0)
    return nn.Conv2d(2, 3, 2).to(memory_format=layout)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def backward(model, rank=0):
    x = torch.arange(18.0).view(1, 2, 3, 3) * (rank + 1) * 0.01
    model(x).square().mean().backward()


def train(model, optimizer, rank, steps, set_to_none=True):
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, rank)
        optimizer.step()


def plain(steps, workers=2, layout=torch.channels_last):
    """One process that takes all workers' batches."""
    model = convolution(layout)
    optimizer = adamw(model)
    for _ in range(steps):
        optimizer.zero_grad()
        for rank in range(workers):
            x = torch.arange(18.0).view(1, 2, 3, 3) * (rank + 1) * 0.01
            (model(x).square().mean() / workers).backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize(
    ("parameter", "strides"),
    [
        (torch.zeros(4, 3), (3, 1)),
        (torch.zeros(3, 4).t(), (1, 4)),
        (torch.zeros(()), ()),
        (torch.zeros(0, 3), (3, 1)),
        (torch.zeros(4, 6)[:, ::2], (3, 1)),  # with gaps
        (torch.zeros(1, 3).expand(4, 3), (3, 1)),  # elements that overlap
        (
            torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
            (60, 1, 15, 3),
        ),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), (1, 12, 4)),
    ],
)
def test_a_gradient_lies_as_its_parameter_where_that_has_no_gaps(parameter, strides):
    assert strides_in_bucket(parameter) == strides


def test_views_hold_every_element_of_a_bucket_once():
    members = [
        ("a", nn.Parameter(torch.zeros(3, 4).t())),
        ("b", nn.Parameter(torch.zeros(2, 3, 4, 5))),
        ("c", nn.Parameter(torch.zeros(()))),
        ("d", nn.Parameter(torch.zeros(2, 3, 4).permute(2, 0, 1))),
    ]
    (bucket,) = make_buckets(members, [[0, 1, 2, 3]])
    for view in bucket.views:
        view.add_(1 + torch.arange(view.numel()).view(view.shape))
    everyone = torch.cat([1.0 + torch.arange(p.numel()) for _, p in members])
    assert torch.equal(bucket.by_index(), everyone)
    assert torch.equal(bucket.buffer.sort().values, everyone.sort().values)
    (contiguous,) = make_buckets(members, [[1, 2]])
    assert contiguous.by_index() is contiguous.buffer


def test_ranks_with_different_strides_are_refused_on_all_of_them():
    def body(rank):
        model = convolution((torch.channels_last, torch.contiguous_format)[rank])
        with pytest.raises(ModelMismatchError) as caught:
            paceline.distribute(model, adamw(model))
        return str(caught.value)

    for message in run(2, body):
        assert "weight float32[3x2x2x2] strides 8x1x4x2" in message


def test_strides_of_sizes_of_one_are_no_difference():
    """Any of them leads to the same element."""

    def body(rank):
        torch.manual_seed(0)
        layout = (torch.channels_last, torch.contiguous_format)[rank]
        model = nn.Conv2d(2, 3, 1).to(memory_format=layout)
        optimizer = paceline.distribute(model, adamw(model))
        train(model, optimizer, rank, 2)
        optimizer.finish()
        return model.weight.detach()

    first, other = run(2, body)
    assert torch.equal(first, other)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_other_strides_after_distribute_are_refused(with_gradients):
    def body(rank):
        model = convolution(torch.contiguous_format)
        optimizer = paceline.distribute(model, adamw(model))
        if with_gradients:
            train(model, optimizer, rank, 1)
        model.to(memory_format=torch.channels_last)
        backward(model, rank)

    with pytest.raises(WorkerFailedError) as caught:
        run(2, body)
    error = caught.value.__cause__
    assert isinstance(error, GradientError)
    assert "'weight'" in str(error)
    assert "(8, 1, 4, 2)" in str(error)


def test_gradients_that_were_moved_out_of_their_bucket_are_averaged():
    """``model.to(...)`` gives a parameter other memory, and its gradient too."""

    def body(rank):
        model = convolution()
        optimizer = paceline.distribute(model, adamw(model))
        for _ in range(5):
            optimizer.zero_grad(set_to_none=False)
            with optimizer.no_sync():
                backward(model, rank)
            model._apply(torch.clone)
            backward(model, rank)
            assert model.weight.grad.stride() == model.weight.stride()
            optimizer.step()
        optimizer.finish()
        return model.weight.detach()

    first, other = run(2, body)
    assert torch.equal(first, other)
    # AdamW divides a gradient by its size: twice the gradient is nearly the same step.
    torch.testing.assert_close(first, plain(5), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "method", ["bsp", "ssp:staleness=0", "local-sgd", "osp:collective=native"]
)
def test_a_loaded_state_lies_as_its_parameter(method, tmp_path):
    """A checkpoint need not keep strides."""

    def body(rank):
        model = convolution()
        inner = adamw(model)
        optimizer = paceline.distribute(model, inner, method=method)
        train(model, optimizer, rank, 3)
        paceline.save(tmp_path / "checkpoint")
        saved = copy.deepcopy(optimizer.state_dict())
        for entry in saved["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = entry[name].contiguous()
        train(model, optimizer, rank, 3)
        paceline.load(tmp_path / "checkpoint")
        optimizer.load_state_dict(saved)
        train(model, optimizer, rank, 3)
        optimizer.finish()
        states = inner.state_dict()["state"][0]
        for name in ("exp_avg", "exp_avg_sq"):
            assert states[name].stride() == model.weight.stride()
        return model.weight.detach()

    straight = run(2, lambda rank: _straight(rank, method))
    for weight, expected in zip(run(2, body), straight, strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5)


def _straight(rank, method):
    model = convolution()
    optimizer = paceline.distribute(model, adamw(model), method=method)
    train(model, optimizer, rank, 6)
    optimizer.finish()
    return model.weight.detach()


ASYNCHRONOUS = [case for case in CASES if not case.timing_free]


@pytest.mark.parametrize("case", ASYNCHRONOUS, ids=lambda case: case.name)
def test_strides_change_nothing_where_timing_decides(case: Case):
    """The kit's law asks for a result that repeats, and in virtual time each does."""
    Simulation(case.cluster(2)).run(lambda rank: strides_change_nothing(case, "single"))
