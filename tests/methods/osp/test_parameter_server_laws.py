"""Laws of osp's server, whatever arrives when, twice or never, whatever is deferred, and
whoever dies.

Workers do what those of `paceline.methods.osp.parameter_server` do, over the network of
`lossy_network`: they send a step's first stage beside the second one of the step
before, and go on when both are answered. Requests of the second channel arrive in order;
everything else in none. What counted for each unit in each step is kept, and torch's own
SGD goes through it again: answers must have its bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.interfaces import Discipline, Reply, UpdatesOnServer
from paceline.interfaces.server_messages import (
    Done,
    Join,
    Joined,
    OptimizerState,
    Parameters,
    Pull,
    PullState,
    Push,
    Rejected,
    Request,
    Unit,
)
from paceline.methods.backup import Backup
from paceline.methods.osp import OSP
from paceline.methods.osp.measurement import WorkerReport, encode_report
from paceline.methods.osp.parameter_server import TwoStageDiscipline, decode_mask
from paceline.parameter_server.client.remote_model import LATE_CHANNEL
from tests.parameter_server.state_machine.test_server_laws import QUICK
from tests.support.lossy_network import Key, Letter, Network
from tests.support.lossy_training import (
    HYPERPARAMETERS,
    LIVES,
    STEPS,
    Case,
    Life,
    Training,
)
from tests.support.profiles import examples

Place = tuple[int, int]
"""A shard, and a bucket of which it holds a part."""


@dataclass
class StagedCase(Case):
    units: list[int] = field(default_factory=list)
    """Per bucket, how many units each of its parts has."""
    momentum: float = 0.0
    noise: bool = False
    """Gradients are random numbers, and not the entries of a ledger."""
    seed: int = 0


@dataclass
class StagedLife(Life):
    masks: dict[Place, list[int]] = field(default_factory=dict)
    """What the step under way defers; then, what the next one does."""
    late: dict[Place, list[int]] = field(default_factory=dict)
    """What the last step has deferred."""


class Taken(NamedTuple):
    """A worker's gradient of one unit in one step, as a server has it."""

    worker: int
    weight: float
    element: int
    gradient: torch.Tensor


class OrderedAnswers(Network):
    """Answers of one moment in an order of their own, whatever the server's was."""

    def take(self, shard: int, answers: list[Reply]) -> None:
        super().take(shard, sorted(answers, key=lambda answer: answer.to[:4]))


class StagedTraining(Training):
    """Workers that take their steps in two stages."""

    case: StagedCase

    def __init__(self, case: StagedCase) -> None:
        self.taken: dict[tuple[Place, int, int], list[Taken]] = {}
        """By place, unit and step."""
        self.told: dict[tuple[Place, int], list[int]] = {}
        """By place and step: what it defers."""
        self.pushes = 0
        self.held_back = False
        """The second channel is slow: the next first stage comes before its requests."""
        self.begins: set[Key] = set()
        """Pulls of those that begin."""
        super().__init__(case)
        self.how = [{**HYPERPARAMETERS[0], "momentum": case.momentum}]
        self.network = OrderedAnswers(self.network.servers)
        self.begun: set[int] = set()
        """Shards whose first discipline was made."""

    def new_discipline(self, shard: int) -> Discipline:
        stages = super().new_discipline(shard)
        if shard not in self.begun:
            # A mask can be there from the start; one that is decided takes steps to arrive.
            self.begun.add(shard)
            self.defer(stages, self.case.seed + shard, now=True)
        return stages

    # ---- a worker ----

    def born(self, worker: int, incarnation: int) -> Life:
        return StagedLife(worker, incarnation, self.case.data[worker])

    def enter(self, life: Life) -> None:
        life.phase = "join"
        for shard in range(self.case.shards):
            units, number = list[list[Unit]](), 0
            for bucket, where in enumerate(self.case.layout):
                count = self.case.units[bucket] if shard in where else 0
                units.append(
                    [Unit(number + u, 0, self.elements, 0) for u in range(count)]
                )
                number += count
            join = Join(
                options="",
                units=units,
                dtypes=["float64"] * len(units),
                optimizer="SGD",
                hyperparameters=HYPERPARAMETERS,
            )
            life.to_send.append((shard, join, None))

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.elements, dtype=torch.float64)

    @property
    def places(self) -> list[Place]:
        return [(s, b) for b, where in enumerate(self.case.layout) for s in where]

    def to_all(
        self, life: Life, make: Callable[[int], Request], payload: torch.Tensor | None
    ) -> None:
        for shard, bucket in self.places:
            sized = payload
            if payload is not None:
                sized = payload.repeat(self.case.units[bucket])
            life.to_send.append((shard, make(bucket), sized))

    def advance(self, life: Life) -> None:
        assert isinstance(life, StagedLife)
        if life.phase == "train":  # the first stage is over, and the second of before
            self.second_stage(life)
            life.phase = "guess"
        elif life.phase == "guess":
            life.next_step = life.step + 1
            life.phase = "train" if life.done < life.data else "settle"
            if life.phase == "train":
                self.begin_step(life)
        elif life.phase == "pull" and life.done < life.data and not life.pulls_from:
            life.phase = "train"
            self.begin_step(life)
        elif life.phase == "settle":
            life.phase = "pull"
            super().advance(life)
        else:
            super().advance(life)

    def act(self, life: Life, index: int) -> None:
        if life.to_send:
            index %= len(life.to_send)
            shard, message, _ = life.to_send[index]
            channel = channel_of(message)
            if channel:
                index = min(
                    i
                    for i, (where, other, _) in enumerate(life.to_send)
                    if where == shard and channel_of(other)
                )
            self.send(life, *life.to_send.pop(index), channel)
            return
        waits = {
            type(self.letter(life, place).message).__name__ for place in life.unanswered
        }
        # The states for a tentative step are awaited after its second stage was sent, and
        # that one's answers in the next step.
        allowed = {"train": {"PullState"}, "guess": {"Push"}}.get(life.phase, set())
        if life.phase != "end" and waits <= allowed:
            self.advance(life)

    def send(
        self,
        life: Life,
        shard: int,
        message: Request,
        payload: torch.Tensor | None,
        channel: str = "",
    ) -> None:
        super().send(life, shard, message, payload, channel)
        # Nobody waits for who has left before: it takes what there is.
        if isinstance(message, Pull) and life.phase == "pull" and not life.over:
            number = life.numbers[shard, channel] - 1
            self.begins.add((shard, life.worker, life.incarnation, channel, number))

    def letter(self, life: Life, place: tuple[int, str, int]) -> Letter:
        shard, channel, number = place
        return self.network.letters[
            shard, life.worker, life.incarnation, channel, number
        ]

    def begin_step(self, life: Life) -> None:
        assert isinstance(life, StagedLife)
        life.step = life.next_step
        life.done += 1
        self.ask_states(life)
        report = b""
        if isinstance(self.case.method, OSP):
            report = encode_report(self.measured(life))
        for place in self.places:
            late = self.mask(life, place)
            units = [u for u in range(self.case.units[place[1]]) if u not in late]
            self.push(life, place, units, report=report)
        life.late = dict(life.masks)

    def mask(self, life: StagedLife, place: Place) -> list[int]:
        """What this step of the worker defers; the same as for every worker."""
        mine = life.masks.get(place, [])
        assert self.told.setdefault((place, life.step), mine) == mine
        return mine

    def second_stage(self, life: StagedLife) -> None:
        for place in self.places:
            if life.late.get(place):
                self.push(life, place, life.late[place], late=True)

    def ask_states(self, life: StagedLife) -> None:
        for shard, bucket in self.places:
            units = life.masks.get((shard, bucket), [])
            if units and self.case.momentum:
                pull = PullState(bucket=bucket, units=units, step=life.step)
                life.to_send.append((shard, pull, None))

    def push(
        self,
        life: StagedLife,
        place: Place,
        units: Sequence[int],
        late: bool = False,
        report: bytes = b"",
    ) -> None:
        shard, bucket = place
        whole = len(units) == self.case.units[bucket]
        element = self.element(life)
        weight = 1 + life.worker % 3
        self.pushed[element] = (life.step, weight)
        message = Push(
            step=life.step,
            bucket=bucket,
            late=late,
            units=None if whole else list(units),
            weight=weight,
            used=[True] * len(units),
            hyperparameters=self.how,
            report=report,
        )
        parts = [self.gradient(place, unit, element) for unit in units]
        life.to_send.append((shard, message, torch.cat(parts) if parts else None))

    def element(self, life: Life) -> int:
        return (life.worker * LIVES + life.incarnation) * STEPS + life.done - 1

    def gradient(self, place: Place, unit: int, element: int) -> torch.Tensor:
        if self.case.noise:
            seed = hash((*place, unit, element, self.case.seed))
            generator = torch.Generator().manual_seed(seed)
            return torch.randn(self.elements, dtype=torch.float64, generator=generator)
        gradient = torch.zeros(self.elements, dtype=torch.float64)
        gradient[element] = 1.0
        return gradient

    def measured(self, life: Life) -> WorkerReport:
        count = len(self.case.layout)
        choice = random.Random(hash((self.case.seed, life.worker, life.step)))
        ready = sorted(choice.random() for _ in range(count))
        return WorkerReport(
            ready=ready if choice.random() < 0.9 else [],
            end=1.0,
            start_up=0.0,
            per_byte=choice.choice([0.0, 1e-5, 1e-3, 1e-2]),
            bytes=[choice.randrange(5000) for _ in range(count)],
            part=choice.choice([0.0, 0.5, 1.0, 1.0]),
            whole=choice.choice([0.0, 1.0, 1.0, 1.0, 2.0]),
        )

    # ---- what can happen ----

    def play(self, choices: bytes) -> None:
        for kind, index in zip(choices[::2], choices[1::2], strict=False):
            what = kind // 16
            if what == 15:
                self.tick(index)
            elif what == 11:
                self.held_back = index % 2 == 0
            elif what in (10, 14):
                server = self.network.servers[index % self.case.shards]
                self.defer(server.shard.discipline, index + self.case.seed)
            elif what == 13 and index % 16 == 0:
                self.die(index // 16 % len(self.lives))
            elif what == 13 and index % 16 == 1:
                for worker in range(len(self.lives)):
                    self.die(worker)
            elif what == 12 and index % 4 == 0:
                self.come_back(index // 4 % len(self.lives))
            else:
                super().play(bytes((kind, index)))

    def drain(self) -> None:
        self.held_back = False
        super().drain()

    def tick(self, index: int) -> None:
        shard = index % self.case.shards
        server = self.network.servers[shard]
        if server.next_deadline() is not None:
            assert server.on_timer(0.0) == []

    def defer(self, stages: Discipline, seed: int, now: bool = False) -> None:
        """A server decides something else, whatever it has measured."""
        method = self.case.method
        if not isinstance(method, OSP) or method.defer == "nothing":
            return
        if not isinstance(stages, TwoStageDiscipline):
            return  # no worker has joined yet
        choice = random.Random(seed)
        part = choice.choice([0.0, 0.5, 0.5, 1.0])
        masks = {
            bucket: [u for u in range(count) if choice.random() < part]
            for bucket, count in enumerate(self.case.units)
        }
        stages.defer(masks, now)

    def deliver(self, index: int) -> None:
        if self.held_back and self.network.requests[index].sender.channel:
            return
        letter, answers, new = self.network.deliver(self.in_order(index))
        if isinstance(letter.message, Push) and new:
            refused = any(
                answer.to == letter.sender and isinstance(answer.message, Rejected)
                for answer in answers
            )
            if not refused:
                self.take(letter)

    def in_order(self, index: int) -> int:
        """Of a channel that keeps its order, the letter that is first."""
        net = self.network
        letter = net.requests[index]
        if not letter.sender.channel or letter.key in net.delivered:
            return index
        return min(
            (
                i
                for i, other in enumerate(net.requests)
                if other.key[:4] == letter.key[:4] and other.key not in net.delivered
            ),
            key=lambda i: net.requests[i].sender.number,
        )

    def take(self, letter: Letter) -> None:
        push = letter.message
        assert isinstance(push, Push)
        place = (letter.shard, push.bucket)
        self.pushes += 1
        units = self.units_of(push)
        parts = [] if letter.payload is None else letter.payload.split(self.elements)
        for unit, part in zip(units, parts, strict=True):
            mine = self.taken.setdefault((place, unit, push.step), [])
            assert letter.sender.worker not in [taken.worker for taken in mine]
            element = -1 if self.case.noise else int(part.argmax())
            mine.append(Taken(letter.sender.worker, push.weight, element, part))

    def units_of(self, push: Push) -> Sequence[int]:
        whole = range(self.case.units[push.bucket])
        return whole if push.units is None else push.units

    def arrive(self, index: int) -> None:
        shard, answer = self.network.answers.pop(index)
        life = self.lives[answer.to.worker]
        if life.incarnation != answer.to.incarnation or life.dead:
            return
        assert isinstance(life, StagedLife)
        message = answer.message
        assert not isinstance(message, Rejected), f"{life}: {message.reason}"
        where = (shard, answer.to.channel, answer.to.number)
        if where not in life.unanswered:
            return  # it is here already
        life.unanswered.discard(where)
        if isinstance(message, Joined):
            if message.over:
                life.over, life.data = True, 0
            life.next_step = max(life.next_step, message.step)
            life.joined_at = life.next_step
            life.loaded = life.loaded and message.loaded
        elif isinstance(message, Parameters):
            request = self.letter(life, where).message
            begins = (shard, *answer.to[:4]) in self.begins
            if begins or (isinstance(request, Push) and not request.late):
                life.masks[shard, message.bucket] = decode_mask(message.notice)
        else:
            assert isinstance(message, Done | OptimizerState)

    # ---- laws ----

    def check_end(self) -> None:
        for life in self.lives:
            assert life.dead or life.phase == "end", f"waits for ever: {life}"
        self.network.check_answers_were_left_alone()
        for server in self.network.servers:
            assert not server.shard.unanswered
            assert not server._state_pulls
            if isinstance(server.shard.discipline, TwoStageDiscipline):
                assert not server.shard.discipline.rounds
        counts = [server.counts["gradients applied"] for server in self.network.servers]
        assert sum(counts) == self.pushes
        if not self.deaths_happened():
            what = "updates of units that nobody sent"
            assert not any(s.counts[what] for s in self.network.servers)
        histories = self.histories()
        self.check_final(histories)
        self.check_answers_exactly(histories)
        if not self.case.noise and not self.case.momentum:
            self.check_entries()

    def deaths_happened(self) -> bool:
        return self.deaths < self.case.deaths

    def histories(self) -> dict[tuple[Place, int], list[History]]:
        """By place and unit, its parameters and momentum before each step."""
        last = max((step for _, _, step in self.taken), default=-1) + 1
        found = {}
        for place in self.places:
            for unit in range(self.case.units[place[1]]):
                of_step = [
                    self.taken.get((place, unit, step), []) for step in range(last)
                ]
                found[place, unit] = replayed(
                    self.elements, of_step, self.case.momentum
                )
        return found

    def check_final(self, histories: dict[tuple[Place, int], list[History]]) -> None:
        for (shard, bucket), final in self.final().items():
            for unit, values in enumerate(final.split(self.elements)):
                last = histories[(shard, bucket), unit][-1]
                assert torch.equal(values, last.parameters)

    def check_answers_exactly(
        self, histories: dict[tuple[Place, int], list[History]]
    ) -> None:
        """An answer to step i is version i + 1 of what was pushed; a worker that begins
        with step i has version i of everything; and so has the state that it asks for."""
        for key, (answer, carried) in self.network.first.items():
            letter = self.network.letters[key]
            request, message = letter.message, answer.message
            if isinstance(message, Parameters):
                assert carried is not None
                place = (letter.shard, message.bucket)
                units: Sequence[int] = range(self.case.units[message.bucket])
                versions: Sequence[int] = range(STEPS * LIVES * self.case.workers)
                if isinstance(request, Push):
                    units, versions = self.units_of(request), [request.step + 1]
                elif isinstance(request, Pull) and key in self.begins:
                    versions = [request.step]
                parts = carried.split(self.elements) if units else []
                for unit, part in zip(units, parts, strict=True):
                    history = histories[place, unit]
                    assert any(
                        torch.equal(part, version(history, v).parameters)
                        for v in versions
                    ), (request, unit)
            elif isinstance(message, OptimizerState):
                assert isinstance(request, PullState)
                assert request.units is not None
                assert carried is not None
                place = (letter.shard, request.bucket)
                for unit, entries in zip(request.units, message.entries, strict=True):
                    state = version(histories[place, unit], request.step).momentum
                    if state is None:
                        assert entries == []
                        continue
                    ((name, offset),) = entries
                    assert name == "momentum_buffer"
                    assert isinstance(offset, int)
                    mine = carried[offset : offset + self.elements]
                    assert torch.equal(mine, state)

    def check_entries(self) -> None:
        """The ledger: each gradient is in once, with its part of the weights that counted,
        and P = P(0) - sum of means."""
        for place, final in self.final().items():
            for unit, values in enumerate(final.split(self.elements)):
                steps = [
                    taken
                    for (where, number, _), taken in self.taken.items()
                    if (where, number) == (place, unit)
                ]
                assert -values.sum().item() == pytest.approx(len(steps))
                assert int((values != 0).sum()) == sum(map(len, steps))
                for taken in steps:
                    whole = sum(one.weight for one in taken)
                    for one in taken:
                        part = pytest.approx(one.weight / whole, rel=1e-12)
                        assert -values[one.element].item() == part


class History(NamedTuple):
    parameters: torch.Tensor
    momentum: torch.Tensor | None


def version(history: Sequence[History], number: int) -> History:
    """As of after so many steps, of which the last may have been nobody's."""
    return history[min(number, len(history) - 1)]


def replayed(
    elements: int, steps: Sequence[Sequence[Taken]], momentum: float
) -> list[History]:
    """What torch's own SGD makes of what counted, step by step; before each, and at the
    end."""
    parameter = torch.nn.Parameter(torch.zeros(elements, dtype=torch.float64))
    sgd = torch.optim.SGD([parameter], lr=1.0, momentum=momentum)
    found = []

    def note() -> None:
        buffer = sgd.state[parameter].get("momentum_buffer")
        copied = None if buffer is None else buffer.clone()
        found.append(History(parameter.detach().clone(), copied))

    for pushes in steps:
        note()
        if not pushes:
            continue
        ordered = sorted(pushes, key=lambda taken: taken.worker)
        weighed = [taken.gradient * taken.weight for taken in ordered]
        whole = sum(taken.weight for taken in ordered)
        total = weighed[0].clone()
        for one in weighed[1:]:
            total += one
        parameter.grad = total * (1 / whole)
        sgd.step()
    note()
    return found


def channel_of(message: Request) -> str:
    later = isinstance(message, Push) and message.late
    return LATE_CHANNEL if later or isinstance(message, PullState) else ""


# ---- cases ----


@st.composite
def cases(
    draw: st.DrawFn, method: UpdatesOnServer, most_workers: int = 3
) -> StagedCase:
    workers = draw(st.integers(1, most_workers))
    shards = draw(st.integers(1, 3))
    layout = draw(
        st.lists(
            st.lists(
                st.integers(0, shards - 1), min_size=1, max_size=shards, unique=True
            ),
            min_size=1,
            max_size=3,
        )
    )
    count, steps = len(layout), st.sampled_from([0, 2, STEPS - 1, STEPS, STEPS])
    return StagedCase(
        method,
        workers,
        layout,
        draw(st.lists(steps, min_size=workers, max_size=workers)),
        shards,
        draw(st.integers(0, 6)) if most_workers > 1 else 0,
        units=draw(st.lists(st.integers(1, 4), min_size=count, max_size=count)),
        momentum=draw(st.sampled_from([0.0, 0.5])),
        noise=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


SCHEDULES = st.builds(
    lambda seed, events: random.Random(seed).randbytes(2 * events),
    st.integers(0, 2**32),
    st.sampled_from([100, 300, 1000, 3000]),
)
"""Longer ones than Hypothesis would draw by itself: a step takes dozens of events."""
DEEP = settings(QUICK, max_examples=examples(300))
METHODS = {
    "nothing": OSP(defer="nothing"),
    "importance": OSP(defer="most", most=0.6, budget="constant", order="importance"),
    "late": OSP(defer="most", most=0.6, budget="constant"),
    "all": OSP(defer="most", most=1.0, budget="constant"),
    "measured": OSP(most=1.0, order="importance"),
}


@pytest.fixture(autouse=True)
def every_step() -> Iterator[None]:
    """What may wait is decided in every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OSP, "interval", 1)
        yield


def played(case: StagedCase, choices: bytes) -> StagedTraining:
    training = StagedTraining(case)
    training.play(choices)
    training.drain()
    return training


def check_laws(case: StagedCase, choices: bytes) -> None:
    played(case, choices).check_end()


def check_plain(case: StagedCase, choices: bytes) -> None:
    """T2: one worker trains as if there were no server, whatever is deferred."""
    case.noise, case.momentum = True, 0.5
    training = played(case, choices)
    training.check_end()
    for place, final in training.final().items():
        parameter = torch.nn.Parameter(torch.zeros_like(final))
        sgd = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
        for step in range(case.data[0]):
            parts = [
                training.gradient(place, u, step) for u in range(case.units[place[1]])
            ]
            parameter.grad = torch.cat(parts)
            sgd.step()
        assert torch.equal(parameter.detach(), final)


def check_same_as_backup(case: StagedCase, choices: bytes) -> None:
    """T1: with nothing deferred every answer has the bits of what `backup` answers."""
    case.noise = True
    mine = played(case, choices)
    mine.check_end()
    case.method = Backup()
    theirs = played(case, choices)
    theirs.check_end()
    assert mine.network.first.keys() == theirs.network.first.keys()
    for key, (answer, carried) in mine.network.first.items():
        other, theirs_carried = theirs.network.first[key]
        assert type(answer.message) is type(other.message)
        if carried is not None:
            assert theirs_carried is not None
            assert torch.equal(carried, theirs_carried)


@pytest.mark.parametrize("defer", METHODS)
def test_laws_of_two_stages(defer: str) -> None:
    QUICK(given(cases(METHODS[defer]), SCHEDULES)(check_laws))()


@pytest.mark.parametrize(
    "length", [QUICK, pytest.param(DEEP, marks=pytest.mark.slow)], ids=["quick", "deep"]
)
def test_one_worker_is_plain_sgd(length: settings) -> None:
    length(given(cases(METHODS["importance"], 1), SCHEDULES)(check_plain))()


@pytest.mark.slow
def test_with_nothing_deferred_it_is_backup() -> None:
    DEEP(given(cases(METHODS["nothing"]), SCHEDULES)(check_same_as_backup))()
