"""Group servers in virtual time: every gradient once in the end, wherever workers push; and
models without contents, whose updates take as long."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.cluster import Cluster
from paceline.methods import METHODS
from paceline.methods.gssp import GSSP
from paceline.runtimes.simulated.services import SimulatedServer
from paceline.testing.problems import Counting, flat_parameters
from tests.runtimes.simulated.test_compute import model, train, workload
from tests.support.group_server_trial import Grouped
from tests.support.simulations import cluster, rack, run, run_on, simulation

LR = 0.5
WORKERS = 4


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    for method in (Grouped, GSSP):
        monkeypatch.setitem(METHODS, method.name, method)


def counted(method: str, where: int | Cluster = WORKERS, steps=(7, 7, 7, 7), **options):
    """By how many whole gradients each worker's parameters have moved at the end, and the
    servers' machines."""
    runtime = simulation(where)

    def body(rank: int) -> float:
        trained = Counting()
        plain = torch.optim.SGD(trained.parameters(), lr=LR)
        optimizer = paceline.distribute(trained, plain, method=method, **options)
        for _ in range(steps[rank]):
            paceline.pace(0.01 * (1 + rank))
            optimizer.zero_grad()
            trained().backward()
            optimizer.step()
        optimizer.finish()
        counts = -flat_parameters(trained) / LR
        assert counts.max() - counts.min() < 1e-3
        return round(counts.mean().item(), 3)

    found = run_on(runtime, body)
    return found, [service.server for service in runtime._services[0]]


@pytest.mark.parametrize("steps", [(7, 7, 7, 7), (1, 9, 0, 4)])
@pytest.mark.parametrize(
    "members", ["0-1+2-3", "0+1+2+3", "3.0+1-2", "0-3"], ids=lambda text: text
)
def test_every_gradient_is_in_every_model(members, steps):
    found, machines = counted(f"grouped:members={members}", steps=steps)
    assert found == [sum(steps) / WORKERS] * WORKERS
    assert len(machines) == members.count("+") + 1


def test_workers_that_are_told_to_move_lose_nothing():
    method = "gssp:measure_steps=2,most_groups=3,ratio=1.3"
    found, machines = counted(method, steps=(40, 20, 14, 10))
    assert found == [84 / WORKERS] * WORKERS
    assert all(machine.local.counts["gradients applied"] for machine in machines)


def test_racks_may_be_groups():
    by_hand = cluster(rack(2, group="near"), rack(2, group="far"))
    found, machines = counted("gssp", by_hand)
    assert found == [7.0] * WORKERS
    assert len(machines) == 2


@pytest.fixture
def talk(monkeypatch):
    """What servers ask each other: kinds of requests, and their bytes."""
    asked = []
    take = SimulatedServer.take

    def counting(self, sender, message, payload, receiver, time):
        size = take(self, sender, message, payload, receiver, time)
        if sender.worker >= WORKERS:
            asked.append((type(message).__name__, size))
        return size

    monkeypatch.setattr(SimulatedServer, "take", counting)
    return asked


def test_a_stand_in_s_updates_are_as_large_as_the_model_s(talk):
    method, found = "gssp:members=0-1+2-3", []
    for make in (model, lambda: paceline.stand_in(workload())):
        talk.clear()
        run(WORKERS, lambda rank, make=make: train(make(), 6, method=method) and None)
        found.append(set(talk))
    assert found[0] == found[1]
    payload = sum(4 * p.numel() for p in model().parameters())
    (passed,) = [size for kind, size in found[0] if kind == "Update"]
    assert payload <= passed < payload + 1000
