"""A small training over one server in virtual time, and the ledger of its gradients.

The network loses connections, workers and the server. A seed decides everything: the next message to be
delivered, deaths and returns of workers, snapshots, and the server's deaths. Each gradient has an element of its
own, so the parameters show which gradients they contain, and how often.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch

from paceline.interfaces import Discipline, Reply, Sender
from paceline.interfaces.server_messages import (
    Join,
    Joined,
    KeepAlive,
    Leave,
    Load,
    Parameters,
    Pull,
    PullState,
    Push,
    Rejected,
    ReplyMessage,
    Request,
    Unit,
)
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.testing.problems import CheckFailedError, require

BUCKETS = 2
UNITS = 3
"""Units of each bucket, if steps have two stages; else 1."""
STEPS = 6
"""Steps of the worker with the least data; each other worker does one more than the one before."""
MOST_MOVES = 5000
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
_Batch = list[tuple[Request, torch.Tensor | None]]
_Script = Generator[_Batch, list[ReplyMessage], None]


class Stages(NamedTuple):
    """How workers take a step in two stages: deferred units are pushed late, beside the next step.

    *decode*: the units of a bucket that the next step defers, from a notice.
    *report*: a worker's report about a step, drawn at random.
    """

    decode: Callable[[bytes], Sequence[int]]
    report: Callable[[random.Random], bytes]


class ServerLaws(NamedTuple):
    """Guarantees of a method's server.

    Attributes:
        bound: No worker starts step c before all others have done c - *bound* steps. Its parameters
            contain the gradients of those steps. With a bound of 0 they contain no gradient of a
            later step. None: no bound.
        drops: A late gradient may be dropped, and its worker may skip steps.
        stages: Steps have two stages. Deferred units are bound in the reply to their late push.
    """

    bound: int | None = None
    drops: bool = False
    stages: Stages | None = None


ANY = ServerLaws()
"""Each gradient once, and no bound."""


class Faults(NamedTuple):
    """The largest numbers of faults. *come_back*: lost workers come back, each as its next incarnation."""

    losses: int = 0
    restarts: int = 0
    come_back: bool = True


NO_FAULTS = Faults()


@dataclass
class TrialWorker:
    """One incarnation of a worker, and the messages in flight between it and the server."""

    rank: int
    incarnation: int
    requests: deque[tuple[int, Request, torch.Tensor | None]] = field(
        default_factory=deque
    )
    replies: deque[Reply] = field(default_factory=deque)
    batch: dict[int, Request] = field(default_factory=dict)
    """The requests that wait for replies, by number: the worker continues when it has all replies."""
    sent_replies: dict[int, Reply] = field(default_factory=dict)
    """The server's replies to them."""
    received: dict[int, ReplyMessage] = field(default_factory=dict)
    numbers: int = 0
    step: int = 0
    deferred: dict[int, list[int]] = field(default_factory=dict)
    """By bucket: the units that its step defers."""
    is_lost: bool = False
    has_ended: bool = False
    final: list[torch.Tensor] = field(default_factory=list)
    """By bucket: its final parameters."""

    @property
    def is_pushing(self) -> bool:
        """Whether it is in a step."""
        return any(isinstance(message, Push) for message in self.batch.values())

    @property
    def arrived(self) -> list[Request]:
        """The requests of its batch that have arrived at the server."""
        left = {number for number, *_ in self.requests}
        return [m for number, m in self.batch.items() if number not in left]

    @property
    def is_in_mid_step(self) -> bool:
        """Whether only some main pushes of its step have arrived."""
        return 0 < self._mains_arrived < BUCKETS

    @property
    def has_sent_step(self) -> bool:
        """Whether all main pushes of its step have arrived."""
        return self._mains_arrived == BUCKETS

    @property
    def _mains_arrived(self) -> int:
        return sum(isinstance(m, Push) and not m.late for m in self.arrived)


@dataclass
class Ledger:
    """The gradients that the server has accepted: after a restart, those accepted before the snapshot."""

    units: int
    """Units of each bucket."""
    taken: set[tuple[int, int, int, int]] = field(default_factory=set)
    """Workers, steps, buckets and units of the gradients that must be in the parameters."""
    mains: set[tuple[int, int, int]] = field(default_factory=set)
    """Workers, steps and buckets of the main pushes that have arrived."""
    torn: set[tuple[int, int, int, int]] = field(default_factory=set)
    """Gradients that may be in the parameters: a snapshot has them, but only a part of their step."""
    skipped: set[tuple[int, int]] = field(default_factory=set)
    """Workers and steps that need not be done: others continued while the worker was lost."""
    done: dict[int, int] = field(default_factory=dict)
    """By worker that the server waits for: its steps whose main pushes have all arrived."""
    absent: set[int] = field(default_factory=set)
    """Workers that are lost to the server, and have not come back."""

    def copied(self) -> Ledger:
        return replace(
            self,
            taken=set(self.taken),
            mains=set(self.mains),
            torn=set(self.torn),
            skipped=set(self.skipped),
            done=dict(self.done),
            absent=set(self.absent),
        )

    def is_whole(self, rank: int, step: int) -> bool:
        return all(
            (rank, step, bucket, unit) in self.taken
            for bucket in range(BUCKETS)
            for unit in range(self.units)
        )

    def begins(self, rank: int, step: int) -> None:
        """A worker has joined, with first step *step*."""
        furthest = max((its + 1 for _, its, _ in self.mains), default=0)
        require(
            step <= max([furthest, *self.done.values()]),
            f"worker {rank} is to begin with step {step}: expected at most {furthest}, the "
            "furthest step of all workers",
        )
        if rank in self.absent:
            self.skip(rank, range(step))
        self.absent.discard(rank)
        self.done[rank] = step

    def skip(self, rank: int, steps: Iterable[int]) -> None:
        self.skipped |= {(rank, s) for s in steps if not self.is_whole(rank, s)}

    def take(self, rank: int, push: Push) -> None:
        step = push.step
        units = range(self.units) if push.units is None else push.units
        self.taken |= {(rank, step, push.bucket, unit) for unit in units}
        if push.late:
            return
        self.mains.add((rank, step, push.bucket))
        if all((rank, step, bucket) in self.mains for bucket in range(BUCKETS)):
            self.done[rank] = max(self.done.get(rank, 0), step + 1)

    def lose(self, rank: int) -> None:
        self.absent.add(rank)
        self.done.pop(rank, None)

    def go_on_from(self, firsts: Sequence[int]) -> None:
        """A server was restored: each worker begins with its step in *firsts*."""
        torn = {entry for entry in self.taken if entry[1] >= firsts[entry[0]]}
        self.taken -= torn
        self.torn |= torn
        self.mains = {entry for entry in self.mains if entry[1] < firsts[entry[0]]}
        self.done = dict(enumerate(firsts))


class ServerTrial:
    """A training of *workers* workers over one server, until each is out of data."""

    def __init__(
        self,
        make: MakeDiscipline,
        workers: int,
        seed: int,
        laws: ServerLaws = ANY,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._make, self._workers = make, workers
        self.laws, self._faults = laws, faults
        self._losses_left, self._restarts_left = faults.losses, faults.restarts
        self._random = random.Random(seed)
        self._ends = [STEPS + rank for rank in range(workers)]
        self._now = 0.0
        self._losses: list[tuple[int, int]] = []
        """Workers and incarnations whose loss the server has not noticed yet."""
        self._known: dict[int, int] = {}
        """By worker: the latest incarnation that the server knows."""
        self._snapshot: tuple[dict[str, Any], Ledger] | None = None
        self._payloads: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Payloads of replies, each with a copy."""
        self.size = workers * (STEPS + workers)
        self.units = UNITS if laws.stages else 1
        self.ledger = Ledger(self.units, done=dict.fromkeys(range(workers), 0))
        self.server = self._started()
        self._scripts: dict[int, _Script] = {}
        self.workers = [TrialWorker(rank, 0) for rank in range(workers)]
        for worker in self.workers:
            self._start(worker)

    def _started(self) -> ParameterServer:
        server = ParameterServer(self._workers, lambda _: self._make())
        if self._faults.come_back:
            server.wait_for_the_lost()
        return server

    # ---- a worker ----

    def _start(self, worker: TrialWorker) -> None:
        self._scripts[worker.rank] = script = self._script(worker)
        self._send(worker, next(script))

    def _script(self, worker: TrialWorker) -> _Script:
        """A worker's requests: it sends each batch when all of the batch before is answered."""
        rank, buckets = worker.rank, range(BUCKETS)
        [joined] = yield [(self.join(), None)]
        assert isinstance(joined, Joined), joined
        step = worker.step = max(joined.step, joined.own)
        if not joined.loaded and rank == 0:
            zeros = torch.zeros(self.units * self.size)
            yield [(Load(bucket=bucket), zeros.clone()) for bucket in buckets]
        if step or joined.late_joiner:
            yield [(KeepAlive(step=step, late_joiner=joined.late_joiner), None)]
        if not joined.over:
            replies = yield [
                (Pull(bucket=bucket, step=step), None) for bucket in buckets
            ]
            self._defer(worker, replies)
        late: _Batch = []
        while not joined.over and worker.step < self._ends[rank]:
            step = worker.step
            batch = late + self._step(worker)
            late = self._late_pushes(worker)
            order = self._random.sample(batch, len(batch))
            replies = yield order
            steps = [reply.step for reply in replies if isinstance(reply, Parameters)]
            worker.step = max(steps)
            if worker.step > step + 1:
                require(
                    self.laws.drops,
                    f"worker {rank} is to skip steps ({steps}), but the method does not declare "
                    "drops",
                )
                self.ledger.skip(rank, range(step + 1, worker.step))
                behind = [
                    push.bucket
                    for (push, _), its in zip(order, steps, strict=True)
                    if isinstance(push, Push) and its < max(steps)
                ]
                if behind:
                    yield [(Pull(bucket=b, step=worker.step), None) for b in behind]
            mains = [
                reply
                for (push, _), reply in zip(order, replies, strict=True)
                if isinstance(push, Push) and not push.late
            ]
            self._defer(worker, mains)
        if late:
            yield late
        yield [(Leave(), None)]
        yield [(Pull(bucket=bucket), None) for bucket in buckets]

    def _defer(self, worker: TrialWorker, replies: Iterable[ReplyMessage]) -> None:
        """The worker's next step defers the units that these replies name."""
        if self.laws.stages is None:
            return
        for reply in replies:
            assert isinstance(reply, Parameters), reply
            worker.deferred[reply.bucket] = [*self.laws.stages.decode(reply.notice)]

    def _step(self, worker: TrialWorker) -> _Batch:
        """The main pushes of a worker's step. If it defers units, it also requests their optimizer
        state."""
        rank, step, stages = worker.rank, worker.step, self.laws.stages
        if stages is None:
            return [self.push(rank, step, bucket) for bucket in range(BUCKETS)]
        batch: _Batch = []
        for bucket in range(BUCKETS):
            deferred = worker.deferred.get(bucket, [])
            units = [unit for unit in range(self.units) if unit not in deferred]
            push, gradient = self.push(rank, step, bucket, units)
            if bucket == BUCKETS - 1:
                push.report = stages.report(self._random)
            batch.append((push, gradient))
            if deferred:
                batch.append(
                    (PullState(bucket=bucket, units=deferred, step=step), None)
                )
        return batch

    def _late_pushes(self, worker: TrialWorker) -> _Batch:
        """The deferred units of a worker's step: pushed beside the main pushes of the next one."""
        return [
            self.push(worker.rank, worker.step, bucket, units, late=True)
            for bucket, units in worker.deferred.items()
            if units
        ]

    def join(self) -> Join:
        """The training's description: one parameter per unit."""
        shape = (self.size,)
        return Join(
            options="",
            units=[
                [
                    Unit(b * self.units + u, 0, self.size, 0, shape)
                    for u in range(self.units)
                ]
                for b in range(BUCKETS)
            ],
            dtypes=["float32"] * BUCKETS,
            optimizer="SGD",
            hyperparameters=SGD,
        )

    def weight(self, rank: int) -> float:
        """A worker's weight. All sums of some workers' weights differ, and none is twice another."""
        return 0.9 * (1 + rank / 7) / self._workers

    def element(self, rank: int, step: int) -> int:
        """The element that is one in a worker's gradient of a step."""
        return rank * (STEPS + self._workers) + step

    def push(
        self,
        rank: int,
        step: int,
        bucket: int,
        units: Sequence[int] | None = None,
        late: bool = False,
    ) -> tuple[Push, torch.Tensor | None]:
        """A worker's gradient of a step, of all units unless *units* names some; without units
        there is no payload."""
        numbers = range(self.units) if units is None else units
        gradient = torch.zeros(len(numbers), self.size)
        gradient[:, self.element(rank, step)] = 1.0
        push = Push(
            step=step,
            bucket=bucket,
            late=late,
            units=None if len(numbers) == self.units else [*numbers],
            weight=self.weight(rank),
            used=[True] * len(numbers),
            hyperparameters=SGD,
        )
        return push, gradient.view(-1) if numbers else None

    # ---- messages ----

    def ask(
        self, worker: TrialWorker, message: Request, payload: torch.Tensor | None
    ) -> Sequence[Reply]:
        """Deliver a request that is not the worker's own; returns the server's messages."""
        number, worker.numbers = worker.numbers, worker.numbers + 1
        sender = Sender(worker.rank, worker.incarnation, _channel_of(message), number)
        return self.server.on_request(sender, message, payload, self._now)

    def _send(self, worker: TrialWorker, batch: _Batch) -> None:
        worker.batch, worker.sent_replies, worker.received = {}, {}, {}
        for message, payload in batch:
            worker.batch[worker.numbers] = message
            worker.requests.append((worker.numbers, message, payload))
            worker.numbers += 1

    def deliver_request(self, worker: TrialWorker) -> None:
        """Deliver the next request of a worker to the server."""
        number, message, payload = worker.requests.popleft()
        rank, incarnation = worker.rank, worker.incarnation
        if self._known.get(rank, incarnation) < incarnation:
            self.ledger.lose(rank)  # The server notices the loss by this message.
        self._known[rank] = incarnation
        if isinstance(message, Push):
            self.ledger.take(rank, message)
        elif isinstance(message, Leave):
            self.ledger.done.pop(rank, None)
        sender = Sender(rank, incarnation, _channel_of(message), number)
        self._take(self.server.on_request(sender, message, payload, self._now))

    def _take(self, replies: Iterable[Any]) -> None:
        """Record replies that leave the server."""
        for reply in replies:
            worker = self.workers[reply.to.worker]
            message = reply.message
            if isinstance(message, Rejected):
                raise CheckFailedError(
                    f"the server refuses a valid request: {message.reason}"
                )
            if worker.is_lost or worker.incarnation != reply.to.incarnation:
                continue
            number = reply.to.number
            require(number in worker.batch, f"{message} is a reply without a request")
            require(
                number not in worker.sent_replies,
                f"{message} is a second reply to one request",
            )
            worker.sent_replies[number] = reply
            worker.replies.append(reply)
            if reply.payload is not None:
                self._payloads.append((reply.payload, reply.payload.clone()))
            if isinstance(message, Joined) and not message.over:
                self.ledger.begins(worker.rank, max(message.step, message.own))
            if len(worker.sent_replies) == len(worker.batch):
                self._require_bound(worker)

    def deliver_reply(self, worker: TrialWorker) -> None:
        """Deliver the next reply to a worker."""
        reply = worker.replies.popleft()
        worker.received[reply.to.number] = reply.message
        if isinstance(reply.message, Parameters) and reply.payload is not None:
            worker.final = [*worker.final, reply.payload][-BUCKETS:]
        if len(worker.received) == len(worker.batch):
            try:
                batch = self._scripts[worker.rank].send(
                    [worker.received[number] for number in worker.batch]
                )
            except StopIteration:
                worker.has_ended = True
            else:
                self._send(worker, batch)

    # ---- faults ----

    def lose(self, worker: TrialWorker) -> None:
        """Lose a worker, or its connection, with all messages in flight."""
        worker.is_lost = True
        worker.requests.clear()
        worker.replies.clear()
        self._losses.append((worker.rank, worker.incarnation))

    def notice_loss(self, place: int) -> None:
        """Let the server notice a lost connection."""
        rank, incarnation = self._losses.pop(place)
        if incarnation >= self._known.get(rank, incarnation):
            self._known[rank] = incarnation
            self.ledger.lose(rank)
        self._take(self.server.on_worker_lost(rank, incarnation, self._now))

    def come_back(self, worker: TrialWorker) -> None:
        """Restart a lost worker."""
        fresh = TrialWorker(worker.rank, worker.incarnation + 1)
        self.workers[worker.rank] = fresh
        self._start(fresh)

    def write_snapshot(self) -> None:
        """Let the server write a snapshot, if this moment allows one."""
        saved = self.server.snapshot()
        if saved:
            self._snapshot = saved, self.ledger.copied()

    def restart(self) -> None:
        """Kill the server, and restart it from its last snapshot, or from nothing. All workers are
        restarted."""
        for worker in self.workers:
            if not worker.is_lost:
                self.lose(worker)
        self._losses.clear()
        self._known.clear()
        self.server = self._started()
        self.ledger = Ledger(self.units, done=dict.fromkeys(range(self._workers), 0))
        if self._snapshot is not None:
            saved, ledger = self._snapshot
            self.ledger = ledger.copied()
            step = self.server.restore(saved)
            owns = map(self.server.shard.next_step, range(self._workers))
            self.ledger.go_on_from([max(step, own) for own in owns])

    # ---- moves ----

    def run(self, watch: Callable[[int], None] = lambda number: None) -> None:
        """Run to the end. *watch* is called before each move, with its number."""
        for number in range(MOST_MOVES):
            watch(number)
            if not self.move():
                return
        raise CheckFailedError(f"training has not ended after {MOST_MOVES} moves")

    def move(self) -> bool:
        """Make one random move; returns whether any was possible."""
        self._now += self._random.random()
        self._fail_sometimes()
        moves: list[tuple[Callable[[Any], None], Any]] = []
        for worker in self.workers:
            if worker.requests:
                moves.append((self.deliver_request, worker))
            if worker.replies:
                moves.append((self.deliver_reply, worker))
            if worker.is_lost and self._faults.come_back:
                moves.append((self.come_back, worker))
        moves += [(self.notice_loss, place) for place in range(len(self._losses))]
        deadline = self.server.next_deadline()
        if deadline is not None and (deadline <= self._now or not moves):
            self._now = max(self._now, deadline)
            moves.append((self._on_timer, None))
        if moves:
            happens, what = self._random.choice(moves)
            happens(what)
        return bool(moves)

    def _on_timer(self, _: None) -> None:
        self._take(self.server.on_timer(self._now))

    def _fail_sometimes(self) -> None:
        if self._random.random() < 0.1:
            self.write_snapshot()
        able = [w for w in self.workers if not (w.is_lost or w.has_ended)]
        if not self._faults.come_back and not self.server.shard.is_loaded:
            able = [w for w in able if w.rank]  # Only rank 0 loads the parameters.
        if able and self._losses_left and self._random.random() < 0.05:
            self._losses_left -= 1
            self.lose(self._random.choice(able))
        is_over = self.server.is_over() or any(w.has_ended for w in self.workers)
        if not is_over and self._restarts_left and self._random.random() < 0.02:
            self._restarts_left -= 1
            self.restart()

    # ---- laws ----

    def _require_bound(self, worker: TrialWorker) -> None:
        """Check that a worker may start its step: all active workers have done enough, and its parameters
        contain their gradients."""
        if self.laws.bound is None or worker.rank not in self.ledger.done:
            return
        step = 0
        for number, message in worker.batch.items():
            sent = worker.sent_replies[number]
            if isinstance(sent.message, Parameters):
                assert isinstance(message, Pull | Push)
                begins = message.step if isinstance(message, Pull) else message.step + 1
                step = max(step, begins if begins else sent.message.step)
                if begins < self._ends[worker.rank]:
                    self._require_gradients(worker, message, sent.payload, begins)
        if not step or step >= self._ends[worker.rank]:
            return  # It leaves.
        for rank, done in self.ledger.done.items():
            require(
                done >= step - self.laws.bound,
                f"worker {worker.rank} starts step {step} when worker {rank} has done {done} "
                f"steps: expected at most {self.laws.bound} ahead",
            )

    def _require_gradients(
        self,
        worker: TrialWorker,
        message: Pull | Push,
        payload: torch.Tensor | None,
        step: int,
    ) -> None:
        """Check that the parameters at the start of *step* contain all required gradients, and no other."""
        bound = self.laws.bound
        assert bound is not None
        units = message.units if isinstance(message, Push) else None
        numbers = range(self.units) if units is None else units
        if not numbers:
            return
        assert payload is not None
        values = [part.tolist() for part in payload.split(self.size)]
        parts = dict(zip(numbers, values, strict=True))
        for rank, its, bucket, unit in self.ledger.taken:
            if bucket != message.bucket or unit not in parts:
                continue
            found = parts[unit][self.element(rank, its)] != 0
            require(
                found or its >= step - bound,
                f"worker {worker.rank} starts step {step} without worker {rank}'s gradient of "
                f"step {its} in bucket {bucket}",
            )
            require(
                not found or its < step or bound > 0,
                f"worker {worker.rank} starts step {step} with worker {rank}'s gradient of "
                f"step {its} in bucket {bucket}",
            )

    def require_all_ended(self) -> None:
        """Check that no worker waits forever."""
        for worker in self.workers:
            waits = [m for n, m in worker.batch.items() if n not in worker.received]
            require(
                worker.has_ended or worker.is_lost,
                f"worker {worker.rank} waits forever for a reply to {waits[:1]}",
            )
            require(
                not (worker.is_lost and self._faults.come_back),
                f"worker {worker.rank} is still lost at the end: expected its restart",
            )

    def require_replies_left_alone(self) -> None:
        """Check that sent payloads were not changed, and that all workers end with the server's parameters."""
        for payload, before in self._payloads:
            require(
                torch.equal(payload, before),
                "the server has changed the payload of a sent reply",
            )
        flats = self.server.shard.store.flats
        for worker in self.workers:
            if worker.has_ended:
                same = all(map(torch.equal, worker.final, flats))
                require(
                    same,
                    f"worker {worker.rank} ends with other parameters than the server's",
                )

    def require_each_once(self) -> None:
        """Check that every accepted gradient is in each bucket: alone at its weight, or as a part of its
        step's mean. Nothing else may be in it, and no step may be missing."""
        dropped = 0
        for rank, ends in enumerate(self._ends):
            gone = self.workers[rank].is_lost
            for step, bucket, unit in product(
                range(ends), range(BUCKETS), range(self.units)
            ):
                found, once = self._found(rank, step, bucket, unit)
                entry = (rank, step, bucket, unit)
                may_miss = entry not in self.ledger.taken and (
                    gone or (rank, step) in self.ledger.skipped
                )
                if not may_miss and self.laws.drops and not found:
                    may_miss = True
                    dropped += entry in self.ledger.taken
                may_be_in = entry in self.ledger.taken | self.ledger.torn
                require(
                    (once and may_be_in) or (not found and may_miss),
                    f"worker {rank}'s gradient of step {step} is in bucket {bucket} "
                    f"{found / self.weight(rank):.3f} times: expected "
                    f"{0 if may_miss and not may_be_in else 1}",
                )
        if self._faults == NO_FAULTS:
            counted = self.server.counts["gradients dropped"]
            require(
                dropped == counted,
                f"{dropped} gradients were dropped, but the server has counted {counted}",
            )

    def _found(
        self, rank: int, step: int, bucket: int, unit: int
    ) -> tuple[float, bool]:
        """A gradient's factor in a unit, and whether the unit contains it once."""
        flat = self.server.shard.store.flats[bucket].split(self.size)[unit]
        factors = [
            -flat[self.element(other, step)].item() + 0.0
            for other, ends in enumerate(self._ends)
            if step < ends
        ]
        ranks = [r for r, ends in enumerate(self._ends) if step < ends]
        by_rank = dict(zip(ranks, factors, strict=True))
        weight = self.weight(rank)
        whole = sum(self.weight(r) for r, factor in by_rank.items() if factor)
        found = by_rank[rank]
        rights = [weight, weight / whole] if whole else [weight]
        return found, any(abs(found - right) < 1e-4 for right in rights)


def _channel_of(message: Request) -> str:
    """The channel of a request: second stages use a separate one."""
    is_late = isinstance(message, Push) and message.late
    return "late" if is_late or isinstance(message, PullState) else ""
