"""The ring of r2sp: who goes on when, by hand and whatever comes when, on a real `ParameterServer`; and
in virtual time, what turns do to the link, and what that gains."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.errors import DeadlockError
from paceline.interfaces import Reply, Sender
from paceline.interfaces.server_messages import (
    Done,
    Join,
    Joined,
    Leave,
    Load,
    Parameters,
    Push,
    Rejected,
    Request,
    Unit,
)
from paceline.methods.r2sp import R2SP, RoundRobin
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.runtimes.simulated.services import HEADER_BYTES, ServerRates
from tests.support.profiles import examples
from tests.support.training import train

HYPERPARAMETERS: list[dict[str, Any]] = [
    {
        "lr": 1.0,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }
]


def join(buckets: int = 1, shard: int = 0) -> Join:
    return Join(
        options="",
        shard=shard,
        units=[[Unit(bucket, 0, 1, 0)] for bucket in range(buckets)],
        dtypes=["float64"] * buckets,
        optimizer="SGD",
        hyperparameters=HYPERPARAMETERS,
    )


def push(step: int, bucket: int = 0) -> Push:
    return Push(step=step, bucket=bucket, used=[True], hyperparameters=HYPERPARAMETERS)


def one() -> torch.Tensor:
    return torch.ones(1, dtype=torch.float64)


class Talk:
    """A server whose workers have all joined, and the requests of these."""

    def __init__(
        self, method: R2SP, workers: int, buckets: int = 1, shard: int = 0
    ) -> None:
        self.join, self.numbers = join(buckets, shard), dict[tuple[int, int], int]()
        self.ring = method.server(workers)
        assert isinstance(self.ring, RoundRobin)
        self.server = ParameterServer(workers, lambda _: self.ring)
        for worker in range(workers):
            self.ask(0.0, worker, self.join)
        for bucket in range(buckets):
            self.ask(0.0, 0, Load(bucket=bucket), one())

    def ask(
        self,
        now: float,
        worker: int,
        message: Request,
        payload: torch.Tensor | None = None,
        life: int = 0,
    ) -> list[Reply]:
        number = self.numbers.get((worker, life), 0)
        self.numbers[worker, life] = number + 1
        sender = Sender(worker, life, "", number)
        answers = self.server.on_request(sender, message, payload, now)
        for answer in answers:
            assert not isinstance(answer.message, Rejected), answer.message.reason
        return answers

    def push(self, now: float, worker: int, step: int, bucket: int = 0) -> list[int]:
        """Whoever goes on because of it."""
        return went_on(self.ask(now, worker, push(step, bucket), one()))

    def ring_at(self, now: float) -> list[int]:
        return went_on(self.server.on_timer(now))


def went_on(answers: list[Reply]) -> list[int]:
    """Workers, as they were answered."""
    return [a.to.worker for a in answers if isinstance(a.message, Parameters)]


# ---- by hand ----


def test_the_gap_is_a_part_of_a_steps_time_without_its_wait() -> None:
    talk = Talk(R2SP(warmup_steps=4), 2)
    assert talk.push(1.0, 0, 0) == [0]
    assert talk.push(3.0, 1, 0) == [1]
    assert talk.push(5.0, 0, 1) == [
        0
    ]  # the first 2 of 4 steps are not measured: not 4 s
    assert talk.push(11.0, 0, 2) == [0]  # 6 s
    for now, step in ((12.0, 1), (13.0, 2), (14.0, 3)):
        assert talk.push(now, 1, step) == [1]  # whoever comes, goes on
    assert talk.push(19.0, 0, 3) == [0]  # 8 s; worker 0 has done 4 steps, as all have
    # T = 7 s, and the gap is 7 / (1.2 * 2) s: the next turn is worker 1's, not before
    gap = 7.0 / 2.4
    assert talk.push(20.0, 1, 4) == []
    assert talk.server.next_deadline() == 19.0 + gap
    assert talk.ring_at(20.5) == []  # it is too early
    assert talk.ring_at(19.0 + gap) == [1]
    assert talk.server.next_deadline() is None  # worker 0 computes
    assert talk.push(22.0, 0, 4) == []  # after 3 s: T = 17 / 3 s
    second = 19.0 + gap + gap
    assert talk.ring_at(second) == [0]
    assert talk.push(second + 1.0, 1, 5) == []
    assert talk.server.next_deadline() == pytest.approx(second + 17 / 3 / 2.4)


def test_slack_divides_the_gap() -> None:
    gaps = {}
    for slack in (1.0, 1.25):
        talk = Talk(R2SP(warmup_steps=2, slack=slack), 2)
        for step in range(2):
            assert talk.push(0.5 + step, 1, step) == [1]
        assert talk.push(1.0, 0, 0) == [0]
        assert talk.push(11.0, 0, 1) == [0]
        assert talk.push(11.5, 1, 2) == []
        deadline = talk.server.next_deadline()
        assert deadline is not None
        gaps[slack] = deadline - 11.0
    assert gaps == {1.0: 10.0 / 2, 1.25: pytest.approx(0.8 * 10.0 / 2)}


def warm(workers: int, buckets: int = 1) -> Talk:
    """It is 20 s, all have done 2 steps, a gap is 10 / 1.2 / *workers*, and worker 1 has the
    next turn."""
    talk = Talk(R2SP(warmup_steps=2), workers, buckets)
    for now, step in ((10.0, 0), (20.0, 1)):
        for worker in reversed(range(workers)):
            for bucket in range(buckets):
                talk.push(now, worker, step, bucket)
    return talk


def test_a_step_is_answered_as_a_whole_with_the_parameters_of_its_turn() -> None:
    talk = warm(2, buckets=2)
    assert (
        talk.push(30.0, 1, 2, bucket=1) == []
    )  # its turn, and only a part of its step
    assert talk.server.next_deadline() is None
    assert talk.push(31.0, 0, 2, bucket=0) == []
    answers = talk.ask(32.0, 1, push(2, bucket=0), one())
    assert went_on(answers) == [1, 1]
    payloads = [answer.payload for answer in answers]
    values = {
        answer.message.bucket: payload.item()
        for answer, payload in zip(answers, payloads, strict=True)
        if isinstance(answer.message, Parameters) and payload is not None
    }
    # bucket 0: three of each; bucket 1: two of worker 0 and three of its own
    assert values == {0: 1.0 - 6, 1: 1.0 - 5}


def test_what_a_worker_does_while_it_is_away_is_no_step() -> None:
    talk = warm(2)
    talk.push(25.0, 1, 2)  # worker 0 computes
    talk.server.on_worker_lost(0, 0, 26.0)
    talk.ask(1000.0, 0, talk.join, life=1)
    talk.push(1000.0, 1, 3)
    went = went_on(talk.ask(1001.0, 0, push(3), one(), life=1))
    assert 0 in went
    talk.push(1002.0, 1, 4)
    # T is 10 s as before, and not near 1000
    assert talk.server.next_deadline() == pytest.approx(1001.0 + 10 / 2.4)


def test_if_worker_0_goes_the_next_one_is_measured() -> None:
    talk = Talk(R2SP(warmup_steps=2), 3)
    talk.push(1.0, 0, 0)
    talk.push(2.0, 1, 0)
    talk.server.on_worker_lost(0, 0, 3.0)
    assert talk.push(4.0, 2, 0) == [2]  # still warming up
    assert talk.push(6.0, 1, 1) == [1]  # the second of worker 1, after 4 s
    assert talk.push(6.5, 2, 1) == [2]  # it has caught up: the ring begins
    assert talk.push(7.0, 1, 2) == []
    assert talk.server.next_deadline() == 6.5 + 4.0 / 2.4


def test_the_ring_begins_where_all_have_done_equally_many_steps() -> None:
    """Else who waits in a barrier after step n would have the turn that another one needs
    for it."""
    talk = Talk(R2SP(warmup_steps=2), 3)
    for now, step in ((1.0, 0), (2.0, 1), (3.0, 2)):
        assert talk.push(now, 1, step) == [1]
    for now, step in ((4.0, 0), (8.0, 1)):
        assert talk.push(now, 0, step) == [0]
    # The warm-up is over: worker 1 is let begin no other step, and the others go on freely.
    assert talk.push(8.1, 1, 3) == []
    assert talk.server.next_deadline() is None
    assert talk.push(8.2, 2, 0) == [2]
    assert talk.push(8.3, 0, 2) == [0]
    assert talk.push(8.4, 2, 1) == [2]
    assert talk.push(8.5, 0, 3) == []
    assert talk.push(8.6, 2, 2) == [2]  # all have done 3: the ring begins
    gap = talk.server.next_deadline()
    assert gap is not None
    assert talk.ring_at(gap) == [0]
    gap = talk.server.next_deadline()
    assert gap is not None
    assert talk.ring_at(gap) == [1]


def test_who_has_not_joined_yet_is_waited_for() -> None:
    server = ParameterServer(2, lambda _: R2SP(warmup_steps=2).server(2))
    requests: list[tuple[Request, torch.Tensor | None]] = [
        (join(), None),
        (Load(bucket=0), one()),
    ]
    requests += [(push(step), one()) for step in range(3)]
    for number, (request, payload) in enumerate(requests):
        answers = server.on_request(Sender(0, 0, "", number), request, payload, 1.0)
        # It goes on twice; then worker 1 has yet to do as much.
        assert bool(answers) == (number < 4)
    server.on_request(Sender(1, 0, "", 0), join(), None, 2.0)
    first = server.on_request(Sender(1, 0, "", 1), push(0), one(), 3.0)
    assert went_on(first) == [1]
    second = server.on_request(Sender(1, 0, "", 2), push(1), one(), 4.0)
    assert went_on(second)[0] == 1


def test_who_leaves_meanwhile_is_not_waited_for() -> None:
    talk = Talk(R2SP(warmup_steps=2), 2)
    for now, step in ((1.0, 0), (2.0, 1)):
        assert talk.push(now, 0, step) == [0]
    assert talk.push(3.0, 0, 2) == []  # worker 1 has not caught up
    assert went_on(talk.ask(4.0, 1, Leave())) == [0]


def test_another_server_than_the_first_holds_nobody_back() -> None:
    talk = Talk(R2SP(warmup_steps=2), 2, shard=1)
    for step in range(9):
        assert talk.push(1.0 + step, 0, step) == [0]
    assert talk.server.next_deadline() is None


def test_a_restored_server_warms_up_again() -> None:
    talk = warm(2)
    talk.push(21.0, 1, 2)
    method = R2SP(warmup_steps=2)
    server = ParameterServer(2, lambda _: method.server(2))
    assert server.restore(talk.server.snapshot()) == 2  # worker 0 has done two steps
    for worker in range(2):
        server.on_request(Sender(worker, 1, "", 0), join(), None, 30.0)
    answers = server.on_request(Sender(1, 1, "", 1), push(3), one(), 31.0)
    assert went_on(answers) == [1]
    assert server.next_deadline() is None


# ---- laws, whatever comes when and whoever dies ----


@dataclass
class Life:
    """One incarnation of a worker."""

    worker: int
    number: int
    left: bool = False
    done: bool = False
    steps: int = 0


class Turn(NamedTuple):
    """A worker went on."""

    time: float
    worker: int
    came: float
    """When its step was in."""
    here: frozenset[int]
    """Who took part then."""
    gap: float
    """To the next turn, at least."""
    warm: bool


@dataclass
class Scene:
    """Workers that compute and talk for random times; some die, and some come back."""

    workers: int
    buckets: int
    data: list[int]
    """Steps of each life, by worker."""
    deaths: list[tuple[float, int, float | None]]
    """When, who, and how long until it is back."""
    slack: float
    warmup_steps: int
    seed: int
    turns: list[Turn] = field(default_factory=list)

    def play(self) -> None:
        self.random = random.Random(self.seed)
        self.talk = Talk(
            R2SP(slack=self.slack, warmup_steps=self.warmup_steps),
            self.workers,
            self.buckets,
        )
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.counter = 0
        self.lives = [Life(worker, 0) for worker in range(self.workers)]
        self.missing: dict[int, int] = {}
        self.came: dict[int, float] = {}
        for life in self.lives:
            self.go_on(life, 0, 0.0)
        for time, worker, absent in self.deaths:
            if worker < self.workers:
                self.after(time, lambda now, w=worker, a=absent: self.die(w, a, now))  # type: ignore[misc]
        while self.events or self.talk.server.next_deadline() is not None:
            deadline = self.talk.server.next_deadline()
            if deadline is None or (self.events and self.events[0][0] < deadline):
                now, _, action = heapq.heappop(self.events)
                action(now)
            else:
                self.take(self.talk.server.on_timer(deadline), deadline)
                assert self.talk.server.next_deadline() != deadline, "it would spin"

    def after(self, time: float, action: Callable[[float], None]) -> None:
        self.counter += 1
        heapq.heappush(self.events, (time, self.counter, action))

    def here(self, life: Life) -> bool:
        return self.lives[life.worker] is life

    def go_on(self, life: Life, step: int, now: float) -> None:
        if life.steps == self.data[life.worker]:
            self.after(now + self.random.random(), lambda at: self.leave(life, at))
            return
        life.steps += 1
        self.missing[life.worker] = self.buckets
        computed = now + self.random.uniform(0.5, 4.0)
        for bucket in self.random.sample(range(self.buckets), self.buckets):
            arrives = computed + self.random.random()
            self.after(arrives, lambda at, b=bucket: self.push(life, step, b, at))  # type: ignore[misc]

    def push(self, life: Life, step: int, bucket: int, now: float) -> None:
        if self.here(life):
            self.missing[life.worker] -= 1
            self.came[life.worker] = now
            request = push(step, bucket)
            answers = self.talk.ask(now, life.worker, request, one(), life.number)
            self.take(answers, now)

    def leave(self, life: Life, now: float) -> None:
        if self.here(life):
            life.left = True
            self.take(self.talk.ask(now, life.worker, Leave(), None, life.number), now)

    def die(self, worker: int, absent: float | None, now: float) -> None:
        before = self.lives[worker]
        life = self.lives[worker] = Life(
            worker, before.number + 1, left=True, done=True
        )
        self.take(self.talk.server.on_worker_lost(worker, before.number, now), now)
        if absent is not None:
            self.after(now + absent, lambda at: self.come_back(life, at))

    def come_back(self, life: Life, now: float) -> None:
        if self.here(life):
            life.left = life.done = False
            answers = self.talk.ask(now, life.worker, self.talk.join, None, life.number)
            self.take(answers, now)

    def take(self, answers: list[Reply], now: float) -> None:
        """Messages from the server, all of one moment."""
        parts: dict[int, list[Parameters]] = {}
        ring = self.talk.ring
        assert isinstance(ring, RoundRobin)
        for answer in answers:
            life = self.lives[answer.to.worker]
            assert life.number == answer.to.incarnation, "a word to a dead worker"
            if isinstance(answer.message, Parameters):
                parts.setdefault(life.worker, []).append(answer.message)
            elif isinstance(answer.message, Joined):
                if answer.message.over:  # an earlier life has done all of its steps
                    life.steps = self.data[life.worker]
                self.go_on(life, max(answer.message.step, answer.message.own), now)
            elif isinstance(answer.message, Done):
                life.done = True
        for worker, mine in parts.items():
            assert self.missing[worker] == 0, "it goes on in the middle of its step"
            assert {message.bucket for message in mine} == set(range(self.buckets))
            here = frozenset(self.talk.server.shard.active_workers(10**9))
            # All turns but the last of a moment come from gaps of no time.
            gap = ring._step_seconds / (self.slack * len(here))
            turn = Turn(now, worker, self.came[worker], here, gap, ring._is_warm)
            self.turns.append(turn)
            self.go_on(self.lives[worker], mine[0].step, now)

    # ---- laws ----

    def check(self) -> None:
        for life in self.lives:
            assert life.left, f"waits for ever: {life}"
            assert life.done, f"waits for ever: {life}"
        for turn in self.turns:
            if not turn.warm:
                assert turn.time == turn.came
        # The last turn before `warm` counts is the first of the ring.
        first = next((i for i, t in enumerate(self.turns) if t.warm), len(self.turns))
        ring = self.turns[first:]
        for before, turn in pairwise(ring):
            due = before.time + before.gap
            assert turn.time >= due or turn.gap == 0.0
            if not self.deaths and turn.here == before.here:
                # Nobody waits longer than for its predecessor, and the gap.
                assert turn.time == max(due, turn.came)
        for index, turn in enumerate(ring):
            self.check_round(ring, index, turn.worker)

    def check_round(self, ring: list[Turn], index: int, worker: int) -> None:
        """Until a worker's next turn, who took part all the time had exactly one."""
        following = range(index + 1, len(ring))
        again = next((i for i in following if ring[i].worker == worker), None)
        if again is None:
            return
        between = [turn.worker for turn in ring[index + 1 : again]]
        always = frozenset.intersection(*(t.here for t in ring[index : again + 1]))
        for other in always - {worker} if worker in always else ():
            assert between.count(other) == 1, (worker, other, between)


@st.composite
def scenes(draw: st.DrawFn, deadly: bool) -> Scene:
    workers = draw(st.integers(1, 5))
    death = st.tuples(
        st.floats(0.0, 40.0), st.integers(0, 4), st.none() | st.floats(0.0, 20.0)
    )
    return Scene(
        workers=workers,
        buckets=draw(st.integers(1, 3)),
        data=draw(st.lists(st.integers(0, 15), min_size=workers, max_size=workers)),
        deaths=draw(st.lists(death, min_size=1, max_size=6)) if deadly else [],
        slack=draw(st.sampled_from([1.0, 1.2, 1.25, 3.0])),
        warmup_steps=draw(st.sampled_from([2, 3, 10])),
        seed=draw(st.integers(0, 2**32)),
    )


QUICK = settings(max_examples=examples(60))
DEEP = settings(QUICK, max_examples=examples(200))


@pytest.mark.parametrize(
    "length", [QUICK, pytest.param(DEEP, marks=pytest.mark.slow)], ids=["quick", "deep"]
)
@pytest.mark.parametrize("deadly", [False, True], ids=["all live", "some die"])
def test_laws_of_the_ring(deadly: bool, length: settings) -> None:
    def laws(scene: Scene) -> None:
        scene.play()
        scene.check()

    length(given(scenes(deadly))(laws))()


# ---- in virtual time ----

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

        def watch(rank: int, step: int, model: torch.nn.Module, _: Any) -> None:
            self.ends.append((paceline.now(), rank))

        run = train(
            method,
            simulation,
            steps,
            make=Layers,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            loss=lambda model, rank, step: model(),
            watch=watch,
            reads=False,
            buckets="optimal",  # unless the method says another rule
        )
        self.model = [one.end for one in run]
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
    turns = Played(method, COMPUTE, steps=26, servers=2).ends
    turns = turns[-12 * WORKERS : -2 * WORKERS]
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
    textbook, turns = (
        Played(method, COMPUTE, steps=26, server=wide).seconds()
        for method in (BSP, TURNS)
    )
    assert turns == pytest.approx(textbook, rel=1e-3)


def test_a_link_that_never_rests_is_the_limit() -> None:
    turns = Played("r2sp:buckets=wfbp", compute=0.1).seconds()
    assert turns == pytest.approx(WORKERS * ALONE, rel=0.02)


def test_turns_wait_for_a_busy_processor() -> None:
    rates = ServerRates(stepped=SIZE / 0.05)
    turns = Played(TURNS, COMPUTE, rates=rates)
    # Each push keeps the processor for 50 ms, and its own worker waits for that.
    assert turns.seconds() == pytest.approx(COMPUTE + 2 * ALONE + 0.05, rel=1e-3)


def test_a_worker_that_never_has_its_turn_is_a_deadlock() -> None:
    def train(rank: int) -> None:
        layers = Layers()
        plain = torch.optim.SGD(layers.parameters(), lr=1.0)
        optimizer = paceline.distribute(layers, plain, method="r2sp:warmup_steps=2")
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
