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
arrive     the worker sends nothing, until it has met     `Met`, when all that train are
           all others that train                          there, and what is to be loaded
                                                          is; to the lowest rank that has
                                                          something to load, before that:
                                                          it leads; `Refused` where others
                                                          will not come (see `meetings`)
load,      with the last bucket's parameters: these, and  `Done`; pulls and meetings that
load-state, the states and the rest that came before; the waited; `Refused` from others
load-rest  discipline begins anew, holding nothing        than who leads, once loaded
pull       -                                              `Parameters`, once loaded and
                                                          once the discipline allows it for
                                                          all buckets
pull-rest, -                                              `Rest`, `Blended`, once loaded
pull-buffers
decide     server 0's choice of who counts for a step,    `Done`
           passed on by a worker
pull-norm  -                                              `NormPart`, once all of the
                                                          step's mean is known
norm       the step's mean is scaled, and applied         `Done`
blend      the model's buffers are mixed                  `Blended`
push       once per (worker, incarnation, step, bucket,   `Parameters`, when the
           late or not): handed to the discipline; with   discipline says so; `Refused`
           the step's last main push the worker's clock   if it is of a step before, or
           moves; a later step than expected, where       of a later one while pushes of
           another server named it, leaves out those      an earlier one are unanswered;
           before                                         if late and not just what the
                                                          main push left out; if main and
                                                          late units should have come
pull-state -                                              `OptimizerState`; of units, once
                                                          all updates before the step are
                                                          in them; `Refused` if that is
                                                          beyond the worker's next step
reduce     the part is added, in rank order               `Reduced`, to all, with the
                                                          last part
note       -                                              `Done`
leave      nobody waits for the worker's gradients        `Done`, once nobody trains, or
                                                          is to come back; `Refused` in
                                                          mid-step
lost       the same, and it gets no more answers; what    -
           it had pushed still counts
timer      what the discipline does at a time of its own  `Parameters`, as it says
========== ============================================== ==============================

Law: a request that comes again is not done again, and is answered again if it had been
answered. Each request says which answers its worker has; only those are forgotten.

Where workers disagree about a step's hyperparameters training cannot go on: all pushes and
pulls that wait are refused, and all pushes that come.

Parts
-----
- `members`: who takes part, in which life, and how far each is.
- `answers`: what was asked before, and what is to leave.
- `held_model`: the parameters, and their updates.
- `bound_discipline`: the method's discipline, which decides when somebody is answered.
- `pushes`, `pulls`, `reductions`: what is asked for, and waits.
- `meetings`, `incoming`: where all wait for all, and what is loaded then.
- `rest`: frozen parameters and buffers.
- here: what each event does with these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from paceline.clipping import check_clip_norm
from paceline.errors import UsageError
from paceline.interfaces import Answer, Discipline, HeldPush, Led, Sender, Work
from paceline.messages import (
    Arrive,
    Blend,
    Blended,
    Decide,
    Done,
    Join,
    Joined,
    Leave,
    Load,
    LoadRest,
    LoadState,
    Norm,
    NormPart,
    Note,
    Pull,
    PullBuffers,
    PullNorm,
    PullRest,
    PullState,
    Push,
    Reduce,
    Request,
    Say,
)
from paceline.server.answers import Answers
from paceline.server.bound_discipline import BoundDiscipline
from paceline.server.checks import require_same
from paceline.server.clipping import ClippedSteps
from paceline.server.held_model import HeldModel
from paceline.server.incoming import Incoming
from paceline.server.meetings import HOW_TO_LOAD, Meetings
from paceline.server.members import Members
from paceline.server.pulls import Pulls
from paceline.server.pushes import Pushes
from paceline.server.reductions import Reductions
from paceline.server.rest import HeldRest


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
        self._make = make
        self._description: Join | None = None
        """What is trained, as the first worker has said it."""
        self._restored = False
        self._members = Members(workers)
        self._answers = Answers(name, self._members, self.counts, remembers)
        self._model = HeldModel(self.counts)
        self._rest = HeldRest()
        self._incoming = Incoming(self._model, self._rest)
        self._discipline = BoundDiscipline(self, discipline)
        self._pushes = Pushes(self._members, self._model, self._discipline, self.counts)
        self._pulls = Pulls(
            self._members,
            self._model,
            self._discipline,
            self._pushes,
            self._answers,
            self._rest,
            lambda: self._meetings.loads,
            lambda worker: self._meetings.may_pull(worker),
        )
        self._meetings = Meetings(
            self._members, self._pushes, self._pulls, self._discipline, self._answers
        )
        self._reductions = Reductions(self._members, self._answers)
        self._leaves: list[Sender] = []
        self._norms: list[tuple[Sender, int]] = []
        """Who waits for this server's part of the norm of which step."""
        self._handlers: dict[type, Callable[[Sender, Any, Any], None]] = {
            Join: self._join,
            Arrive: self._arrive,
            Load: self._load,
            LoadRest: self._load_rest,
            LoadState: self._load_state,
            Pull: self._pull,
            PullRest: self._pull_rest,
            PullBuffers: self._pull_rest,
            PullState: self._pull_state,
            Push: self._push,
            Reduce: self._reduce,
            Leave: self._leave,
            Note: self._note,
            Decide: self._decide,
            PullNorm: self._pull_norm,
            Norm: self._norm,
            Blend: self._blend,
            Say: self._say,
        }

    # ---- the `Server` ----

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        self.now = now
        joins = isinstance(message, Join)
        if joins:
            self._hear_of(sender.worker, sender.incarnation)
        stranger = self._members.stranger(sender, joins)
        if stranger:
            self._answers.turn_away(sender, stranger)
        elif self._answers.is_new(sender):
            try:
                self._handlers[type(message)](sender, message, payload)
            except UsageError as error:
                self._answers.refuse(sender, str(error))
        self._look()
        return self._answers.taken_out()

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        self.now = now
        self._hear_of(worker, incarnation)
        if self._members.is_alive(worker, incarnation):
            self._lose(worker)
        self._look()
        return self._answers.taken_out()

    def next_deadline(self) -> float | None:
        return self._discipline.next_deadline()

    def on_timer(self, now: float) -> list[Answer]:
        self.now = now
        self._discipline.timer(now)
        self._look()
        return self._answers.taken_out()

    def take_work(self) -> Work:
        work = self._model.take_work()
        return Work(work.added + self._reductions.take_added(), work.stepped)

    # ---- who comes back ----

    def wait_for_the_lost(self) -> None:
        """From now on whoever is lost comes back: nobody who has left is told that all is
        over before it has."""
        self._members.return_from_loss = True

    def on_done(self, worker: int) -> list[Answer]:
        """A worker's script has ended well: if it is not here, it does not come back."""
        self._members.is_done(worker)
        self._somebody_has_gone()
        self._look()
        return self._answers.taken_out()

    # ---- snapshots ----

    def is_over(self) -> bool:
        """Workers were here, and nobody trains any more, or is to come."""
        return self._members.is_over()

    def is_quiet(self) -> bool:
        """No push is unanswered, and no worker in the middle of its pushes."""
        return self._pushes.are_all_answered() and self._members.is_between_steps()

    def snapshot(self) -> dict[str, Any]:
        """What `restore` goes on from: copied tensors, and plain values. Empty while
        there is nothing to go on from, or a step has ended for some buckets only."""
        if not self._model.is_loaded or self._model.fault:
            return {}
        step = self._discipline.ended()
        if step is None:
            return {}
        join = bytearray(msgspec.msgpack.encode(self._description))
        return {
            "workers": self.workers,
            "join": torch.frombuffer(join, dtype=torch.uint8).clone(),
            "step": step,
            "counts": dict(self.counts),
            "store": self._model.store.saved(),
            "rest": self._rest.saved(),
            "load": self._meetings.loads,
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
        discipline = self._discipline.discipline
        if self._make is not None:
            discipline = self._make(join.method, self.workers)
        self._discipline.bind(discipline, partial(self._clipped, join))
        self._description, self._restored = join, True
        self._reductions.order = join.sums
        self._model.hold(join)
        self._model.store.restore(saved["store"])
        self._rest.restore(saved["rest"])
        self._meetings.loads = int(saved["load"])
        self.counts.update(saved["counts"])
        step = int(saved["step"])
        self._members.begin_with(step)
        self._discipline.resume(step)
        return step

    # ---- the `Shard` ----

    def expected(self, step: int) -> list[int]:
        return self._members.expected(step)

    def clock(self, worker: int) -> int:
        return self._members.clock(worker)

    def move_on(self, worker: int, step: int) -> None:
        member = self._members[worker]
        member.clock = max(member.clock, step)

    def slowest(self) -> int:
        return self._members.slowest()

    def fastest(self) -> int:
        return self._members.furthest

    @property
    def buckets(self) -> list[int]:
        return self._model.buckets

    @property
    def all_buckets(self) -> int:
        return len(self._model.store.flats)

    def version(self, bucket: int) -> int:
        return self._model.store.versions[bucket]

    def unit_bytes(self, bucket: int) -> list[int]:
        return self._model.unit_bytes(bucket)

    def values(self, bucket: int, units: Sequence[int]) -> list[torch.Tensor]:
        return self._model.store.values(bucket, units)

    def apply(self, push: HeldPush) -> None:
        self._model.apply(push)

    def apply_mean(self, bucket: int, pushes: Sequence[HeldPush]) -> None:
        self._model.apply_mean(bucket, pushes)
        if self._model.fault:  # training cannot go on: let nobody wait for it
            waiting = [sender for sender, _ in self._norms]
            self._norms.clear()
            self._meetings.give_up(self._model.fault)
            for sender in [*self._pushes.give_up(), *waiting]:
                self._answers.refuse(sender, self._model.fault)

    def answer(self, push: HeldPush, counted: Sequence[int] = ()) -> None:
        sender = self._pushes.answered(push)
        if sender is not None:
            self._pulls.give_parameters(
                sender, push.bucket, push.units, counted, push.late
            )

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # ---- who takes part ----

    def _hear_of(self, worker: int, incarnation: int) -> None:
        """An incarnation of a worker is there, or was: one before it is lost."""
        if self._members.is_one(worker):
            if self._members.has_older(worker, incarnation):
                self._lose(worker)
            self._members.hear_of(worker, incarnation)

    def _say(self, *_: object) -> None:
        raise UsageError("say: those are the words of another kind of service")

    def _join(self, sender: Sender, join: Join, _: object) -> None:
        worker = sender.worker
        if self._members[worker].joined:
            raise UsageError(f"join: worker {worker} has joined before")
        if self._description is None:
            self._begin(join)
        else:
            require_same(self._description, join, worker, self._restored)
        awaited = self._members.is_awaited(worker)
        if self._meetings.is_under_way() and not awaited:
            self._meetings.put_off(worker, partial(self._admit, sender))
        else:
            self._admit(sender)

    def _admit(self, sender: Sender) -> None:
        members, loads = self._members, self._meetings.loads
        step, guest = members.begin, self._restored
        if not members.is_awaited(sender.worker):
            step = self._discipline.first_step()
            guest = guest or members.has_begun_training() or loads > 0
        members.join(sender.worker, step, guest)
        loaded = self._model.is_loaded
        joined = Joined(step=step, loaded=loaded, load=loads, guest=guest)
        self._answers.send(sender, joined)

    def _begin(self, join: Join) -> None:
        """The first worker says what is trained."""
        discipline = self._discipline.discipline
        if self._make is not None and join.method:
            discipline = self._make(join.method, self.workers)
        if join.shard and isinstance(discipline, Led):
            discipline.follow()
        if discipline is not None:
            self._model.hold(join)
        self._clipped(join)  # may refuse
        self._discipline.bind(discipline, partial(self._clipped, join))
        self._meetings.follows = bool(join.shard) and isinstance(discipline, Led)
        self._description = join
        self._reductions.order = join.sums

    def _clipped(self, join: Join) -> ClippedSteps | None:
        """What holds a step's updates until their norm is known, if that is wanted."""
        check_clip_norm(join.clip_norm)
        if join.clip_norm == math.inf:
            return None
        alone, added = join.servers == 1, self._model.add_work
        return ClippedSteps(self, join.clip_norm, alone, added)

    def _leave(self, sender: Sender, leave: Leave, _: object) -> None:
        member = self._members[sender.worker]
        if member.begun:
            raise UsageError("leave: in the middle of a step")
        self._meetings.check_not_there("leave", sender.worker)
        self._pushes.check_late_units("leave", sender.worker, member.clock, "it leaves")
        member.leaving = True
        self._leaves.append(sender)
        self._somebody_has_gone()

    def _lose(self, worker: int) -> None:
        """Nobody waits for a worker, and it is told nothing any more."""
        self._members.lose(worker)
        self._meetings.forget(worker)
        if worker == self._incoming.worker:
            self._incoming.clear()
        self._pushes.forget(worker)
        self._pulls.forget(worker)
        self._norms = [wait for wait in self._norms if wait[0].worker != worker]
        self._leaves = [s for s in self._leaves if s.worker != worker]
        self.counts["workers lost"] += 1
        self._somebody_has_gone()

    def _somebody_has_gone(self) -> None:
        """Let go of who waited for them."""
        if self._model.is_held:
            self._discipline.changed()
            self._let_go()
        self._reductions.answer_ended()
        if self._members.nobody_trains():
            leaves, self._leaves = self._leaves, []
            for sender in leaves:
                self._answers.send(sender, Done())

    # ---- loads ----

    def _arrive(self, sender: Sender, arrive: Arrive, _: object) -> None:
        member = self._members[sender.worker]
        if arrive.purpose != "meet":
            self._model.check_held()
        if self._model.fault:
            raise UsageError(self._model.fault)
        if member.begun or member.leaving:
            raise UsageError("arrive: in the middle of a step, or after the last one")
        self._meetings.check_not_there("arrive", sender.worker)
        self._meetings.arrive(sender, arrive)

    def _look(self) -> None:
        """Whether those who have arrived have met by now."""
        meets = self._meetings.is_under_way()
        if self._meetings.look():
            self.counts["loads that nobody has brought"] += 1
            self._take_load()
        if meets or self._meetings.is_under_way():
            # Steps may have ended without those who are here, or they have met.
            self._let_go()

    def _load(self, sender: Sender, load: Load, payload: torch.Tensor | None) -> None:
        self._check_may_load("load", sender.worker)
        self._incoming.take_parameters(load.bucket, payload)
        self._answers.send(sender, Done())
        if self._incoming.is_whole():
            self._take_load()

    def _load_state(
        self, sender: Sender, load: LoadState, payload: torch.Tensor | None
    ) -> None:
        self._check_may_load("load-state", sender.worker)
        self._incoming.take_state(load, payload)
        self._answers.send(sender, Done())

    def _load_rest(
        self, sender: Sender, load: LoadRest, payload: torch.Tensor | None
    ) -> None:
        self._model.check_held()
        self._check_may_load("load-rest", sender.worker)
        self._incoming.take_rest(load.start, payload)
        self._answers.send(sender, Done())

    def _check_may_load(self, what: str, worker: int) -> None:
        if self._model.is_loaded and worker != self._meetings.leader:
            raise UsageError(
                f"{what}: this server has parameters, and others go on from them: "
                f"{HOW_TO_LOAD}"
            )
        self._incoming.begin(worker)

    def _take_load(self) -> None:
        """All that is to be loaded is here. Who trains is where all meet, and has nothing
        under way: what is held of those who died is from before."""
        goes_on = self._model.is_loaded
        self._incoming.put()
        if goes_on:
            step = self._meetings.step()
            self._model.store.catch_up(step)
            self._discipline.renew()
            self._discipline.resume(step)
            self._meetings.has_loaded()
        self._discipline.changed()
        self._let_go()

    # ---- the other requests ----

    def _push(self, sender: Sender, push: Push, payload: torch.Tensor | None) -> None:
        if not push.late:  # late units may come after their worker
            self._meetings.check_not_there("push", sender.worker)
        held = self._pushes.take(sender, push, payload)
        is_last = not push.late and self.clock(sender.worker) > push.step
        self._discipline.pushed(held)
        if is_last:  # of its step
            self._discipline.changed()
        self._let_go()

    def _pull(self, sender: Sender, pull: Pull, _: object) -> None:
        self._pulls.ask_parameters(sender, pull)

    def _pull_rest(
        self, sender: Sender, pull: PullRest | PullBuffers, _: object
    ) -> None:
        self._pulls.ask_rest(sender, pull)
        if isinstance(pull, PullBuffers):
            self._members[sender.worker].has_buffers = True

    def _pull_state(self, sender: Sender, pull: PullState, _: object) -> None:
        self._pulls.ask_state(sender, pull)

    def _decide(self, sender: Sender, decide: Decide, _: object) -> None:
        self._model.check_held()
        self._discipline.decided(decide.step, decide.workers)
        self._answers.send(sender, Done())
        self._let_go()

    def _pull_norm(self, sender: Sender, pull: PullNorm, _: object) -> None:
        if self._model.fault:
            raise UsageError(self._model.fault)
        self._clipping("pull-norm")
        self._members.check_step("pull-norm", pull.step)
        self._norms.append((sender, pull.step))
        self._let_go()

    def _norm(self, sender: Sender, norm: Norm, _: object) -> None:
        clipped = self._clipping("norm")
        self._members.check_step("norm", norm.step)
        if norm.squares < 0:  # what is not finite shows in the gradients
            raise UsageError(f"norm: expected a sum of squares, got {norm.squares}")
        clipped.norm(norm.step, norm.squares)
        self._answers.send(sender, Done())
        self._let_go()

    def _clipping(self, what: str) -> ClippedSteps:
        if self._discipline.clipped is None:
            raise UsageError(f"{what}: nothing is clipped on this server")
        return self._discipline.clipped

    def _let_go(self) -> None:
        """Answer who waited for what is known by now."""
        self._pulls.let_go()
        waiting, self._norms = self._norms, []
        for sender, step in waiting:
            part = self._clipping("pull-norm").part(step)
            if part is None:
                self._norms.append((sender, step))
            else:
                answer = NormPart(squares=part.squares, counted=list(part.counted))
                self._answers.send(sender, answer)

    def _blend(
        self, sender: Sender, blend: Blend, payload: torch.Tensor | None
    ) -> None:
        member, kept = self._members[sender.worker], self._rest.buffers
        if member.guest and not member.has_buffers and kept is not None:
            # Those of a script that begins at its top are not what training has made.
            self._answers.send(sender, Blended(), kept)
        else:
            self._answers.send(sender, Blended(), self._rest.blend(blend, payload))
        member.has_buffers = True

    def _reduce(
        self, sender: Sender, reduce: Reduce, payload: torch.Tensor | None
    ) -> None:
        self._reductions.add(sender, reduce, payload)

    def _note(self, sender: Sender, note: Note, _: object) -> None:
        if note.guest:
            self._members[sender.worker].guest = True
        if note.step and self._model.is_held:
            self._pulls.go_on("note", sender.worker, note.step)
            self._let_go()
        self._answers.send(sender, Done())
