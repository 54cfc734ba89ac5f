"""`distribute(clip_norm=)`: the mean clipped exactly where all of it is known before any of
it is applied, each worker's own gradient elsewhere."""

import pytest
import torch

import paceline
from paceline.cluster import uniform_cluster
from paceline.errors import UsageError, WorkerFailedError
from paceline.runtimes.simulated import Simulation
from paceline.testing.problems import Quadratic, centers_of, flat_parameters

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


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def end_of(method, make, workers=3, servers=0, limit=LIMIT, batches=None):
    """All workers' final parameters."""
    ends = {}

    def train(rank):
        model = Quadratic()
        optimizer = paceline.distribute(
            model, make(model), method=method, buckets="wfbp", clip_norm=limit
        )
        for step in range(1, STEPS + 1 if batches is None else batches[rank] + 1):
            optimizer.zero_grad()
            model(centers_of(rank, step)).backward()
            optimizer.step()
        optimizer.finish()
        ends[rank] = flat_parameters(model)

    Simulation(uniform_cluster(workers, "1gbit", "50us", servers)).run(train)
    for end in ends.values():
        assert torch.equal(end, ends[0])
    return ends[0]


def reference(make, workers=3, limit=LIMIT, batches=None):
    """One process, the mean over workers, and torch's own clipping."""
    model = Quadratic()
    optimizer = make(model)
    batches = batches or [STEPS] * workers
    clipped = 0
    for step in range(1, max(batches) + 1):
        here = [rank for rank in range(workers) if batches[rank] >= step]
        optimizer.zero_grad()
        sum(model(centers_of(rank, step)) / len(here) for rank in here).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        clipped += bool(norm > limit)
        optimizer.step()
    assert clipped > 0, "the limit is never reached: nothing is tested"
    return flat_parameters(model)


@pytest.mark.parametrize(
    ("method", "make"),
    [
        *((method, plain_sgd if "ssp" in method else momentum) for method in MEAN),
        *((method, adamw) for method in ("bsp", "backup")),
    ],
)
def test_the_mean_is_clipped_as_torch_clips_it(method, make):
    torch.testing.assert_close(
        end_of(method, make), reference(make), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("method", ["backup", "ssp:staleness=0", "osp:defer=nothing"])
def test_several_servers_that_would_clip_the_mean_are_refused(method):
    """On every worker, before anything is trained: none waits for another."""
    refused = []

    def train(rank):
        model = Quadratic()
        with pytest.raises(UsageError, match="2 servers"):
            paceline.distribute(model, plain_sgd(model), method=method, clip_norm=LIMIT)
        refused.append(rank)

    Simulation(uniform_cluster(3, "1gbit", "50us", 2)).run(train)
    assert sorted(refused) == [0, 1, 2]


def test_several_servers_whose_workers_clip_are_not_refused():
    assert end_of("asp", plain_sgd, servers=2).isfinite().all()


@pytest.mark.parametrize("method", ["bsp", "backup", "osp:defer=nothing"])
def test_uneven_data_is_clipped_to_the_end(method):
    batches = [3, 7, 5]
    end = end_of(method, momentum, batches=batches)
    expected = reference(momentum, batches=batches)
    torch.testing.assert_close(end, expected, rtol=1e-5, atol=1e-6)


def test_who_counts_is_clipped_though_others_come_too_late():
    """The fastest two of three are the same two, in every step; what the third one sends
    is dropped, and would change the norm."""
    ends = {}

    def train(rank):
        model = Quadratic()
        optimizer = paceline.distribute(
            model,
            plain_sgd(model),
            method="backup:wait_for=2",
            buckets="wfbp",
            clip_norm=LIMIT,
        )
        late = rank == 2
        for step in range(1, 4 if late else STEPS + 1):
            paceline.pace(3.5 if late else 1.0)
            optimizer.zero_grad()
            model(centers_of(rank, step)).backward()
            optimizer.step()
        optimizer.finish()
        ends[rank] = flat_parameters(model)

    Simulation(uniform_cluster(3, "1gbit", "50us", 1)).run(train)
    expected = reference(plain_sgd, 3, batches=[STEPS, STEPS, 0])
    for end in ends.values():
        torch.testing.assert_close(end, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", OWN)
def test_elsewhere_each_worker_clips_its_own(method):
    """Gradients that are constant: every one is applied, scaled to the limit, or, where it
    is smaller, as it is."""
    directions = [torch.tensor([3.0, 4.0]), torch.tensor([0.03, 0.04])]
    ends = {}

    def train(rank):
        model = torch.nn.Module()
        model.weights = torch.nn.Parameter(torch.zeros(2))
        model.forward = lambda: (model.weights * directions[rank]).sum()
        optimizer = paceline.distribute(
            model,
            torch.optim.SGD([model.weights], lr=1.0),
            method=method,
            clip_norm=1.0,
        )
        for _ in range(10):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        optimizer.finish()
        ends[rank] = model.weights.detach().clone()

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(train)
    expected = -10 * (directions[0] / 5 + directions[1]) / 2
    for end in ends.values():
        torch.testing.assert_close(end, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["bsp", "asp", "backup"])
def test_what_was_accumulated_is_clipped_as_a_whole(method):
    def train(rank):
        model = torch.nn.Module()
        model.weights = torch.nn.Parameter(torch.zeros(2))
        model.forward = lambda scale: (model.weights * scale).sum()
        optimizer = paceline.distribute(
            model,
            torch.optim.SGD([model.weights], lr=1.0),
            method=method,
            clip_norm=1.0,
        )
        with optimizer.no_sync():
            model(torch.tensor([2.0, 0.0])).backward()
        model(torch.tensor([1.0, 4.0])).backward()
        optimizer.step()
        optimizer.finish()
        expected = torch.tensor([-0.6, -0.8])
        torch.testing.assert_close(model.weights.detach(), expected, rtol=1e-5, atol=0)

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(train)


def test_half_of_the_samples_is_half_of_the_gradient_and_not_of_the_limit():
    """A worker with few samples does not clip at a smaller norm."""

    def train(rank):
        data = [[4.0]] * 4
        sampler = paceline.Sampler(data, batch_size=4, shares=[3, 1], shuffle=False)
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = paceline.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            method="osp:collective=native,defer=most",
            sampler=sampler,
            clip_norm=1.0,
        )
        for batch in sampler:
            model(torch.tensor([data[i] for i in batch])).mean().backward()
            optimizer.step()
        optimizer.finish()
        assert model.weight.item() == pytest.approx(-1.0, rel=1e-5)

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(train)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(WorkerFailedError, match="clip_norm") as failure:
        end_of("bsp", plain_sgd, limit=limit)
    assert isinstance(failure.value.__cause__, UsageError)


def test_a_spec_says_it_too():
    ends = [end_of("backup", plain_sgd), end_of("backup:clip_norm=0.5", plain_sgd)]
    assert torch.equal(*ends)
