"""`distribute(clip_norm=)`: the mean clipped exactly where all of it is known before any of
it is applied, each worker's own gradient elsewhere."""

import pytest
import torch

import paceline
from paceline.cluster import uniform_cluster
from paceline.errors import UsageError, WorkerFailedError
from paceline.testing.problems import Quadratic, centers_of
from tests.support.training import flat, simulate, train, train_to_one_model

LIMIT = 0.5
"""About a tenth of the norm of the first gradients here, and more than that of the last."""
STEPS = 12
MEAN = (
    "bsp",
    "bsp:overlap=false",
    "bsp:collective=parameter-server",
    "backup",
    "backup:overlap=false",
    "backup:wait_for=3",
    "ssp:staleness=0",
    "osp:defer=nothing",
    "osp:defer=nothing,overlap=false",
    "osp:collective=native,defer=nothing",
)
OWN = (
    *("asp", "ssp", "r2sp", "sync-switch:bsp_steps=3"),
    *("osp:defer=most", "osp:collective=native,defer=most"),
)


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def distance(model, rank, step):
    """The loss of a `Quadratic`."""
    return model(centers_of(rank, step))


def end_of(method, optimizer, servers=0, steps=STEPS, clip_norm=LIMIT):
    """Three workers' final parameters."""
    return train_to_one_model(
        method,
        uniform_cluster(3, "1gbit", "50us", servers),
        steps=steps,
        make=Quadratic,
        optimizer=optimizer,
        loss=distance,
        clip_norm=clip_norm,
    )


def reference(make, batches=(STEPS,) * 3):
    """One process, the mean over workers, and torch's own clipping."""
    model = Quadratic()
    optimizer = make(model.parameters())
    clipped = 0
    for step in range(max(batches)):
        here = [rank for rank, count in enumerate(batches) if count > step]
        optimizer.zero_grad()
        sum(distance(model, rank, step) / len(here) for rank in here).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        clipped += bool(norm > LIMIT)
        optimizer.step()
    assert clipped > 0, "the limit is never reached: nothing is tested"
    return flat(model)


@pytest.mark.parametrize(
    ("method", "make"),
    [
        *((method, plain_sgd if "ssp" in method else momentum) for method in MEAN),
        *((method, adamw) for method in ("bsp", "backup")),
    ],
)
def test_the_mean_is_clipped_as_torch_clips_it(method, make):
    torch.testing.assert_close(end_of(method, make), reference(make), **CLOSE)


@pytest.mark.parametrize("method", ["backup", "ssp:staleness=0", "osp:defer=nothing"])
def test_several_servers_that_would_clip_the_mean_are_refused(method):
    """On every worker, before anything is trained: none waits for another."""

    def body(rank):
        model = Quadratic()
        plain = plain_sgd(model.parameters())
        with pytest.raises(UsageError, match="2 servers"):
            paceline.distribute(model, plain, method=method, clip_norm=LIMIT)

    simulate(3, body, servers=2)


def test_several_servers_whose_workers_clip_are_not_refused():
    assert end_of("asp", plain_sgd, servers=2).isfinite().all()


@pytest.mark.parametrize("method", ["bsp", "backup", "osp:defer=nothing"])
def test_uneven_data_is_clipped_to_the_end(method):
    batches = [3, 7, 5]
    end = end_of(method, momentum, steps=batches)
    torch.testing.assert_close(end, reference(momentum, batches), **CLOSE)


def test_who_counts_is_clipped_though_others_come_too_late():
    """The fastest two of three are the same two, in every step; what the third one sends
    is dropped, and would change the norm."""

    def late_or_not(model, rank, step):
        paceline.pace(3.5 if rank == 2 else 1.0)
        return distance(model, rank, step)

    end = train_to_one_model(
        "backup:wait_for=2",
        uniform_cluster(3, "1gbit", "50us", 1),
        steps=[STEPS, STEPS, 3],
        make=Quadratic,
        optimizer=plain_sgd,
        loss=late_or_not,
        clip_norm=LIMIT,
    )
    torch.testing.assert_close(end, reference(plain_sgd, [STEPS, STEPS, 0]), **CLOSE)


class Weights(torch.nn.Module):
    """Two, whose gradient is what they are multiplied by."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(2))

    def forward(self, direction):
        return (self.weights * torch.tensor(direction)).sum()


def whole_steps(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.parametrize("method", OWN)
def test_elsewhere_each_worker_clips_its_own(method):
    """Gradients that are constant: every one is applied, scaled to the limit, or, where it
    is smaller, as it is."""
    directions = [(3.0, 4.0), (0.03, 0.04)]
    ends = train(
        method,
        steps=10,
        make=Weights,
        optimizer=whole_steps,
        loss=lambda model, rank, step: model(directions[rank]),
        clip_norm=1.0,
    )
    large, small = torch.tensor(directions, dtype=torch.double)
    for end in ends:
        torch.testing.assert_close(end.end, -10 * (large / 5 + small) / 2, **CLOSE)


@pytest.mark.parametrize("method", ["bsp", "asp", "backup"])
def test_what_was_accumulated_is_clipped_as_a_whole(method):
    def body(rank):
        model = Weights()
        plain = whole_steps(model.parameters())
        optimizer = paceline.distribute(model, plain, method=method, clip_norm=1.0)
        with optimizer.no_sync():
            model((2.0, 0.0)).backward()
        model((1.0, 4.0)).backward()
        optimizer.step()
        optimizer.finish()
        expected = torch.tensor([-0.6, -0.8])
        torch.testing.assert_close(model.weights.detach(), expected, rtol=1e-5, atol=0)

    simulate(2, body)


def test_half_of_the_samples_is_half_of_the_gradient_and_not_of_the_limit():
    """A worker with few samples does not clip at a smaller norm."""

    def body(rank):
        data = [[4.0]] * 4
        sampler = paceline.Sampler(data, batch_size=4, shares=[3, 1], shuffle=False)
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = paceline.distribute(
            model,
            whole_steps(model.parameters()),
            method="osp:collective=native,defer=most",
            sampler=sampler,
            clip_norm=1.0,
        )
        for batch in sampler:
            model(torch.tensor([data[i] for i in batch])).mean().backward()
            optimizer.step()
        optimizer.finish()
        assert model.weight.item() == pytest.approx(-1.0, rel=1e-5)

    simulate(2, body)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(WorkerFailedError, match="clip_norm") as failure:
        end_of("bsp", plain_sgd, clip_norm=limit)
    assert isinstance(failure.value.__cause__, UsageError)


def test_a_spec_says_it_too():
    ends = [end_of("backup", plain_sgd), end_of("backup:clip_norm=0.5", plain_sgd)]
    assert torch.equal(*ends)
