"""A loop that is left between ``backward()`` and ``step()``, on some workers, or in the
middle of ``backward()``, on one."""

import pytest
import torch

import paceline
from paceline.errors import DeadlockError, GradientError
from tests.methods.osp.helpers import ALL, HALF
from tests.support.training import flat, loss_of, network, sgd, simulate

STEPS = 9
WORKERS = 3
METHODS = [
    *("asp", "bsp", "bsp:collective=parameter-server", "backup", "ssp:staleness=0"),
    *(HALF, ALL.replace("collective=native,", "")),
]
"""One of each way to update; the kit tries all, without steps that others do afterwards."""


def train(method, leavers=(), more=0):
    """Each worker's model at the end; *leavers* leave step `STEPS` after its backward pass,
    and the others train for *more* steps."""

    def body(rank):
        model = network()
        optimizer = paceline.distribute(
            model, sgd(model.parameters()), method=method, buckets="wfbp"
        )
        for step in range(STEPS + more):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if rank in leavers and step == STEPS - 1:
                break
            optimizer.step()
        optimizer.finish()
        return flat(model)

    return simulate(WORKERS, body)


def assert_all_equal(models):
    assert all(torch.equal(model, models[0]) for model in models)


@pytest.mark.parametrize("method", METHODS)
def test_the_others_may_train_on(method):
    models = train(method, leavers=(1,), more=4)
    assert_all_equal(models)
    assert not torch.equal(models[0], train(method, leavers=(1,))[0])


def in_the_middle_of_backward(model):
    def fail(gradient):
        raise ValueError("a thing of its own")

    def sabotage(module, arguments, output):
        output.register_hook(fail)

    model[0].register_forward_hook(sabotage)
    with pytest.raises(ValueError, match="thing"):
        loss_of(model, 1, 3).backward()


def by_a_second_pass(model):
    loss_of(model, 1, 3).backward()
    with pytest.raises(GradientError, match="second backward pass"):
        loss_of(model, 1, 3).backward()


@pytest.mark.parametrize(
    ("method", "breaks", "words"),
    [
        ("bsp", in_the_middle_of_backward, "a part of its gradients had been sent"),
        (ALL, by_a_second_pass, "GradientError: a second backward pass before"),
        ("backup", by_a_second_pass, "GradientError: a second backward pass before"),
    ],
)
def test_who_waits_for_a_broken_training_learns_the_cause(method, breaks, words):
    """Where virtual time cannot go on; real processes are told (see `runtimes.real.runtime`)."""

    def body(rank):
        model = network()
        optimizer = paceline.distribute(
            model, sgd(model.parameters()), method=method, buckets="wfbp"
        )
        for step in range(STEPS):
            if rank == 1 and step == 3:
                breaks(model)
                break
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        optimizer.finish()

    ended = rf"worker 1 has ended: it broke off its training: .*{words}"
    with pytest.raises(DeadlockError, match=ended):
        simulate(2, body)
