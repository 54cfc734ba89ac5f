"""Ends of ATP's sums over real sockets: they find each other, servers of their own included."""

import contextlib
import os
import random
import threading
from collections import Counter

import msgspec
import numpy as np
import pytest

from paceline.collectives.in_network.atp_session import ServedEnd
from paceline.collectives.in_network.atp_tree import Server, Ways, beside_workers
from paceline.collectives.in_network.best_effort import FallbackServer
from paceline.collectives.in_network.packets import FEWEST_ELEMENTS
from paceline.collectives.in_network.sums_service import ServerHosts, SumsService
from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import Sender
from paceline.interfaces.server_messages import Introduce, Refused, Said, Say
from paceline.parameter_server.process.dedicated_server import make_shell
from paceline.transport.connection import RemoteServer
from paceline.transport.listener import Listener
from tests.collectives.in_network.test_ring_session import (
    Exchanges,
    addresses,
    aggregators,
)
from tests.collectives.in_network.test_server import TOKEN, lossy, together
from tests.support.hanging import SECONDS

RACKS = (0, 0, 1, 1, 2)
LONG_TOKEN = 3 * TOKEN


@contextlib.contextmanager
def served(ways, faults=None):
    """The ends of every rank's dedicated servers; none where there are none. *faults*: a list for
    the errors that end servers."""
    count = sum(server.rank is None for server in ways.servers)
    with contextlib.ExitStack() as stack:
        listeners = [
            Listener("127.0.0.1", 0, workers=len(ways.racks)) for _ in range(count)
        ]
        for listener in listeners:
            stack.callback(listener.close)
        shells = [make_shell(len(ways.racks), one, LONG_TOKEN) for one in listeners]

        def run(shell):
            try:
                shell.run(None)
            except RuntimeError as fault:
                if faults is None:
                    raise
                faults.append(fault)

        threads = [threading.Thread(target=run, args=(shell,)) for shell in shells]
        for thread in threads:
            thread.start()
            stack.callback(thread.join, 20)
        names = [f"sums {number}" for number in range(count)]

        def ends_of(rank):
            ends = [
                RemoteServer(
                    name, "127.0.0.1", shell.port, worker=rank, token=LONG_TOKEN
                )
                for name, shell in zip(names, shells, strict=True)
            ]
            for number, end in enumerate(ends):
                words = Introduce(kind="fallback-server", services=names, number=number)
                end.request(words).wait()
            return ends

        yield ends_of if count else lambda rank: []


def in_a_job(ways, where, work, ends_of=lambda rank: [], faulty=False, **options):
    exchanges = Exchanges(len(ways.racks))
    own = {"token": TOKEN, "job": "a job", "slots": 16} | options

    def one(rank):
        chance = lossy(rank, 0.01) if faulty else None
        ends = ends_of(rank)
        hosts = ServerHosts(ends) if ends else None
        try:
            end = ServedEnd(
                ways, hosts, rank, where, exchanges.of(rank), **own, lossy=chance
            )
            try:
                return work(rank, end)
            finally:
                end.serve_while(lambda: exchanges.barrier.wait(SECONDS))
                end.close()
        finally:
            for one in ends:
                one.close()

    return together(len(ways.racks), one)


@pytest.mark.parametrize("faulty", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("aggregating", "servers"),
    [
        ((0, 1), beside_workers(RACKS)),
        ((0, 1), (Server(2, None, 0), Server(0, None, 1))),
        ((), (Server(1, None, 0),)),
    ],
    ids=["shards", "dedicated", "no switch"],
)
def test_sums_are_exact(aggregating, servers, faulty):
    chance = np.random.default_rng(0)
    made = [
        chance.integers(-(2**31), 2**31, (len(RACKS), size)).astype(np.int32)
        for size in (30_011, 1, 4000)
    ]
    totals = [values.sum(axis=0, dtype=np.int64).astype(np.int32) for values in made]
    ways = Ways(RACKS, aggregating, servers)

    def work(rank, end):
        for values in made:
            end.sum_integers(values[rank])

    with aggregators(aggregating) as there, served(ways) as ends_of:
        in_a_job(ways, addresses(there), work, ends_of, faulty)
    for values, total in zip(made, totals, strict=True):
        assert (values == total).all()


def test_an_aggregator_that_dies_is_a_loss_and_values_are_as_they_were():
    racks = (0, 0, 1, 1)
    began, died = threading.Barrier(4), threading.Event()
    values = [np.full(200_000, rank, np.int32) for rank in range(4)]

    def told():
        if died.is_set():
            raise PeerLostError("told by others")

    with aggregators({1}) as there, contextlib.ExitStack() as first:
        there[0] = first.enter_context(aggregators({0}))[0]

        def work(rank, end):
            end.sum_integers(np.ones(10, np.int32))
            began.wait(SECONDS)
            end.watch = told if racks[rank] else None
            if rank == 0:
                first.close()
                died.set()
            with pytest.raises(PeerLostError):
                end.sum_integers(values[rank])

        ways = Ways(racks, (0, 1), beside_workers(racks))
        in_a_job(ways, addresses(there), work)
    for rank in range(4):
        assert (values[rank] == rank).all()


@pytest.mark.parametrize("own", [False, True], ids=["beside workers", "dedicated"])
def test_a_server_whose_thread_fails_is_a_loss_to_all_at_once(own, monkeypatch):
    """Who has the server beside it tells the others, as `sum_queue` does; a dedicated server's
    process ends."""
    racks = (0, 0, 0)
    ways = Ways(racks, (), (Server(0, None, 0),) if own else beside_workers(racks)[:1])
    fails, told, began = threading.Event(), threading.Event(), threading.Barrier(3)
    fault, faults = RuntimeError("no room for sums"), []
    take = FallbackServer.take

    def failing(server, packets):
        if fails.is_set():
            raise fault
        return take(server, packets)

    def hears():
        if told.is_set():
            raise PeerLostError("told by others")

    def work(rank, end):
        end.sum_integers(np.ones(10, np.int32))
        began.wait(SECONDS)
        fails.set()
        look = end.watch
        end.watch = look if own or rank == 0 else hears
        with pytest.raises(PeerLostError) as lost:
            end.sum_integers(np.ones(10, np.int32))
        if not own and rank == 0:
            assert "part 0" in str(lost.value)
            assert str(fault) in str(lost.value)
        told.set()
        if own:
            return
        # Between sums, too, it is not only the next one that finds it out.
        done, wake = os.pipe()
        with contextlib.nullcontext() if rank else pytest.raises(PeerLostError):
            end.idle(0.01, done)
        os.close(done)
        os.close(wake)

    monkeypatch.setattr(FallbackServer, "take", failing)
    with served(ways, faults) as ends_of:
        where = {0: ("127.0.0.1", 1)}  # no rack aggregates: only its family counts
        in_a_job(ways, where, work, ends_of)
    assert faults == [fault] * own


def refusals(ways, where, kind, **options):
    exchanges, errors = Exchanges(len(ways.racks)), []

    def one(rank):
        own = {"token": TOKEN, "job": "refused"} | options
        try:
            ServedEnd(ways, None, rank, where, exchanges.of(rank), **own)
        except kind as error:
            errors.append(str(error))

    together(len(ways.racks), one)
    assert len(errors) == len(ways.racks)
    return errors


def test_what_is_refused_is_refused_on_all_ranks():
    ways = Ways((0, 0, 1), (0,), beside_workers((0, 0, 1)))
    with aggregators([0]) as there:
        where = addresses(there)
        for options, said in (
            ({"token": "another"}, "another token"),
            ({"mtu": 90}, "MTU 90: expected"),
            ({"mtu": 9000}, "start it with a larger --mtu"),
        ):
            for error in refusals(ways, where, UsageError, **options):
                assert said in error
    for error in refusals(ways, where, PeerLostError):
        assert "cannot be reached" in error


def test_a_dedicated_server_refuses_what_makes_no_sense():
    ways = Ways((0,), (), (Server(0, None, 0),))
    with served(ways) as ends_of:
        [end] = ends_of(0)
        hosts = ServerHosts([end])
        for slots, elements in ((0, 358), (1 << 30, 358), (8, FEWEST_ELEMENTS - 1)):
            with pytest.raises(UsageError, match="slots of"):
                hosts.open("job", TOKEN, workers=1, slots=slots, elements=elements)
        with pytest.raises(UsageError, match="waiting for its routes"):
            hosts.lead("job", TOKEN, [[]])
        hosts.open("job", TOKEN, workers=1, slots=8, elements=358)
        with pytest.raises(UsageError, match="one of that number"):
            hosts.open("job", TOKEN, workers=1, slots=8, elements=358)
        hosts.forget("job", TOKEN)
        end.close()


def test_whatever_a_dedicated_server_is_told_it_does_not_break():
    """Orders with random words in their fields, and no orders at all."""
    chance = random.Random(0)
    words = [0, -1, 1, 8, 358, 1 << 40, "", "127.0.0.1", "::1", "nowhere", "00" * 32]
    words += [None, [], [[1, "127.0.0.1", 1 << 17]], [[-1, "127.0.0.1", 9]]]
    service = SumsService()
    kinds = [
        {"type": "open", "host": "127.0.0.1", "number": 1, "key": "00" * 32}
        | {"workers": 2, "slots": 8, "elements": 358},
        {"type": "lead", "number": 1, "routes": [[3, "127.0.0.1", 9]]},
        {"type": "forget", "number": 1},
    ]
    answered = Counter()
    for number in range(400):
        order = dict(chance.choice(kinds))
        if chance.random() < 0.7:
            order[chance.choice(sorted(order))] = chance.choice(words)
        said = msgspec.json.encode(order)
        if number % 10 == 0:
            said = chance.randbytes(20)
        sender = Sender(0, 0, "", number)
        [answer] = service.on_message(sender, Say(words=said), None, 0.0)
        answered[type(answer.message)] += 1
    assert answered[Said] > 20
    assert answered[Refused] > 100
    service.close()
