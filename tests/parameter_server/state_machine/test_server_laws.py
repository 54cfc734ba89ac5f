"""Laws of the parameter server, whatever arrives when, twice or never, and whoever dies: of training, of
reductions, and of compressed pushes and answers.

Small model workers talk to real `ParameterServer`s over a network that Hypothesis steers.
Every gradient is 1 at an element of its own, so that parameters under plain SGD with a
learning rate of 1 are the ledger: they say which gradients are in, and with what weight.
A load makes all of it zeros again, and counts itself in an element of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from paceline.compression import COMPRESSORS, State, make
from paceline.interfaces import Reply, Sender
from paceline.interfaces.server_messages import (
    Join,
    Joined,
    Parameters,
    Push,
    Reduce,
    Reduced,
    Rejected,
    Request,
    Unit,
)
from paceline.methods.asp import ASP
from paceline.methods.ssp import SSP
from paceline.parameter_server.state_machine.compression import views
from paceline.parameter_server.state_machine.server import ParameterServer
from tests.parameter_server.state_machine.test_compression import Largest
from tests.support.lossy_training import (
    LIVES,
    STEPS,
    Case,
    Key,
    Letter,
    Life,
    Network,
    Training,
    cases,
)
from tests.support.profiles import examples

NAMES = [
    *("asp", "r2sp", "ssp 0", "ssp 1", "ssp 3"),
    *("backup, all", "backup, some", "sync-switch"),
]


def check_laws(case: Case, choices: bytes) -> None:
    training = Training(case)
    training.play(choices)
    training.drain()
    training.check_end()


@pytest.mark.parametrize("name", NAMES)
def test_laws_of_training(name: str) -> None:
    drawn = given(cases(name), st.binary(min_size=400, max_size=3000))
    settings(max_examples=examples(80))(drawn(check_laws))()


def test_who_has_left_and_comes_back_while_others_load() -> None:
    case = Case(
        SSP(staleness=0),
        workers=3,
        layout=[[0], [0, 1]],
        data=[1, 2, 3],
        shards=2,
        deaths=3,
        loads=frozenset([4]),
    )
    check_laws(case, random.Random(31).randbytes(1000))


class Reducing:
    """Workers that issue the same all-reduces on one server, and die without return."""

    def __init__(self, workers: int, count: int, deaths: int) -> None:
        self.network = Network([ParameterServer(workers)])
        self.workers, self.count, self.deaths = workers, count, deaths
        self.next = dict.fromkeys(range(workers), -1)
        self.unanswered: dict[int, set[int]] = {w: set() for w in range(workers)}
        self.here: dict[int, list[int]] = {number: [] for number in range(count)}
        """By reduction: whose parts were taken."""
        self.dead: set[int] = set()

    def act(self, worker: int) -> None:
        number = self.next[worker]
        if worker in self.dead or number >= self.count:
            return
        if number <= 0 and self.unanswered[worker]:
            return  # the first thing is to join
        message: Request
        if number < 0:
            message, payload = Join(options=""), None
        else:
            message = Reduce(channel="", number=number, operation=_operation(number))
            payload = torch.zeros(self.workers, dtype=torch.float64)
            payload[worker] = 1 + worker
        sender = Sender(worker, 0, "", number + 1)
        self.unanswered[worker].add(number + 1)
        self.next[worker] += 1
        self.network.send(Letter(0, sender, message, payload))

    def deliver(self, index: int) -> None:
        letter, answers, new = self.network.deliver(index)
        if isinstance(letter.message, Reduce) and new:
            turned_away = any(
                isinstance(a.message, Rejected) and a.to == letter.sender
                for a in answers
            )
            if not turned_away:
                self.here[letter.message.number].append(letter.sender.worker)

    def arrive(self, index: int) -> None:
        _, answer = self.network.answers.pop(index)
        if answer.to.worker not in self.dead:
            assert isinstance(answer.message, Joined | Reduced), answer.message
            self.unanswered[answer.to.worker].discard(answer.to.number)

    def play(self, choices: bytes) -> None:
        net = self.network
        for kind, index in zip(choices[::2], choices[1::2], strict=False):
            kind %= 16
            if kind < 6:
                self.act(index % self.workers)
            elif kind < 10 and net.requests:
                self.deliver(index % len(net.requests))
            elif kind < 14 and net.answers:
                self.arrive(index % len(net.answers))
            elif kind == 14 and net.losses:
                net.lose(0)
            elif kind == 15 and self.deaths and index % self.workers not in self.dead:
                self.deaths -= 1
                self.dead.add(index % self.workers)
                net.losses.append((0, index % self.workers, 0))

    def drain(self) -> None:
        net = self.network
        while True:
            before = dict(self.next), sum(map(len, self.unanswered.values()))
            while net.losses:
                net.lose(0)
            for worker in range(self.workers):
                self.act(worker)
            while net.requests:
                self.deliver(0)
            while net.answers:
                self.arrive(0)
            if before == (dict(self.next), sum(map(len, self.unanswered.values()))):
                return

    def check_end(self) -> None:
        for worker in range(self.workers):
            if worker not in self.dead:
                assert self.next[worker] == self.count
                assert not self.unanswered[worker], f"{worker} waits for ever"
        self.network.check_answers_were_left_alone()
        for key, (answer, carried) in self.network.first.items():
            message = self.network.letters[key].message
            if not isinstance(message, Reduce):
                continue
            assert isinstance(answer.message, Reduced)
            assert carried is not None
            here = self.here[message.number]
            assert set(here).issuperset(set(range(self.workers)) - self.dead)
            expected = torch.zeros(self.workers, dtype=torch.float64)
            for worker in here:
                expected[worker] = 1 + worker
            if message.operation == "mean":
                expected /= len(here)
            assert torch.equal(carried, expected)


def _operation(number: int) -> Any:
    return ("mean", "sum", "max")[number % 3]


@settings(max_examples=examples(200))
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 3),
    st.binary(min_size=100, max_size=800),
)
def test_laws_of_reductions(
    workers: int, count: int, deaths: int, choices: bytes
) -> None:
    reducing = Reducing(workers, count, deaths)
    reducing.play(choices)
    reducing.drain()
    reducing.check_end()


RankInfo = tuple[int, int]
"""A shard and a bucket."""


@pytest.fixture(autouse=True)
def largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPRESSORS, Largest.name, Largest)


class CodedNetwork(Network):
    """Knows what servers held of a worker when they answered."""

    def __init__(self, servers: Any) -> None:
        super().__init__(servers)
        self.held: dict[Key, torch.Tensor] = {}

    def take(self, shard: int, answers: list[Reply]) -> None:
        super().take(shard, answers)
        for answer in answers:
            coded = self.servers[shard].shard.compression
            if coded is None:  # nobody has joined yet
                assert isinstance(answer.message, Rejected)
                continue
            if isinstance(answer.message, Parameters) and answer.message.sequence:
                key = (shard, *answer.to[:4])
                if key not in self.held and coded.replicas is not None:
                    shadow = coded.replicas[answer.to.worker, answer.message.bucket]
                    assert shadow.sequence == answer.message.sequence
                    self.held[key] = shadow.values.clone()
            if coded.replicas is not None:
                buckets = self.servers[shard].shard.buckets
                workers = self.servers[shard].workers
                assert len(coded.replicas) <= workers * len(buckets)


class CodedTraining(Training):
    """Pushes are codes; a bucket is a tensor and a part of one."""

    def __init__(self, case: Case, differs: bool) -> None:
        self.differs = differs
        self.code: Any = make("largest:error_feedback=true")
        self.states: dict[tuple[int, int, int, int], list[State]] = {}
        """By worker, life, shard and bucket."""
        self.shares: dict[tuple[int, int, int, int], torch.Tensor] = {}
        self.sent: dict[tuple[int, int, int, int], torch.Tensor] = {}
        """All that was given to a code; all that its codes stood for."""
        self.stands_for: dict[tuple[RankInfo, int], torch.Tensor] = {}
        """What a push's code stands for; by the element of its gradient."""
        self.turns: Counter[tuple[int, int, int, int]] = Counter()
        self.differences = 0
        super().__init__(case)
        self.network: CodedNetwork = CodedNetwork(self.network.servers)  # type: ignore[assignment]

    def units(self) -> list[Unit]:
        return [
            Unit(0, 0, self.elements, 0, (self.elements // STEPS, STEPS)),
            Unit(1, 3, 4, 0),
        ]

    def join_the_next(self, life: Life) -> None:
        super().join_the_next(life)
        shard, join, payload = life.to_send.pop()
        assert isinstance(join, Join)
        units = [self.units() if theirs else [] for theirs in join.units]
        answers: Any = "deltas" if self.differs else "full"
        join = structs.replace(
            join,
            units=units,
            compression="largest:error_feedback=true",
            replies=answers,
        )
        life.to_send.append((shard, join, payload))

    def begin_step(self, life: Life) -> None:
        before = len(life.to_send)
        super().begin_step(life)
        for number, (shard, push, gradient) in enumerate(life.to_send):
            if number < before:
                continue
            assert isinstance(push, Push)
            assert gradient is not None
            element = int(gradient.argmax())
            code = self.coded(life, (shard, push.bucket), element, push.weight)
            push = structs.replace(push, used=[True, True])
            life.to_send[number] = shard, push, code

    def coded(
        self, life: Life, place: RankInfo, element: int, weight: float
    ) -> torch.Tensor:
        """A gradient with two elements: one is left for later."""
        share = self.zeros()
        share[element] = weight
        share[(element + 7) % self.elements] = 0.5 * weight
        key = (life.worker, life.incarnation, *place)
        parts = views(share, self.units())
        if key not in self.states:
            self.states[key] = [
                self.code.init_state(part, f"{n}", life.worker)
                for n, part in enumerate(parts)
            ]
            self.shares[key], self.sent[key] = self.zeros(), self.zeros()
        code: torch.Tensor = self.code.encode(parts, self.states[key])
        decoded = self.zeros()
        self.code.decode(code, views(decoded, self.units()))
        self.shares[key] += share
        self.sent[key] += decoded
        self.stands_for[place, element] = decoded
        return code

    def deliver(self, index: int) -> None:
        """As for gradients, but for how a push's element is known."""
        letter, answers, new = self.network.deliver(index)
        if isinstance(letter.message, Push) and new:
            refused = any(
                answer.to.number == letter.sender.number
                and answer.to.worker == letter.sender.worker
                and isinstance(answer.message, Rejected)
                and " to load" not in answer.message.reason
                for answer in answers
            )
            if not refused:
                place = letter.shard, letter.message.bucket
                (element,) = (
                    e
                    for e, (step, _) in self.pushed.items()
                    if step == letter.message.step and self.is_of(e, letter.sender)
                )
                applied = (*place, letter.sender.worker, letter.message.step)
                if applied not in self.steps:  # else it is answered, and not applied
                    self.steps.add(applied)
                    self.accepted.setdefault(place, []).append(element)
        self.check_new(letter.shard, answers)

    def is_of(self, element: int, sender: Any) -> bool:
        worker, life = divmod(element // STEPS, LIVES)
        return (worker, life) == (sender.worker, sender.incarnation)

    def arrive(self, index: int) -> None:
        """A difference is added to what its worker holds: to the bits that the server had."""
        shard, answer = self.network.answers[index]
        life, message = self.lives[answer.to.worker], answer.message
        place = (shard, answer.to.channel, answer.to.number)
        alive = life.incarnation == answer.to.incarnation and not life.dead
        fresh = alive and place in life.unanswered
        held = None
        if isinstance(message, Parameters):
            held = life.model.get((shard, message.bucket))
        super().arrive(index)
        if not fresh or not isinstance(message, Parameters) or not self.differs:
            return
        assert answer.payload is not None
        key = (shard, *answer.to[:4])
        pushed = isinstance(self.network.letters[key].message, Push)
        if pushed:
            assert held is not None
            difference = self.zeros()
            self.code.decode(answer.payload, views(difference, self.units()))
            life.model[shard, message.bucket] = held + difference
            self.differences += 1
        if message.sequence:
            counted = (life.worker, life.incarnation, shard, message.bucket)
            assert message.sequence == self.turns[counted] + 1
            self.turns[counted] += 1
            now = life.model[shard, message.bucket]
            assert torch.equal(now, self.network.held[key])

    # ---- laws ----

    def check_ledger(self, place: RankInfo, parameters: torch.Tensor) -> None:
        taken = self.accepted.get(place, [])
        assert len(taken) == len(set(taken))
        if self.is_torn():
            return
        assert parameters[-1] == self.loads[place[0]]
        gone = self.from_before.get(place, [])
        assert not set(taken) & set(gone)
        # What was applied is what was decoded, each once.
        applied = sum(
            (self.stands_for[place, element] for element in taken), self.zeros()
        )
        torch.testing.assert_close(-parameters[:-1], applied[:-1])
        for key, states in self.states.items():
            if key[2:] != place:
                continue
            left = torch.cat([state["residual"].reshape(-1) for state in states])
            torch.testing.assert_close(self.sent[key] + left, self.shares[key])

    def check_answers(self, final: dict[RankInfo, torch.Tensor]) -> None:
        """Codes do not tell which steps are in them."""

    def check_end(self) -> None:
        super().check_end()
        for shard, server in enumerate(self.network.servers):
            coded = server.shard.compression
            assert (coded is None) == (not server.shard.is_held)
            left = coded.replicas if coded is not None and coded.replicas else {}
            for (worker, bucket), _ in left.items():
                # Only of lives that did not come to their end.
                assert self.lives[worker].phase != "end", (shard, worker, bucket)


def check_compressed_laws(case: Case, differs: bool, choices: bytes) -> None:
    training = CodedTraining(case, differs)
    training.play(choices)
    training.drain()
    training.check_end()


@pytest.mark.parametrize("differs", [False, True], ids=["full", "deltas"])
@pytest.mark.parametrize("name", ["asp", "ssp 1", "r2sp"])
def test_laws_of_compressed_pushes(name: str, differs: bool) -> None:
    def check(case: Case, choices: bytes) -> None:
        check_compressed_laws(case, differs, choices)

    drawn = given(cases(name), st.binary(min_size=400, max_size=3000))
    settings(max_examples=examples(30))(drawn(check))()


def test_the_laws_see_differences() -> None:
    """Of a quiet training, that it has any."""
    case = Case(
        method=ASP(),
        workers=2,
        layout=[[0], [0, 1]],
        data=[STEPS, STEPS],
        shards=2,
        deaths=0,
    )
    training = CodedTraining(case, differs=True)
    training.drain()
    training.check_end()
    assert training.differences == 2 * STEPS * 3
