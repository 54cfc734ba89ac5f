"""What a server process says of itself and of others, and what it logs."""

import contextlib
import os
import subprocess
import sys
import threading

import msgspec
import pytest
import torch

from paceline.errors import UsageError
from paceline.interfaces import Ask, Reply, Sender, Service, ServiceSpec, Work
from paceline.interfaces.server_messages import (
    Describe,
    Done,
    Join,
    PeerAddress,
    Reduce,
    Reduced,
    Rejected,
    ServiceRequest,
)
from paceline.parameter_server.process import services
from paceline.parameter_server.process.host import ServerHost
from paceline.parameter_server.process.services import (
    MOST_SERVICES,
    make_parameter_server,
)
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.runtimes.real.services import describe
from paceline.transport.listener import ServerListener
from paceline.transport.peers import PeerConnections, Route
from paceline.transport.protocol import ServiceKey
from tests.support.server_jobs import SECONDS, TOKEN, connect, time_limit

WORKERS = 2
NAMES = ["server 0", "server 1"]


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


class Neighbour(Service):
    """Asks its first peer for what workers ask it; answers peers with its own name."""

    def __init__(self, description, workers, method):
        self.description, self.workers = description, workers
        self.waiting = []

    def on_request(self, sender, message, payload, now):
        if sender.worker >= self.workers:
            number = float(self.description.number)
            return [Reply(sender, Reduced(), torch.full_like(payload, number))]
        self.waiting.append(sender)
        into = torch.empty_like(payload)
        number = len(self.waiting) - 1
        return [Ask(next(iter(self.description.peers)), number, message, payload, into)]

    def on_reply(self, peer, number, reply, payload, now):
        return [Reply(self.waiting[number], reply, payload)]

    def on_peer_lost(self, peer, reason, now):
        return [Reply(to, Rejected(reason=reason)) for to in self.waiting]

    def on_worker_lost(self, worker, incarnation, now):
        return []

    def next_deadline(self):
        return None

    def on_timer(self, now):
        return []

    def take_work(self):
        return Work()


@pytest.fixture(autouse=True)
def neighbours(monkeypatch):
    monkeypatch.setitem(services.SERVICES, "neighbour", Neighbour)


THERE = PeerAddress(host="host", port=7, token=TOKEN)
PEERS = {"server 1": THERE}


def description(**changes):
    words = Describe(kind="neighbour", services=list(NAMES), peers=PEERS)
    return msgspec.structs.replace(words, **changes)


class Described:
    """A server process that workers describe, and its *end* of each worker."""

    def __init__(self, stack):
        self.listener = ServerListener(
            workers=WORKERS, token=TOKEN, services=MOST_SERVICES, welcomes_any=True
        )
        self.host = ServerHost(self.listener)
        control, end = os.pipe()
        thread = threading.Thread(target=self._run, args=(control,))
        thread.start()
        stack.callback(os.close, control)
        stack.callback(thread.join, SECONDS)
        stack.callback(os.close, end)
        self._stack = stack
        self._ends = {}

    def _run(self, control):
        for _ in self.host.serve(control):
            pass
        self.host.close()

    @property
    def port(self):
        return self.listener.port

    @property
    def service(self):
        """What it is by now."""
        (hosted,) = self.host.services.values()
        return hosted.service

    def end(self, worker):
        if worker not in self._ends:
            end = connect(self, worker)
            self._ends[worker] = end
            self._stack.callback(end.part, well=False)
        return self._ends[worker]

    def tell(self, message, worker=0):
        """What it replies; raises `UsageError` where it refuses."""
        return self.end(worker).request(message).wait()


@pytest.fixture
def process():
    with contextlib.ExitStack() as stack:
        yield Described(stack)


def test_all_workers_say_the_same_and_peers_are_met_once(process, monkeypatch):
    met = []
    monkeypatch.setattr(PeerConnections, "meet", lambda _, *words: met.append(words))
    there = Route(ServiceKey(0, 1), THERE)
    for worker in range(WORKERS):
        assert process.tell(description(), worker) == Done()
        assert met == [(WORKERS, {"server 1": there}, 0)]
    elsewhere = {"server 1": msgspec.structs.replace(THERE, host="its other name")}
    assert process.tell(description(peers=elsewhere), 1) == Done()
    assert len(met) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "os:system"}, "kind of service 'os:system'"),
        ({"kind": ""}, "kind of service ''"),
        ({"kind": "sever"}, "Did you mean 'server'"),
        ({"services": []}, "no service 0"),
        ({"services": ["a", "a"]}, "got 2"),
        (
            {"services": [str(n) for n in range(MOST_SERVICES + 1)]},
            f"up to {MOST_SERVICES} services .* got {MOST_SERVICES + 1}",
        ),
        ({"number": 2}, "no service 2"),
        ({"number": -1}, "no service -1"),
        ({"peers": {"server 0": THERE}}, "among the other services"),
        ({"peers": {**PEERS, "x": THERE}}, "among the other services"),
    ],
)
def test_what_makes_no_sense_changes_nothing(changes, words, process):
    with pytest.raises(UsageError, match=words):
        process.tell(description(**changes))
    assert process.service is None
    assert process.tell(description(peers={})) == Done()


@pytest.mark.parametrize(
    ("changes", "worker", "words"),
    [
        ({"number": 1}, 1, "worker 1 describes other servers"),
        ({"kind": "server"}, 1, "worker 1 describes other servers"),
        ({}, WORKERS, "only workers"),
    ],
)
def test_who_may_not_say_it_or_says_something_else_is_refused(
    changes, worker, words, process
):
    assert process.tell(description(peers={})) == Done()
    with pytest.raises(UsageError, match=words):
        process.tell(description(**({"peers": {}} | changes)), worker)


def test_workers_describe_first(process):
    with pytest.raises(UsageError, match="yet to be told"):
        process.tell(Join(options="", method="asp"))
    assert process.tell(description(kind="server", peers={})) == Done()
    assert isinstance(process.service, ParameterServer)


def test_other_services_wait_until_a_server_is_described(process):
    message = Reduce(channel="", number=0, operation="sum")
    lost, asker = process.end(WORKERS), process.end(WORKERS + 1)
    lost.request(message, torch.zeros(2))
    part = torch.zeros(2)
    reply = asker.request(message, part, into=part)
    lost.part(well=False)
    process.tell(description(number=1, peers={}))
    reply.wait()
    assert part.tolist() == [1.0, 1.0]


def test_a_parameter_server_of_another_kind_of_words():
    machine = make_parameter_server(1, "server")
    machine.on_request(Sender(0, 0, "", 0), Join(options=""), None, 0.0)
    for number, message in enumerate((description(), ServiceRequest()), start=1):
        sender = Sender(0, 0, "", number)
        ((_, answer, _),) = machine.on_request(sender, message, None, 0.0)
        assert "expected a request of a parameter server" in answer.reason


def test_workers_describe_servers_that_then_ask_each_other():
    with contextlib.ExitStack() as stack:
        hosts = [Described(stack) for _ in NAMES]
        specs = [
            ServiceSpec(name, "neighbour", peers=tuple(set(NAMES) - {name}))
            for name in NAMES
        ]
        addresses = [
            PeerAddress(host="127.0.0.1", port=host.port, token=TOKEN) for host in hosts
        ]
        of_workers = [
            [
                connect(host, worker, service=ServiceKey(0, number))
                for number, host in enumerate(hosts)
            ]
            for worker in range(WORKERS)
        ]
        for ends in of_workers:
            describe(specs, addresses, ends)
        for ends in of_workers:
            for number, end in enumerate(ends):
                part = torch.empty(10)
                message = Reduce(channel="", number=0, operation="sum")
                end.request(message, part, into=part).wait()
                assert part.tolist() == [1.0 - number] * 10
        for end in [end for ends in of_workers for end in ends]:
            end.close()


SAYS = """
import logging, paceline.parameter_server.process.logs
{configures}
log = logging.getLogger("paceline.transport.listener")
log.warning("a warning")
log.info("news")
"""


@pytest.mark.parametrize(
    ("configures", "expected"),
    [
        (
            "[paceline.parameter_server.process.logs.log_to_stderr() for _ in range(2)]",
            "paceline: a warning\npaceline: news\n",
        ),
        ("", "a warning\n"),
        (
            "logging.basicConfig(format='%(name)s %(message)s')",
            "paceline.transport.listener a warning\n",
        ),
    ],
    ids=["its own process", "a script's", "a script's that configures logging"],
)
def test_where_lines_go(configures, expected):
    script = SAYS.format(configures=configures)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ,
        check=True,
    )
    assert ended.stderr == expected
