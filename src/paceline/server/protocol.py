"""The parameter server as a state machine: no I/O, no clock, no threads.

Transitions
-----------
========== ============================================== ==============================
event      what changes                                   answer
========== ============================================== ==============================
join       the worker takes part: from step 0, or where   `Joined`; `Refused` where model
           it was missed before, from the step that the   or options differ from those of
           discipline names; an older incarnation of it   who came first
           is lost
load       the bucket's parameters                        `Done`; pulls that waited
pull       -                                              `Parameters`, once loaded and
                                                          once the discipline allows
decide     server 0's choice of who counts for a step,    `Done`
           passed on by a worker
blend      the model's buffers are mixed                  `Blended`
push       once per (worker, incarnation, step, stage,    `Parameters`, when the
           bucket): handed to the discipline; with the    discipline says so; `Refused`
           step's last bucket the worker's clock moves;   if it is of a step before, or
           a later step than expected, where another      of a later one while pushes of
           server named it, leaves out those before       an earlier one are unanswered
pull-state -                                              `OptimizerState`
load-state the bucket's optimizer state                   `Done`
reduce     the part is added, in rank order               `Reduced`, to all, with the
                                                          last part
note       -                                              `Done`
leave      nobody waits for the worker's gradients        `Done`, once nobody trains
lost       the same, and it gets no more answers; what    -
           it had pushed still counts
timer      what the discipline does at a time of its own  `Parameters`, as it says
========== ============================================== ==============================

Law: a request that comes again is not done again, and is answered again if it had been
answered. Each request says which answers its worker has; only those are forgotten.

Where workers disagree about a step's hyperparameters training cannot go on: all pushes and
pulls that wait are refused, and all pushes that come.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import (
    Answer,
    Coordinated,
    Deferring,
    Discipline,
    HeldPush,
    Led,
    Sender,
    Timed,
    Work,
)
from paceline.messages import (
    FIRST,
    SECOND,
    Blend,
    Blended,
    Decide,
    Done,
    Join,
    Joined,
    Leave,
    Load,
    LoadState,
    Measured,
    Note,
    OptimizerState,
    Parameters,
    Pull,
    PullState,
    Push,
    Reduce,
    Reduced,
    Refused,
    Reply,
    Request,
)
from paceline.server.buffers import blended
from paceline.server.checks import (
    different_hyperparameters,
    different_units,
    require_same,
    total_weight,
)
from paceline.server.reductions import Reductions
from paceline.server.store import Store
from paceline.server.sums import Order
from paceline.tensors import wire_bytes

MOST_STEPS_AHEAD = 100_000
"""Of the other workers: by more a step is a mistake, and not taken."""


@dataclass
class Channel:
    """What was seen of one worker's requests on one channel."""

    forgotten: int = 0
    """Numbers below this one were answered, and their worker has the answers."""
    answers: dict[int, Answer | None] = field(default_factory=dict)
    """By number; None while it is not answered."""


@dataclass
class Member:
    """A worker, as the server knows it."""

    incarnation: int
    joined: bool = False
    lost: bool = False
    first_step: int = 0
    clock: int = 0
    """Steps that are in as a whole: the number of the next."""
    begun: set[int] = field(default_factory=set)
    """Buckets that are in of the step under way, in its first stage."""
    second: dict[int, set[int]] = field(default_factory=dict)
    """By step: buckets that are in of its second stage."""
    leaving: bool = False
    channels: dict[str, Channel] = field(default_factory=dict)


class ParameterServer:
    """The `Server`, and the `Shard` that its discipline sees.

    Without a *discipline* it holds no parameters, and only reduces; *make* makes one from
    the spec that the first worker joins with. *workers*: how many there are to be.
    *remembers*: keep answers, payloads and all, until their worker has them, for requests
    that come again; False behind a transport that repeats none.
    """

    def __init__(
        self,
        workers: int,
        discipline: Discipline | None = None,
        name: str = "server",
        make: Callable[[str, int], Discipline] | None = None,
        remembers: bool = True,
    ) -> None:
        self.workers = workers
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self._name = name
        self._take_on(discipline)
        self._sums: Order = "rank"
        self._make = make
        self._remembers = remembers
        self._description: Join | None = None
        self._store: Store | None = None
        self.buckets: list[int] = []
        self._members: dict[int, Member] = {}
        self._awaited = set(range(workers))
        """Workers that have not joined yet: they will, at the first step."""
        self._asked: dict[int, Sender] = {}  # by the stamp of a push
        self._stamp = 0
        self._begin = 0
        """The step at which training begins: later than 0 after `restore`."""
        self._furthest = 0
        """Nobody has begun this step, nor a later one."""
        self._restored = False
        self._fault = ""
        """Why training cannot go on: every push is refused with it."""
        self._pulls: list[tuple[Sender, int, int]] = []
        self._state_pulls: list[tuple[Sender, PullState]] = []
        self._leaves: list[Sender] = []
        self._blended: torch.Tensor | None = None
        self._reductions = Reductions()
        self._out: list[Answer] = []
        self._work = Work()
        self._handlers: dict[type, Callable[[Sender, Any, Any], None]] = {
            Join: self._join,
            Load: self._load,
            Pull: self._pull,
            Push: self._push,
            PullState: self._pull_state,
            LoadState: self._load_state,
            Reduce: self._reduce,
            Leave: self._leave,
            Note: self._note,
            Decide: self._decide,
            Blend: self._blend,
        }

    # ---- the `Server` ----

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        self.now = now
        if not self._is_new(sender, message):
            return self._taken_out()
        try:
            self._handlers[type(message)](sender, message, payload)
        except UsageError as error:
            self._refuse(sender, str(error))
        return self._taken_out()

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        self.now = now
        if 0 <= worker < self.workers:
            member = self._heard_of(worker, incarnation)
            if member.incarnation == incarnation and not member.lost:
                self._remove(worker)
        return self._taken_out()

    def next_deadline(self) -> float | None:
        return None if self._timed is None else self._timed.next_deadline()

    def on_timer(self, now: float) -> list[Answer]:
        self.now = now
        deadline = self.next_deadline()
        if self._timed is not None and deadline is not None and now >= deadline:
            self._timed.timer(self)
        return self._taken_out()

    def take_work(self) -> Work:
        work, self._work = self._work, Work()
        return work

    # ---- snapshots ----

    def is_over(self) -> bool:
        """Workers were here, and nobody trains any more, or is to come."""
        return bool(self._members) and not self._awaited and not self._training()

    def is_quiet(self) -> bool:
        """No push is unanswered, and no worker in the middle of its pushes."""
        return not self._asked and not any(m.begun for _, m in self._training())

    def snapshot(self) -> dict[str, Any]:
        """What `restore` goes on from: copied tensors, and plain values. Empty while
        there is nothing to go on from, or a step has ended for some buckets only."""
        store, discipline = self._store, self._discipline
        if store is None or discipline is None or not all(store.loaded) or self._fault:
            return {}
        step = discipline.ended(self)
        if step is None:
            return {}
        join = bytearray(msgspec.msgpack.encode(self._description))
        return {
            "workers": self.workers,
            "join": torch.frombuffer(join, dtype=torch.uint8).clone(),
            "step": step,
            "counts": dict(self.counts),
            "store": store.saved(),
        }

    def restore(self, saved: dict[str, Any]) -> int:
        """Go on from a `snapshot`, before anybody has joined: workers begin with its step,
        which is returned. Raises `UsageError` where it does not fit this server."""
        if saved["workers"] != self.workers:
            raise UsageError(
                f"the snapshot is of {saved['workers']} workers, and this job has "
                f"{self.workers}: start as many as before, or remove the file"
            )
        data = saved["join"].numpy().tobytes()
        join = msgspec.msgpack.decode(data, type=Join)
        if self._make is not None:
            self._take_on(self._make(join.method, self.workers))
        assert self._discipline is not None
        self._description, self._sums, self._restored = join, join.sums, True
        self._store = Store(join)
        self._store.restore(saved["store"])
        self.buckets = [b for b, units in enumerate(join.units) if units]
        self.counts.update(saved["counts"])
        self._begin = self._furthest = int(saved["step"])
        self._discipline.resume(self, self._begin)
        return self._begin

    # ---- the `Shard` ----

    def expected(self, step: int) -> list[int]:
        mine = {w for w, m in self._training() if m.first_step <= step}
        return sorted(mine | self._awaited)

    def clock(self, worker: int) -> int:
        return self._members[worker].clock

    def move_on(self, worker: int, step: int) -> None:
        member = self._members[worker]
        member.clock = max(member.clock, step)

    def slowest(self) -> int:
        clocks = [member.clock for _, member in self._training()]
        return min(
            [*clocks, *(self._begin for _ in self._awaited)], default=self._furthest
        )

    def fastest(self) -> int:
        return self._furthest

    def version(self, bucket: int) -> int:
        return self._stored().versions[bucket]

    def unit_bytes(self, bucket: int) -> list[int]:
        store = self._stored()
        units = range(len(self._units_of(bucket)))
        return [store.size(bucket, [unit]) for unit in units]

    def values(self, bucket: int, units: Sequence[int]) -> list[torch.Tensor]:
        return self._stored().values(bucket, units)

    def apply(self, push: HeldPush) -> None:
        if self._fault:
            return
        store = self._stored()
        store.apply(
            push.bucket,
            push.gradient,
            push.used,
            push.hyperparameters,
            push.weight,
            push.units,
        )
        self._add_work(stepped=store.size(push.bucket, push.units))
        self.counts["gradients applied"] += 1

    def apply_mean(self, bucket: int, pushes: Sequence[HeldPush]) -> None:
        if self._fault:
            return
        store = self._stored()
        different = different_hyperparameters(pushes) or different_units(pushes)
        if different:
            self._stop(different)
            return
        whole = total_weight([push.weight for push in pushes])
        self.counts["gradients applied"] += len(pushes)
        if not whole:
            store.updated(bucket)  # nobody had a sample
            return
        first = pushes[0]
        total = first.gradient
        for push in pushes:
            # As workers do that weigh before they send, so that the bits are the same.
            if push.weight != 1.0:
                push.gradient.mul_(push.weight)
            if push is not first:
                total.add_(push.gradient)
        if whole != 1.0:
            total.mul_(1 / whole)
        used = [any(flags) for flags in zip(*(p.used for p in pushes), strict=True)]
        store.apply(bucket, total, used, first.hyperparameters, units=first.units)
        size = store.size(bucket, first.units)
        self._add_work(added=size * (len(pushes) - 1), stepped=size)

    def answer(self, push: HeldPush, counted: Sequence[int] = ()) -> None:
        sender = self._asked.pop(push.stamp, None)
        if sender is not None:  # it was not refused, and its worker is not lost
            self._give_parameters(sender, push.bucket, counted, push.units)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # ---- requests ----

    def _take_on(self, discipline: Discipline | None) -> None:
        self._discipline = discipline
        # Looked up once: to ask whether an object fits a protocol takes 16 us.
        self._timed = discipline if isinstance(discipline, Timed) else None
        self._deferring = discipline if isinstance(discipline, Deferring) else None

    def _join(self, sender: Sender, join: Join, _: object) -> None:
        member = self._members[sender.worker]
        if member.joined:
            raise UsageError(f"join: worker {sender.worker} has joined before")
        first = self._description
        if first is None:
            discipline = self._discipline
            if self._make is not None and join.method:
                discipline = self._make(join.method, self.workers)
            if join.shard and isinstance(discipline, Led):
                discipline.follow()
            if discipline is not None:
                self._store = Store(join)
                self.buckets = [b for b, units in enumerate(join.units) if units]
            self._take_on(discipline)
            self._sums = join.sums
            self._description = join
        else:
            require_same(first, join, sender.worker, self._restored)
        if sender.worker in self._awaited:
            # All have waited for it, at the first step.
            self._awaited.discard(sender.worker)
            member.first_step = member.clock = self._begin
        elif self._discipline is not None:
            member.first_step = member.clock = self._discipline.first_step(self)
        member.joined = True
        loaded = self._store is not None and all(self._store.loaded)
        self._send(sender, Joined(step=member.first_step, loaded=loaded))

    def _load(self, sender: Sender, load: Load, payload: torch.Tensor | None) -> None:
        flat = self._checked("load", load.bucket, payload)
        self._stored().load(load.bucket, flat)
        self._send(sender, Done())
        self._give_pulls()

    def _pull(self, sender: Sender, pull: Pull, _: object) -> None:
        self._check_bucket(pull.bucket)
        member = self._members[sender.worker]
        if pull.step > member.clock and self._is_idle(sender.worker):
            # It joined where servers were at different steps, or came too late for its own,
            # and goes on with the latest: do not wait for it before that.
            self._check_step("pull", pull.step)
            member.first_step = member.clock = pull.step
            self._furthest = max(self._furthest, pull.step)
            if self._discipline is not None:
                self._discipline.changed(self)
        step = max(pull.step, member.first_step)
        self._pulls.append((sender, pull.bucket, step))
        self._give_pulls()

    def _decide(self, sender: Sender, decide: Decide, _: object) -> None:
        self._stored()
        if not isinstance(self._discipline, Coordinated):
            raise UsageError("decide: nothing is decided under this method")
        self._discipline.decided(self, decide.step, decide.workers)
        self._send(sender, Done())
        self._give_pulls()

    def _blend(self, sender: Sender, blend: Blend, payload: Any) -> None:
        self._blended = blended(self._blended, blend, payload)
        self._send(sender, Blended(), self._blended)

    def _give_pulls(self) -> None:
        waiting, self._pulls = self._pulls, []
        for sender, bucket, step in waiting:
            member = self._members[sender.worker]
            assert self._discipline is not None
            if member.leaving or (
                self._stored().loaded[bucket]
                and self._discipline.may_pull(self, step, bucket)
            ):
                self._give_parameters(sender, bucket)
            elif self._fault:
                self._refuse(sender, self._fault)
            else:
                self._pulls.append((sender, bucket, step))

    def _push(self, sender: Sender, push: Push, payload: torch.Tensor | None) -> None:
        store = self._stored()
        if self._fault:
            raise UsageError(self._fault)
        gradient = self._checked("push", push.bucket, payload, push.units)
        member = self._members[sender.worker]
        units = len(self._units_of(push.bucket) if push.units is None else push.units)
        if not store.loaded[push.bucket]:
            raise UsageError("push: no parameters were loaded yet")
        if member.leaving:
            raise UsageError(f"push: worker {sender.worker} has left")
        if len(push.used) != units:
            raise UsageError(f"push: expected {units} used bits, got {len(push.used)}")
        if not 0 <= push.weight < math.inf:
            raise UsageError(f"push: expected a weight of 0 or more, got {push.weight}")
        store.check_hyperparameters(push.hyperparameters)
        if push.measured is not None:
            self._check_measured(push.measured)
        if push.units is not None and self._deferring is None:
            raise UsageError(
                f"push: this method takes whole buckets, got units {push.units} of bucket "
                f"{push.bucket}"
            )
        if push.stage == FIRST:
            self._check_order(sender.worker, push, member)
        else:
            self._check_second(sender.worker, push, member)
        held = HeldPush(
            worker=sender.worker,
            step=push.step,
            bucket=push.bucket,
            weight=push.weight,
            used=push.used,
            hyperparameters=push.hyperparameters,
            gradient=gradient,
            stamp=self._stamp,
            stage=push.stage,
            units=push.units,
            measured=push.measured,
        )
        self._asked[self._stamp] = sender
        self._stamp += 1
        complete = False
        if push.stage == FIRST:
            self._furthest = max(self._furthest, push.step + 1)
            member.begun.add(push.bucket)
            complete = len(member.begun) == len(self.buckets)
        if complete:
            member.clock += 1
            member.begun.clear()
        assert self._discipline is not None
        self._discipline.pushed(self, held)
        if complete:
            self._discipline.changed(self)
        if self._pulls:
            self._give_pulls()
        if self._state_pulls:
            self._give_states()

    def _check_order(self, worker: int, push: Push, member: Member) -> None:
        if push.step < member.clock or (
            push.step == member.clock and push.bucket in member.begun
        ):
            self.counts["pushes that came again"] += 1
            raise UsageError(
                f"push: worker {worker} has pushed bucket {push.bucket} of step "
                f"{push.step} before"
            )
        if push.step > member.clock:
            self._check_step("push", push.step)
            if not self._is_idle(worker):
                raise UsageError(
                    f"push: expected step {member.clock} of worker {worker}, whose "
                    "earlier pushes are not all in, or not all answered, got step "
                    f"{push.step}"
                )
            member.first_step = member.clock = push.step

    def _check_second(self, worker: int, push: Push, member: Member) -> None:
        """The second stage of a step comes after all of its first was answered, and before
        that of the next is over."""
        if self._deferring is None or push.stage != SECOND:
            raise UsageError(f"push: this method has no stage {push.stage}")
        known = push.step >= member.first_step
        if not known or not member.clock - 2 <= push.step < member.clock:
            raise UsageError(
                f"push: stage 2 of step {push.step} of worker {worker}, whose next step is "
                f"{member.clock}"
            )
        for step in [s for s in member.second if s < member.clock - 2]:
            del member.second[step]
        seen = member.second.setdefault(push.step, set())
        if push.bucket in seen:
            self.counts["pushes that came again"] += 1
            raise UsageError(
                f"push: worker {worker} has pushed bucket {push.bucket} of step "
                f"{push.step}, stage 2, before"
            )
        seen.add(push.bucket)

    def _check_measured(self, measured: Measured) -> None:
        assert self._description is not None
        numbers = [*measured.ready, measured.end, measured.start_up, measured.per_byte]
        if (
            len(measured.ready) not in (0, len(self._description.units))
            or not all(0 <= number < math.inf for number in numbers)
            or not all(size >= 0 for size in measured.bytes)
            or not 0 <= measured.part <= 1
        ):
            raise UsageError(
                f"push: measured times, bytes or parts that make no sense: {measured}"
            )

    def _check_step(self, what: str, step: int) -> None:
        if step > self._furthest + MOST_STEPS_AHEAD:
            raise UsageError(
                f"{what}: step {step}, where nobody is beyond step {self._furthest}"
            )

    def _is_idle(self, worker: int) -> bool:
        """Whether all of a worker's steps are in as a whole, and answered."""
        asks = any(asked.worker == worker for asked in self._asked.values())
        return not (asks or self._members[worker].begun)

    def _pull_state(self, sender: Sender, pull: PullState, _: object) -> None:
        self._check_bucket(pull.bucket)
        self._stored().elements(pull.bucket, pull.units)
        self._state_pulls.append((sender, pull))
        self._give_states()

    def _give_states(self) -> None:
        waiting, self._state_pulls = self._state_pulls, []
        for sender, pull in waiting:
            units, deferring = pull.units, self._deferring
            if units is not None and deferring is not None:
                if self._fault:
                    self._refuse(sender, self._fault)
                    continue
                if not deferring.has(self, pull.step, pull.bucket, units):
                    self._state_pulls.append((sender, pull))
                    continue
            entries, payload = self._stored().state(pull.bucket, units)
            self._add_work(added=wire_bytes(payload))
            self._send(sender, OptimizerState(entries=entries), payload)

    def _load_state(self, sender: Sender, load: LoadState, payload: Any) -> None:
        store = self._stored()
        self._check_bucket(load.bucket)
        given = store.flats[load.bucket].new_empty(0) if payload is None else payload
        store.load_state(load.bucket, load.entries, given)
        self._send(sender, Done())

    def _reduce(self, sender: Sender, reduce: Reduce, payload: Any) -> None:
        self._reductions.add(sender, reduce, payload, self._everybody(), self._sums)
        self._end_reductions()

    def _end_reductions(self) -> None:
        for senders, result, added in self._reductions.ended(self._everybody()):
            self._add_work(added=added)
            for sender in senders:
                self._send(sender, Reduced(), result)

    def _leave(self, sender: Sender, leave: Leave, _: object) -> None:
        member = self._members[sender.worker]
        if member.begun:
            raise UsageError("leave: in the middle of a step")
        member.leaving = True
        self._leaves.append(sender)
        self._changed()

    def _note(self, sender: Sender, note: Note, _: object) -> None:
        self._send(sender, Done())

    # ---- who takes part ----

    def _is_new(self, sender: Sender, message: Request) -> bool:
        """Whether this request is to be done; answers those that are not."""
        if isinstance(message, Join) and 0 <= sender.worker < self.workers:
            self._heard_of(sender.worker, sender.incarnation)
        member = self._members.get(sender.worker)
        reason = self._stranger(sender, member)
        if reason or member is None:
            self._out.append(Answer(sender, Refused(reason=reason)))
            return False
        if not member.joined and not isinstance(message, Join):
            self._out.append(Answer(sender, Refused(reason="join first")))
            return False
        channel = member.channels.setdefault(sender.channel, Channel())
        for number in range(channel.forgotten, sender.received):
            channel.answers.pop(number, None)
        channel.forgotten = max(channel.forgotten, sender.received)
        if sender.number < channel.forgotten or sender.number in channel.answers:
            self.counts["requests that came again"] += 1
            before = channel.answers.get(sender.number)
            if before is not None:
                self._out.append(before)
            return False
        channel.answers[sender.number] = None
        return True

    def _stranger(self, sender: Sender, member: Member | None) -> str:
        """Why a request is none of a worker that is here; empty where it is."""
        if not 0 <= sender.worker < self.workers:
            return f"worker {sender.worker}: there are only {self.workers} workers"
        if member is None or sender.incarnation > member.incarnation:
            return "join first"
        if member.lost or sender.incarnation < member.incarnation:
            return "taken for lost: join with another life"
        return ""

    def _present(self) -> dict[int, Member]:
        return {w: m for w, m in self._members.items() if m.joined and not m.lost}

    def _training(self) -> list[tuple[int, Member]]:
        return [(w, m) for w, m in self._present().items() if not m.leaving]

    def _everybody(self) -> list[int]:
        """Who is to take part in a reduction: also who is out of data keeps company."""
        return sorted(self._present().keys() | self._awaited)

    def _heard_of(self, worker: int, incarnation: int) -> Member:
        """The worker as it is known now: an incarnation before this one is lost."""
        member = self._members.get(worker)
        if member is None or incarnation > member.incarnation:
            if member is not None and not member.lost:
                self._remove(worker)
            member = self._members[worker] = Member(incarnation)
        return member

    def _remove(self, worker: int) -> None:
        """A worker is lost: nobody waits for it, and it is told nothing any more."""
        self._members[worker].lost = True
        self._awaited.discard(worker)
        self._asked = {n: s for n, s in self._asked.items() if s.worker != worker}
        self._pulls = [pull for pull in self._pulls if pull[0].worker != worker]
        self._state_pulls = [p for p in self._state_pulls if p[0].worker != worker]
        self._leaves = [s for s in self._leaves if s.worker != worker]
        self.counts["workers lost"] += 1
        self._changed()

    def _changed(self) -> None:
        """Somebody has gone: let go of who waited for them."""
        if self._discipline is not None and self._store is not None:
            self._discipline.changed(self)
            self._give_pulls()
            self._give_states()
        self._end_reductions()
        if not self._training() and not self._awaited:
            leaves, self._leaves = self._leaves, []
            for sender in leaves:
                self._send(sender, Done())

    # ---- answers ----

    def _give_parameters(
        self,
        to: Sender,
        bucket: int,
        counted: Sequence[int] = (),
        units: Sequence[int] | None = None,
    ) -> None:
        store = self._stored()
        payload, copied = store.snapshot(bucket, units)
        if copied:
            self._add_work(added=store.size(bucket, units))
        deferred: Sequence[int] = ()
        if self._deferring is not None:
            deferred = self._deferring.deferred(bucket)
        step = self._members[to.worker].clock
        message = Parameters(
            bucket=bucket,
            version=store.versions[bucket],
            step=step,
            counted=list(counted),
            deferred=list(deferred),
        )
        self._send(to, message, payload)

    def _send(
        self, to: Sender, message: Reply, payload: torch.Tensor | None = None
    ) -> None:
        member = self._members.get(to.worker)
        if member is None or member.incarnation != to.incarnation or member.lost:
            return
        answer = Answer(to, message, payload)
        channel = member.channels[to.channel]
        channel.answers[to.number] = answer if self._remembers else None
        self._out.append(answer)

    def _refuse(self, to: Sender, reason: str) -> None:
        self.counts["requests refused"] += 1
        print(
            f"paceline: {self._name} refused worker {to.worker}: {reason}",
            file=sys.stderr,
        )
        self._send(to, Refused(reason=reason))

    def _stop(self, reason: str) -> None:
        """Training cannot go on: let nobody wait for it."""
        self._fault = reason
        asked, self._asked = self._asked, {}
        for sender in asked.values():
            self._refuse(sender, reason)

    def _taken_out(self) -> list[Answer]:
        out, self._out = self._out, []
        return out

    # ---- help ----

    def _stored(self) -> Store:
        if self._store is None:
            raise UsageError("this server holds no parameters: it only reduces")
        return self._store

    def _units_of(self, bucket: int) -> Sequence[object]:
        assert self._description is not None
        return self._description.units[bucket]

    def _check_bucket(self, bucket: int) -> None:
        self._stored()
        if bucket not in self.buckets:
            raise UsageError(f"expected a bucket of {self.buckets}, got {bucket}")

    def _checked(
        self,
        what: str,
        bucket: int,
        payload: torch.Tensor | None,
        units: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The payload, which fits the bucket, or these units of it."""
        self._check_bucket(bucket)
        store = self._stored()
        flat, elements = store.flats[bucket], store.elements(bucket, units)
        if payload is None and not elements:
            payload = flat.new_empty(0)
        if payload is None:
            raise UsageError(f"{what}: expected a payload, got none")
        if payload.numel() != elements or payload.dtype != flat.dtype:
            raise UsageError(
                f"bucket {bucket}: expected {elements} elements of {flat.dtype}, got "
                f"{payload.numel()} of {payload.dtype}"
            )
        return payload

    def _add_work(self, added: int = 0, stepped: int = 0) -> None:
        self._work = Work(self._work.added + added, self._work.stepped + stepped)
