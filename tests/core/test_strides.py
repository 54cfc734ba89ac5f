"""Parameters whose elements lie in memory in another order than their indices, as in
``channels_last``: gradients follow them, on all ranks alike."""

import copy

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import GradientError, ModelMismatchError, WorkerFailedError
from paceline.interfaces.buckets import make_buckets, strides_in_bucket
from paceline.runtimes.simulated import Simulation
from paceline.testing import CASES
from paceline.testing.cases import Case
from paceline.testing.method_checks import strides_change_nothing
from tests.support.simulations import run


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


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_fused_optimizer_is_right_in_channels_last(set_to_none):
    def body(rank):
        model = convolution()
        optimizer = paceline.distribute(model, adamw(model))
        train(model, optimizer, rank, 5, set_to_none)
        assert model.weight.grad.stride() == model.weight.stride()
        optimizer.finish()
        return model.weight.detach()

    for weight in run(2, body):
        torch.testing.assert_close(weight, plain(5), rtol=0, atol=1e-5)


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
