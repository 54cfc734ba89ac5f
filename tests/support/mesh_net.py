"""Group servers and workers over a network that a test steers: pure machines, no time.

Requests between two servers come in order, and so do answers; what is on different ways comes in
any order. Connections break and come back, servers die and are started again, workers die and
come back, move and meet. Every gradient is 1 at an element of its own, so parameters under plain
SGD with a learning rate of 1 are the ledger: they say how often each gradient is in.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.interfaces import Answer, Ask, Groups, Sender
from paceline.interfaces.server_messages import (
    Arrive,
    Blend,
    Join,
    Joined,
    Leave,
    Load,
    Met,
    Note,
    Pull,
    Push,
    Refused,
    Reply,
    Request,
    Unit,
)
from paceline.parameter_server.groups.local_server import Home
from paceline.parameter_server.groups.server import GroupServer
from tests.support.sums_up import SumsUp

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
MOST_EVENTS = 20_000


@dataclass
class Case:
    """*of*: each worker's group. *steps*: how many each does. *meets*: before which steps all
    workers meet, or load zeros. *moves*: a worker goes to another group before its step:
    (worker, step): group. *cuts*, *kills*, *deaths*: of connections, servers, workers;
    *peril*: how likely kills are at each event."""

    of: tuple[int, ...]
    servers: int
    steps: tuple[int, ...]
    buckets: int = 2
    period: int = 2
    meets: frozenset[int] = frozenset()
    loads: frozenset[int] = frozenset()
    moves: dict[tuple[int, int], int] = field(default_factory=dict)
    cuts: int = 0
    kills: int = 0
    deaths: int = 0
    peril: float = 0.005
    agree: bool = True
    snapshots: bool = False
    by_step: bool = False
    """Workers end after so many steps of the job, and not of their own lives."""
    ends: int = 0
    """So often all servers die, and go on from server 0's snapshot."""
    rates: tuple[float, ...] = (1.0,)
    """Learning rates, step by step, over and over."""


Script = Generator[
    list[tuple[int, Request, torch.Tensor | None]],
    dict[int, tuple[Reply, torch.Tensor | None]],
    None,
]


@dataclass
class Life:
    """One incarnation of a worker."""

    worker: int
    incarnation: int
    script: Script
    numbers: Counter[int] = field(default_factory=Counter)
    waits: dict[tuple[int, int], int] = field(default_factory=dict)
    """By server and number: the place in what was asked last."""
    answers: dict[int, tuple[Reply, torch.Tensor | None]] = field(default_factory=dict)
    over: bool = False
    dead: bool = False


@dataclass
class Way:
    """What server *a* asks server *b*, over connections one after the other."""

    up: bool = True
    incarnation: int = 0
    requests: deque[Ask] = field(default_factory=deque)
    replies: deque[tuple[int, Reply, torch.Tensor | None]] = field(
        default_factory=deque
    )
    asked: dict[int, Ask] = field(default_factory=dict)
    received: int = 0
    told_asker: bool = True
    told_asked: bool = True


class MeshNet:
    """A job. *make* makes a server's discipline; *choose* steers."""

    def __init__(
        self,
        case: Case,
        choose: random.Random,
        make: Callable[[MeshNet, int], Any] | None = None,
    ) -> None:
        self.case, self.choose = case, choose
        self.workers = len(case.of)
        self.elements = 1
        self.size = (sum(case.steps) + 1) * (
            case.deaths + self.workers * (case.kills + case.ends) + 1
        )
        self.names = [f"server {number}" for number in range(case.servers)]
        self._make = make or MeshNet.sums_up
        self.taken: list[tuple[int, int]] = []
        """Of each gradient that a server has taken: the element, and the bucket."""
        self.weights: dict[int, float] = {}
        """By element: the weight of its gradient times its learning rate."""
        self.step_of: dict[int, tuple[int, int]] = {}
        """By element: whose gradient it is, and of which step."""
        self.ends = case.ends
        self.at: dict[int, int] = {}
        """By element: the server that it was pushed to."""
        self.loads_before: dict[int, int] = {}
        """By element: how many loads there were when it was pushed."""
        self.met: dict[int, list[torch.Tensor]] = {}
        """By meeting: the models of those that met."""
        self.killed: set[int] = set()
        """Servers that have died, ever."""
        self.snapshots: dict[int, dict[str, Any]] = {}
        self.life = dict.fromkeys(range(case.servers), 0)
        self.entering: set[int] = set()
        self.servers: dict[int, GroupServer] = {
            number: self.started(number) for number in range(case.servers)
        }
        self.ways = {
            (a, b): Way()
            for a in range(case.servers)
            for b in range(case.servers)
            if a != b
        }
        self.to_server: dict[tuple[int, int], deque[Any]] = {}
        self.to_worker: dict[tuple[int, int], deque[Answer]] = {}
        self.cuts, self.kills, self.deaths = case.cuts, case.kills, case.deaths
        self.done_steps = [0] * self.workers
        self.refusals: list[str] = []
        self.is_loaded = False
        """The first load is over: before, nobody else would do it."""
        self.lives = {worker: self.born(worker, 0) for worker in range(self.workers)}

    # ---- servers ----

    def sums_up(self, number: int) -> SumsUp:
        groups = Groups(self.case.of, self.case.servers)
        return SumsUp(groups, self.case.period, self.takes)

    def takes(self, element: int, bucket: int) -> None:
        self.taken.append((element, bucket))

    def started(self, number: int, enters: bool = False) -> GroupServer:
        def entered() -> None:
            self.entering.discard(number)

        if enters:
            self.entering.add(number)
        discipline = self._make(self, number)
        home = Home(
            *(number, self.workers, discipline, self.names[number]), meets=number == 0
        )
        if self.life[number]:
            home.wait_for_the_lost()
            if number in self.snapshots:
                home.restore(self.snapshots[number])
        server = GroupServer(
            home,
            self.names,
            life=self.life[number],
            enters=enters,
            agree=self.case.agree,
            entered=entered,
        )
        server.wait_for_the_lost()
        return server

    def take(self, number: int, outgoing: Any) -> None:
        """What a server's transition has returned is on its way."""
        for one in outgoing:
            if isinstance(one, Ask):
                way = self.ways[number, self.names.index(one.peer)]
                if way.up:
                    way.requests.append(one)
                continue
            to = one.to
            if to.worker < self.workers:
                queue = self.to_worker.setdefault((number, to.worker), deque())
                queue.append(one)
                continue
            asker = to.worker - self.workers
            way = self.ways[asker, number]
            if way.up and to.incarnation == way.incarnation:
                way.replies.append((to.number, one.message, one.payload))

    def deliver_request(self, a: int, b: int) -> None:
        way = self.ways[a, b]
        ask = way.requests.popleft()
        number, way.received = way.received, way.received + 1
        way.asked[number] = ask
        sender = Sender(self.workers + a, way.incarnation, "", number)
        payload = None if ask.payload is None else ask.payload.clone()
        self.take(b, self.servers[b].on_message(sender, ask.message, payload, 0.0))

    def deliver_reply(self, a: int, b: int) -> None:
        way = self.ways[a, b]
        number, reply, payload = way.replies.popleft()
        ask = way.asked.pop(number)
        if payload is not None and ask.into is not None:
            ask.into[: payload.numel()].copy_(payload)
        self.take(
            a,
            self.servers[a].on_reply(self.names[b], ask.number, reply, ask.into, 0.0),
        )

    def cut(self, a: int, b: int) -> None:
        way = self.ways[a, b]
        if way.up:
            way.up = way.told_asker = way.told_asked = False
            way.requests.clear()
            way.replies.clear()
            way.asked.clear()

    def tell_asker(self, a: int, b: int) -> None:
        self.ways[a, b].told_asker = True
        self.take(a, self.servers[a].on_peer_lost(self.names[b], "it was cut", 0.0))

    def tell_asked(self, a: int, b: int) -> None:
        way = self.ways[a, b]
        way.told_asked = True
        self.take(b, self.servers[b].on_lost(self.workers + a, way.incarnation, 0.0))

    def restore(self, a: int, b: int) -> None:
        way = self.ways[a, b]
        if not way.told_asked:
            self.tell_asked(a, b)
        way.up = True
        way.incarnation += 1
        way.received = 0
        self.take(a, self.servers[a].on_peer_back(self.names[b], 0.0))

    def kill(self, number: int) -> None:
        """A server dies, and all workers with it; all are started again."""
        self.killed.add(number)
        self.life[number] += 1
        for a, b in self.ways:
            if number in (a, b):
                self.cut(a, b)
                way = self.ways[a, b]
                # The one that is new knows of nothing.
                way.told_asker = way.told_asker or a == number
                way.told_asked = way.told_asked or b == number
        for life in self.lives.values():
            if not life.over and not life.dead:
                self.die(life)
        for worker in range(self.workers):
            self.to_server.setdefault((worker, number), deque()).clear()
            self.to_worker.setdefault((number, worker), deque()).clear()
        enters = any(
            other != number and other not in self.entering for other in self.servers
        )
        self.servers[number] = server = self.started(number, enters)
        for worker, life in self.lives.items():
            if life.over:
                self.take(number, server.on_done(worker, 0.0))

    def end_all(self) -> None:
        """All servers die at once, and go on from what server 0 has just now."""
        saved = self.servers[0].snapshot()
        if not saved:
            return
        self.ends -= 1
        for life in self.lives.values():
            if not life.over and not life.dead:
                self.die(life)
        for place, way in self.ways.items():
            self.ways[place] = Way(incarnation=way.incarnation + 1)
        self.to_server.clear()
        self.to_worker.clear()
        self.snapshots, self.entering = {0: saved}, set()
        for number in self.servers:
            self.life[number] += 1
            self.servers[number] = self.started(number, enters=number > 0)
        for number, server in self.servers.items():
            self.take(number, server.on_timer(0.0))
            for worker, life in self.lives.items():
                if life.over:
                    self.take(number, server.on_done(worker, 0.0))

    # ---- workers ----

    def born(self, worker: int, incarnation: int) -> Life:
        life = Life(worker, incarnation, iter(()))  # type: ignore[arg-type]
        life.script = self.script(life)
        self.ask(life, next(life.script))
        return life

    def ask(
        self, life: Life, requests: list[tuple[int, Request, torch.Tensor | None]]
    ) -> None:
        life.answers = {}
        for place, (server, message, payload) in enumerate(requests):
            number = life.numbers[server]
            life.numbers[server] += 1
            life.waits[server, number] = place
            sender = Sender(life.worker, life.incarnation, "", number)
            queue = self.to_server.setdefault((life.worker, server), deque())
            queue.append((sender, message, payload))

    def deliver_to_server(self, worker: int, server: int) -> None:
        sender, message, payload = self.to_server[worker, server].popleft()
        machine = self.servers[server]
        if message is None:
            self.take(server, machine.on_lost(worker, sender.incarnation, 0.0))
            return
        copied = None if payload is None else payload.clone()
        self.take(server, machine.on_message(sender, message, copied, 0.0))

    def deliver_to_worker(self, server: int, worker: int) -> None:
        answer = self.to_worker[server, worker].popleft()
        life = self.lives[worker]
        if life.dead or answer.to.incarnation != life.incarnation:
            return
        place = life.waits.pop((server, answer.to.number))
        if isinstance(answer.message, Refused):
            self.refusals.append(answer.message.reason)
            self.die(life)
            return
        life.answers[place] = answer.message, answer.payload
        if not life.waits:
            try:
                self.ask(life, life.script.send(life.answers))
            except StopIteration:
                life.over = True
                for number, server in self.servers.items():
                    self.take(number, server.on_done(worker, 0.0))

    def die(self, life: Life) -> None:
        life.dead = True
        life.waits.clear()
        for server in range(self.case.servers):
            queue = self.to_server.setdefault((life.worker, server), deque())
            while queue and self.choose.random() < 0.5:
                queue.pop()
            lost = Sender(life.worker, life.incarnation, "", 0)
            queue.append((lost, None, None))

    def come_back(self, worker: int) -> None:
        self.lives[worker] = self.born(worker, self.lives[worker].incarnation + 1)

    def script(self, life: Life) -> Script:
        """What a worker does."""
        case, worker = self.case, life.worker
        everywhere = range(case.servers)
        empty, step, guest = [], 0, False
        home = case.of[worker]
        for server in reversed(everywhere):
            answers = yield [(server, self.join(server), None)]
            joined = answers[0][0]
            assert isinstance(joined, Joined), joined
            guest = guest or joined.guest
            step = max(joined.step, joined.own) if server == home else step
            if not joined.loaded:
                empty.append(server)
        if empty and worker == 0:
            for server in empty:
                yield [
                    (server, Load(bucket=bucket), self.zeros())
                    for bucket in range(case.buckets)
                ]
        self.is_loaded = self.is_loaded or worker == 0
        yield [(server, Note(step=step, guest=guest), None) for server in everywhere]
        yield self.pulls(home, step)
        while (step if case.by_step else self.done_steps[worker]) < case.steps[worker]:
            done = self.done_steps[worker]
            if done in case.meets and not life.incarnation:
                yield from self.meet(home, done)
            if done in case.loads and not life.incarnation:
                yield from self.load(home)
            self.done_steps[worker] += 1
            moved = case.moves.get((worker, done), home)
            if moved != home:
                home = moved
                yield [(home, Note(step=step), None)]
                yield self.pulls(home, step)
            yield self.pushes(home, worker, step)
            step += 1
        yield [(server, Leave(), None) for server in everywhere]
        yield self.pulls(home, step)

    def meet(self, home: int, number: int) -> Script:
        """All that meet have one model, between two meetings."""
        arrive = Arrive(purpose="meet")
        yield [(0, arrive, None)]
        answers = yield self.pulls(home, 0)
        model = [payload for _, payload in answers.values() if payload is not None]
        yield [(0, arrive, None)]
        self.met.setdefault(number, []).append(torch.cat(model))

    def load(self, home: int) -> Script:
        """All load what the lowest rank has: nothing but how often that was."""
        answers = yield [(0, Arrive(purpose="load", brings=True), None)]
        met = answers[0][0]
        assert isinstance(met, Met), met
        if met.leads:
            new = self.zeros()
            new[0] = met.load + 1
            loads = [Load(bucket=bucket) for bucket in range(self.case.buckets)]
            yield [(0, load, new) for load in loads]
        yield [(0, Arrive(purpose="pulled"), None)]
        answers = yield self.pulls(home, 0)
        for _, payload in answers.values():
            assert payload is not None
            assert payload[0] > 0
            assert not payload[1:].any()
        yield [(0, Arrive(purpose="meet"), None)]

    def join(self, server: int) -> Join:
        units = [[Unit(0, 0, self.size, 0)] for _ in range(self.case.buckets)]
        return Join(
            options="",
            shard=server,
            units=units,
            dtypes=["float64"] * self.case.buckets,
            optimizer="SGD",
            hyperparameters=HYPERPARAMETERS,
        )

    def pulls(self, server: int, step: int) -> list[Any]:
        return [
            (server, Pull(bucket=bucket, step=step), None)
            for bucket in range(self.case.buckets)
        ]

    def pushes(self, server: int, worker: int, step: int) -> list[Any]:
        element, self.elements = self.elements, self.elements + 1
        assert element < self.size
        gradient = self.zeros()
        gradient[element] = 1.0
        self.step_of[element] = worker, step
        weight = float(1 + worker % 3)
        rate = self.case.rates[step % len(self.case.rates)]
        self.weights[element] = weight * rate
        self.at[element] = server
        self.loads_before[element] = self.servers[0].home.loads
        buffers = torch.tensor([float(worker), float(step)], dtype=torch.float64)
        requests: list[Any] = [(server, Blend(weight=0.5, floats=1), buffers)]
        return requests + [
            (
                server,
                Push(
                    step=step,
                    bucket=bucket,
                    weight=weight,
                    used=[True],
                    hyperparameters=[how | {"lr": rate} for how in HYPERPARAMETERS],
                ),
                gradient,
            )
            for bucket in range(self.case.buckets)
        ]

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.size, dtype=torch.float64)

    # ---- running ----

    def events(self) -> list[Callable[[], None]]:
        """What may happen next, of what is on its way."""
        found: list[Callable[[], None]] = []
        for (a, b), way in self.ways.items():
            if way.requests:
                found.append(lambda a=a, b=b: self.deliver_request(a, b))  # type: ignore[misc]
            if way.replies:
                found.append(lambda a=a, b=b: self.deliver_reply(a, b))  # type: ignore[misc]
            if not way.told_asked:
                found.append(lambda a=a, b=b: self.tell_asked(a, b))  # type: ignore[misc]
            if not way.up:
                told = way.told_asker
                next_ = self.restore if told else self.tell_asker
                found.append(lambda a=a, b=b, f=next_: f(a, b))  # type: ignore[misc]
        for (w, s), requests in self.to_server.items():
            if requests:
                found.append(lambda w=w, s=s: self.deliver_to_server(w, s))  # type: ignore[misc]
        for (s, w), answers in self.to_worker.items():
            if answers:
                found.append(lambda s=s, w=w: self.deliver_to_worker(s, w))  # type: ignore[misc]
        for worker, life in self.lives.items():
            if life.dead:
                found.append(lambda w=worker: self.come_back(w))  # type: ignore[misc]
        return found

    def run(self) -> None:
        """Until nothing is left to happen."""
        left = MOST_EVENTS
        while events := self.events():
            self.choose.choice(events)()
            self.disturb()
            left -= 1
            assert left, "there is no end to it"
            for number, server in self.servers.items():
                deadline = server.next_deadline()
                if deadline is not None and deadline <= 0.0:
                    self.take(number, server.on_timer(0.0))

    def disturb(self) -> None:
        choose = self.choose
        if self.cuts and choose.random() < 0.02:
            self.cuts -= 1
            self.cut(*choose.choice(list(self.ways)))
        if self.deaths and choose.random() < 0.01:
            life = choose.choice(list(self.lives.values()))
            if not life.dead and not life.over and self.is_loaded:
                self.deaths -= 1
                self.die(life)
        if self.ends and self.is_loaded and choose.random() < self.case.peril:
            self.end_all()
        if self.kills and self.is_loaded and choose.random() < self.case.peril:
            number = choose.choice(list(self.servers))
            if not self.entering:
                self.kills -= 1
                if self.case.snapshots:
                    saved = self.servers[number].snapshot()
                    if saved:
                        self.snapshots[number] = saved
                self.kill(number)

    # ---- laws ----

    def parameters(self, server: int, bucket: int) -> torch.Tensor:
        return self.servers[server].home.shard.store.flats[bucket]

    def check_end(self) -> None:
        """Nobody waits for ever; each gradient is in once at each server that is in the mesh,
        and where servers agree, all have the same to the bit."""
        for life in self.lives.values():
            assert life.over, f"waits for ever: {life}"
        inside = [n for n, s in self.servers.items() if self.case.agree or s.is_active]
        for bucket in range(self.case.buckets):
            models = [self.parameters(number, bucket) for number in inside]
            for model in models:
                assert torch.allclose(model, models[0], rtol=0, atol=1e-9)
                assert not self.case.agree or torch.equal(model, models[0])
            self.check_ledger(models[0], bucket)
        if self.case.agree:
            rests = [self.servers[number].home.rest.buffers for number in inside]
            assert all(torch.equal(rest, rests[0]) for rest in rests)
            quiet = not self.case.deaths and not self.case.kills  # no guests train on
            for models in self.met.values() if quiet else ():
                assert all(torch.equal(model, models[0]) for model in models)

    def check_each_step_once(self) -> None:
        """Each gradient of each step of each worker is in once, at every server."""
        for number in self.servers:
            for bucket in range(self.case.buckets):
                flat, times = (
                    self.parameters(number, bucket),
                    Counter[tuple[int, int]](),
                )
                for element, step in self.step_of.items():
                    times[step] += round(-flat[element].item() / self.weights[element])
                due = {
                    (w, s) for w, its in enumerate(self.case.steps) for s in range(its)
                }
                wrong = {step: times[step] for step in due if times[step] != 1}
                assert not wrong, (number, bucket, wrong)

    def check_ledger(self, parameters: torch.Tensor, bucket: int) -> None:
        taken = Counter(e for e, of in self.taken if of == bucket)
        loads = self.servers[0].home.loads
        for element in range(1, self.elements):
            times = -parameters[element].item() / self.weights[element]
            assert taken[element] <= 1
            if self.loads_before[element] < loads:
                assert times == 0, (element, times)
            elif self.at[element] in self.killed:
                # It may have died with its server: then nobody has it.
                assert min(abs(times), abs(times - 1)) < 1e-9, (element, times)
            else:
                assert abs(times - taken[element]) < 1e-9, (element, times)
