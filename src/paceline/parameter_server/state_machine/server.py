"""The parameter server as a state machine: no I/O, no clock, no threads.

Transitions
-----------
========== ============================================== ==============================
event      what changes                                   answer
========== ============================================== ==============================
join       The worker takes part from step 0, or where    `Joined`; `Refused` where it
           it was missed before from the step that the    trains something else than the
           discipline names, and in any case after its    first worker
           gradients that were applied. An older life of
           it is lost.
           One whose older life has left is told so.
arrive     The worker sends nothing, until it has met     `Met`, when all have arrived and
           all others that train.                         the load is here; earlier to the
                                                          worker that leads the load;
                                                          `Refused` where the others will
                                                          not come (see `barriers`)
load,      With the last bucket's parameters all of the   `Done`; `Refused` to others than
load-state, load takes effect: the discipline begins      the leader, once loaded
load-rest  anew, and pulls and meetings go on.
pull       -                                              `Parameters`, once loaded, when
                                                          the discipline allows all buckets
pull-rest, -                                              `Rest`, `Blended`, once loaded
pull-buffers
push       The discipline takes it, once per (worker,     `Parameters`, when the
           life, step, bucket, main or late). The step's  discipline says so; `Refused`
           last main push moves the worker's clock. A     out of order (see `pushes`),
           step beyond it, which another server named,    and where nothing can take what
           leaves out those before.                       it brings: parts, or a report
decide     The discipline is told who counts for a step:  `Done`
           server 0 has decided it.
pull-norm  -                                              `NormPart`, once all of the
                                                          step's mean is here
norm       The step's mean is scaled, and applied.        `Done`
blend      The model's buffers are mixed.                 `Blended`
pull-state -                                              `OptimizerState`; of units, once
                                                          all updates before the step are
                                                          in them; `Refused` beyond the
                                                          worker's next step
reduce     The part is added, in rank order.              `Reduced`, to all, with the
                                                          last part
note       The worker is alive. One that joined at a      `Done`
           later step elsewhere begins with that here.
leave      Nobody waits for the worker's gradients.       `Done`, once nobody trains, or
                                                          is to come back; `Refused` in
                                                          mid-step
lost       Nobody waits for the worker's gradients; those -
           that have come still count.
timer      The discipline acts.                           `Parameters`, as it says
========== ============================================== ==============================

Law: a request that comes again is not done again, and is answered again if it had been
answered. Each request says which answers its worker has; only those are forgotten.

Where workers disagree about a step's hyperparameters, or about its units, training cannot go
on: all pushes and pulls that wait are refused, and all pushes that come.

Modules
-------
- `shard`: the parameters (`store`), who trains them (`members`), and the method's discipline,
  which decides when somebody is answered; `shard.ClippedSteps` holds a step's updates until its norm is
  known.
- `admission`: who is let in, and what is trained.
- `replies`: what was asked before, and what is to leave.
- `pushes`, `pulls`, `norms`, `reductions`: what is asked for, and waits.
- `barriers`, `loads`: where all wait for all, and what is loaded then.
- `untrained`: frozen parameters and buffers.
- here: who comes and goes, and which room an event concerns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch

from paceline.errors import UsageError
from paceline.interfaces import Answer, Coordinated, Discipline, Meshed, Sender, Work
from paceline.interfaces.server_messages import (
    Arrive,
    Blend,
    Blended,
    Decide,
    Done,
    Introduce,
    Join,
    Leave,
    Load,
    LoadRest,
    LoadState,
    Norm,
    Note,
    PeerRequest,
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
from paceline.parameter_server.state_machine.admission import Admission, Make
from paceline.parameter_server.state_machine.barriers import Meetings
from paceline.parameter_server.state_machine.norms import Norms
from paceline.parameter_server.state_machine.pending_loads import Loads
from paceline.parameter_server.state_machine.pulls import Pulls
from paceline.parameter_server.state_machine.pushes import Pushes
from paceline.parameter_server.state_machine.reductions import Reductions
from paceline.parameter_server.state_machine.replies import Answers
from paceline.parameter_server.state_machine.shard import HeldShard
from paceline.parameter_server.state_machine.untrained_tensors import HeldRest


class ParameterServer:
    """The `Server`.

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
        make: Make | None = None,
        remembers: bool = True,
    ) -> None:
        self.workers = workers
        self.shard = HeldShard(
            workers,
            discipline,
            lambda push, counted: self._pulls.answer(push, counted),
            self._stop,
        )
        self._members = self.shard.members
        self.counts = self.shard.counts
        self._answers = Answers(name, self._members, self.counts, remembers)
        self._rest = HeldRest()
        self._pushes = Pushes(self.shard)
        self._pulls = Pulls(
            self.shard,
            self._pushes,
            self._answers,
            self._rest,
            lambda: self._meetings.loads,
            lambda worker: self._meetings.may_pull(worker),
        )
        self._meetings = Meetings(self.shard, self._pushes, self._pulls, self._answers)
        self._loads = Loads(self.shard, self._rest, self._meetings, self._answers)
        self._norms = Norms(self.shard, self._answers)
        self._reductions = Reductions(self._members, self._answers)
        self._admission = Admission(
            workers, self.shard, self._meetings, self._answers, make
        )
        self._leaves: list[Sender] = []
        self._handlers: dict[type, Callable[[Sender, Any], None]] = {
            Join: self._admission.join,
            Arrive: self._arrive,
            Pull: self._pulls.ask_parameters,
            PullRest: self._pulls.ask_rest,
            PullBuffers: self._pulls.ask_buffers,
            PullState: self._pulls.ask_state,
            Leave: self._leave,
            Note: self._note,
            Decide: self._decide,
            PullNorm: self._pull_norm,
            Norm: self._norm,
            Introduce: self._of_another_kind,
        }
        self._taking: dict[type, Callable[[Sender, Any, torch.Tensor | None], None]] = {
            Load: self._load,
            LoadRest: self._loads.take_rest,
            LoadState: self._loads.take_state,
            Push: self._push,
            Reduce: self._reductions.add,
            Blend: self._blend,
            Say: self._of_another_kind,
            **dict.fromkeys(get_args(PeerRequest), self._of_another_kind),
        }
        """Of requests that have a payload."""

    # ---- the `Server` ----

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        self.shard.now = now
        joins = isinstance(message, Join)
        if joins:
            self._hear_of(sender.worker, sender.incarnation)
        stranger = self._members.stranger(sender, joins)
        if stranger:
            self._answers.turn_away(sender, stranger)
        elif self._answers.is_new(sender):
            try:
                self._handle(sender, message, payload)
            except UsageError as error:
                self._answers.refuse(sender, str(error))
        return self._done()

    def _handle(
        self, sender: Sender, message: Request, payload: torch.Tensor | None
    ) -> None:
        taking = self._taking.get(type(message))
        if taking is not None:
            taking(sender, message, payload)
        else:
            self._handlers[type(message)](sender, message)

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        self.shard.now = now
        self._hear_of(worker, incarnation)
        if self._members.is_alive(worker, incarnation):
            self._lose(worker)
        return self._done()

    def next_deadline(self) -> float | None:
        return self.shard.next_deadline()

    def on_timer(self, now: float) -> list[Answer]:
        self.shard.now = now
        self.shard.timer(now)
        return self._done()

    def take_work(self) -> Work:
        work = self.shard.take_work()
        return work._replace(added=work.added + self._reductions.take_added())

    def _done(self) -> list[Answer]:
        """Something has happened: whether those who have arrived have met by now, and what
        is to leave."""
        meets = self._meetings.is_under_way()
        if self._meetings.look():
            self.counts["loads that nobody has brought"] += 1
            self._take_load()
        if meets or self._meetings.is_under_way():
            # Steps may have ended without those who are here, or they have met.
            self._let_go()
        return self._answers.taken_out()

    # ---- who comes back ----

    def wait_for_the_lost(self) -> None:
        """From now on lost workers come back: those that leave are told that all is over
        only then."""
        self._members.return_from_loss = True

    def on_done(self, worker: int, now: float) -> list[Answer]:
        """A worker's script has ended well: if it is not here, it does not come back."""
        self.shard.now = now
        self._members.is_done(worker)
        self._somebody_has_gone()
        return self._done()

    def missing(self) -> list[int]:
        """Workers that are to come, or to come back, and have not."""
        return self._members.missing()

    # ---- snapshots ----

    def is_over(self) -> bool:
        """Workers were here, and nobody trains any more, or is to come."""
        return self._members.is_over()

    def is_quiet(self) -> bool:
        """No push is unanswered, and no worker in the middle of its pushes."""
        return self._pushes.are_all_answered() and self._members.is_between_steps()

    def ended(self) -> int | None:
        """The first step that workers may do after a snapshot of this moment, if any."""
        return self.shard.ended()

    def snapshot(self) -> dict[str, Any]:
        """What `restore` goes on from: copied tensors, and plain values. Empty while
        there is nothing to go on from, or a step has ended for some buckets only."""
        shard = self.shard
        step = self.ended() if shard.is_loaded and not shard.fault else None
        if step is None:
            return {}
        return {
            "workers": self.workers,
            "join": self._admission.saved(),
            "step": step,
            "counts": dict(self.counts),
            "store": shard.store.saved(),
            "rest": self._rest.saved(),
            "load": self._meetings.loads,
        }

    def restore(self, saved: dict[str, Any]) -> int:
        """Go on from a `snapshot`, before anybody has joined: workers begin with its step,
        which is returned, or after the gradients of theirs that are in it. Raises `UsageError` where it does not fit this server."""
        if saved["workers"] != self.workers:
            raise UsageError(
                f"the snapshot is of {saved['workers']} workers, and this job has "
                f"{self.workers}: start as many as before, or remove the file"
            )
        self._admission.restore(saved["join"])
        self.shard.store.restore(saved["store"])
        self._rest.restore(saved["rest"])
        self._meetings.loads = int(saved["load"])
        self.counts.update(saved["counts"])
        self.resume(int(saved["step"]))
        return int(saved["step"])

    def resume(self, step: int) -> None:
        """Training goes on with *step*, and with each worker where its own gradients end."""
        self._members.begin_with(step, self._own_steps())
        self.shard.resume(step)

    def _own_steps(self) -> dict[int, int]:
        """By worker, the step at which its gradients end that are here."""
        return {w: self.shard.next_step(w) for w in range(self.workers)}

    # ---- who takes part ----

    def _hear_of(self, worker: int, incarnation: int) -> None:
        """An incarnation of a worker is there, or was: one before it is lost."""
        if self._members.is_one(worker):
            if self._members.has_older(worker, incarnation):
                self._lose(worker)
            self._members.hear_of(worker, incarnation)

    def _of_another_kind(self, *_: object) -> None:
        raise UsageError("those are the words of another kind of service")

    def _arrive(self, sender: Sender, arrive: Arrive) -> None:
        self._loads.arrive(sender, arrive)
        if isinstance(self.shard.discipline, Meshed):
            self.shard.changed()  # a group may do without who waits for other groups

    def _leave(self, sender: Sender, leave: Leave) -> None:
        member = self._members[sender.worker]
        if member.begun:
            raise UsageError("leave: in the middle of a step")
        self._meetings.check_not_there("leave", sender.worker)
        self._pushes.check_late_units("leave", sender.worker, member.clock, "it leaves")
        self._members.leave(sender.worker)
        self._leaves.append(sender)
        self._somebody_has_gone()

    def _lose(self, worker: int) -> None:
        """Nobody waits for a worker, and it is told nothing any more."""
        self._members.lose(worker)
        self._meetings.forget(worker)
        self._loads.forget(worker)
        self._pushes.forget(worker)
        self._pulls.forget(worker)
        self._norms.forget(worker)
        self.shard.forget(worker)
        self._leaves = [s for s in self._leaves if s.worker != worker]
        self.counts["workers lost"] += 1
        self._somebody_has_gone()

    def _somebody_has_gone(self) -> None:
        """Let go of those who waited for them."""
        if self.shard.is_held:
            self.shard.changed()
            self._let_go()
        self._reductions.answer_ended()
        if self._members.nobody_trains():
            leaves, self._leaves = self._leaves, []
            for sender in leaves:
                self._answers.send(sender, Done())

    # ---- what a request sets off ----

    def _push(self, sender: Sender, push: Push, payload: torch.Tensor | None) -> None:
        if not push.late:  # late units may come after their worker
            self._meetings.check_not_there("push", sender.worker)
        held = self._pushes.take(sender, push, payload)
        is_last = not push.late and self._members.clock(sender.worker) > push.step
        self.shard.discipline.pushed(self.shard, held)
        self.shard.settle()
        if is_last:  # of its step
            self.shard.changed()
        self._let_go()

    def _load(self, sender: Sender, load: Load, payload: torch.Tensor | None) -> None:
        if self._loads.take_parameters(sender, load, payload):
            self._take_load()

    def _take_load(self) -> None:
        self._loads.put()
        self._let_go()

    def _decide(self, sender: Sender, decide: Decide) -> None:
        self.shard.check_held()
        discipline = self.shard.discipline
        if not isinstance(discipline, Coordinated):
            raise UsageError("decide: nothing is decided under this method")
        discipline.decided(self.shard, decide.step, decide.workers)
        self.shard.settle()
        self._answers.send(sender, Done())
        self._let_go()

    def _pull_norm(self, sender: Sender, pull: PullNorm) -> None:
        self._norms.ask(sender, pull)
        self._let_go()

    def _norm(self, sender: Sender, norm: Norm) -> None:
        self._norms.take(sender, norm)
        self._let_go()

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

    def _note(self, sender: Sender, note: Note) -> None:
        if note.step and self.shard.is_held:
            self._pulls.begin_with(sender.worker, note.step)  # may refuse
        if note.guest:
            self._members[sender.worker].guest = True
        if note.elsewhere:
            self.shard.forget(sender.worker)
        if note.step and self.shard.is_held:
            self._let_go()
        self._answers.send(sender, Done())

    def _let_go(self) -> None:
        """Answer those who waited for what is known by now."""
        self._pulls.let_go()
        self._norms.let_go()

    def _stop(self) -> None:
        """Training cannot go on: let nobody wait for it."""
        fault, waiting = self.shard.fault, self._norms.give_up()
        self._meetings.give_up(fault)
        for sender in [*self._pushes.give_up(), *waiting]:
            self._answers.refuse(sender, fault)
