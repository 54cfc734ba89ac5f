"""Laws of a method whose server updates, checked on the server's state machine alone.

Workers send one message at a time, in an order that a seed decides. Each gradient has an element
of its own, so the parameters tell which gradients are in them, and how often.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from paceline.interfaces import Answer, Coordinated, Discipline, Sender
from paceline.interfaces.server_messages import (
    Arrive,
    Blend,
    Decide,
    Introduce,
    Join,
    Joined,
    Leave,
    Load,
    LoadRest,
    LoadState,
    Norm,
    Note,
    Parameters,
    Pull,
    PullNorm,
    PullRest,
    PullState,
    Push,
    Reduce,
    Refused,
    Request,
    Unit,
)
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.testing.problems import CheckFailedError, require

BUCKETS = 2
STEPS = 6
"""The worker with the least data does so many, and each other one a step more."""
SGD: list[dict[str, Any]] = [
    {
        "lr": 1.0,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }
]

MakeDiscipline = Callable[[], Discipline]


@dataclass
class _Worker:
    """One life of a worker: what it has yet to send, and what it waits for."""

    rank: int
    life: int
    ends_with: int
    step: int = 0
    ahead: deque[tuple[Request, torch.Tensor | None]] = field(default_factory=deque)
    waits_for: set[int] = field(default_factory=set)
    numbers: int = 0
    has_left: bool = False


class ServerTrial:
    """*workers* that train over one server until each is out of data."""

    def __init__(self, make: MakeDiscipline, workers: int, seed: int) -> None:
        self._make, self._workers = make, workers
        self._random = random.Random(seed)
        self._ends = [STEPS + rank for rank in range(workers)]
        self._now = 0.0
        self._life = 0
        self.size = workers * (STEPS + workers)
        self.server = self._started()
        self.workers = self._begun()

    def _started(self) -> ParameterServer:
        return ParameterServer(self._workers, self._make(), remembers=False)

    def _begun(self) -> list[_Worker]:
        """All join, and begin with what the server has said."""
        workers = [
            _Worker(rank, self._life, ends) for rank, ends in enumerate(self._ends)
        ]
        for worker in workers:
            [answer] = self.ask(worker, self.join())
            joined = answer.message
            require(isinstance(joined, Joined), f"a join is answered with {joined}")
            assert isinstance(joined, Joined)
            worker.step = max(joined.step, joined.own)
            if not joined.loaded and not worker.rank:
                for bucket in range(BUCKETS):
                    self.ask(worker, Load(bucket=bucket), torch.zeros(self.size))
        for worker in workers:
            for bucket in range(BUCKETS):  # which may have to wait for others
                self._send(worker, Pull(bucket=bucket, step=worker.step), None)
        return workers

    def join(self) -> Join:
        """What all train: one parameter a bucket."""
        return Join(
            options="",
            units=[[Unit(b, 0, self.size, 0, (self.size,))] for b in range(BUCKETS)],
            dtypes=["float32"] * BUCKETS,
            optimizer="SGD",
            hyperparameters=SGD,
        )

    def weight(self, rank: int) -> float:
        """No two workers', and no sum of some of them, are alike."""
        return (1 + rank / 7) / self._workers

    def element(self, rank: int, step: int) -> int:
        """Where a worker's gradient of a step is one."""
        return rank * (STEPS + self._workers) + step

    def push(self, rank: int, step: int, bucket: int) -> tuple[Push, torch.Tensor]:
        """A worker's gradient of a step."""
        gradient = torch.zeros(self.size)
        gradient[self.element(rank, step)] = 1.0
        push = Push(
            step=step,
            bucket=bucket,
            weight=self.weight(rank),
            used=[True],
            hyperparameters=SGD,
        )
        return push, gradient

    # ---- messages ----

    def ask(
        self, worker: _Worker, message: Request, payload: torch.Tensor | None = None
    ) -> Sequence[Answer]:
        """Send a request; returns what leaves the server."""
        number, worker.numbers = worker.numbers, worker.numbers + 1
        sender = Sender(worker.rank, worker.life, "", number, number)
        return self.server.on_message(sender, message, payload, self._now)

    def _send(
        self, worker: _Worker, message: Request, payload: torch.Tensor | None
    ) -> None:
        worker.waits_for.add(worker.numbers)
        workers = getattr(self, "workers", None) or [worker]
        self._hear(self.ask(worker, message, payload), workers)

    def _hear(self, answers: Iterable[Answer], workers: Sequence[_Worker]) -> None:
        for answer in answers:
            message = answer.message
            if isinstance(message, Refused):
                raise CheckFailedError(f"the server refuses: {message.reason}")
            worker = next(w for w in workers if w.rank == answer.to.worker)
            worker.waits_for.discard(answer.to.number)
            if isinstance(message, Parameters):
                worker.step = max(worker.step, message.step)

    # ---- moves ----

    def move(self) -> bool:
        """One worker sends one message, or the server's time has come; returns whether any
        could."""
        able = [w for w in self.workers if w.ahead or not (w.waits_for or w.has_left)]
        if able:
            self._now += self._random.random()
            self._act(self._random.choice(able))
            return True
        deadline = self.server.next_deadline()
        if deadline is None:
            return False
        self._now = max(self._now, deadline)
        self._hear(self.server.on_timer(self._now), self.workers)
        return True

    def _act(self, worker: _Worker) -> None:
        if not worker.ahead and worker.step >= worker.ends_with:
            worker.has_left = True
            self._send(worker, Leave(), None)
            return
        if not worker.ahead:
            order = self._random.sample(range(BUCKETS), BUCKETS)
            worker.ahead += [self.push(worker.rank, worker.step, b) for b in order]
        self._send(worker, *worker.ahead.popleft())

    def restart(self) -> None:
        """The server dies, goes on from a snapshot of this moment, and all workers are started
        again."""
        saved = self.server.snapshot()
        if saved:
            self._life += 1
            self.server = self._started()
            self.server.restore(saved)
            del self.workers
            self.workers = self._begun()

    # ---- what is in the parameters ----

    def require_each_once(self) -> None:
        """Every gradient of every worker is in each bucket: alone at its weight, or as a part of
        its step's mean."""
        for rank, ends in enumerate(self._ends):
            for step in range(ends):
                there = [r for r, its in enumerate(self._ends) if step < its]
                weight, whole = self.weight(rank), sum(map(self.weight, there))
                for bucket, flat in enumerate(self.server.shard.store.flats):
                    found = -flat[self.element(rank, step)].item()
                    right = any(abs(found - w) < 1e-4 for w in (weight, weight / whole))
                    require(
                        right,
                        f"worker {rank}'s gradient of step {step} is {found / weight + 0.0:.3f} "
                        f"times in bucket {bucket}, and should be once",
                    )

    # ---- what is refused ----

    def mistakes(self, worker: _Worker) -> list[tuple[Request, torch.Tensor | None]]:
        """Requests that this worker must not be let do now."""
        push, gradient = self.push(worker.rank, worker.step, 0)
        wrong: list[dict[str, Any]] = [
            *({"bucket": BUCKETS}, {"used": []}, {"weight": -1.0}),
            *({"weight": math.nan}, {"late": True}, {"units": [0]}, {"report": b"?"}),
            *({"hyperparameters": []}, {"hyperparameters": [{"lr": "a"}]}),
            {"step": worker.step - 1},
        ]
        idle = not worker.ahead and not worker.waits_for
        mistakes: list[tuple[Request, torch.Tensor | None]] = [
            *((msgspec.structs.replace(push, **what), gradient) for what in wrong),
            *((push, None), (push, gradient[1:]), (push, gradient.double())),
            (self.join(), None),
            (Load(bucket=0), gradient),
            (LoadState(bucket=0, entries=[[]]), None),
            (LoadRest(start=0), torch.zeros(1, dtype=torch.uint8)),
            (Pull(bucket=BUCKETS), None),
            (PullState(bucket=BUCKETS), None),
            (PullRest(start=1 << 40, most=1), None),
            (Arrive(purpose="pulled"), None),
            (PullNorm(step=0), None),
            (Norm(step=0, squares=1.0), None),
            (Blend(weight=0.5, floats=0), None),
            (Reduce(number=0, channel="", operation="sum"), None),
            (Introduce(kind="", services=[], number=0), None),
        ]
        if not isinstance(self.server.shard.discipline, Coordinated):
            mistakes.append((Decide(step=0, workers=[0]), None))
        if idle:
            mistakes += [
                (msgspec.structs.replace(push, step=FAR), gradient),
                (Pull(bucket=0, step=FAR), None),
                (Note(step=FAR, guest=True), None),
            ]
        elif worker.ahead:
            mistakes += [(Leave(), None), (Arrive(purpose="meet"), None)]
        return mistakes

    def require_refusals_change_nothing(self) -> None:
        """Nobody is answered but who has made a mistake, and the server is as before."""
        for worker in self.workers:
            for message, payload in (
                self.mistakes(worker) if not worker.has_left else ()
            ):
                before = state_of(self.server)
                copied = None if payload is None else payload.clone()
                answers = self.ask(worker, message, copied)
                kind = type(message).__name__
                refused = [isinstance(answer.message, Refused) for answer in answers]
                require(refused == [True], f"{message} is answered with {answers}")
                changed = difference(before, state_of(self.server))
                require(not changed, f"a refused {kind} has changed {changed}")


FAR = 1 << 50
"""A step that nobody will come to."""
_PASSING = frozenset(
    ("counts", "channels", "now", "_answers", "_work", "_snapshots", "_number")
)
"""Attributes that say what was answered, when, and what it cost."""


def state_of(value: Any) -> dict[str, Any]:
    """All that a server holds, as plain values by path: for comparing it with itself."""
    found: dict[str, Any] = {}
    _collect(value, "", found, set())
    return found


def _collect(value: Any, path: str, found: dict[str, Any], seen: set[int]) -> None:
    """Each object once: parts of a server know each other."""
    parts: list[tuple[str, Any]]
    if isinstance(value, torch.Tensor):
        found[path] = str(value.dtype), value.tolist()
        return
    if isinstance(value, Mapping):
        parts = [(f"{path}[{key}]", its) for key, its in value.items()]
    elif isinstance(value, list | tuple | deque | Set):
        parts = [(f"{path}[{place}]", its) for place, its in enumerate(value)]
    elif not hasattr(value, "__dict__"):
        found[path] = repr(value)
        return
    elif id(value) in seen or callable(value):
        return
    else:
        seen.add(id(value))
        names = vars(value).keys() - _PASSING
        parts = [(f"{path}.{name}", vars(value)[name]) for name in sorted(names)]
    found[path] = len(parts)
    for place, its in parts:
        _collect(its, place, found, seen)


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Where two states differ."""
    places = before.keys() | after.keys()
    return sorted(p for p in places if before.get(p) != after.get(p))


def what_is_refused_changes_nothing(make: MakeDiscipline, workers: int) -> None:
    """At any moment of a training each kind of request that makes no sense is refused, and the
    server holds what it held before; in the end each gradient is in once."""
    for seed in range(2):
        trial = ServerTrial(make, workers, seed)
        for number in range(1000):
            if number % 5 == seed:
                trial.require_refusals_change_nothing()
            if not trial.move():
                break
        trial.require_each_once()


def every_gradient_is_applied_once(make: MakeDiscipline, workers: int) -> None:
    """Whenever the server is restarted from a snapshot, also in the middle of workers' steps,
    each gradient is in the parameters once at the end."""
    for seed in range(12):
        trial = ServerTrial(make, workers, seed)
        moves = random.Random(seed)
        restarts = {moves.randrange(1, 12 * workers) for _ in range(2)}
        for number in range(1000):
            if number in restarts:
                trial.restart()
            if not trial.move():
                break
        waiting = [w.rank for w in trial.workers if w.waits_for and not w.has_left]
        require(not waiting, f"workers {waiting} wait for ever")
        trial.require_each_once()


CHECKS: tuple[Callable[[MakeDiscipline, int], None], ...] = (
    every_gradient_is_applied_once,
    what_is_refused_changes_nothing,
)


def check_server(make: MakeDiscipline, workers: Sequence[int] = (1, 2, 3)) -> None:
    """All laws of a discipline that drops no gradient; *make* makes a new one.

    Raises:
        CheckFailedError: a law is broken. Its notes name the law and the number of workers.
    """
    for count in workers:
        for check in CHECKS:
            try:
                check(make, count)
            except CheckFailedError as error:
                error.add_note(f"conformance: {check.__name__}, {count} workers")
                raise
