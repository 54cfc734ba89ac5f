"""Trials of group servers: servers and workers over a network that seeds steer, without time.

Requests from one server to another come in order, and so do replies. Everything else comes in any
order. Connections break and come back; servers and workers die and are started again; workers
change groups, and meet at barriers.

Every gradient is 1 at an element of its own. Under plain SGD with a learning rate of 1 parameters
are therefore a ledger: they say how often each gradient is in. `Grouped` is the smallest method of
groups: each server applies what comes, and sends the mean of what it has applied after every *period*
pushes of a bucket.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from paceline.interfaces import (
    Ask,
    Groups,
    GroupServerDiscipline,
    GroupUpdate,
    PushedGradient,
    Reply,
    Sender,
    Shard,
)
from paceline.interfaces.server_messages import (
    BarrierPassed,
    EnterBarrier,
    Join,
    Joined,
    KeepAlive,
    Leave,
    Load,
    MixBuffers,
    Pull,
    Push,
    Rejected,
    ReplyMessage,
    Request,
    Unit,
)
from paceline.methods.group_members import read_members
from paceline.methods.push_pull import PushPull, without_gradient
from paceline.parameter_server.groups.local_server import LocalServer
from paceline.parameter_server.groups.server import GroupServer
from paceline.testing.server_trial import SGD as HYPERPARAMETERS


@dataclass(frozen=True, kw_only=True)
class Grouped(PushPull):
    """*period*: see `SumsUp`."""

    name: ClassVar[str] = "grouped"

    members: str = ""
    period: int = 0

    def groups(self, workers: int) -> Groups:
        if self.members:
            return read_members(self.members, workers)
        return Groups((0,) * workers, 1)

    def server(self, workers: int) -> SumsUp:
        return SumsUp(self.groups(workers), self.period)


@dataclass
class Sum:
    """A bucket's gradients times their weights, since the last update."""

    total: torch.Tensor
    last: PushedGradient
    gradients: int = 0
    weight: float = 0.0


@dataclass
class SumsUp(GroupServerDiscipline):
    """The server's half. *period*: pushes in an update; 0: as many as the group has workers. *taken*
    is told the element and the bucket of each gradient."""

    known: Groups
    period: int = 0
    taken: Callable[[int, int], None] | None = None
    number: int = 0
    sums: dict[int, Sum] = field(default_factory=dict)
    notified: int = 0
    notices: dict[int, list[bytes]] = field(default_factory=dict)

    @property
    def groups(self) -> Groups:
        return self.known

    def serve_group(self, number: int) -> None:
        self.number = number

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        if push.applied:
            shard.reply(push)
            return
        if self.taken is not None:
            self.taken(int(push.gradient.argmax()), push.bucket)
        its = self.sums.setdefault(
            push.bucket, Sum(torch.zeros_like(push.gradient), push)
        )
        its.total.add_(push.gradient, alpha=push.weight)
        used = [a or b for a, b in zip(its.last.used, push.used, strict=True)]
        its.last = without_gradient(push)._replace(used=used)
        its.gradients += 1
        its.weight += push.weight
        shard.apply(push)
        shard.reply(push)

    def take_due_updates(self, shard: Shard) -> list[GroupUpdate]:
        period = self.period or len(self.groups.members(self.number))
        return self._take(period)

    def take_all_updates(self, shard: Shard) -> list[GroupUpdate]:
        return self._take(0)

    def _take(self, least: int) -> list[GroupUpdate]:
        due = [b for b, its in self.sums.items() if its.gradients >= least]
        sums = [(bucket, self.sums.pop(bucket)) for bucket in due]
        return [
            GroupUpdate(
                bucket=bucket,
                gradients=its.gradients,
                weight=its.weight,
                used=its.last.used,
                hyperparameters=its.last.hyperparameters,
                values=its.total.div_(its.weight or 1.0),
            )
            for bucket, its in sums
        ]

    def apply_update(self, shard: Shard, source: int, update: GroupUpdate) -> None:
        push = PushedGradient(
            worker=-1 - source,
            step=0,
            bucket=update.bucket,
            weight=update.weight,
            used=update.used,
            hyperparameters=update.hyperparameters,
            gradient=update.values,
            number=-1,
        )
        shard.apply(push)

    def encode_notice(self, shard: Shard) -> bytes:
        if shard.next_unstarted_step() <= self.notified:
            return b""
        self.notified = shard.next_unstarted_step()
        return b"%d" % self.notified

    def on_notice(self, shard: Shard, source: int, notice: bytes) -> None:
        self.notices.setdefault(source, []).append(notice)


MOST_EVENTS = 20_000


@dataclass
class Case:
    """What happens in a trial.

    Args:
        of: By worker, its group at the start.
        servers: How many servers there are.
        steps: By worker, how many steps it does; with *by_step* of the job, else in all its
            processes together.
        buckets: How many buckets the model has.
        period: After how many gradients a server sends an update.
        meets: Before which steps all workers meet.
        loads: Before which steps all workers load zeros.
        moves: By worker and step: the group that it pushes to from this step on.
        cuts: How many connections between servers break.
        kills: How many servers die.
        deaths: How many workers die.
        peril: How likely kills and ends are at each event.
        agree: Whether servers adopt the state of server 0 at barriers.
        snapshots: Whether a server that died goes on from its snapshot.
        by_step: See *steps*.
        ends: How often all servers die, and go on from server 0's snapshot.
        rates: Learning rates, step by step, over and over.
    """

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
    ends: int = 0
    rates: tuple[float, ...] = (1.0,)


Script = Generator[
    list[tuple[int, Request, torch.Tensor | None]],
    dict[int, tuple[ReplyMessage, torch.Tensor | None]],
    None,
]


@dataclass
class WorkerProcess:
    """One incarnation of a worker, which does what its *script* says."""

    worker: int
    incarnation: int
    script: Script
    numbers: Counter[int] = field(default_factory=Counter)
    waits: dict[tuple[int, int], int] = field(default_factory=dict)
    """By server and number of a request: its place in the batch that is unanswered."""
    answers: dict[int, tuple[ReplyMessage, torch.Tensor | None]] = field(
        default_factory=dict
    )
    over: bool = False
    dead: bool = False


@dataclass
class Link:
    """The connections from one server to another, one after the other.

    *asker_knows*, *asked_knows*: whether the servers know that it is down.
    """

    up: bool = True
    incarnation: int = 0
    requests: deque[Ask] = field(default_factory=deque)
    replies: deque[tuple[int, ReplyMessage, torch.Tensor | None]] = field(
        default_factory=deque
    )
    asked: dict[int, Ask] = field(default_factory=dict)
    received: int = 0
    asker_knows: bool = True
    asked_knows: bool = True


class GroupServerTrial:
    """One trial of a *case*. *choose* says what happens next; *make* makes a server's discipline."""

    def __init__(
        self,
        case: Case,
        choose: random.Random,
        make: Callable[[GroupServerTrial, int], Any] | None = None,
    ) -> None:
        self.case, self.choose = case, choose
        self.workers = len(case.of)
        self.elements = 1
        self.size = (sum(case.steps) + 1) * (
            case.deaths + self.workers * (case.kills + case.ends) + 1
        )
        self.names = [f"server {number}" for number in range(case.servers)]
        self._make = make or GroupServerTrial.sums_up
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
        self.incarnations = dict.fromkeys(range(case.servers), 0)
        self.entering: set[int] = set()
        self.servers: dict[int, GroupServer] = {
            number: self.started(number) for number in range(case.servers)
        }
        self.links = {
            (a, b): Link()
            for a in range(case.servers)
            for b in range(case.servers)
            if a != b
        }
        self.to_server: dict[tuple[int, int], deque[Any]] = {}
        self.to_worker: dict[tuple[int, int], deque[Reply]] = {}
        self.cuts, self.kills, self.deaths = case.cuts, case.kills, case.deaths
        self.done_steps = [0] * self.workers
        self.refusals: list[str] = []
        self.is_loaded = False
        """The first load is over: before, nobody else would do it."""
        self.processes = {
            worker: self.born(worker, 0) for worker in range(self.workers)
        }

    # ---- servers ----

    def sums_up(self, number: int) -> SumsUp:
        groups = Groups(self.case.of, self.case.servers)
        return SumsUp(groups, self.case.period, self.takes)

    def takes(self, element: int, bucket: int) -> None:
        self.taken.append((element, bucket))

    def started(self, number: int, enters: bool = False) -> GroupServer:
        if enters:
            self.entering.add(number)
        local = LocalServer(
            number,
            self.workers,
            lambda _: self._make(self, number),
            self.names[number],
        )
        if self.incarnations[number]:
            local.wait_for_the_lost()
            if number in self.snapshots:
                local.restore(self.snapshots[number])
        server = GroupServer(
            local,
            self.names,
            incarnation=self.incarnations[number],
            enters=enters,
        )
        server.membership.cut.adopts_state = self.case.agree
        local.wait_for_the_lost()
        return server

    def take(self, number: int, outgoing: Any) -> None:
        """What a server's transition has returned is on its way."""
        if self.servers[number].holds_model:
            self.entering.discard(number)
        for one in outgoing:
            if isinstance(one, Ask):
                link = self.links[number, self.names.index(one.peer)]
                if link.up:
                    link.requests.append(one)
                continue
            to = one.to
            if to.worker < self.workers:
                queue = self.to_worker.setdefault((number, to.worker), deque())
                queue.append(one)
                continue
            asker = to.worker - self.workers
            link = self.links[asker, number]
            if link.up and to.incarnation == link.incarnation:
                link.replies.append((to.number, one.message, one.payload))

    def deliver_request(self, a: int, b: int) -> None:
        link = self.links[a, b]
        ask = link.requests.popleft()
        number, link.received = link.received, link.received + 1
        link.asked[number] = ask
        sender = Sender(self.workers + a, link.incarnation, "", number)
        payload = None if ask.payload is None else ask.payload.clone()
        self.take(b, self.servers[b].on_request(sender, ask.message, payload, 0.0))

    def deliver_reply(self, a: int, b: int) -> None:
        link = self.links[a, b]
        number, reply, payload = link.replies.popleft()
        ask = link.asked.pop(number)
        if payload is not None and ask.into is not None:
            ask.into[: payload.numel()].copy_(payload)
        self.take(
            a,
            self.servers[a].on_reply(self.names[b], ask.number, reply, ask.into, 0.0),
        )

    def cut(self, a: int, b: int) -> None:
        link = self.links[a, b]
        if link.up:
            link.up = link.asker_knows = link.asked_knows = False
            link.requests.clear()
            link.replies.clear()
            link.asked.clear()

    def tell_asker(self, a: int, b: int) -> None:
        self.links[a, b].asker_knows = True
        self.take(a, self.servers[a].on_peer_lost(self.names[b], "it was cut", 0.0))

    def tell_asked(self, a: int, b: int) -> None:
        link = self.links[a, b]
        link.asked_knows = True
        self.take(
            b, self.servers[b].on_worker_lost(self.workers + a, link.incarnation, 0.0)
        )

    def restore(self, a: int, b: int) -> None:
        link = self.links[a, b]
        if not link.asked_knows:
            self.tell_asked(a, b)
        link.up = True
        link.incarnation += 1
        link.received = 0
        self.take(a, self.servers[a].on_peer_back(self.names[b], 0.0))

    def kill(self, number: int) -> None:
        """A server dies, and all workers with it; all are started again."""
        self.killed.add(number)
        self.incarnations[number] += 1
        for a, b in self.links:
            if number in (a, b):
                self.cut(a, b)
                link = self.links[a, b]
                # The one that is new knows of nothing.
                link.asker_knows = link.asker_knows or a == number
                link.asked_knows = link.asked_knows or b == number
        for process in self.processes.values():
            if not process.over and not process.dead:
                self.die(process)
        for worker in range(self.workers):
            self.to_server.setdefault((worker, number), deque()).clear()
            self.to_worker.setdefault((number, worker), deque()).clear()
        enters = any(
            other != number and other not in self.entering for other in self.servers
        )
        self.servers[number] = server = self.started(number, enters)
        for worker, process in self.processes.items():
            if process.over:
                self.take(number, server.on_worker_finished(worker, 0.0))

    def end_all(self) -> None:
        """All servers die at once, and go on from what server 0 has just now."""
        saved = self.servers[0].local.snapshot()
        if not saved:
            return
        self.ends -= 1
        for process in self.processes.values():
            if not process.over and not process.dead:
                self.die(process)
        for place, link in self.links.items():
            self.links[place] = Link(incarnation=link.incarnation + 1)
        self.to_server.clear()
        self.to_worker.clear()
        self.snapshots, self.entering = {0: saved}, set()
        for number in self.servers:
            self.incarnations[number] += 1
            self.servers[number] = self.started(number, enters=number > 0)
        for number, server in self.servers.items():
            self.take(number, server.on_timer(0.0))
            for worker, process in self.processes.items():
                if process.over:
                    self.take(number, server.on_worker_finished(worker, 0.0))

    # ---- workers ----

    def born(self, worker: int, incarnation: int) -> WorkerProcess:
        process = WorkerProcess(worker, incarnation, iter(()))  # type: ignore[arg-type]
        process.script = self.script(process)
        self.ask(process, next(process.script))
        return process

    def ask(
        self,
        process: WorkerProcess,
        requests: list[tuple[int, Request, torch.Tensor | None]],
    ) -> None:
        process.answers = {}
        for place, (server, message, payload) in enumerate(requests):
            number = process.numbers[server]
            process.numbers[server] += 1
            process.waits[server, number] = place
            sender = Sender(process.worker, process.incarnation, "", number)
            queue = self.to_server.setdefault((process.worker, server), deque())
            queue.append((sender, message, payload))

    def deliver_to_server(self, worker: int, server: int) -> None:
        sender, message, payload = self.to_server[worker, server].popleft()
        machine = self.servers[server]
        if message is None:
            self.take(server, machine.on_worker_lost(worker, sender.incarnation, 0.0))
            return
        copied = None if payload is None else payload.clone()
        self.take(server, machine.on_request(sender, message, copied, 0.0))

    def deliver_to_worker(self, server: int, worker: int) -> None:
        answer = self.to_worker[server, worker].popleft()
        process = self.processes[worker]
        if process.dead or answer.to.incarnation != process.incarnation:
            return
        place = process.waits.pop((server, answer.to.number))
        if isinstance(answer.message, Rejected):
            self.refusals.append(answer.message.reason)
            self.die(process)
            return
        process.answers[place] = answer.message, answer.payload
        if not process.waits:
            try:
                self.ask(process, process.script.send(process.answers))
            except StopIteration:
                process.over = True
                for number, server in self.servers.items():
                    self.take(number, server.on_worker_finished(worker, 0.0))

    def die(self, process: WorkerProcess) -> None:
        process.dead = True
        process.waits.clear()
        for server in range(self.case.servers):
            queue = self.to_server.setdefault((process.worker, server), deque())
            while queue and self.choose.random() < 0.5:
                queue.pop()
            lost = Sender(process.worker, process.incarnation, "", 0)
            queue.append((lost, None, None))

    def come_back(self, worker: int) -> None:
        self.processes[worker] = self.born(
            worker, self.processes[worker].incarnation + 1
        )

    def script(self, process: WorkerProcess) -> Script:
        """What a worker does."""
        case, worker = self.case, process.worker
        everywhere = range(case.servers)
        empty, step, guest = [], 0, False
        group = case.of[worker]
        for server in reversed(everywhere):
            answers = yield [(server, self.join(server), None)]
            joined = answers[0][0]
            assert isinstance(joined, Joined), joined
            guest = guest or joined.late_joiner
            step = max(joined.step, joined.own) if server == group else step
            if not joined.loaded:
                empty.append(server)
        if empty and worker == 0:
            for server in empty:
                yield [
                    (server, Load(bucket=bucket), self.zeros())
                    for bucket in range(case.buckets)
                ]
        self.is_loaded = self.is_loaded or worker == 0
        yield [
            (server, KeepAlive(step=step, late_joiner=guest), None)
            for server in everywhere
        ]
        yield self.pulls(group, step)
        while (step if case.by_step else self.done_steps[worker]) < case.steps[worker]:
            done = self.done_steps[worker]
            if done in case.meets and not process.incarnation:
                yield from self.meet(group, done)
            if done in case.loads and not process.incarnation:
                yield from self.load(group)
            self.done_steps[worker] += 1
            moved = case.moves.get((worker, done), group)
            if moved != group:
                group = moved
                yield [(group, KeepAlive(step=step), None)]
                yield self.pulls(group, step)
            yield self.pushes(group, worker, step)
            step += 1
        yield [(server, Leave(), None) for server in everywhere]
        yield self.pulls(group, step)

    def meet(self, group: int, number: int) -> Script:
        """All that meet have one model, between two meetings."""
        arrive = EnterBarrier(kind="meet")
        yield [(0, arrive, None)]
        answers = yield self.pulls(group, 0)
        model = [payload for _, payload in answers.values() if payload is not None]
        yield [(0, arrive, None)]
        self.met.setdefault(number, []).append(torch.cat(model))

    def load(self, group: int) -> Script:
        """All load what the lowest rank has: nothing but how often that was."""
        answers = yield [(0, EnterBarrier(kind="load", brings=True), None)]
        met = answers[0][0]
        assert isinstance(met, BarrierPassed), met
        if met.leads:
            new = self.zeros()
            new[0] = met.load + 1
            loads = [Load(bucket=bucket) for bucket in range(self.case.buckets)]
            yield [(0, load, new) for load in loads]
        yield [(0, EnterBarrier(kind="pulled"), None)]
        answers = yield self.pulls(group, 0)
        for _, payload in answers.values():
            assert payload is not None
            assert payload[0] > 0
            assert not payload[1:].any()
        yield [(0, EnterBarrier(kind="meet"), None)]

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
        self.loads_before[element] = self.servers[0].local.shard.loads
        buffers = torch.tensor([float(worker), float(step)], dtype=torch.float64)
        requests: list[Any] = [(server, MixBuffers(weight=0.5, floats=1), buffers)]
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
        for (a, b), link in self.links.items():
            if link.requests:
                found.append(lambda a=a, b=b: self.deliver_request(a, b))  # type: ignore[misc]
            if link.replies:
                found.append(lambda a=a, b=b: self.deliver_reply(a, b))  # type: ignore[misc]
            if not link.asked_knows:
                found.append(lambda a=a, b=b: self.tell_asked(a, b))  # type: ignore[misc]
            if not link.up:
                knows = link.asker_knows
                next_ = self.restore if knows else self.tell_asker
                found.append(lambda a=a, b=b, f=next_: f(a, b))  # type: ignore[misc]
        for (w, s), requests in self.to_server.items():
            if requests:
                found.append(lambda w=w, s=s: self.deliver_to_server(w, s))  # type: ignore[misc]
        for (s, w), answers in self.to_worker.items():
            if answers:
                found.append(lambda s=s, w=w: self.deliver_to_worker(s, w))  # type: ignore[misc]
        for worker, process in self.processes.items():
            if process.dead:
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
            self.cut(*choose.choice(list(self.links)))
        if self.deaths and choose.random() < 0.01:
            process = choose.choice(list(self.processes.values()))
            if not process.dead and not process.over and self.is_loaded:
                self.deaths -= 1
                self.die(process)
        if self.ends and self.is_loaded and choose.random() < self.case.peril:
            self.end_all()
        if self.kills and self.is_loaded and choose.random() < self.case.peril:
            number = choose.choice(list(self.servers))
            if not self.entering:
                self.kills -= 1
                if self.case.snapshots:
                    saved = self.servers[number].local.snapshot()
                    if saved:
                        self.snapshots[number] = saved
                self.kill(number)

    # ---- laws ----

    def parameters(self, server: int, bucket: int) -> torch.Tensor:
        return self.servers[server].local.shard.store.flats[bucket]

    def check_end(self) -> None:
        """No worker waits for ever. Each gradient is in the parameters of each active server once.
        Where servers adopt server 0's state, all have the same model to the bit."""
        for process in self.processes.values():
            assert process.over, f"waits for ever: {process}"
        inside = [
            n
            for n, s in self.servers.items()
            if self.case.agree or s.membership.is_active
        ]
        for bucket in range(self.case.buckets):
            models = [self.parameters(number, bucket) for number in inside]
            for model in models:
                assert torch.allclose(model, models[0], rtol=0, atol=1e-9)
                assert not self.case.agree or torch.equal(model, models[0])
            self.check_ledger(models[0], bucket)
        if not self.case.loads and not self.case.kills and not self.case.ends:
            for server in self.servers.values():
                self.check_notices(server.local.discipline)
        if self.case.agree:
            rests = [self.servers[number].local.untrained.buffers for number in inside]
            assert all(torch.equal(rest, rests[0]) for rest in rests)
            quiet = not self.case.deaths and not self.case.kills  # no guests train on
            for models in self.met.values() if quiet else ():
                assert all(torch.equal(model, models[0]) for model in models)

    def check_notices(self, discipline: Any) -> None:
        """Each notice has come once, in order."""
        for notices in getattr(discipline, "notices", {}).values():
            numbers = [int(notice) for notice in notices]
            assert numbers == sorted(set(numbers))

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
        loads = self.servers[0].local.shard.loads
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
