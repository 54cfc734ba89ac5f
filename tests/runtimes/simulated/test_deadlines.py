"""A server's own deadlines on the virtual clock."""

from __future__ import annotations

from functools import partial

import torch

from paceline.cluster import uniform_cluster
from paceline.cluster.links import Links
from paceline.interfaces import Reply, Sender, Service, Work
from paceline.interfaces.server_messages import KeepAlive, Request
from paceline.runtimes.simulated.clock import Completion, VirtualClock
from paceline.runtimes.simulated.services import ServerRates, SimulatedServer
from tests.support.simulations import until_over


class Sleeper(Service):
    """Its deadline is as of the last message that said one: the message at *t* sets
    ``plan[t]``. Each message is *work* bytes to add."""

    def __init__(self, plan: dict[float, float | None], work: int = 0) -> None:
        self.plan, self.work = plan, work
        self.deadline: float | None = None
        self.rang: list[float] = []

    def on_request(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Reply]:
        self.deadline = self.plan[now]
        return []

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> list[Reply]:
        return []

    def next_deadline(self) -> float | None:
        return self.deadline

    def on_timer(self, now: float) -> list[Reply]:
        self.rang.append(now)
        self.deadline = None
        return []

    def take_work(self) -> Work:
        return Work(added=self.work)


def when_it_rings(plan: dict[float, float | None], work: int = 0) -> list[float]:
    """With a message at each time of *plan*, which sets the deadline to what stands there."""
    clock = VirtualClock(1)
    server = Sleeper(plan, work)
    links = Links(clock, uniform_cluster(1, "1gbit", "0 s", 1))
    rates = ServerRates(added=1.0)
    virtual = SimulatedServer("server 0", 1, 0, server, clock, links, rates)
    for number, time in enumerate(plan):
        sender = Sender(0, 0, "", number)
        heard = partial(server.on_request, sender, KeepAlive(), None)
        clock.at(time, partial(virtual.enter, heard))

    def body() -> None:
        end = Completion(lambda: "the end")
        clock.at(100.0, lambda: clock.complete(end))
        clock.wait(end)

    clock.run([body], until_over)
    return server.rang


def test_a_deadline_rings_once_at_its_time() -> None:
    assert when_it_rings({1.0: 5.0}) == [5.0]
    assert when_it_rings({1.0: 1.0}) == [1.0]


def test_a_deadline_that_moves_rings_at_its_last_time() -> None:
    assert when_it_rings({1.0: 5.0, 2.0: 9.0}) == [9.0]
    assert when_it_rings({1.0: 9.0, 2.0: 5.0}) == [5.0]
    assert when_it_rings({1.0: 9.0, 2.0: 5.0, 3.0: 9.0}) == [9.0]
    assert when_it_rings({1.0: 9.0, 2.0: 5.0, 6.0: 9.0, 20.0: 21.0}) == [5.0, 9.0, 21.0]


def test_a_deadline_that_is_given_up_does_not_ring() -> None:
    assert when_it_rings({1.0: 5.0, 2.0: None}) == []


def test_a_busy_processor_takes_the_deadline_in_its_turn() -> None:
    # The message at 1 s keeps it until 11 s; then comes what has rung at 5 s.
    assert when_it_rings({1.0: 5.0}, work=10) == [11.0]
