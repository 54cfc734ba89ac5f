"""Laws of group servers: each gradient is in once at each of them, whatever happens; what they refuse,
and connections that are made again. Logs with a fault each show that the laws can be broken.
"""

import contextlib
import math
import random
import re
from dataclasses import replace

import pytest
import torch

from paceline.errors import UsageError
from paceline.interfaces import Groups, Reply, Sender
from paceline.interfaces.server_messages import (
    AdoptState,
    Away,
    BufferUpdate,
    Describe,
    Done,
    Enter,
    EnterBarrier,
    GetState,
    GetStatus,
    GradientUpdate,
    Join,
    Joined,
    KeepAlive,
    Leave,
    Load,
    Notice,
    Parameters,
    PeerAddress,
    Pull,
    Push,
    Quiesce,
    Rejected,
    Unit,
    Update,
)
from paceline.methods.ssp import SSP
from paceline.parameter_server.groups import state_transfer
from paceline.parameter_server.groups.local_server import LocalServer
from paceline.parameter_server.groups.server import (
    ROUNDS_UNACKNOWLEDGED,
    GroupServer,
)
from paceline.parameter_server.groups.update_log import Peer, UpdateLog
from paceline.parameter_server.process.services import make_group_server, make_service
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.parameter_server.state_machine.store import Store
from paceline.testing.server_checks import difference, state_of
from paceline.timeouts import timeouts
from tests.support.group_server_trial import (
    HYPERPARAMETERS,
    Case,
    GroupServerTrial,
    SumsUp,
)
from tests.support.processes import wait_until
from tests.support.server_jobs import SECONDS, TOKEN, connect, running, time_limit

OF = (0, 0, 1, 1, 2)
STEPS = (4, 5, 6, 4, 4)
MOVES = {(4, 2): 1, (1, 3): 2}
CASES = {
    "cuts": Case(OF, 3, STEPS, cuts=6),
    "meetings": Case(OF, 3, STEPS, cuts=3, meets=frozenset({1, 3}), moves=MOVES),
    "loads": Case(OF, 3, STEPS, cuts=3, loads=frozenset({1, 3}), moves=MOVES),
    "deaths": Case(OF, 3, STEPS, cuts=3, deaths=3, meets=frozenset({2}), moves=MOVES),
    "servers die": Case(OF, 3, STEPS, cuts=3, deaths=1, kills=2),
    "one dies": Case(OF, 3, STEPS, cuts=6, kills=1, period=1, peril=0.01),
    "snapshots": Case(
        OF, 3, STEPS, cuts=2, kills=2, meets=frozenset({2}), snapshots=True
    ),
    "two": Case((0, 0, 1), 2, (4, 5, 6), cuts=3, deaths=1, kills=2),
    "one": Case((0, 0, 0), 1, (2, 3, 4), deaths=1, meets=frozenset({1})),
}


def run(name, seed, agree=True):
    case = CASES[name]
    trial = GroupServerTrial(replace(case, agree=agree), random.Random(seed))
    trial.run()
    trial.check_end()
    if not case.deaths and not case.kills:
        assert not trial.refusals
    return trial


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
    both_ways(name, range(100, 110))


@pytest.mark.parametrize("seed", [11, 58])
def test_who_has_not_begun_a_cut_that_others_ended_is_told_by_a_new_server_0(seed):
    """Server 0 died in the middle of it, and the first to hear of that had quiesced."""
    run("snapshots", seed, agree=False)


# ---- controls ----


def breaks(name, seeds=20):
    """Whether some law is broken."""
    for seed in range(seeds):
        try:
            run(name, seed, agree=False)
        except (AssertionError, UsageError):
            return True
    return False


def nothing(*_):
    pass


def starts_at_the_end(log, peer, entry, via):
    return retain_for(log, peer, entry, None)


def forgets_what_it_has(log, vector):
    restore(log, [])


retain_for, restore = UpdateLog.retain_for, UpdateLog.restore


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "case"),
    [
        (UpdateLog, "is_new", lambda log, line, number: True, "cuts"),
        (UpdateLog, "on_peer_lost", nothing, "one dies"),
        (UpdateLog, "retain_for", starts_at_the_end, "servers die"),
        (UpdateLog, "restore", forgets_what_it_has, "servers die"),
        (UpdateLog, "acknowledged", nothing, "cuts"),
        (Peer, "_send_again", nothing, "cuts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_control_a_log_that_is_wrong_breaks_a_law(
    owner, method, wrong, case, monkeypatch
):
    monkeypatch.setattr(owner, method, wrong)
    assert breaks(case)


# ---- one server of two ----


PEER = "server 1"


class Alone:
    """Server *number* of two, loaded with zeros; the test takes what it sends."""

    def __init__(self, number=0, of=(0, 1), **options):
        trial = GroupServerTrial(Case(of, 2, (9, 9), period=1), random.Random(0))
        self.size, self.join = trial.size, trial.join(0)
        local = LocalServer(number, 2, lambda _: trial.sums_up(number))
        self.server = GroupServer(local, ["server 0", PEER], **options)
        self.numbers = 0
        for worker in (0, 1):
            [joined] = self.ask(worker, self.join)
            assert isinstance(joined, Joined)
        for bucket in range(2):
            self.ask(0, Load(bucket=bucket), trial.zeros())

    def send(self, sender, message, payload=None, incarnation=0):
        """All that the server sends then. Sender 2 + *i* is server *i*."""
        self.numbers += 1
        to = Sender(sender, incarnation, "", self.numbers)
        return self.server.on_request(to, message, payload, 0.0)

    def ask(self, *request, **options):
        """The replies that the server sends then."""
        return replies(self.send(*request, **options))

    def push(self, worker, step, bucket=0):
        """All that the server sends when a gradient of ones comes."""
        gradient = torch.ones(self.size, dtype=torch.float64)
        push = Push(
            step=step, bucket=bucket, used=[True], hyperparameters=HYPERPARAMETERS
        )
        return self.send(worker, push, gradient)


def replies(outputs):
    return [one.message for one in outputs if isinstance(one, Reply)]


def updates(outputs):
    return [
        one
        for one in outputs
        if not isinstance(one, Reply) and isinstance(one.message, Update)
    ]


def gradients(**changes):
    given = {
        "bucket": 0,
        "gradients": 2,
        "weight": 2.0,
        "used": [True],
        "hyperparameters": HYPERPARAMETERS,
    }
    return GradientUpdate(**(given | changes))


def update(what, number=0):
    return Update(
        source=1,
        incarnation=0,
        number=number,
        floor=0,
        load=0,
        cut=0,
        entry=0,
        what=what,
    )


TO_PEERS = [
    update(Away()),
    Quiesce(incarnation=0, cut=1),
    Notice(incarnation=0, number=0, content=b""),
]
DOUBLE, SINGLE = torch.float64, torch.float32
REFUSALS = [
    (3, update(gradients(bucket=7)), DOUBLE, 0, "expected a bucket of"),
    (3, update(gradients()), SINGLE, 0, "elements of torch.float64"),
    (3, update(gradients()), DOUBLE, 1, "expected .* elements of"),
    (3, update(gradients(used=[])), DOUBLE, 0, "expected 1 used bits, got 0"),
    (3, update(gradients(weight=math.inf)), DOUBLE, 0, "a finite weight"),
    (3, update(gradients(weight=math.nan)), DOUBLE, 0, "a finite weight"),
    (3, update(gradients(gradients=-1)), DOUBLE, 0, "a number of gradients"),
    (3, update(gradients(hyperparameters=[])), DOUBLE, 0, "hyperparameters of 1"),
    (3, update(gradients(steps={9: 1})), DOUBLE, 0, "got steps of workers .9."),
    (3, update(BufferUpdate(weight=0.5, floats=1)), SINGLE, 0, "double precision"),
    (3, update(Away(), 1), DOUBLE, 0, "expected number 0 of server 1, got 1"),
    *(
        (0, m, DOUBLE, 0, "only the other servers of the job say that")
        for m in TO_PEERS
    ),
    *((s, Pull(bucket=0), DOUBLE, 0, "what its peers say") for s in (2, 3, 4)),
]


@pytest.mark.parametrize(("sender", "message", "dtype", "more", "words"), REFUSALS)
def test_what_is_refused_changes_nothing(sender, message, dtype, more, words):
    """Worker 0, both servers, and one that there is not."""
    alone = Alone()
    before = state_of(alone.server.local)
    payload = torch.ones(alone.size + more, dtype=dtype)
    [refused] = alone.ask(sender, message, payload)
    assert isinstance(refused, Rejected)
    assert re.search(words, refused.reason), refused.reason
    assert not difference(before, state_of(alone.server.local))


@pytest.mark.parametrize("message", TO_PEERS)
def test_a_server_that_is_alone_is_no_peer(message):
    alone = ParameterServer(1)
    alone.on_request(Sender(0, 0, "", 0), Join(options=""), None, 0.0)
    [refused] = replies(alone.on_request(Sender(0, 0, "", 1), message, None, 0.0))
    assert "expected a request of a parameter server" in refused.reason


def test_the_method_must_be_one_of_groups():
    local = LocalServer(0, 1, lambda _: SSP().server(1))
    [refused] = replies(
        local.on_request(Sender(0, 0, "", 0), Join(options=""), None, 0.0)
    )
    assert "group server 0: expected" in refused.reason


def test_while_a_peer_answers_nothing_updates_become_fewer_and_larger():
    alone = Alone()
    alone.server.on_peer_lost(PEER, "the line was cut", 0.0)
    for step in range(40):
        for bucket in range(2):
            alone.push(0, step, bucket)
    again = updates(alone.server.on_peer_back(PEER, 0.0))
    assert len(again) <= ROUNDS_UNACKNOWLEDGED * 3 + 2
    sent = []
    while again:
        sent += again
        outputs = [
            one
            for a in again
            for one in alone.server.on_reply(PEER, a.number, Done(), None, 0.0)
        ]
        again = updates(outputs)
    assert [ask.message.number for ask in sent] == list(range(len(sent)))
    for bucket in range(2):
        mine = [a.message.what for a in sent if a.message.what.bucket == bucket]
        assert sum(what.gradients for what in mine) == 40


def test_a_peer_that_does_not_come_back_ends_the_training():
    alone = Alone(patience=10.0)
    alone.server.on_peer_lost(PEER, "server 1 at host:1 is lost", 5.0)
    assert alone.server.next_deadline() == 15.0
    alone.ask(0, Pull(bucket=0))
    alone.server.on_timer(15.0)
    [refused] = replies(alone.push(0, 0))
    assert refused.reason == (
        "server 0: server 1 at host:1 is lost, and it was not there again within 10 s"
    )
    assert alone.server.next_deadline() is None


def test_a_lost_peer_is_awaited_as_long_as_a_restart_takes_or_briefly_without_one():
    words = Describe(kind="group-server", services=["server 0", "server 1"], number=0)
    deadlines = []
    for server in (make_service(words, 2), make_group_server(words, 2)):
        server.on_peer_lost("server 1", "server 1 is lost", 5.0)
        deadlines.append(server.next_deadline())
    assert deadlines == [5.0 + timeouts.peer_return, 5.0 + timeouts.unreachable]


def test_a_peer_that_rejects_an_update_ends_the_training():
    alone = Alone()
    [ask] = updates(alone.push(0, 0))
    reason = "server 1 does not take what was applied here: another model"
    alone.server.on_reply(PEER, ask.number, Rejected(reason="another model"), None, 0.0)
    [refused] = replies(alone.push(0, 0, bucket=1))
    assert reason in refused.reason


@pytest.mark.parametrize(("number", "leaves"), [(0, False), (1, True)])
def test_a_server_without_workers_leaves_and_server_0_stays(number, leaves):
    server = Alone(number, of=(1 - number,) * 2).server
    server.on_timer(0.0)
    assert server.membership.is_active
    kept = [entry.update for entry, _ in server.log._kept.get((number, 0), [])]
    assert (kept == [Away()]) is leaves


def test_a_worker_of_another_group_may_have_done_any_number_of_steps():
    alone = Alone()
    for ahead in (150_000, 10**9):
        assert alone.ask(1, KeepAlive(step=ahead)) == [Done()]
    [answer] = replies(alone.push(1, 10**9))
    assert isinstance(answer, Parameters), answer


@pytest.mark.parametrize(("back", "waits"), [(80, True), (100, False)])
def test_a_barrier_waits_for_a_worker_that_came_back_at_an_earlier_step(back, waits):
    """Server 0 sees no push of worker 1, which has done 100 steps elsewhere."""
    alone = Alone()
    alone.server.on_worker_lost(0, 0, 0.0)
    again = alone.join, KeepAlive(step=back, late_joiner=True), Pull(bucket=0)
    for request in again:
        alone.ask(0, request, incarnation=1)
    alone.ask(1, EnterBarrier(kind="meet", step=100))
    assert (not alone.server.local.held_replies) is waits


MEETS = Case((0, 0, 1, 1), 2, (5, 5, 5, 5), meets=frozenset({2}))
DIES = Case((0, 0, 1, 1), 2, (5, 5, 5, 5), kills=1, peril=0.05)


def refuse(*_):
    raise UsageError("bucket 0: what comes does not fit")


class Faulty(GroupServerTrial):
    """Workers that were refused do not come back. *tampers*: the replies to these requests are
    *reply* instead."""

    tampers = None
    reply = None

    def deliver_to_worker(self, server, worker):
        answer, process = self.to_worker[server, worker][0], self.processes[worker]
        if process.over:
            self.to_worker[server, worker].popleft()
            return
        super().deliver_to_worker(server, worker)
        if isinstance(answer.message, Rejected) and process.dead:
            process.dead, process.over = False, True

    def deliver_reply(self, a, b):
        link = self.links[a, b]
        number, _, payload = link.replies[0]
        if self.tampers and isinstance(link.asked[number].message, self.tampers):
            link.replies[0] = number, self.reply, payload
        super().deliver_reply(a, b)


def run_with(case, tampers=None, reply=None):
    """Returns why workers were refused; nobody waits for ever."""
    trial = Faulty(case, random.Random(0))
    trial.tampers, trial.reply = tampers, reply
    trial.run()
    assert not any(process.waits for process in trial.processes.values()), (
        "waits for ever"
    )
    assert trial.refusals
    return trial.refusals


def test_a_copy_that_does_not_fit_at_a_meeting_ends_the_training(monkeypatch):
    monkeypatch.setattr(state_transfer, "_check", refuse)
    reasons = run_with(MEETS)
    assert any("bucket 0: what comes does not fit" in reason for reason in reasons)


@pytest.mark.parametrize("case", [MEETS, DIES], ids=["meets", "dies"])
def test_a_state_that_does_not_fit_ends_the_training(case, monkeypatch):
    monkeypatch.setattr(Store, "fitting_state", refuse)
    reasons = run_with(case)
    assert any("bucket 0: what comes does not fit" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("kind", "case", "reply", "words"),
    [
        (GetStatus, DIES, Done(), "got Done"),
        (GetStatus, DIES, Rejected(reason="not here"), "not here"),
        (Enter, DIES, Done(), "got Done"),
        (GetState, DIES, Done(), "got Done"),
        (Quiesce, MEETS, Done(), "got Done"),
        (Quiesce, MEETS, Rejected(reason="not here"), "not here"),
        (AdoptState, MEETS, Rejected(reason="not here"), "not here"),
    ],
)
def test_a_reply_of_another_kind_is_a_fault_with_a_reason(kind, case, reply, words):
    reasons = run_with(case, kind, reply)
    assert any("server " in reason and words in reason for reason in reasons)


SIZE = 700_000
"""More than one chunk."""
NAMES = ["server 0", "server 1"]


@pytest.fixture
def _limit():
    with time_limit():
        yield


class Watched(GroupServer):
    """Remembers who was lost, and came back."""

    def __init__(self, local):
        super().__init__(local, NAMES)
        self.lost, self.back = [], []

    def on_peer_lost(self, peer, reason, now):
        self.lost.append(peer)
        return super().on_peer_lost(peer, reason, now)

    def on_peer_back(self, peer, now):
        self.back.append(peer)
        return super().on_peer_back(peer, now)


def machine(number):
    discipline = SumsUp(Groups((0, 1), 2), 1, lambda element, bucket: None)
    return Watched(LocalServer(number, 2, lambda _: discipline))


def join(end, server):
    answer = end.request(
        Join(
            options="",
            shard=server,
            units=[[Unit(0, 0, SIZE, 0)]],
            dtypes=["float32"],
            optimizer="SGD",
            hyperparameters=HYPERPARAMETERS,
        )
    ).wait()
    assert isinstance(answer, Joined)


def push(end, worker, step):
    gradient = torch.zeros(SIZE)
    gradient[2 * step + worker] = 1
    into = torch.empty(SIZE)
    message = Push(step=step, bucket=0, used=[True], hyperparameters=HYPERPARAMETERS)
    assert isinstance(end.request(message, gradient, into=into).wait(), Parameters)


def pulled(end):
    into = torch.empty(SIZE)
    end.request(Pull(bucket=0), into=into).wait()
    return into


@pytest.mark.usefixtures("_limit")
def test_a_connection_that_is_cut_and_comes_back_loses_nothing_and_repeats_nothing():
    machines = [machine(number) for number in (0, 1)]
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(running(one, 2, services=2, peers=[NAMES[1 - number]]))
            for number, one in enumerate(machines)
        ]
        for number, host in enumerate(hosts):
            other = hosts[1 - number]
            at = PeerAddress(host="127.0.0.1", port=other.port, token=TOKEN)
            host.meet(2 + number, {NAMES[1 - number]: at})
        ends = [[connect(host, worker) for host in hosts] for worker in (0, 1)]
        for worker in (0, 1):
            for server, end in enumerate(ends[worker]):
                join(end, server)
        for end in ends[0]:
            end.request(Load(bucket=0), torch.zeros(SIZE)).wait()
        for step in range(4):
            if step == 2:
                # As the same sender, of a later incarnation: its connection is lost.
                connect(hosts[1], 2, incarnation=1).part(well=False)
                wait_until(lambda: machines[0].lost, SECONDS, "the loss")
            for worker in (0, 1):
                push(ends[worker][worker], worker, step)
        leaves = [end.request(Leave()) for mine in ends for end in mine]
        for pending_reply in leaves:
            pending_reply.wait()
        models = [pulled(ends[worker][worker]) for worker in (0, 1)]
        for end in (end for mine in ends for end in mine):
            end.close()
    assert torch.equal(models[0], models[1])
    assert models[0][:8].tolist() == [-1.0] * 8
    assert not models[0][8:].any()
    assert machines[0].lost == machines[0].back == [NAMES[1]]
