"""A loop that is left between ``backward()`` and ``step()``, on some workers."""

import pytest
import torch

import paceline
from tests.osp.helpers import ALL, HALF, flat, loss_of, network, sgd, simulate

STEPS = 9
WORKERS = 3
WORKER_UPDATES = ["bsp", "bsp:collective=parameter-server"]
OTHERS_UPDATE = [
    *(HALF, ALL, "osp:collective=native,defer=nothing"),
    *(HALF.replace("collective=native,", ""), ALL.replace("collective=native,", "")),
    *("osp", "backup", "ssp:staleness=0"),
]


def train(method, leavers=(), more=0):
    """Each worker's model at the end; *leavers* leave step `STEPS` after its backward pass,
    and the others train for *more* steps."""

    def body(rank):
        model = network()
        optimizer = paceline.distribute(
            model, sgd(model.parameters()), method=method, fusion="wfbp"
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


LEAVERS = [(0,), (2,), (0, 1), (0, 1, 2)]


@pytest.mark.parametrize("leavers", LEAVERS, ids=str)
@pytest.mark.parametrize("method", WORKER_UPDATES)
def test_all_take_the_model_of_one_who_stepped(method, leavers):
    models = train(method, leavers)
    assert_all_equal(models)
    whole = train(method)[0]
    assert torch.equal(models[0], whole) == (len(leavers) < WORKERS)


@pytest.mark.parametrize("leavers", LEAVERS, ids=str)
@pytest.mark.parametrize("method", OTHERS_UPDATE)
def test_a_gradient_that_has_left_counts(method, leavers):
    models = train(method, leavers)
    assert_all_equal(models)
    assert torch.equal(models[0], train(method)[0])


@pytest.mark.parametrize("method", [*WORKER_UPDATES, *OTHERS_UPDATE, "asp", "r2sp"])
def test_the_others_may_train_on(method):
    models = train(method, leavers=(1,), more=4)
    assert_all_equal(models)
    assert not torch.equal(models[0], train(method, leavers=(1,))[0])
