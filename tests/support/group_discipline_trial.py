"""Trials of groups' disciplines: servers and workers in virtual time, without a network in between.

Updates and notices of a server come to each other server in order, after random times. Every
gradient is 1 at an element of its own. Under plain SGD with a learning rate of 1 parameters are
therefore a ledger: they say which gradients are in, and with what weight. With other learning
rates they say with what weight times rate.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from paceline.interfaces import (
    Discipline,
    GroupServerDiscipline,
    GroupUpdate,
    Reply,
    Sender,
    UpdatesOnServer,
)
from paceline.interfaces.server_messages import (
    Done,
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
from paceline.methods.gssp.grouping import (
    WorkerReport,
    encode,
    read_groups,
    read_worker_notice,
)
from paceline.parameter_server.state_machine.server import ParameterServer

SGD: dict[str, Any] = {
    "lr": 1.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}


class Pushed(NamedTuple):
    """A gradient that has come to a server."""

    bucket: int
    worker: int
    step: int


@dataclass
class Worker:
    number: int
    data: int
    """Steps to do."""
    group: int = 0
    step: int = 0
    done: int = 0
    encoded_groups: bytes = b""
    version: int = 0
    steps_of_all: float = 0.0
    unanswered: set[int] = field(default_factory=set)
    began: list[float] = field(default_factory=list)
    """When each of its steps began."""
    left: bool = False
    lost: bool = False
    ended: bool = False


class GroupTrial:
    """*seconds*: of a step, by worker, and of the moment; *steps* of each; *latency* of updates at
    most; *dies*: when workers are lost."""

    def __init__(
        self,
        method: UpdatesOnServer,
        seconds: Sequence[Callable[[float], float]],
        steps: Sequence[int],
        buckets: int = 1,
        latency: float = 0.5,
        jitter: float = 0.0,
        seed: int = 0,
        dies: Sequence[tuple[float, int]] = (),
        how: dict[str, Any] = SGD,
    ) -> None:
        self.n, self.most = len(steps), max(steps)
        self.seconds, self.buckets, self.how = seconds, buckets, how
        self.size = max(2, self.n * self.most)
        self.latency, self.jitter = latency, jitter
        self.random, self.lines = random.Random(seed), random.Random(seed)
        groups = method.groups(self.n)
        self.servers = []
        for number in range(groups.servers if groups is not None else 1):

            def make(_: str, number: int = number) -> Discipline:
                discipline = method.server(self.n)
                if isinstance(discipline, GroupServerDiscipline):
                    discipline.serve_group(number)
                return discipline

            self.servers.append(ParameterServer(self.n, make))
        of = groups.of if groups is not None else (0,) * self.n
        self.workers = [Worker(w, steps[w], of[w]) for w in range(self.n)]
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now, self._counter = 0.0, 0
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._lines: dict[tuple[int, int], float] = {}
        self.pushed: list[Pushed] = []
        self.updates: list[tuple[int, GroupUpdate]] = []
        self.answers: list[tuple[int, Reply]] = []
        self.tamper: Callable[[int, GroupUpdate], list[GroupUpdate]] = (
            lambda _, update: [update]
        )
        """What becomes of an update on its way to one server."""
        self.rates: list[list[float]] = [[1.0], [1.0]]
        """By group of the optimizer: learning rates, step by step, over and over, in parts of
        *how*'s."""
        self.dies = dies

    # ---- what happens ----

    def play(self) -> GroupTrial:
        """Until all have left."""
        for worker in range(self.n):
            for server in reversed(range(len(self.servers))):
                self.ask(server, worker, self.join())
        for server in range(len(self.servers)):
            for bucket in range(self.buckets):
                self.ask(server, 0, Load(bucket=bucket), self.zeros())
        for time, number in self.dies:
            self.after(time, lambda w=self.workers[number]: self.die(w))  # type: ignore[misc]
        for worker in self.workers:
            self.begin(worker)
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()
        return self

    def flush(self) -> None:
        """All that is owed is passed on, and comes at once."""
        for number, server in enumerate(self.servers):
            for update in self.discipline(number).take_all_updates(server.shard):
                self.pass_on(number, update)
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()

    def discipline(self, number: int) -> Any:
        return self.servers[number].shard.discipline

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._counter += 1
        heapq.heappush(self.events, (self.now + seconds, self._counter, action))

    def join(self) -> Join:
        return Join(
            options="",
            units=[
                [Unit(b, 0, self.half, 0), Unit(b, self.half, self.size, 1)]
                for b in range(self.buckets)
            ],
            dtypes=["float64"] * self.buckets,
            optimizer="SGD",
            hyperparameters=[self.how, self.how],
        )

    @property
    def half(self) -> int:
        """The first element of the second group of the optimizer."""
        return self.size - self.size // 2

    def rate(self, group: int, step: int) -> float:
        return self.rates[group][step % len(self.rates[group])]

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.size, dtype=torch.float64)

    def ask(
        self,
        server: int,
        worker: int,
        request: Request,
        payload: torch.Tensor | None = None,
    ) -> None:
        number = self._numbers[server, worker]
        self._numbers[server, worker] += 1
        sender = Sender(worker, 0, "", number)
        machine = self.servers[server]
        self.happened(server, machine.on_request(sender, request, payload, self.now))

    def happened(self, server: int, answers: list[Reply]) -> None:
        """An event of a server is over."""
        for answer in answers:
            self.answers.append((server, answer))
            self.answered(server, self.workers[answer.to.worker], answer)
        discipline, shard = self.discipline(server), self.servers[server].shard
        if not isinstance(discipline, GroupServerDiscipline) or not shard.is_held:
            return
        for update in discipline.take_due_updates(shard):
            self.pass_on(server, update)
        notice = discipline.encode_notice(shard)
        if notice:
            self.send(server, lambda to: self.notified(to, server, notice))

    def pass_on(self, source: int, update: GroupUpdate) -> None:
        self.updates.append((source, update))

        def arrives(to: int) -> None:
            for each in self.tamper(to, update):
                self.discipline(to).apply_update(self.servers[to].shard, source, each)
            self.happened(to, self.servers[to].on_timer(self.now))

        self.send(source, arrives)

    def notified(self, to: int, source: int, notice: bytes) -> None:
        self.discipline(to).on_notice(self.servers[to].shard, source, notice)
        self.happened(to, self.servers[to].on_timer(self.now))

    def send(self, source: int, arrives: Callable[[int], None]) -> None:
        for to in range(len(self.servers)):
            if to != source:
                line, at = (source, to), self.now + self.lines.random() * self.latency
                at = self._lines[line] = max(at, self._lines.get(line, 0.0))
                self.after(at - self.now, lambda to=to: arrives(to))  # type: ignore[misc]

    # ---- workers ----

    def begin(self, worker: Worker) -> None:
        if worker.lost:
            return
        if worker.done == worker.data:
            worker.left = True
            for server in range(len(self.servers)):
                self.ask(server, worker.number, Leave())
            return
        worker.began.append(self.now)
        worker.unanswered = set(range(self.buckets))
        seconds = self.seconds[worker.number](self.now)
        seconds *= 1 + self.jitter * self.random.random()
        for bucket in range(self.buckets):
            part = seconds * (1 + bucket) / self.buckets
            self.after(part, lambda b=bucket: self.push(worker, b))  # type: ignore[misc]

    def gradient(self, worker: Worker) -> torch.Tensor:
        gradient = self.zeros()
        gradient[worker.number * self.most + worker.done] = 1.0
        return gradient

    def push(self, worker: Worker, bucket: int) -> None:
        if worker.lost:
            return
        self.pushed.append(Pushed(bucket, worker.number, worker.done))
        report, steps = b"", worker.steps_of_all
        if steps and not bucket:
            report = encode(WorkerReport(worker.encoded_groups, steps=steps))
        push = Push(
            step=worker.step,
            bucket=bucket,
            weight=1 / self.n,
            used=[True, True],
            hyperparameters=[
                self.how | {"lr": self.how["lr"] * self.rate(group, worker.done)}
                for group in (0, 1)
            ],
            report=report,
        )
        self.ask(worker.group, worker.number, push, self.gradient(worker))

    def answered(self, server: int, worker: Worker, answer: Reply) -> None:
        message = answer.message
        assert not isinstance(message, Rejected), message.reason
        if isinstance(message, Joined):
            return
        if isinstance(message, Done):
            worker.ended = worker.left
            return
        if not isinstance(message, Parameters) or server != worker.group:
            return
        if message.bucket not in worker.unanswered:
            return  # to a pull
        worker.unanswered.discard(message.bucket)
        if message.notice:
            notice = read_worker_notice(message.notice)
            worker.encoded_groups = notice.groups or worker.encoded_groups
            worker.steps_of_all = max(worker.steps_of_all, notice.steps)
        if not worker.unanswered:
            worker.step, worker.done = message.step, worker.done + 1
            self.after(0.0, lambda: self.go_on(worker))

    def go_on(self, worker: Worker) -> None:
        groups = read_groups(worker.encoded_groups) if worker.encoded_groups else None
        if groups is not None and groups.version > worker.version and not worker.lost:
            worker.version = groups.version
            group = groups.of[worker.number]
            if group != worker.group:
                worker.group = group
                self.ask(group, worker.number, KeepAlive(step=worker.step))
                for bucket in range(self.buckets):
                    pull = Pull(bucket=bucket, step=worker.step)
                    self.ask(group, worker.number, pull)
        self.begin(worker)

    def die(self, worker: Worker) -> None:
        if worker.left or worker.lost:
            return
        worker.lost = True
        for number, server in enumerate(self.servers):
            self.happened(number, server.on_worker_lost(worker.number, 0, self.now))

    # ---- what is in ----

    def ledger(self, server: int, bucket: int) -> torch.Tensor:
        """By worker and step: how often its gradient is in the parameters, times its learning
        rate."""
        flat = self.servers[server].shard.store.flats[bucket]
        return -flat[: self.n * self.most].view(self.n, self.most) * self.n

    def expected(self, bucket: int) -> torch.Tensor:
        whole = torch.zeros(self.n, self.most, dtype=torch.float64)
        for its, worker, step in self.pushed:
            if its == bucket:
                group = int(worker * self.most + step >= self.half)
                whole[worker, step] += self.rate(group, step)
        return whole


def each(*seconds: float) -> list[Callable[[float], float]]:
    """Steps that take so long by worker, all the time."""
    return [lambda _, its=its: its for its in seconds]  # type: ignore[misc]
