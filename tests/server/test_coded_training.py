"""Trainings in virtual time whose pushes are codes, and whose answers may be."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.compression import COMPRESSORS
from paceline.network import Cluster, Rack, ServerHost
from paceline.optimizer import training_of
from paceline.worlds.virtual import ComputeModel, Simulation
from tests.server.test_coded import Largest

SHAPES = ((40, 30), (300, 200), (50,), ())
LR = 0.5


@pytest.fixture(autouse=True)
def largest(monkeypatch):
    monkeypatch.setitem(COMPRESSORS, Largest.name, Largest)


class Given(torch.nn.Module):
    """Its gradient is what it is given, whatever its parameters are."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        for number, shape in enumerate(SHAPES):
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
            self.register_parameter(f"p{number}", parameter)

    def forward(self, gradients):
        pairs = zip(self.parameters(), gradients, strict=True)
        return sum((p * g).sum() for p, g in pairs)


def gradients_of(rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in SHAPES
    ]


def residuals_of(optimizer):
    """By the name of a tensor, or of a part of one."""
    (own,) = training_of(optimizer).own_states
    return {name: state["residual"] for name, state in own.save().items()}


def simulation(workers, servers=1, compute=None, link=1e9):
    rack = Rack(workers=workers, link=link, latency=1e-4)
    cluster = Cluster((rack,), servers=(ServerHost(),) * servers)
    return Simulation(cluster, compute=compute or ComputeModel())


def machines(world):
    """The servers' state machines."""
    return [service.server for service in world._services[0]]


def train(
    world, method, steps=6, after=lambda *_: None, dtype=torch.float64, **options
):
    """Every worker's end: parameters, residuals, gradients that it made, times its weight."""
    ends = {}
    workers = world.cluster.workers

    def body(rank):
        model = Given(dtype)
        plain = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = paceline.distribute(model, plain, method=method, **options)
        made = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(steps):
            paceline.pace(0.01 * (1 + rank))
            given = gradients_of(rank, step, dtype)
            optimizer.zero_grad()
            model(given).backward()
            optimizer.step()
            for total, gradient in zip(made, given, strict=True):
                total += gradient.double() / workers
            after(rank, step, model, optimizer)
        left = residuals_of(optimizer) if "residuals=true" in str(options) else {}
        left = {name: value.clone() for name, value in left.items()}
        optimizer.finish()
        ends[rank] = [p.detach().clone() for p in model.parameters()], left, made

    world.run(body)
    return [ends[rank] for rank in range(workers)]


# ---- laws ----


@pytest.mark.parametrize("answers", ["dense", "differences"])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("method", ["asp", "ssp:staleness=1", "backup", "r2sp"])
def test_what_was_applied_and_what_is_left_are_all_gradients(method, servers, answers):
    world = simulation(3, servers)
    ends = train(world, method, compression="largest:residuals=true", answers=answers)
    first = ends[0][0]
    for parameters, _, _ in ends:
        for mine, theirs in zip(parameters, first, strict=True):
            assert torch.equal(mine, theirs)
    names = [f"p{number}" for number in range(len(SHAPES))]
    parts = set().union(*(left for _, left, _ in ends))
    assert any("[" in name for name in parts) == (servers > 1)
    for number, name in enumerate(names):
        applied = -first[number] / LR
        made = sum(total[number] for _, _, total in ends)
        left = torch.zeros_like(applied)
        for _, kept, _ in ends:
            for part, residual in kept.items():
                if part.split("[")[0] == name:
                    _add_part(left, part, residual)
        assert left.any() or left.numel() == 1
        torch.testing.assert_close(applied + left, made, rtol=1e-9, atol=1e-9)


def _add_part(whole, part, residual):
    flat = whole.view(-1)
    if "[" in part:
        start, stop = map(int, part.split("[")[1].rstrip("]").split(":"))
        flat = flat[start:stop]
    flat += residual.reshape(-1)


def test_without_residuals_that_law_fails():
    """The law's control."""
    ends = train(simulation(3), "asp", compression="largest")
    applied = -ends[0][0][1] / LR
    made = sum(total[1] for _, _, total in ends)
    assert (applied - made).abs().max() > 1


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("method", ["asp", "ssp:staleness=1", "backup"])
def test_servers_know_what_a_worker_holds_to_the_bit(method, servers, dtype):
    world, looked = simulation(3, servers), []

    def look(rank, step, model, optimizer):
        if step == 3:  # what is shown in between is not what is held
            with optimizer.consolidated():
                shown = [p.detach().clone() for p in model.parameters()]
            held = [p.detach() for p in model.parameters()]
            looked.append(
                all(torch.equal(a, b) for a, b in zip(shown, held, strict=True))
            )
        spread = training_of(optimizer).remote._spread
        for part in spread.on(spread.shards):
            shadows = machines(world)[part.shard].shard.coded.shadows
            shadow = shadows[rank, part.bucket].values
            assert torch.equal(shadow, spread.landing_of(part))
            flat = torch.cat(
                [p.detach().view(-1) for p in spread.buckets[part.bucket].parameters]
            )
            assert torch.equal(shadow, flat[part.start : part.stop])
        now = [machine.shard.store.flats for machine in machines(world)]
        assert len(now) == servers

    train(
        world,
        method,
        after=look,
        dtype=dtype,
        compression="largest",
        answers="differences",
    )
    assert looked == [False] * 3
    for machine in machines(world):
        assert not machine.shard.coded.shadows  # all have left


def test_looking_changes_nothing():
    def look(rank, step, model, optimizer):
        with optimizer.consolidated():
            pass

    options = {"compression": "largest:residuals=true", "answers": "differences"}
    straight, looked = (
        train(simulation(3), "ssp:staleness=0", after=after, **options)
        for after in (lambda *_: None, look)
    )
    for mine, theirs in zip(straight[0][0], looked[0][0], strict=True):
        assert torch.equal(mine, theirs)


def test_one_worker_alone_loses_nothing():
    ((parameters, _, made),) = train(simulation(1), "asp", compression="largest")
    for parameter, total in zip(parameters, made, strict=True):
        torch.testing.assert_close(-parameter / LR, total)
