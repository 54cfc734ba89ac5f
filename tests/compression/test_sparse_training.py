"""Sparse codes in whole trainings, in virtual time."""

import pytest
import torch

import paceline
from paceline.compression import make
from paceline.errors import UsageError
from paceline.testing.compressor_checks import Workers, gradients
from tests.support.simulations import run


class Model(torch.nn.Module):
    """A matrix that is large enough for a code, a vector, and a matrix that is used only where
    *both*."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(40, 30).double())
        self.vector = torch.nn.Parameter(torch.zeros(20).double())
        self.second = torch.nn.Parameter(torch.zeros(50, 40).double())

    def forward(self, target, both=True):
        loss = (self.first - target).square().sum() / 2
        loss = loss + (self.vector - target.mean()).square().sum() / 2
        return loss + (self.second - 1).square().sum() / 2 if both else loss


def target(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(40, 30, generator=generator, dtype=torch.float64)


def begin(compression, **sgd):
    model = Model()
    plain = torch.optim.SGD(model.parameters(), **({"lr": 0.1} | sgd))
    return model, paceline.distribute(
        model, plain, compression=compression, buckets="wfbp", buffers="local"
    )


def step(model, optimizer, *inputs):
    optimizer.zero_grad()
    model(*inputs).backward()
    optimizer.step()


def trained(compression, workers, steps=6, **sgd):
    """All workers' final parameters, one after the other."""

    def body(rank):
        model, optimizer = begin(compression, **sgd)
        for number in range(steps):
            step(model, optimizer, target(rank, number))
        optimizer.finish()
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    return run(workers, body)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("compression", "sgd"),
    [
        ("top-k:density=1", {}),
        ("top-k:density=1,chunk=64,small=0", {}),
        ("top-k:density=1,error_feedback=false", {}),
        ("gd-top-k:epoch_steps=1", {"momentum": 0.9}),
        ("ef21:density=1", {"momentum": 0.9, "nesterov": True}),
        ("ef21:density=1,small=0", {}),
        ("dgc:density=1,momentum=0", {}),
    ],
)
def test_settings_that_lose_nothing_are_bsp(compression, sgd, workers):
    exact = trained("none", workers, **sgd)[0]
    for parameters in trained(compression, workers, **sgd):
        torch.testing.assert_close(parameters, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "compression",
    ["dgc:density=1", "dgc:density=0.99,momentum=0", "top-k:density=0.5", "ef21"],
)
def test_others_are_not(compression):
    exact, lossy = (trained(one, 2)[0] for one in ("none", compression))
    assert (exact - lossy).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("compression", "momentum"), [("dgc", 0.9), ("dgc:warmup_steps=3", 0.5)]
)
def test_momentum_twice_is_refused(compression, momentum):
    def body(rank):
        with pytest.raises(UsageError, match=r"compression\.momentum=0") as caught:
            begin(compression, momentum=momentum)
        assert str(momentum) in str(caught.value)

    run(2, body)


def test_whose_momentum_it_is():
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    dgc = make("dgc").code
    dgc.check_optimizer(torch.optim.SGD(parameters, lr=1.0))
    dgc.check_optimizer(torch.optim.RMSprop(parameters))
    make("dgc:momentum=0").code.check_optimizer(torch.optim.AdamW(parameters))
    with pytest.raises(UsageError, match=r"AdamW.*0.9"):
        dgc.check_optimizer(torch.optim.AdamW(parameters))


def test_an_estimate_of_a_worker_without_data_goes_to_zero():
    """Else its last gradient were in all means that follow, and means of those who still train
    twice as long."""

    def body(rank):
        model, optimizer = begin("ef21:density=0.25", lr=0.0)
        norms = []
        with optimizer.join():
            for _ in range(3 if rank else 12):
                step(model, optimizer, target(rank, 0))
                norms.append(model.first.grad.clone())
        return norms

    longer = run(2, body)[0]
    own = -target(0, 0)
    assert (longer[2] - own).norm() > 0.3 * own.norm()
    torch.testing.assert_close(longer[-1], own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compression", ["top-k:density=0.3", "dgc:density=0.3"])
def test_what_is_not_used_moves_nothing_and_keeps_what_waits(compression):
    def body(rank):
        model, optimizer = begin(compression)
        step(model, optimizer, target(rank, 0))
        before = model.second.detach().clone()
        step(model, optimizer, target(rank, 1), False)
        unmoved = torch.equal(before, model.second), model.second.grad is None
        for number in range(2, 30):
            step(model, optimizer, target(rank, number))
        return unmoved, (model.second - 1).abs().max().item()

    for unmoved, distance in run(2, body):
        assert unmoved == (True, True)
        assert distance < 0.5


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        ("dgc:density=0.1", ("momentum", "velocity")),
        ("ef21:density=0.1", ("estimate",)),
    ],
)
def test_a_step_that_a_grad_scaler_skips_changes_no_memory(spec, keys):
    shapes = ((40, 30), (7,), (50, 40))
    workers = Workers(make(spec), gradients(1, shapes=shapes)[0], 2)
    for number in range(3):
        workers.mean(gradients(2, seed=number, shapes=shapes))
    before = [
        states[0]["code"][key].clone() for states in workers.states for key in keys
    ]
    common = workers.states[0][0]["code"]["common"]
    shared = {key: one.clone() for key, one in common.items() if hasattr(one, "clone")}
    given = gradients(2, seed=9, shapes=shapes)
    given[1][0][3, 3] = torch.inf
    results = workers.mean(given).results
    assert not results[0][0].isfinite().all()
    after = [states[0]["code"][key] for states in workers.states for key in keys]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(one, common[key]) for key, one in shared.items())
