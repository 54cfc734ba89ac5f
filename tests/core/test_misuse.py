"""Silent mistakes are found: the same data on all workers, changes of gradients that were sent."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.core.misuse import (
    MOST_SAME_DATA_STEPS,
    SAME_DATA_STEPS,
    SUMMED_STEPS,
    SameDataCheck,
    SentGradientCheck,
)
from paceline.errors import GradientError
from paceline.interfaces import Rounds
from paceline.interfaces.buckets import make_buckets
from tests.support import training
from tests.support.training import inputs, network

WORDS = "do all workers train on the same data?"


def context_of(buckets, report=lambda sentence: None):
    """What the checks ask of rank 0's `TrainingContext`."""
    return SimpleNamespace(
        buckets=buckets,
        comm=SimpleNamespace(rank=0, size=2),
        method=SimpleNamespace(name="bsp", visible_gradient="mean"),
        rounds=Rounds(),
        sampler=None,
        report=report,
        fail=GradientError,
    )


def train(capsys, loss_of, workers=3, make=network, method="bsp", steps=6):
    """What was said to people while so many workers trained."""

    training.train(
        method, workers, steps, make=make, optimizer=training.plain_sgd, loss=loss_of
    )
    return capsys.readouterr().err


def equal(model, rank, step):
    return model(inputs(0, step)).square().mean()


@pytest.mark.parametrize("workers", [2, 3, 7])
@pytest.mark.parametrize("method", ["bsp", "bsp:collective=parameter-server"])
def test_equal_data_on_all_workers_is_said_once(capsys, workers, method):
    said = train(capsys, equal, workers, method=method)
    assert said.count(WORDS) == 1
    assert f"the mean of all {workers}" in said


def test_shares_of_the_data_are_not(capsys):
    assert WORDS not in train(capsys, lambda m, r, s: m(inputs(r, s)).square().mean())


def test_one_worker_has_nobody_to_be_equal_to(capsys):
    assert WORDS not in train(capsys, equal, workers=1)


def test_data_that_differs_on_one_worker_of_many_is_not_equal(capsys):
    def loss_of(model, rank, step):
        return model(inputs(int(rank == 6), step)).square().mean()

    assert WORDS not in train(capsys, loss_of, workers=7)


def test_equal_batches_now_and_then_are_not_equal_data(capsys):
    def loss_of(model, rank, step):
        return model(inputs(rank * (step % SAME_DATA_STEPS == 2), step)).square().mean()

    assert WORDS not in train(capsys, loss_of)


def test_models_made_to_be_timed_are_not_taken_for_it(capsys):
    """Their gradients are one number, whatever the data."""
    made = train(capsys, lambda m, r, s: m.weight.sum(), make=lambda: nn.Linear(6, 8))
    assert WORDS not in made


def test_gradients_that_tell_nothing_are_waited_out_and_not_for_ever():
    parameters = [("a", nn.Parameter(torch.zeros(100)))]
    (bucket,) = buckets = make_buckets(parameters, [[0]])

    def watch(gradients):
        said = []
        watcher = SameDataCheck(
            context_of(buckets, said.append), SimpleNamespace(share=0.5)
        )
        seen = 0
        for gradient in gradients:
            if watcher.watching:
                seen += 1
                bucket.buffer.copy_(gradient / 2)
                watcher.bucket_leaves(bucket)
                bucket.buffer.copy_(gradient)
                watcher.means_are_there()
        return len(said), seen

    telling = [torch.randn(100) for _ in range(20)]
    nothing = [torch.zeros(100)] * 20
    assert watch(telling) == (1, SAME_DATA_STEPS)
    assert watch(nothing[:4] + telling) == (1, SAME_DATA_STEPS + 4)
    assert watch(nothing) == (0, MOST_SAME_DATA_STEPS)


def buckets_of(dtype=torch.float32):
    """Two buckets, of one and of two tensors, with gradients in them."""
    torch.manual_seed(0)
    parameters = [
        (name, nn.Parameter(torch.zeros(size, dtype=dtype)))
        for name, size in (("a", 3), ("b", 5), ("c", 2))
    ]
    buckets = make_buckets(parameters, [[0], [1, 2]])
    for bucket in buckets:
        bucket.buffer.copy_(torch.randn(bucket.buffer.shape, dtype=dtype))
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            parameter.grad = view
    return buckets


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128],
    ids=str,
)
def test_what_was_written_counts_and_not_that_it_was(dtype):
    said = []
    buckets = buckets_of(dtype)
    sent = SentGradientCheck(context_of(buckets, said.append))
    _, second = buckets
    sent.remember()
    sent.require_unchanged()
    assert not said
    for _ in range(2):
        sent.remember()
        second.parameters[0].grad.mul_(1.0)
        sent.require_unchanged()
    (sentence,) = said
    assert "clip_norm" in sentence
    for change in (
        lambda: second.parameters[0].grad.mul_(0.5),
        lambda: second.parameters[0].grad.neg_(),
        lambda: second.parameters[1].grad[-1].add_(1),
        lambda: second.buffer.zero_(),
    ):
        sent.remember()
        change()
        with pytest.raises(GradientError, match="gradient of 'b'"):
            sent.require_unchanged()
        second.buffer.copy_(torch.randn(second.buffer.shape, dtype=dtype))


def test_another_tensor_in_its_place_is_named():
    buckets = buckets_of()
    sent = SentGradientCheck(context_of(buckets))
    sent.remember()
    parameter = buckets[1].parameters[1]
    parameter.grad = parameter.grad.clone()
    with pytest.raises(GradientError, match="gradient of 'c'"):
        sent.require_unchanged()
    parameter.grad = None  # zero_grad: nothing that could be taken for the gradient
    sent.require_unchanged()


def test_contents_are_summed_up_in_the_first_steps_and_while_scripts_write():
    """With the contents summed up, a write of the same values is no change."""
    buckets = buckets_of()
    sent = SentGradientCheck(context_of(buckets))

    def step(write):
        sent.remember()
        if write:
            buckets[0].buffer.mul_(1.0)
        sent.require_unchanged()

    for _ in range(3 * SUMMED_STEPS):
        step(write=True)
    for _ in range(SUMMED_STEPS - 1):
        step(write=False)
    step(write=True)
    for _ in range(SUMMED_STEPS):
        step(write=False)
    # Nothing to compare with: a write is taken for a change, as nothing else is safe.
    with pytest.raises(GradientError, match="gradient of 'a'"):
        step(write=True)
