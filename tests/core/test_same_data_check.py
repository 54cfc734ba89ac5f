"""Workers that all train on the same data are told so, once."""

import pytest
import torch
from torch import nn

import paceline
from paceline.core.same_data_check import MOST_STEPS, STEPS, SameData
from paceline.interfaces.buckets import make_buckets
from tests.core.cases import inputs, small_model
from tests.support.simulations import run

WORDS = "do all workers train on the same data?"


def train(capsys, loss_of, workers=3, make=small_model, method="bsp", steps=6):
    """What was said to people while so many workers trained."""

    def body(rank):
        model = make()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, sgd, method=method, buckets="wfbp")
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        optimizer.finish()

    run(workers, body)
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
        return model(inputs(rank * (step % STEPS == 2), step)).square().mean()

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
        watcher = SameData(True, 2, said.append, lambda: buckets, lambda: 0.5)
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
    assert watch(telling) == (1, STEPS)
    assert watch(nothing[:4] + telling) == (1, STEPS + 4)
    assert watch(nothing) == (0, MOST_STEPS)
