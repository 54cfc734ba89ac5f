"""Servers that were there before their job are told what they are, and whom to ask."""

import contextlib

import msgspec
import pytest
import torch

from paceline.errors import UsageError
from paceline.interfaces import Answer, Ask, Sender, Service, Start, Work
from paceline.interfaces.server_messages import (
    Done,
    Introduce,
    Join,
    Reduce,
    Reduced,
    Refused,
    Say,
)
from paceline.parameter_server.process import service_registry
from paceline.parameter_server.process.dedicated_server import MOST_SERVICES, Dedicated
from paceline.runtimes.real import dedicated_servers
from paceline.runtimes.real.job_store import Address
from tests.support.server_jobs import TOKEN, connect, running, time_limit

WORKERS = 2
NAMES = ["server 0", "server 1"]


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


class Neighbour:
    """Asks its first peer for what workers ask it; answers peers with its own name."""

    def __init__(self, start):
        self.start = start
        self.waiting = []

    def on_message(self, sender, message, payload, now):
        if sender.worker >= self.start.workers:
            number = float(self.start.services.index(self.start.name))
            return [Answer(sender, Reduced(), torch.full_like(payload, number))]
        self.waiting.append(sender)
        into = torch.empty_like(payload)
        number = len(self.waiting) - 1
        return [Ask(self.start.peers[0], number, message, payload, into)]

    def on_reply(self, peer, number, reply, payload, now):
        return [Answer(self.waiting[number], reply, payload)]

    def on_peer_lost(self, peer, reason, now):
        return [Answer(to, Refused(reason=reason)) for to in self.waiting]

    def on_lost(self, worker, incarnation, now):
        return []

    def next_deadline(self):
        return None

    def on_timer(self, now):
        return []

    def take_work(self):
        return Work()


@pytest.fixture(autouse=True)
def neighbours(monkeypatch):
    monkeypatch.setitem(service_registry.KINDS, "neighbour", Neighbour)


def introduction(**changes):
    words = Introduce(kind="neighbour", services=list(NAMES), number=0)
    return msgspec.structs.replace(words, **changes)


def told(machine, message, worker=0):
    """What a server answers."""
    sender = Sender(worker, 0, "", 0)
    ((to, answer, _),) = machine.on_message(sender, message, None, 0.0)
    assert to == sender
    return answer


def machine_and_meetings():
    machine, met = Dedicated(WORKERS, "server 0", TOKEN), []
    machine.meet = lambda sender, peers: met.append((sender, dict(peers)))
    return machine, met


PEERS = {"server 1": ("host", 7)}


def test_all_workers_say_the_same_and_peers_are_met_once():
    machine, met = machine_and_meetings()
    for worker in range(WORKERS):
        assert told(machine, introduction(), worker) == Done()
        assert met == []
    for worker in range(WORKERS):
        assert told(machine, introduction(peers=PEERS), worker) == Done()
    ((sender, peers),) = met
    assert sender == WORKERS
    address = peers["server 1"]
    assert (address.host, address.port, address.token) == ("host", 7, TOKEN)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "os:system"}, "expected a kind among .*server"),
        ({"kind": ""}, "expected a kind among"),
        ({"services": []}, "no service 0"),
        ({"services": ["a", "a"]}, "got 2"),
        (
            {"services": [str(n) for n in range(MOST_SERVICES + 1)]},
            f"up to {MOST_SERVICES} services .* got {MOST_SERVICES + 1}",
        ),
        ({"number": 2}, "no service 2"),
        ({"number": -1}, "no service -1"),
    ],
)
def test_what_makes_no_sense_changes_nothing(changes, words):
    machine, met = machine_and_meetings()
    with pytest.raises(UsageError, match=words):
        raise UsageError(told(machine, introduction(**changes)).reason)
    assert told(machine, introduction()) == Done()
    assert not met


@pytest.mark.parametrize("peers", [{"server 0": ("a", 1)}, {**PEERS, "x": ("a", 1)}])
def test_peers_are_the_other_services(peers):
    machine, met = machine_and_meetings()
    assert "where each of the other" in told(machine, introduction(peers=peers)).reason
    assert not met


def test_who_comes_later_with_something_else_is_refused():
    machine, _ = machine_and_meetings()
    assert told(machine, introduction()) == Done()
    reason = told(machine, introduction(number=1), 1).reason
    assert "worker 1 has other servers" in reason


def test_services_introduce_nobody():
    machine, _ = machine_and_meetings()
    assert "only workers" in told(machine, introduction(), WORKERS).reason


def test_it_is_a_parameter_server_unless_it_is_told_first():
    machine, _ = machine_and_meetings()
    told(machine, Join(options="", method="asp"))
    assert "has begun as a parameter server" in told(machine, introduction(), 1).reason


def test_servers_that_a_job_has_started_are_not_told_what_they_are():
    machine = service_registry.make("server", Start("server", 1))
    told(machine, Join(options=""))
    for number, message in enumerate((introduction(), Say()), start=1):
        sender = Sender(0, 0, "", number)
        ((_, answer, _),) = machine.on_message(sender, message, None, 0.0)
        assert "another kind of service" in answer.reason


def test_workers_introduce_servers_that_then_ask_each_other():
    with contextlib.ExitStack() as stack:
        shells = []
        for name in NAMES:
            machine = Dedicated(WORKERS, name, TOKEN)
            shell = running(machine, WORKERS, services=MOST_SERVICES)
            shells.append(stack.enter_context(shell))
            machine.meet = shells[-1].meet
        services = [
            Service(name, "neighbour", peers=tuple(set(NAMES) - {name}))
            for name in NAMES
        ]
        addresses = [Address(host="127.0.0.1", port=shell.port) for shell in shells]
        of_workers = [
            [connect(shell, worker) for shell in shells] for worker in range(WORKERS)
        ]
        for ends in of_workers:
            dedicated_servers.introduce(services, addresses, ends)
        for ends in of_workers:
            for number, end in enumerate(ends):
                part = torch.empty(10)
                message = Reduce(channel="", number=0, operation="sum")
                end.request(message, part, into=part).wait()
                assert part.tolist() == [1.0 - number] * 10
        for end in [end for ends in of_workers for end in ends]:
            end.close()


def test_servers_without_peers_and_those_of_the_job_are_not_introduced():
    for service, address in (
        (Service("server 0"), Address(host="127.0.0.1", port=1)),
        (Service("server 0", peers=("server 1",)), None),
    ):
        dedicated_servers.introduce([service], [address], [None])
