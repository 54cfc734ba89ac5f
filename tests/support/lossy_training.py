"""Small model workers that train over a network that reorders requests and replies, and loses workers;
and the ledger of what they have pushed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from paceline.interfaces import Discipline, Reply, Sender, UpdatesOnServer
from paceline.interfaces.server_messages import (
    BarrierPassed,
    Done,
    EnterBarrier,
    Join,
    Joined,
    KeepAlive,
    Leave,
    Load,
    Parameters,
    Pull,
    Push,
    Rejected,
    Request,
    Unit,
)
from paceline.methods.asp import ASP
from paceline.methods.backup import Backup
from paceline.methods.push_pull import PushPull
from paceline.methods.r2sp import R2SP
from paceline.methods.ssp import SSP
from paceline.methods.sync_switch import SyncSwitch
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.testing.server_trial import SGD as HYPERPARAMETERS


class Letter(NamedTuple):
    shard: int
    sender: Sender
    message: Request
    payload: torch.Tensor | None

    @property
    def key(self) -> Key:
        return (self.shard, *self.sender[:4])


Key = tuple[int, int, int, str, int]
"""A request: the shard's number, and its sender."""


class Network:
    """Requests and answers under way, in no order."""

    def __init__(self, servers: list[ParameterServer]) -> None:
        self.servers = servers
        self.requests: list[Letter] = []
        self.answers: list[tuple[int, Reply]] = []
        self.losses: list[tuple[int, int, int]] = []  # shard, worker, incarnation
        self.letters: dict[Key, Letter] = {}
        self.first: dict[Key, tuple[Reply, torch.Tensor | None]] = {}
        """The first answer to each request, and what it carried then."""
        self.delivered: set[Key] = set()

    def send(self, letter: Letter) -> None:
        assert letter.key not in self.letters
        self.letters[letter.key] = letter
        self.requests.append(letter)

    def deliver(self, index: int) -> tuple[Letter, list[Reply], bool]:
        """Hand over a request; returns it, the answers, and whether it was new."""
        letter = self.requests.pop(index)
        payload = None if letter.payload is None else letter.payload.clone()
        new = letter.key not in self.delivered
        self.delivered.add(letter.key)
        server = self.servers[letter.shard]
        answers = server.on_request(letter.sender, letter.message, payload, 0.0)
        self.take(letter.shard, answers)
        return letter, answers, new

    def lose(self, index: int) -> tuple[int, list[Reply]]:
        shard, worker, incarnation = self.losses.pop(index)
        answers = self.servers[shard].on_worker_lost(worker, incarnation, 0.0)
        self.take(shard, answers)
        return shard, answers

    def take(self, shard: int, answers: list[Reply]) -> None:
        for answer in answers:
            self.answers.append((shard, answer))
            key = (shard, *answer.to[:4])
            if isinstance(answer.message, Rejected):
                continue
            carried = None if answer.payload is None else answer.payload.clone()
            first, _ = self.first.setdefault(key, (answer, carried))
            assert answer.message == first.message, "answered in two ways"
            assert answer.payload is first.payload

    def check_answers_were_left_alone(self) -> None:
        for answer, carried in self.first.values():
            if carried is not None:
                assert answer.payload is not None
                assert torch.equal(answer.payload, carried)


LIVES, STEPS = 4, 6
"""At most so many lives of a worker, and steps of a life."""


@dataclass
class Life:
    """One incarnation of a worker."""

    worker: int
    incarnation: int
    data: int
    """Steps until it is out of data."""
    dead: bool = False
    phase: str = "join"
    step: int = 0
    done: int = 0
    to_send: list[tuple[int, Request, torch.Tensor | None]] = field(
        default_factory=list
    )
    unanswered: set[tuple[int, str, int]] = field(default_factory=set)
    """Shard, channel and number."""
    numbers: Counter[tuple[int, str]] = field(default_factory=Counter)
    loaded: bool = True
    next_step: int = 0
    joins_at: list[int] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    owns: list[int] = field(default_factory=list)
    """What the shards have said when it joined."""
    joined_at: int = 0
    pulls_from: list[int] = field(default_factory=list)
    late_joiner: bool = False
    over: bool = False
    """An earlier life of it has done all of its steps: nobody waits for this one."""
    has_loaded: set[int] = field(default_factory=set)
    """The steps before which its script has loaded."""
    is_fresh: bool = False
    """It has just loaded, and not sent a gradient since."""
    meets_on: list[int] = field(default_factory=list)
    """The shards where it meets others: the first one now, the others then."""
    awaits: set[tuple[int, str, int]] = field(default_factory=set)
    """Of what is unanswered: that it has arrived, for a load."""
    met: set[int] = field(default_factory=set)
    leads: set[int] = field(default_factory=set)
    """The shards where all were there; those where it is the one to load."""
    loads: dict[int, int] = field(default_factory=dict)
    """By shard: how many loads that has come through."""
    model: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """By shard and bucket."""


@dataclass
class Case:
    method: UpdatesOnServer
    workers: int
    layout: list[list[int]]
    """Per bucket, the shards that hold a part of it."""
    data: list[int]
    shards: int
    deaths: int
    loads: frozenset[int] = frozenset()
    """The steps before which every worker's script loads."""
    before: int = 0
    """Steps that this training had before, as those workers know that were not started
    again."""


IN_TRAINING = ("pull", "train", "arrive", "lead", "take", "pulled")
AT_A_LOAD = ("arrive", "lead", "take", "pulled")


class Training:
    """Workers, servers and the network between them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.elements = case.workers * LIVES * STEPS
        self.network = Network(
            [
                ParameterServer(
                    case.workers,
                    lambda _, shard=shard: self.new_discipline(shard),  # type: ignore[misc]
                )
                for shard in range(case.shards)
            ]
        )
        self.lives = [self.born(w, 0) for w in range(case.workers)]
        self.deaths = case.deaths
        self.died = False
        self.refused = 0
        self.loads = dict.fromkeys(range(case.shards), 0)
        self.from_before: dict[tuple[int, int], list[int]] = {}
        """By shard and bucket: elements of the gradients that were taken before a load."""
        self.pushed: dict[int, tuple[int, int]] = {}
        """By element: the step whose gradient it is, and the weight."""
        self.accepted: dict[tuple[int, int], list[int]] = {}
        """By shard and bucket: elements of the gradients that were taken, but for those that an
        earlier life of their worker had sent."""
        self.steps: set[tuple[int, int, int, int]] = set()
        """By shard, bucket and worker: the steps of those."""
        self.first_steps: dict[tuple[int, int, int], int] = {}
        for life in self.lives:
            self.enter(life)

    def new_discipline(self, shard: int) -> Discipline:
        """For a server that begins, or that has come through a load."""
        return self.case.method.server(self.case.workers)

    # ---- a worker ----

    def born(self, worker: int, incarnation: int) -> Life:
        return Life(worker, incarnation, self.case.data[worker])

    def enter(self, life: Life) -> None:
        life.phase, life.joins_at = "join", list(range(self.case.shards))
        self.join_the_next(life)

    def join_the_next(self, life: Life) -> None:
        """At one shard after the other, backwards."""
        shard = life.joins_at.pop()
        units = [
            [Unit(0, 0, self.elements + 1, 0)] if shard in where else []
            for where in self.case.layout
        ]
        join = Join(
            options="",
            units=units,
            dtypes=["float64"] * len(units),
            optimizer="SGD",
            hyperparameters=HYPERPARAMETERS,
        )
        life.to_send.append((shard, join, None))

    def to_all(
        self, life: Life, make: Callable[[int], Request], payload: torch.Tensor | None
    ) -> None:
        for bucket, where in enumerate(self.case.layout):
            for shard in where:
                life.to_send.append((shard, make(bucket), payload))

    def advance(self, life: Life) -> None:
        """All is sent and answered: the next thing."""
        if life.phase == "join" and life.joins_at:
            self.join_the_next(life)
        elif life.phase == "join" and not life.loaded and life.worker == 0:
            life.phase = "load"
            self.to_all(life, lambda b: Load(bucket=b), self.zeros())
        elif life.phase in ("join", "load"):
            life.phase = "tell"
            life.to_send += [
                (
                    shard,
                    KeepAlive(step=life.next_step, late_joiner=life.late_joiner),
                    None,
                )
                for shard in self.holding()
            ]
        elif life.phase == "tell":
            life.phase, life.pulls_from = "pull", self.holding()
            self.pull_the_next(life)
        elif life.phase == "pull" and life.pulls_from:
            self.pull_the_next(life)
        elif life.phase in AT_A_LOAD:
            self.go_on_with_load(life)
        elif life.phase == "pull" and not life.over and self.behind(life):
            # Others load just now, and not all shards are through with it.
            self.go_to_load(life, self.behind(life), brings=False)
        elif life.phase in ("pull", "train") and life.done < life.data:
            step = life.next_step
            ignored = life.late_joiner and not life.done
            if step in self.case.loads - life.has_loaded and not ignored:
                life.has_loaded.add(step)
                self.go_to_load(life, self.holding(), brings=True)
                return
            life.step = step
            life.phase = "train"
            self.begin_step(life)
        elif life.phase in ("pull", "train"):
            life.phase = "leave"
            for shard in range(self.case.shards):
                life.to_send.append((shard, Leave(), None))
        elif life.phase == "leave":
            life.phase = "last pull"
            self.to_all(life, lambda b: Pull(bucket=b), None)
        else:
            life.phase = "end"

    def pull_the_next(self, life: Life) -> None:
        """From one shard after the other, backwards."""
        shard = life.pulls_from.pop()
        for bucket, where in enumerate(self.case.layout):
            if shard in where:
                pull = Pull(bucket=bucket, step=life.joined_at)
                life.to_send.append((shard, pull, None))

    # ---- loads ----

    def holding(self) -> list[int]:
        return sorted({shard for where in self.case.layout for shard in where})

    def behind(self, life: Life) -> list[int]:
        most = max(life.loads.values(), default=0)
        return [shard for shard in self.holding() if life.loads.get(shard, 0) < most]

    def go_to_load(self, life: Life, shards: list[int], brings: bool) -> None:
        """It arrives at all shards, and then does its part at one after the other."""
        life.is_fresh = brings
        life.meets_on = shards
        life.leads, life.met = set(), set()
        life.phase = "arrive"
        for shard in shards:
            life.to_send.append((shard, EnterBarrier(kind="load", brings=brings), None))

    def may_go_on(self, life: Life) -> bool:
        """Whether all that it waits for is answered."""
        if life.phase in AT_A_LOAD:
            return all(place in life.awaits for place in life.unanswered)
        return not life.unanswered

    def go_on_with_load(self, life: Life) -> None:
        shard, *others = life.meets_on
        if life.phase == "arrive" and shard not in life.met:
            return
        buckets = [b for b, where in enumerate(self.case.layout) if shard in where]
        if life.phase == "arrive" and shard in life.leads:
            life.phase = "lead"
            new = self.zeros()
            new[-1] = life.loads[shard] + 1
            life.to_send += [(shard, Load(bucket=b), new) for b in buckets]
        elif life.phase in ("arrive", "lead"):
            life.phase = "take"
            life.to_send += [(shard, Pull(bucket=b), None) for b in buckets]
        elif life.phase == "take":
            life.phase = "pulled"
            life.to_send.append((shard, EnterBarrier(kind="pulled"), None))
        elif others:
            life.phase, life.meets_on = "arrive", others
        else:
            life.phase = "pull"

    def is_torn(self) -> bool:
        """All who had something to load have died between two shards."""
        servers = self.network.servers
        torn = any(server.counts["loads that nobody has brought"] for server in servers)
        assert self.died or not torn
        return torn

    def check_model(self, life: Life) -> None:
        """It computes with one model: no part of it is from before a load that another part
        has come through; and right after a load with just what was loaded."""
        if self.is_torn():
            return
        numbers = {values[-1].item() for values in life.model.values()}
        assert len(numbers) == 1, life
        assert numbers == {life.loads[shard] for shard in self.holding()}
        if life.is_fresh:
            assert not any(values[:-1].any() for values in life.model.values()), life
            life.is_fresh = False

    def begin_step(self, life: Life) -> None:
        if isinstance(self.case.method, SSP):
            self.check_bound(life, self.case.method.staleness)
        self.check_model(life)
        element = (life.worker * LIVES + life.incarnation) * STEPS + life.done
        weight = 1 + life.worker % 3
        self.pushed[element] = (life.step, weight)
        life.done += 1
        gradient = self.zeros()
        gradient[element] = 1.0
        told = self.case.before if life.incarnation == 0 else 0
        self.to_all(
            life,
            lambda b: Push(
                step=life.step,
                bucket=b,
                weight=weight,
                used=[True],
                hyperparameters=HYPERPARAMETERS,
                report=str(told).encode() if told else b"",
            ),
            gradient,
        )

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.elements + 1, dtype=torch.float64)

    # ---- what can happen ----

    def act(self, life: Life, index: int) -> None:
        if not life.to_send:
            if self.may_go_on(life) and life.phase != "end":
                self.advance(life)
            return
        self.send(life, *life.to_send.pop(index % len(life.to_send)))

    def send(
        self,
        life: Life,
        shard: int,
        message: Request,
        payload: torch.Tensor | None,
        channel: str = "",
    ) -> None:
        number = life.numbers[shard, channel]
        life.numbers[shard, channel] += 1
        life.unanswered.add((shard, channel, number))
        if isinstance(message, EnterBarrier) and message.kind == "load":
            life.awaits.add((shard, channel, number))
        sender = Sender(life.worker, life.incarnation, channel, number)
        self.network.send(Letter(shard, sender, message, payload))

    def deliver(self, index: int) -> None:
        letter, answers, new = self.network.deliver(index)
        if isinstance(letter.message, Push) and new:
            refused = any(
                answer.to.number == letter.sender.number
                and answer.to.worker == letter.sender.worker
                and isinstance(answer.message, Rejected)
                and " to load" not in answer.message.reason  # it was taken
                for answer in answers
            )
            if not refused:
                assert letter.payload is not None
                mine = self.accepted.setdefault(
                    (letter.shard, letter.message.bucket), []
                )
                push, worker = letter.message, letter.sender.worker
                place = (letter.shard, push.bucket, worker, push.step)
                if place not in self.steps:
                    self.steps.add(place)
                    mine.append(int(letter.payload.argmax()))
        self.check_new(letter.shard, answers)

    def lose(self, index: int) -> None:
        self.check_new(*self.network.lose(index))

    def arrive(self, index: int) -> None:
        shard, answer = self.network.answers.pop(index)
        life = self.lives[answer.to.worker]
        if life.incarnation != answer.to.incarnation or life.dead:
            return
        message = answer.message
        if isinstance(message, Rejected):
            # Its script ends with an error, and may be started again.
            assert " to load" in message.reason, f"{life}: {message.reason}"
            self.refused += 1
            self.end(life)
            return
        place = (shard, answer.to.channel, answer.to.number)
        if place not in life.unanswered:
            return  # it is here already
        life.unanswered.discard(place)
        if isinstance(message, Joined):
            if shard in self.holding():
                life.first_steps.append(message.step)
                life.owns.append(message.own)
                life.next_step = max(*life.first_steps, min(life.owns))
                life.joined_at = life.next_step
            life.loaded = life.loaded and message.loaded
            life.late_joiner = life.late_joiner or message.late_joiner
            if message.over:
                life.over, life.data = True, 0
            life.loads[shard] = message.load
            if not message.over:
                # Who has left there does no step with what it pulls, so that server
                # answers with what there is: a step that others still do may be missing.
                place = (shard, life.worker, life.incarnation)
                self.first_steps[place] = message.step
        elif isinstance(message, Parameters):
            life.next_step = max(life.next_step, message.step)
            life.loads[shard] = max(life.loads[shard], message.load)
            assert answer.payload is not None
            life.model[shard, message.bucket] = answer.payload
        elif isinstance(message, BarrierPassed):
            life.loads[shard] = max(life.loads[shard], message.load)
            life.met.add(shard)
            if message.leads:
                life.leads.add(shard)
        else:
            assert isinstance(message, Done)

    def end(self, life: Life) -> None:
        life.dead = True
        self.network.losses += [
            (shard, life.worker, life.incarnation) for shard in range(self.case.shards)
        ]

    def die(self, worker: int) -> None:
        life = self.lives[worker]
        if worker == life.incarnation == 0 and life.phase in ("join", "load"):
            return  # nobody else would ever load the parameters
        if self.deaths and not life.dead:
            self.deaths -= 1
            self.died = True
            self.end(life)

    def come_back(self, worker: int) -> None:
        life = self.lives[worker]
        if life.dead and life.incarnation + 1 < LIVES:
            new = self.lives[worker] = self.born(worker, life.incarnation + 1)
            self.enter(new)

    # ---- running ----

    def play(self, choices: bytes) -> None:
        net = self.network
        for kind, index in zip(choices[::2], choices[1::2], strict=False):
            kind %= 16
            if kind < 6:
                life = self.lives[index % len(self.lives)]
                if not life.dead:
                    self.act(life, index // len(self.lives))
            elif kind < 10 and net.requests:
                self.deliver(index % len(net.requests))
            elif kind < 14 and net.answers:
                self.arrive(index % len(net.answers))
            elif kind == 14 and net.losses:
                self.lose(index % len(net.losses))
            elif kind == 15 and index % 2:
                self.come_back(index // 2 % len(self.lives))
            elif kind == 15 and index % 8 == 0:
                self.die(index // 8 % len(self.lives))

    def drain(self) -> None:
        """Let all that is under way arrive, until nothing moves any more."""
        net = self.network
        while True:
            before = self.progress()
            while net.losses:
                self.lose(0)
            for life in self.lives:
                if not life.dead:
                    self.act(life, 0)
            while net.requests:
                self.deliver(0)
            while net.answers:
                self.arrive(0)
            if self.progress() == before:
                return

    def progress(self) -> list[tuple[str, int, int, int, bool]]:
        return [
            (life.phase, life.done, len(life.to_send), len(life.unanswered), life.dead)
            for life in self.lives
        ]

    # ---- laws ----

    def check_bound(self, life: Life, staleness: int) -> None:
        """It starts a step only when all that train have completed the one *staleness*
        steps before."""
        for other in self.lives:
            trains = other.phase in IN_TRAINING
            if not other.dead and (trains or other.incarnation == 0):
                if other.over or other.phase in ("leave", "last pull", "end"):
                    continue
                completed = other.step if other.phase == "train" else other.next_step
                if other.phase == "train" and not other.to_send:
                    # Its step may be in as a whole.
                    completed += 1
                assert life.step <= completed + staleness, (life, other)

    def check_new(self, shard: int, answers: list[Reply]) -> None:
        """What a server has just said to pushes is right at this moment."""
        server = self.network.servers[shard]
        if server.shard.loads > self.loads[shard]:
            self.loads[shard] = server.shard.loads
            for (where, bucket), taken in self.accepted.items():
                if where == shard:
                    self.from_before.setdefault((shard, bucket), []).extend(taken)
                    taken.clear()
            self.forget_halves(shard)
        for answer in answers:
            if not isinstance(answer.message, Parameters):
                continue
            letter = self.network.letters[(shard, *answer.to[:4])]
            if isinstance(letter.message, Push) and isinstance(self.case.method, SSP):
                waited = answer is self.network.first[letter.key][0]
                for worker in server.shard.active_workers(10**9) if waited else []:
                    joined = (shard, worker) in self.members()
                    clock = server.shard.clock(worker) if joined else 0
                    ahead = letter.message.step + 1 - clock
                    assert ahead <= max(1, self.case.method.staleness)

    def forget_halves(self, shard: int) -> None:
        """After a load the steps of which not all buckets had come may be sent again."""
        held = {b for b, where in enumerate(self.case.layout) if shard in where}
        for worker in range(self.case.workers):
            steps = [(b, s) for (h, b, w, s) in self.steps if (h, w) == (shard, worker)]
            last = max((step for _, step in steps), default=0)
            buckets = {bucket for bucket, step in steps if step == last}
            if buckets != held:
                self.steps -= {(shard, b, worker, last) for b in buckets}

    def members(self) -> set[tuple[int, int]]:
        return {
            (letter.shard, letter.sender.worker)
            for key, letter in self.network.letters.items()
            if key in self.network.delivered and isinstance(letter.message, Join)
        }

    def check_end(self) -> None:
        for life in self.lives:
            assert life.dead or life.phase == "end", f"waits for ever: {life}"
        self.network.check_answers_were_left_alone()
        final = self.final()
        for place, parameters in final.items():
            self.check_ledger(place, parameters)
        # Only who comes back, or is carried past a step, can miss where others load.
        some = isinstance(self.case.method, Backup) and self.case.method.wait_for
        assert self.died or some or not self.refused
        for shard, server in enumerate(self.network.servers):
            if self.loads[shard]:
                continue  # what the dead had pushed was dropped, and not counted
            taken = sum(len(a) for (s, _), a in self.accepted.items() if s == shard)
            counted = server.counts["gradients applied"]
            assert taken == counted + server.counts["gradients dropped"]
            if not isinstance(self.case.method, Backup):
                assert server.counts["gradients dropped"] == 0
        if not isinstance(self.case.method, ASP | R2SP):
            self.check_answers(final)

    def final(self) -> dict[tuple[int, int], torch.Tensor]:
        """By shard and bucket, the parameters at the end."""
        final = {}
        for bucket, where in enumerate(self.case.layout):
            for shard in where:
                server = self.network.servers[shard]
                final[shard, bucket] = server.shard.store.flats[bucket].clone()
        return final

    def check_ledger(self, place: tuple[int, int], parameters: torch.Tensor) -> None:
        taken = self.accepted.get(place, [])
        assert len(taken) == len(set(taken))
        values = {e: -parameters[e].item() for e in range(self.elements)}
        if self.is_torn():
            return
        assert parameters[-1] == self.loads[place[0]]
        assert not any(values[e] for e in self.from_before.get(place, []))
        assert all(values[e] == 0.0 for e in values if e not in taken)
        if isinstance(self.case.method, SyncSwitch):
            self.check_phases(taken, values)
            return
        if not isinstance(self.case.method, Backup):
            # Each is in once, at its weight.
            assert {e: values[e] for e in taken} == {
                e: self.pushed[e][1] for e in taken
            }
            return
        steps = {self.pushed[e][0] for e in taken}
        for step in steps:
            counting = [e for e in taken if self.pushed[e][0] == step and values[e]]
            whole = sum(self.pushed[e][1] for e in counting)
            for element in counting:
                weight = self.pushed[element][1]
                assert values[element] == pytest.approx(weight / whole, rel=1e-12)
            wait_for = self.case.method.wait_for
            if not wait_for:
                mine = [e for e in taken if self.pushed[e][0] == step]
                assert sorted(counting) == sorted(mine)

    def check_phases(self, taken: list[int], values: dict[int, float]) -> None:
        """A step's gradients are in as their mean before the switch, and each at its weight
        after it. Where only who was started again is left, nobody knows of steps before."""
        for step in {self.pushed[e][0] for e in taken}:
            mine = [e for e in taken if self.pushed[e][0] == step]
            weights = [self.pushed[e][1] for e in mine]
            mean = [pytest.approx(w / sum(weights), rel=1e-12) for w in weights]
            found = [values[e] for e in mine]
            forgotten = self.died and self.case.before
            if step >= self.switch or forgotten:
                assert found == weights or (forgotten and found == mean)
            else:
                assert found == mean

    @property
    def switch(self) -> int:
        assert isinstance(self.case.method, SyncSwitch)
        return max(0, self.case.method.bsp_steps - self.case.before)

    def check_answers(self, final: dict[tuple[int, int], torch.Tensor]) -> None:
        """Under rounds an answer holds the steps up to its own, all of them, and no
        gradient of a later one."""
        method = self.case.method
        if isinstance(method, SSP) and method.staleness:
            return
        for key, (answer, carried) in self.network.first.items():
            message, letter = answer.message, self.network.letters[key]
            if not isinstance(message, Parameters) or self.loads[letter.shard]:
                continue
            assert carried is not None
            there = final[letter.shard, message.bucket]
            if isinstance(letter.message, Push):
                below = above = letter.message.step + 1
                assert letter.payload is not None
                dropped = there[int(letter.payload.argmax())] == 0
                if isinstance(method, Backup):
                    if dropped:
                        assert message.version >= below
                        below = above = message.version
                    assert message.version == below
            else:  # a pull: at least what came before its worker's first step
                below, above = self.first_steps.get(key[:3], 0), 10**9
            if isinstance(method, SyncSwitch):
                if self.died and self.case.before:
                    continue
                below = min(below, self.switch)
                above = 10**9 if above > self.switch else above
            for element in self.accepted.get((letter.shard, message.bucket), []):
                step = self.pushed[element][0]
                if step < below:
                    assert carried[element] == there[element]
                elif step >= above:
                    assert carried[element] == 0


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    workers = draw(st.integers(2, 4))
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
    data = draw(st.lists(st.integers(0, STEPS), min_size=workers, max_size=workers))
    method: PushPull
    before = 0
    if name == "asp":
        method = ASP()
    elif name == "r2sp":
        method = R2SP(warmup_steps=2)
    elif name.startswith("ssp"):
        method = SSP(staleness=int(name[-1]))
    elif name == "sync-switch":
        method = SyncSwitch(bsp_steps=draw(st.integers(0, STEPS + 1)))
        before = draw(st.sampled_from([0, 0, 1, 3, 10]))
    else:
        some = name == "backup, some"
        method = Backup(wait_for=draw(st.integers(1, workers)) if some else 0)
    loads = draw(st.frozensets(st.integers(0, STEPS - 1), max_size=2))
    deaths = draw(st.integers(0, 4))
    return Case(method, workers, layout, data, shards, deaths, loads, before)
