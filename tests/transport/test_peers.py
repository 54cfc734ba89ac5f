"""Services that ask each other, behind real sockets: mesh, early and late deaths, goodbyes."""

import contextlib
import socket
import threading

import pytest
import torch

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import Ask, Reply, Service, Work
from paceline.interfaces.server_messages import (
    PROTOCOL,
    Leave,
    PeerAddress,
    Reduce,
    Reduced,
    Rejected,
)
from paceline.transport import protocol
from paceline.transport.peers import ATTEMPTS_AN_INCARNATION, PeerConnections, Route
from paceline.transport.poll_loop import PollLoop
from paceline.transport.protocol import ONLY_SERVICE
from tests.support.processes import wait_until
from tests.support.server_jobs import (
    SECONDS,
    TOKEN,
    Adder,
    Line,
    connect,
    running,
    time_limit,
)

PEER = "the other"


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


class Relay(Service):
    """Hands what workers say to the other service, and hands back what that answers; answers
    other services itself with ones."""

    def __init__(self, workers=1):
        self.workers = workers
        self.waiting = {}
        self.next = 0
        self.lost, self.peers_lost = [], []

    def on_request(self, sender, message, payload, now):
        if sender.worker >= self.workers:
            return [Reply(sender, Reduced(), torch.ones_like(payload))]
        number, self.next = self.next, self.next + 1
        self.waiting[number] = sender
        into = None if payload is None else torch.empty_like(payload)
        return [Ask(PEER, number, message, payload, into)]

    def on_reply(self, peer, number, reply, payload, now):
        assert peer == PEER
        return [Reply(self.waiting.pop(number), reply, payload)]

    def on_peer_lost(self, peer, reason, now):
        self.peers_lost.append(reason)
        waiting, self.waiting = self.waiting, {}
        return [Reply(to, Rejected(reason=reason)) for to in waiting.values()]

    def on_worker_lost(self, worker, incarnation, now):
        self.lost.append(worker)
        return []

    def next_deadline(self):
        return None

    def on_timer(self, now):
        return []

    def take_work(self):
        return Work()


def at(host):
    return {PEER: PeerAddress(host="127.0.0.1", port=host.port, token=TOKEN)}


def message(number=0):
    return Reduce(channel="", number=number, operation="sum")


def ask(end, number=0, size=1000):
    part = torch.zeros(size)
    pending_reply = end.request(message(number), part, into=part)
    pending_reply.wait()
    return part


def test_two_services_may_ask_each_other_and_say_goodbye():
    machines = Relay(), Relay()
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(running(machine, 1, services=2, peers=[PEER]))
            for machine in machines
        ]
        ends = [connect(host) for host in hosts]
        # What is asked before they have met is kept.
        early = [end.request(message(), torch.zeros(5)) for end in ends]
        for number, host in enumerate(hosts):
            host.meet(1 + number, at(hosts[1 - number]))
        for pending_reply in early:
            assert pending_reply.wait() == Reduced()
        for end in ends:
            assert torch.equal(ask(end, 1, 700_000), torch.ones(700_000))
        for end in ends:
            end.close()
        for host in hosts:
            host.thread.join(SECONDS)
            assert not host.thread.is_alive()
    # Whichever ended first has said goodbye: nobody who asks was lost.
    assert [machine.lost for machine in machines] == [[], []]


@pytest.mark.slow
def test_many_requests_come_back_in_order():
    with (
        running(Adder(2), 1, services=1) as other,
        running(Relay(), 1, peers=[PEER]) as host,
    ):
        host.meet(1, at(other))
        end, direct = connect(host), connect(other)
        pending_replies = [end.request(message(i), torch.ones(2)) for i in range(1500)]
        for number, pending_reply in enumerate(pending_replies):
            direct.request(message(number), torch.ones(2)).wait()
            assert pending_reply.wait() == Reduced()
        end.close()
        direct.close()


def test_a_peer_that_refuses_is_no_loss():
    machine = Relay()
    with (
        running(Adder(1), 1, services=1) as other,
        running(machine, 1, peers=[PEER]) as host,
    ):
        host.meet(1, at(other))
        end = connect(host)
        for _ in range(2):
            with pytest.raises(UsageError, match="this server only adds"):
                end.request(Leave()).wait()
        end.close()
        connect(other).close()
    assert machine.peers_lost == []


def test_a_peer_that_ends_is_told_while_somebody_waits_and_again_when_it_is_asked():
    machine = Relay()
    with running(machine, 1, peers=[PEER]) as host:
        end = connect(host)
        adder = Adder(2)
        with running(adder, 1, services=1) as other:
            host.meet(1, at(other))
            waiting = end.request(message(), torch.ones(1))  # worker 0 brings no part
            wait_until(lambda: adder.taken, SECONDS, "the request")
        for pending_reply in (waiting, end.request(message(1), torch.ones(1))):
            with pytest.raises(UsageError, match=r"the other at 127.* is lost"):
                pending_reply.wait()
        end.close()
    assert len(machine.peers_lost) == 2


def test_a_peer_that_has_ended_before_they_meet_is_told_at_once():
    machine = Relay()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with running(machine, 1, peers=[PEER]) as host:
        gone = PeerAddress(host="127.0.0.1", port=port, token=TOKEN)
        host.meet(1, {PEER: gone})
        end = connect(host)
        with pytest.raises(UsageError, match=r"the other at .* is lost: .*refused"):
            end.request(message(), torch.ones(1)).wait()
        end.close()


class Returning(Relay):
    """Is told who is there again, and remembers who asks."""

    reconnects_to_peers = True

    def __init__(self):
        super().__init__()
        self.back, self.asked_by = [], []

    def on_request(self, sender, *rest):
        self.asked_by.append(sender.incarnation)
        return super().on_request(sender, *rest)

    def on_peer_back(self, peer, now):
        self.back.append(peer)
        return []


def test_a_peer_that_is_started_again_is_found_again():
    machine = Returning()
    with running(machine, 1, peers=[PEER]) as host:
        end = connect(host)
        with running(Relay(), 1, services=1) as other:
            host.meet(1, at(other))
            ask(end)
        wait_until(lambda: machine.peers_lost, SECONDS, "the loss")
        with pytest.raises(UsageError, match="is lost"):
            ask(end, 1)
        with running(Relay(), 1, services=1, port=other.port):
            wait_until(lambda: machine.back, SECONDS, "the return")
            ask(end, 2)
            end.close()


def test_a_connection_that_breaks_is_made_again_as_a_later_incarnation():
    machine, asked = Returning(), Returning()
    with (
        running(asked, 1, services=1) as other,
        running(machine, 1, peers=[PEER]) as host,
    ):
        host.meet(1, at(other), incarnation=3)
        end = connect(host)
        ask(end)
        first = asked.asked_by[-1]
        # Somebody else with the same number, and a later life: the first one is lost.
        connect(other, 1, incarnation=first + 1).part(well=False)
        wait_until(lambda: machine.back, SECONDS, "the return")
        ask(end, 1)
        assert asked.asked_by[-1] > first + 1
        assert first == 3 * ATTEMPTS_AN_INCARNATION
        end.close()


def test_a_cut_while_the_loop_is_busy_does_not_end_the_service():
    """It comes to light when the machine asks the peer again: a lost peer as any other."""

    class Held(Returning):
        """Stands for an optimizer's step, or a slow disk, in which nothing is read."""

        def __init__(self):
            super().__init__()
            self.holds, self.held, self.go_on = (
                False,
                threading.Event(),
                threading.Event(),
            )

        def on_request(self, sender, message, *rest):
            said = super().on_request(sender, message, *rest)
            if self.holds:
                self.holds = False
                self.held.set()
                assert self.go_on.wait(SECONDS)
            return said

    machine = Held()
    with (
        running(Relay(), 1, services=1) as other,
        Line(other.port) as line,
        running(machine, 1, peers=[PEER]) as host,
    ):
        host.meet(1, {PEER: PeerAddress(host="127.0.0.1", port=line.port, token=TOKEN)})
        end = connect(host)
        ask(end)
        machine.holds = True
        pending_replies = [end.request(message(n), torch.ones(1)) for n in (1, 2)]
        assert machine.held.wait(SECONDS)
        line.cut()
        line.again.wait(0.5)
        machine.go_on.set()
        for pending_reply in pending_replies:
            with pytest.raises(UsageError, match="is lost"):
                pending_reply.wait()
        wait_until(lambda: machine.back, SECONDS, "the return")
        ask(end, 3)
        end.close()
        assert not other.refused


def test_a_peer_that_refuses_this_service_for_good_is_a_lost_peer():
    """Also when the machine asks it once more before its refusal was dealt with."""
    loop = PollLoop()
    with running(Relay(), 1, services=1) as other:
        peers = PeerConnections(loop, [PEER])
        peers.meet(1, {PEER: Route(ONLY_SERVICE, at(other)[PEER])})
        while peers._peers[PEER].connection is None:
            loop.handle(1000)
            assert peers.collect() == []
        end = peers._peers[PEER].connection
        end._channels[""].send(
            protocol.Hello(PROTOCOL, TOKEN, 1, 0, "")
        )  # out of order
        while end.failure is None:
            loop.handle(1000)
        # The refusal, or the end of the connection beside it: whichever is read first.
        assert isinstance(end.failure, UsageError | PeerLostError)
        peers.ask(Ask(PEER, 1, message(), torch.ones(1)))
        [lost] = peers.collect()
        assert lost.peer == PEER
        peers.close(well=False)


def test_a_token_of_another_job_is_told_in_words():
    with (
        running(Adder(1), 1, services=1) as other,
        running(Relay(), 1, peers=[PEER]) as host,
    ):
        stranger = PeerAddress(host="127.0.0.1", port=other.port, token="another job's")
        host.meet(1, {PEER: stranger})
        end = connect(host)
        with pytest.raises(UsageError, match="token"):
            end.request(message(), torch.ones(1)).wait()
        end.close()


def test_asking_one_that_is_no_peer_ends_the_service_in_words():
    def job():
        with (
            running(Relay(), 1, peers=["third"]) as host,
            pytest.raises(PeerLostError),
        ):
            connect(host).request(message(), torch.ones(1)).wait()

    with pytest.raises(AssertionError, match=r"none of its peers.*third"):
        job()


def test_a_service_that_is_lost_or_gone_is_no_worker_that_is():
    machine = Relay()
    with running(machine, 1, services=1) as host:
        asker = connect(host, 1)
        assert torch.equal(ask(asker), torch.ones(1000))
        asker.part(well=False)
        wait_until(lambda: machine.lost == [1], SECONDS, "the loss")
        again = connect(host, 1, incarnation=1)
        again.close()
        end = connect(host)  # still served
        end.close()
        host.thread.join(SECONDS)
        assert not host.thread.is_alive()
    assert machine.lost == [1]
