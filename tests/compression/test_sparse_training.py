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
        ("gd-top-k:epoch_steps=1", {"momentum": 0.9}),
        ("ef21:density=1", {"momentum": 0.9, "nesterov": True}),
        ("dgc:density=1,momentum=0", {}),
    ],
)
def test_settings_that_lose_nothing_are_bsp(compression, sgd, workers):
    exact = trained("none", workers, **sgd)[0]
    for parameters in trained(compression, workers, **sgd):
        torch.testing.assert_close(parameters, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compression", ["dgc:density=1", "top-k:density=0.5", "ef21"])
def test_others_are_not(compression):
    exact, lossy = (trained(one, 2)[0] for one in ("none", compression))
    assert (exact - lossy).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("compression", "optimizer", "said"),
    [
        (
            "dgc",
            {"momentum": 0.9},
            "SGD with a momentum of 0.9: gradients would have it",
        ),
        ("dgc:warmup_steps=3", {"momentum": 0.5}, "compression.momentum=0"),
    ],
)
def test_momentum_twice_is_refused(compression, optimizer, said):
    def body(rank):
        with pytest.raises(UsageError) as caught:
            begin(compression, **optimizer)
        return str(caught.value)

    assert all(said in told for told in run(2, body))


def test_whose_momentum_it_is():
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    dgc = make("dgc")
    dgc.suits(torch.optim.SGD(parameters, lr=1.0))
    dgc.suits(torch.optim.RMSprop(parameters))
    make("dgc:momentum=0").suits(torch.optim.AdamW(parameters))
    with pytest.raises(UsageError, match=r"AdamW.*0.9"):
        dgc.suits(torch.optim.AdamW(parameters))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "top-k:density=0",
            "density: expected the part of a tensor's elements that is",
        ),
        ("top-k:density=1.5", "above 0 and up to 1, got 1.5"),
        ("ef21:density=-1", "density"),
        ("dgc:density=nan", "density"),
        ("top-k:bits=8", "bits: expected 2 or 32 a value, got 8"),
        ("top-k:chunk=-1", "chunk: expected 0 or more elements, got -1"),
        ("dgc:momentum=1", "momentum: expected 0 or more and below 1, got 1.0"),
        ("dgc:warm_up_steps=-1", "warm_up_steps: expected 0 or more, got -1"),
        ("gd-top-k:epoch_steps=-1", "epoch_steps: expected 0 or more, got -1"),
        ("gd-top-k:speed=quick", "unknown value for speed 'quick'"),
        (
            "dgc:error_feedback=true",
            "it takes no residuals: it has a memory of its own",
        ),
        ("ef21:error_feedback=true", "it takes no residuals"),
    ],
)
def test_what_is_out_of_range_is_refused(spec, said):
    with pytest.raises(UsageError) as caught:
        make(spec)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "compression",
    ["top-k:density=0.3", "gd-top-k:epoch_steps=3", "ef21:density=0.3"]
    + [
        "dgc:density=0.3,momentum=0.5,warm_up_steps=4",
        "dgc:density=0.3,warmup_steps=5",
    ],
)
def test_workers_without_data_keep_in_step(compression):
    """Whoever is out of data goes on with the same sizes of codes, and all end with one model."""

    def body(rank):
        model, optimizer = begin(compression, lr=0.02)
        with optimizer.join():
            for number in range(3 + 4 * rank):
                step(model, optimizer, target(rank, number))
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    first, *others = run(3, body)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


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
    before = [states[0][key].clone() for states in workers.states for key in keys]
    common = workers.states[0][0]["common"]
    shared = {key: one.clone() for key, one in common.items() if hasattr(one, "clone")}
    given = gradients(2, seed=9, shapes=shapes)
    given[1][0][3, 3] = torch.inf
    results = workers.mean(given).results
    assert not results[0][0].isfinite().all()
    after = [states[0][key] for states in workers.states for key in keys]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(one, common[key]) for key, one in shared.items())
