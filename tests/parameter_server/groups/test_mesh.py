"""Laws of group servers: each gradient is in once at each of them, whatever happens; and what
they refuse. The controls say that the laws can be broken."""

import math
import random
import re
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from paceline.errors import UsageError
from paceline.interfaces import Answer, Sender
from paceline.interfaces.server_messages import (
    Arrive,
    Away,
    Buffers,
    Done,
    Drain,
    Gradients,
    Join,
    Joined,
    Load,
    Note,
    Parameters,
    Pass,
    Pull,
    Push,
    Refused,
    Tell,
)
from paceline.methods.ssp import SSP
from paceline.parameter_server.groups.local_server import Home
from paceline.parameter_server.groups.outgoing import ROUNDS_UNANSWERED
from paceline.parameter_server.groups.server import GroupServer
from paceline.parameter_server.groups.update_log import Taken
from paceline.parameter_server.state_machine.server import ParameterServer
from tests.support.mesh_net import HYPERPARAMETERS, Case, MeshNet

OF = (0, 0, 1, 1, 2)
STEPS = (4, 5, 6, 4, 4)
MOVES = {(4, 2): 1, (1, 3): 2}
CASES = {
    "cuts": Case(OF, 3, STEPS, cuts=6),
    "meetings": Case(OF, 3, STEPS, cuts=3, meets=frozenset({1, 3}), moves=MOVES),
    "loads": Case(OF, 3, STEPS, cuts=3, loads=frozenset({1, 3}), moves=MOVES),
    "deaths": Case(OF, 3, STEPS, cuts=3, deaths=3, meets=frozenset({2}), moves=MOVES),
    "servers die": Case(OF, 3, STEPS, cuts=3, deaths=1, kills=2),
    "snapshots": Case(
        OF, 3, STEPS, cuts=2, kills=2, meets=frozenset({2}), snapshots=True
    ),
    "two": Case((0, 0, 1), 2, (4, 5, 6), cuts=3, deaths=1, kills=2),
    "one": Case((0, 0, 0), 1, (2, 3, 4), deaths=1, meets=frozenset({1})),
}


def run(name, seed, agree=True):
    case = CASES[name]
    net = MeshNet(replace(case, agree=agree), random.Random(seed))
    net.run()
    net.check_end()
    if not case.deaths and not case.kills:
        assert not net.refusals
    return net


def both_ways(name, seeds):
    for seed in seeds:
        run(name, seed, agree=True)
        if not CASES[name].loads:  # which the others take over
            run(name, seed, agree=False)


@pytest.mark.parametrize("name", CASES)
def test_each_gradient_is_in_once_at_each_server(name):
    both_ways(name, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_gradient_is_in_once_at_length(name):
    both_ways(name, range(100, 130))


# ---- controls ----


class Whatever:
    """Is what comes next, whatever that is."""

    def __lt__(self, other):
        return False

    __gt__ = __lt__


def breaks(name, seeds=20):
    """Whether some law is broken."""
    for seed in range(seeds):
        try:
            run(name, seed, agree=False)
        except AssertionError:
            return True
    return False


def test_control_who_takes_parcels_again_has_gradients_twice(monkeypatch):
    monkeypatch.setattr(Taken, "next", lambda taken, line: Whatever())
    assert breaks("cuts")


# ---- by hand ----


def machine(number=0, servers=2, of=(0, 1), period=1, **options):
    """A server that is loaded with zeros."""
    net = MeshNet(Case(of, servers, (9,) * len(of), period=period), random.Random(0))
    home = Home(number, len(of), net.sums_up(number), meets=number == 0)
    names = [f"server {n}" for n in range(servers)]
    server = GroupServer(home, names, **options)
    server.size, server.join = net.size, net.join(0)
    zeros = net.zeros()
    for worker in range(len(of)):
        [joined] = answers(
            server.on_message(of_worker(worker, 0), net.join(0), None, 0)
        )
        assert isinstance(joined.message, Joined)
    for bucket in range(2):
        server.on_message(of_worker(0, 1 + bucket), Load(bucket=bucket), zeros, 0)
    return server


def of_worker(worker, number):
    return Sender(worker, 0, "", number)


def of_server(server, number, workers=2):
    return Sender(workers + server, 0, "", number)


def answers(outgoing):
    return [one for one in outgoing if isinstance(one, Answer)]


def asks(outgoing, kind):
    return [
        a for a in outgoing if not isinstance(a, Answer) and isinstance(a.message, kind)
    ]


def push(server, worker, step, number, bucket=0):
    gradient = torch.ones(server.size, dtype=torch.float64)
    message = Push(
        step=step, bucket=bucket, used=[True], hyperparameters=HYPERPARAMETERS
    )
    return server.on_message(of_worker(worker, number), message, gradient, 0.0)


def gradients(**changes):
    given = {
        "bucket": 0,
        "gradients": 2,
        "weight": 2.0,
        "used": [True],
        "hyperparameters": HYPERPARAMETERS,
    }
    return Gradients(**(given | changes))


def passed(what, number=0, source=1):
    return Pass(
        source=source,
        life=0,
        number=number,
        floor=0,
        load=0,
        meeting=0,
        entry=0,
        what=what,
    )


def hear(server, message, payload=None, number=0):
    [answer] = answers(server.on_message(of_server(1, number), message, payload, 0.0))
    return answer.message


def test_a_parcel_is_applied_once_and_answered_again():
    server = machine()
    for _ in range(2):
        values = torch.ones(server.size, dtype=torch.float64)
        assert hear(server, passed(gradients()), values) == Done()
    assert server.home.shard.store.flats[0].tolist() == [-2.0] * server.size
    assert server.counts["parcels that came again"] == 1


@pytest.mark.parametrize(
    ("what", "dtype", "size", "words"),
    [
        (gradients(bucket=7), torch.float64, 0, "expected a bucket of"),
        (gradients(), torch.float32, 0, "elements of torch.float64"),
        (gradients(), torch.float64, 1, "expected .* elements of"),
        (gradients(used=[]), torch.float64, 0, "expected 1 used bits, got 0"),
        (gradients(weight=math.inf), torch.float64, 0, "a finite weight"),
        (gradients(weight=math.nan), torch.float64, 0, "a finite weight"),
        (gradients(gradients=-1), torch.float64, 0, "a number of gradients"),
        (gradients(hyperparameters=[]), torch.float64, 0, "hyperparameters of 1"),
        (Buffers(weight=0.5, floats=1), torch.float32, 0, "double precision"),
    ],
)
def test_a_parcel_that_does_not_fit_changes_nothing(what, dtype, size, words):
    server = machine()
    payload = torch.ones(server.size + size, dtype=dtype)
    refused = hear(server, passed(what), payload)
    assert isinstance(refused, Refused)
    assert torch.equal(
        server.home.shard.store.flats[0], torch.zeros(server.size).double()
    )
    assert re.search(words, refused.reason), refused.reason


def test_what_a_lost_server_has_passed_on_goes_to_those_that_may_not_have_it():
    server = machine(servers=3, of=(0, 1))
    for number in range(3):
        values = torch.ones(server.size, dtype=torch.float64)
        message = structs.replace(passed(gradients(), number), floor=max(0, number - 1))
        assert hear(server, message, values, number) == Done()
    relayed = asks(server.on_peer_lost("server 1", "it died", 0.0), Pass)
    assert [ask.peer for ask in relayed] == ["server 2"] * 2
    assert [(a.message.source, a.message.number) for a in relayed] == [(1, 1), (1, 2)]
    for ask in relayed:
        server.on_reply("server 2", ask.number, Done(), None, 0.0)
    server.on_peer_back("server 1", 0.0)
    assert not asks(server.on_peer_lost("server 1", "it died", 0.0), Pass)


def test_a_parcel_that_is_missing_is_noticed():
    refused = hear(machine(), passed(Away(), number=1))
    assert refused == Refused(reason="pass: expected number 0 of server 1, got 1")


def test_workers_do_not_say_what_servers_say_nor_the_reverse():
    server = machine()
    for message in (
        passed(Away()),
        Drain(life=0, meeting=1),
        Tell(life=0, number=0, words=b""),
    ):
        [refused] = server.on_message(of_worker(0, 3), message, None, 0.0)
        assert refused.message.reason == "only the other servers of the job say that"
        alone = ParameterServer(1)
        assert answers(alone.on_message(of_worker(0, 0), Join(options=""), None, 0.0))
        [refused] = alone.on_message(of_worker(0, 1), message, None, 0.0)
        assert "another kind of service" in refused.message.reason
    for sender in (of_server(1, 0), of_server(0, 0), of_server(2, 0)):
        [refused] = server.on_message(sender, Pull(bucket=0), None, 0.0)
        assert refused.message.reason == "server 0: expected what its peers say"


def test_while_a_peer_answers_nothing_parcels_become_fewer_and_larger():
    server, peer = machine(), "server 1"
    server.on_peer_lost(peer, "the line was cut", 0.0)
    for step in range(40):
        for bucket in range(2):
            push(server, 0, step, 3 + 2 * step + bucket, bucket)
    again = asks(server.on_peer_back(peer, 0.0), Pass)
    most = ROUNDS_UNANSWERED * 3
    assert len(again) <= most + 2
    sent = []
    while again:
        sent += again
        outgoing = [server.on_reply(peer, a.number, Done(), None, 0.0) for a in again]
        again = asks([one for some in outgoing for one in some], Pass)
    assert [ask.message.number for ask in sent] == list(range(len(sent)))
    for bucket in range(2):
        mine = [a.message.what for a in sent if a.message.what.bucket == bucket]
        assert sum(what.gradients for what in mine) == 40


def test_what_was_not_answered_comes_again_in_order_when_the_line_is_back():
    server, peer = machine(), "server 1"
    first = asks(push(server, 0, 0, 3), Pass)
    first += asks(push(server, 0, 0, 4, bucket=1), Pass)
    server.on_reply(peer, first[0].number, Done(), None, 0.0)
    server.on_peer_lost(peer, "the line was cut", 0.0)
    assert not asks(push(server, 0, 1, 5), Pass)
    again = asks(server.on_peer_back(peer, 1.0), Pass)
    assert [ask.message.number for ask in again] == [1, 2]
    assert [ask.message.floor for ask in again] == [1, 1]


def test_a_peer_that_does_not_come_back_ends_the_waiting_in_words():
    server = machine(patience=10.0)
    server.on_peer_lost("server 1", "server 1 at host:1 is lost", 5.0)
    assert server.next_deadline() == 15.0
    server.on_message(of_worker(0, 3), Pull(bucket=0), None, 6.0)
    server.on_timer(15.0)
    [refused] = answers(push(server, 0, 0, 4))
    assert refused.message.reason == (
        "server 0: server 1 at host:1 is lost, and it was not there again within 10 s"
    )
    assert server.next_deadline() is None


def test_what_a_peer_refuses_ends_the_training_in_words():
    server = machine()
    [ask] = asks(push(server, 0, 0, 3), Pass)
    server.on_reply("server 1", ask.number, Refused(reason="another model"), None, 0.0)
    [refused] = answers(push(server, 0, 0, 4, bucket=1))
    assert "server 1 does not take what was applied here: another model" in (
        refused.message.reason
    )


def test_a_server_without_workers_goes_and_one_that_is_server_0_stays():
    for number, goes in ((0, False), (1, True)):
        of = (1 - number,) * 2
        server = machine(number, of=of)
        outgoing = list(server.on_timer(0.0))
        assert server.is_active
        sent = [
            letter.item.what
            for letter in server._peers[1 - number].letters
            if letter.item
        ]
        assert (sent == [Away()]) is goes, outgoing


def test_the_method_must_be_one_of_groups():
    with pytest.raises(UsageError, match="group server 0: expected"):
        Home(0, 1, SSP().server(1))


def test_who_comes_from_another_group_may_have_done_any_number_of_steps():
    server = machine()
    for number, ahead in enumerate((150_000, 10**9), 3):
        [done] = answers(
            server.on_message(of_worker(1, number), Note(step=ahead), None, 0.0)
        )
        assert done.message == Done()
    [answer] = answers(push(server, 1, 10**9, 5))
    assert isinstance(answer.message, Parameters), answer


@pytest.mark.parametrize(("back", "waits"), [(80, True), (100, False)])
def test_who_meets_from_another_group_waits_for_who_came_back_at_a_step_before(
    back, waits
):
    """Server 0 sees no push of worker 1, which has done 100 steps elsewhere."""
    server = machine()
    server.on_lost(0, 0, 0.0)
    again = Sender(0, 1, "", 0)
    requests = (server.join, Note(step=back, guest=True), Pull(bucket=0))
    for number, request in enumerate(requests):
        server.on_message(again._replace(number=number), request, None, 0.0)
    arrive = Arrive(purpose="meet", step=100)
    server.on_message(of_worker(1, 3), arrive, None, 0.0)
    assert (not server.home.held) is waits
