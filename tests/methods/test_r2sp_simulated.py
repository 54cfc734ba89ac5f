"""r2sp in virtual time: turns, what they do to the link, what that gains, and where nothing."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.errors import DeadlockError
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.runtimes.simulated.services import HEADER_BYTES, ServerRates

WORKERS = 8
RATE = 1e6
LAYERS, ELEMENTS = 4, 6250
SIZE = 4 * LAYERS * ELEMENTS
"""Bytes of the model: a tenth of a second on a link that one worker has for itself."""
ALONE = (SIZE + HEADER_BYTES) / RATE


class Layers(torch.nn.Module):
    """Equal tensors whose gradients are all ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(LAYERS)
        )

    def forward(self) -> torch.Tensor:
        return torch.stack([layer.sum() for layer in self.layers]).sum()


class Watch:
    """How long gradients crossed the server's link, and how long two or more at a time,
    from *start* on."""

    def __init__(self, simulation: Simulation, start: float) -> None:
        self.some = self.more = 0.0
        self._clock, self._under_way, self._since = simulation.clock, 0, start
        cluster = simulation.cluster
        link = cluster.host_path(0, cluster.host_of_server(0))[-1]
        begin = simulation.links.start

        def watched(demand: Any, size: float, done: Any, messages: Any = None) -> None:
            if size <= HEADER_BYTES or link not in demand:
                begin(demand, size, done, messages)
                return

            def ended() -> None:
                self._count(-1)
                done()

            self._count(1)
            begin(demand, size, ended, messages)

        simulation.links.start = watched  # type: ignore[method-assign]

    def _count(self, change: int) -> None:
        passed = max(0.0, self._clock.now - self._since)
        self.some += passed if self._under_way else 0.0
        self.more += passed if self._under_way > 1 else 0.0
        self._since = max(self._since, self._clock.now)
        self._under_way += change


class Played:
    """One training: when each worker's steps ended, and with what parameters."""

    def __init__(
        self,
        method: str,
        compute: float,
        steps: int = 40,
        jitter: float = 0.0,
        server: float | None = None,
        servers: int = 1,
        rates: ServerRates | None = None,
    ) -> None:
        rack = Rack(workers=WORKERS, link=RATE, latency=0.0)
        cluster = Cluster((rack,), servers=(ServerHost(link=server),) * servers)
        model = ComputeModel(
            forward=compute / 3, backward=2 * compute / 3, jitter=jitter
        )
        simulation = Simulation(cluster, compute=model)
        if rates is not None:
            simulation.server_rates = rates
        self.watch = Watch(simulation, start=compute * steps)
        self.ends: list[tuple[float, int]] = []
        self.model: dict[int, torch.Tensor] = {}

        def train(rank: int) -> None:
            layers = Layers()
            plain = torch.optim.SGD(layers.parameters(), lr=1.0)
            optimizer = paceline.distribute(layers, plain, method=method)
            for _ in range(steps):
                optimizer.zero_grad()
                layers().backward()
                optimizer.step()
                self.ends.append((paceline.now(), rank))
            optimizer.finish()
            self.model[rank] = layers.layers[0].detach().clone()

        simulation.run(train)
        self.ends.sort()

    def seconds(self) -> float:
        """Of a step, among the last ones in which all take part."""
        mine = [time for time, rank in self.ends if rank == 0]
        return (mine[-3] - mine[-13]) / 10


ASP = "asp:overlap=false,buckets=single"
BSP = "bsp:collective=parameter-server,overlap=false,buckets=single"
TURNS = "r2sp:overlap=false,buckets=single"
COMPUTE = 2 * WORKERS * ALONE
"""As long as all at once to the server and back."""

played = cache(Played)


def test_turns_are_in_order_and_evenly_apart() -> None:
    turns = played(TURNS, COMPUTE).ends[-12 * WORKERS : -2 * WORKERS]
    for (_, worker), (_, following) in pairwise(turns):
        assert following == (worker + 1) % WORKERS
    # A worker has the link for itself: the ends of steps are as far apart as turns.
    gaps = [after - before for (before, _), (after, _) in pairwise(turns)]
    step = COMPUTE + 2 * ALONE
    assert min(gaps) >= step / (1.2 * WORKERS)
    assert gaps == [pytest.approx(step / WORKERS, rel=0.05)] * len(gaps)


def test_transfers_get_out_of_each_others_way() -> None:
    # Equal workers of asp stay in step, and meet at the server's link each time.
    crowded, alone = played(ASP, COMPUTE).watch, played(TURNS, COMPUTE).watch
    assert crowded.more == pytest.approx(crowded.some, rel=0.01)
    assert alone.more <= 0.01 * alone.some


def test_of_several_servers_the_first_keeps_the_order() -> None:
    method = "r2sp:overlap=false,buckets=wfbp"
    turns = Played(method, COMPUTE, servers=2).ends[-12 * WORKERS : -2 * WORKERS]
    for (_, worker), (_, following) in pairwise(turns):
        assert following == (worker + 1) % WORKERS


def test_it_gains_what_incast_costs() -> None:
    textbook = played(BSP, COMPUTE).seconds()
    assert textbook == pytest.approx(2 * COMPUTE, rel=1e-3)
    turns = played(TURNS, COMPUTE).seconds()
    assert turns == pytest.approx(COMPUTE + 2 * ALONE, rel=1e-3)
    assert turns < played(ASP, COMPUTE).seconds() < textbook


def test_without_incast_there_is_nothing_to_gain() -> None:
    # The server's link carries all workers at once: each worker's own is the limit.
    wide = 2 * WORKERS * RATE
    textbook = Played(BSP, COMPUTE, server=wide).seconds()
    turns = Played(TURNS, COMPUTE, server=wide).seconds()
    assert turns == pytest.approx(textbook, rel=1e-3)


def test_a_link_that_never_rests_is_the_limit() -> None:
    turns = Played("r2sp:buckets=wfbp", compute=0.1).seconds()
    assert turns == pytest.approx(WORKERS * ALONE, rel=0.02)


def test_two_runs_are_equal_bit_for_bit() -> None:
    first, second = (Played("r2sp", 0.5, steps=20, jitter=0.1) for _ in range(2))
    assert first.ends == second.ends
    for rank in range(WORKERS):
        assert torch.equal(first.model[rank], second.model[rank])
        # Gradients of ones, each once, at a weight of 1/8.
        assert first.model[rank][0] == pytest.approx(-20.0)


def test_turns_wait_for_a_busy_processor() -> None:
    rates = ServerRates(stepped=SIZE / 0.05)
    turns = Played(TURNS, COMPUTE, rates=rates)
    # Each push keeps the processor for 50 ms, and its own worker waits for that.
    assert turns.seconds() == pytest.approx(COMPUTE + 2 * ALONE + 0.05, rel=1e-3)


def test_a_worker_that_never_has_its_turn_is_a_deadlock() -> None:
    def train(rank: int) -> None:
        layers = Layers()
        plain = torch.optim.SGD(layers.parameters(), lr=1.0)
        optimizer = paceline.distribute(layers, plain, method="r2sp:warm_up=2")
        for step in range(9):
            if rank == 1 and step == 4:
                torch.distributed.barrier()  # where nobody else comes
            layers().backward()
            optimizer.step()

    rack = Rack(workers=2, link=RATE, latency=0.0)
    with pytest.raises(DeadlockError, match=r"worker 0 .*server 0"):
        Simulation(Cluster((rack,))).run(train)


@pytest.mark.parametrize("shares", [None, "speed"])
def test_unequal_workers_take_unequal_shares(shares: Any) -> None:
    speeds = (1.0, 1.0, 0.5, 0.5)
    rack = Rack(workers=4, link=1e12, latency=0.0, speed=speeds)
    data = torch.arange(48.0)
    ends, took = [], []

    def train(rank: int) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        paceline.init()
        sampler = paceline.Sampler(data, 12, shares=shares)
        optimizer = paceline.distribute(model, plain, method="r2sp", sampler=sampler)
        times: list[float] = []
        for epoch in range(20):
            if epoch in (10, 18):
                times.append(paceline.now())
            for batch in sampler:
                optimizer.zero_grad()
                model(data[batch].unsqueeze(1)).mean().backward()
                optimizer.step()
        took.append((times[1] - times[0]) / (8 * len(sampler)))
        optimizer.finish()
        ends.append(model.weight.item())

    Simulation(Cluster((rack,)), compute=ComputeModel(forward=0.1, backward=0.2)).run(
        train
    )
    # A gradient is the mean of its samples, and weighs by their number: all epochs move by
    # the mean of all data, times 4 batches.
    assert ends == [pytest.approx(-0.01 * 80 * data.mean().item(), rel=1e-4)] * 4
    # 3 samples take 0.3 s at a speed of 1. With 4, 4, 2 and 2 all are equally fast.
    expected = 0.4 if shares else 0.6
    assert took == [pytest.approx(expected, rel=0.02)] * 4
