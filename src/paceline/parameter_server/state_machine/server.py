"""The parameter server as a state machine: no I/O, no clock, no threads.

`ParameterServer` takes one event at a time, and returns the replies that leave with it.
`TRANSITIONS` has a row for each event: its changes, and when it is answered.

If workers disagree about a step's hyperparameters, or about its units, training cannot continue:
the server refuses all waiting pushes and pulls, and all later pushes.

Its parts:

- `shard`: the parameters (`store`), and the method's discipline, which decides when they are
  updated and which workers get replies. `shard.ClippedStep` holds a step's updates until its norm
  is known.
- `members`: the workers, and their steps.
- `pushes`: accepts pushes.
- `barriers`: barriers of all workers, and loads.
- `reductions`: all-reduces.
- `replies`: the replies that leave when a transition ends.
- this module: joins, pulls, leaves, snapshots, and the consequences of each event.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import (
    Discipline,
    GroupServerDiscipline,
    Reply,
    Sender,
    Service,
    Work,
)
from paceline.interfaces.server_messages import (
    Buffers,
    Decide,
    Done,
    EnterBarrier,
    Join,
    Joined,
    KeepAlive,
    Leave,
    Load,
    LoadState,
    LoadUntrained,
    MixBuffers,
    OptimizerState,
    Pull,
    PullBuffers,
    PullState,
    PullUntrained,
    Push,
    Reduce,
    Request,
    Untrained,
)
from paceline.parameter_server.state_machine.barriers import (
    Barrier,
    BarrierEvent,
    PendingLoad,
)
from paceline.parameter_server.state_machine.members import Members
from paceline.parameter_server.state_machine.pushes import PushOrder
from paceline.parameter_server.state_machine.reductions import Reductions
from paceline.parameter_server.state_machine.replies import ReplyQueue
from paceline.parameter_server.state_machine.shard import NOTHING_HELD, ModelShard
from paceline.parameter_server.state_machine.store import UntrainedTensors


class Transition(NamedTuple):
    """The effect of an event.

    Attributes:
        handler: The method of `ParameterServer` that handles it.
        changes: Its changes, for the documentation.
        reply: Its reply, for the documentation.
        on_parameters: Whether a server that only reduces rejects it.
    """

    handler: str
    changes: str
    reply: str
    on_parameters: bool = False


TRANSITIONS: dict[type | str, Transition] = {
    Join: Transition(
        "_on_join",
        "The worker becomes active. It begins with the step that the discipline names, or after "
        "its last applied gradient if that is later. Its older incarnation counts as lost.",
        "`Joined`, at once or after a barrier in progress; `Rejected` if its model or options "
        "differ from the first worker's",
    ),
    EnterBarrier: Transition(
        "_on_enter_barrier",
        "The worker sends nothing until all other active workers have entered.",
        "`BarrierPassed`, when all have entered and a load is complete; the leader of the load "
        "gets it before it loads; `Rejected` if the other workers cannot enter",
    ),
    Load: Transition(
        "_on_load",
        "The load takes effect as a whole, with the parameters of the last bucket. A new "
        "discipline starts; waiting pulls and the barrier continue.",
        "`Done`; after the first load, `Rejected` if the sender does not lead the load",
        on_parameters=True,
    ),
    LoadState: Transition(
        "_on_load_state", "As `Load`.", "as `Load`", on_parameters=True
    ),
    LoadUntrained: Transition(
        "_on_load_untrained", "As `Load`.", "as `Load`", on_parameters=True
    ),
    Pull: Transition(
        "_on_pull",
        "If another server admitted the worker at a later step, it begins with that step.",
        "`Parameters`, after the first load, when the discipline allows all buckets",
        on_parameters=True,
    ),
    PullUntrained: Transition(
        "_on_pull_untrained",
        "-",
        "`Untrained`, after the first load",
        on_parameters=True,
    ),
    PullBuffers: Transition(
        "_on_pull_buffers", "-", "`Buffers`, after the first load", on_parameters=True
    ),
    PullState: Transition(
        "_on_pull_state",
        "-",
        "`OptimizerState`; for a pull of units, after all updates before the step; `Rejected` "
        "for a step after the worker's next one",
        on_parameters=True,
    ),
    Push: Transition(
        "_on_push",
        "The discipline gets the gradient, once per worker, incarnation, step, bucket, and main or late "
        "push. The step's last main push moves the worker's clock.",
        "`Parameters`, when the discipline decides; `Rejected` if it is out of order, or if the "
        "server cannot apply its content",
        on_parameters=True,
    ),
    Decide: Transition(
        "_on_decide",
        "The discipline learns which workers count in a step, as server 0 has decided.",
        "`Done`",
        on_parameters=True,
    ),
    MixBuffers: Transition(
        "_on_mix_buffers",
        "The server mixes the worker's buffers into its own.",
        "`Buffers`",
    ),
    Reduce: Transition(
        "_on_reduce",
        "The server adds the worker's part, in rank order.",
        "`Reduced`, to all workers, after the last part",
    ),
    KeepAlive: Transition(
        "_on_keep_alive",
        "The worker counts as alive. If it joined another server at a later step, it begins with "
        "that step here, too.",
        "`Done`",
    ),
    Leave: Transition(
        "_on_leave",
        "Other workers stop waiting for its gradients.",
        "`Done`, when all workers have left; `Rejected` in the middle of a step",
    ),
    "worker lost": Transition(
        "on_worker_lost",
        "Other workers stop waiting for its gradients. Gradients that have arrived still count.",
        "-",
    ),
    "worker finished": Transition(
        "on_worker_finished",
        "The worker's script has ended well, so the server waits for no restart of it.",
        "-",
    ),
    "timer": Transition(
        "on_timer", "The discipline acts.", "`Parameters`, when the discipline decides"
    ),
}
"""Handlers by request or other event. Other requests belong to other kinds of services."""

MakeDiscipline = Callable[[str], Discipline | None]
"""Makes a discipline from the method's spec when the first worker joins; None if the server only
reduces."""


class ParameterServer(Service):
    """A server that holds a part of the model, or only reduces, for *workers* workers.

    Args:
        workers: Number of workers.
        make_discipline: Makes a discipline, at the first join and after each load. Without it, the
            server holds no parameters, and only reduces.
        name: The server's name in its log.
    """

    def __init__(
        self,
        workers: int,
        make_discipline: MakeDiscipline = lambda method: None,
        name: str = "server",
    ) -> None:
        self.workers = workers
        self.counts: Counter[str] = Counter()
        """Counts of events, for reports."""
        self.members = Members(workers)
        self.replies = ReplyQueue(name, self.members, self.counts)
        self.shard = ModelShard(self.members, self.counts, self.replies)
        self.untrained = UntrainedTensors()
        self.pushes = PushOrder(self.shard)
        self.barrier = Barrier(self.shard, self.pushes, self.replies)
        self.load = PendingLoad(self.shard, self.untrained, self.barrier)
        self.reductions = Reductions(self.members, self.replies)
        self._make_discipline = make_discipline
        self._first_join: Join | None = None
        """The description of the training, from the first worker or a snapshot."""
        self._restored = False
        self._stopped = False
        """Whether waiting workers were informed of a fault."""
        self._pulls: list[tuple[Sender, Pull]] = []
        """Waiting pulls."""
        self._untrained_pulls: list[tuple[Sender, PullUntrained | PullBuffers]] = []
        self._state_pulls: list[tuple[Sender, PullState]] = []
        self._leaves: list[Sender] = []

    # ---- events ----

    def on_request(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Reply]:
        self.shard.now = now
        joins = isinstance(message, Join)
        if joins:
            self._notice_incarnation(sender.worker, sender.incarnation)
        unknown = self.members.why_unknown(sender, joins)
        if unknown:
            self.replies.reject_unknown(sender, unknown)
            return self._finish()
        try:
            transition = TRANSITIONS.get(type(message))
            if transition is None:
                raise UsageError(
                    f"{type(message).__name__}: expected a request of a parameter server"
                )
            if transition.on_parameters and not self.shard.is_held:
                raise UsageError(NOTHING_HELD)
            getattr(self, transition.handler)(sender, message, payload)
        except UsageError as error:
            self.replies.reject(sender, str(error))
        return self._finish()

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> list[Reply]:
        self.shard.now = now
        self._notice_incarnation(worker, incarnation)
        if self.members.is_alive(worker, incarnation):
            self._lose(worker)
        return self._finish()

    def on_worker_finished(self, worker: int, now: float) -> list[Reply]:
        """Note that a worker's script has ended well: if it is absent, it does not come back."""
        self.shard.now = now
        self.members.is_done(worker)
        self._after_departure()
        return self._finish()

    def next_deadline(self) -> float | None:
        return self.shard.discipline.next_deadline()

    def on_timer(self, now: float) -> list[Reply]:
        self.shard.now = now
        self.shard.on_timer(now)
        return self._finish()

    def take_work(self) -> Work:
        work = self.shard.take_work()
        return work._replace(added=work.added + self.reductions.take_added())

    def _finish(self) -> list[Reply]:
        """End a transition: handle its consequences, and return the replies that leave."""
        if self.shard.fault and not self._stopped:
            self._stop()
        if not self.barrier.is_idle():
            self._advance_barrier()
        while self.barrier.admissible:
            self._admit(self.barrier.admissible.pop(0))
        return self.replies.take()

    def _stop(self) -> None:
        """Reject all waiting requests, because training cannot continue."""
        self._stopped = True
        self.barrier.give_up(self.shard.fault)
        self._grant_pulls()

    # ---- joining ----

    def _notice_incarnation(self, worker: int, incarnation: int) -> None:
        """Note an incarnation of a worker, present or lost: an earlier one is lost."""
        if self.members.is_one(worker):
            if self.members.has_older(worker, incarnation):
                self._lose(worker)
            self.members.note_incarnation(worker, incarnation)

    def _on_join(
        self, sender: Sender, join: Join, payload: torch.Tensor | None
    ) -> None:
        worker = sender.worker
        if self.members[worker].joined:
            raise UsageError(f"join: worker {worker} has joined before")
        if self._first_join is None:
            self._hold(join)
        else:
            _require_same(self._first_join, join, worker, self._restored)
        if self.barrier.is_under_way() and not self.members.is_awaited(worker):
            self.barrier.postpone(sender)
        else:
            self._admit(sender)

    def _hold(self, join: Join) -> None:
        """Make room for the model that *join* describes.

        Raises `UsageError`, with nothing changed, if this server cannot hold it.
        """
        discipline = self._new_discipline(join)
        if discipline is not None:
            self.shard.hold(discipline, join)
            self.barrier.follows = bool(join.shard) and discipline.follows_first_server
        self._first_join = join

    def _new_discipline(self, join: Join) -> Discipline | None:
        discipline = self._make_discipline(join.method)
        if discipline is not None and join.shard and discipline.follows_first_server:
            discipline.follow()
        return discipline

    def _admit(self, sender: Sender) -> None:
        members, loads, worker = self.members, self.shard.loads, sender.worker
        step, late = members.begin, self._restored
        if not members.is_awaited(worker):
            step = self.shard.discipline.first_step(self.shard)
            late = late or members.has_begun_training() or loads > 0
        own = self.shard.next_step(worker)
        members.join(worker, max(step, own), late)
        joined = Joined(
            step=step,
            loaded=self.shard.is_loaded,
            own=own,
            load=loads,
            late_joiner=late,
            over=members.has_left(worker),
        )
        self.replies.reply(sender, joined)

    def _on_keep_alive(
        self, sender: Sender, message: KeepAlive, payload: torch.Tensor | None
    ) -> None:
        worker = sender.worker
        if message.step and self.shard.is_held:
            # The step may be refused.
            self._begin_with(worker, message.step)
        if message.late_joiner:
            self.members[worker].late_joiner = True
        if message.moved_away and self.shard.compression is not None:
            self.shard.compression.forget(worker)
        if message.step and self.shard.is_held:
            self._grant_pulls()
        self.replies.reply(sender, Done())

    # ---- training ----

    def _on_push(
        self, sender: Sender, push: Push, payload: torch.Tensor | None
    ) -> None:
        # Late units may arrive after their worker is at a barrier.
        if not push.late:
            self.barrier.check_not_there("push", sender.worker)
        taken = self.pushes.accept(sender, push, payload)
        self.shard.on_push(taken)
        if not push.late and self.members[sender.worker].clock > push.step:
            self.shard.on_change()
        if self._pulls or self._state_pulls:
            self._grant_pulls()

    def _on_decide(
        self, sender: Sender, decide: Decide, payload: torch.Tensor | None
    ) -> None:
        self.shard.discipline.on_decision(self.shard, decide.step, decide.workers)
        self.shard.apply_ready_updates()
        self.replies.reply(sender, Done())
        self._grant_pulls()

    def _on_reduce(
        self, sender: Sender, reduce: Reduce, payload: torch.Tensor | None
    ) -> None:
        self.reductions.add(sender, reduce, payload)

    def _on_mix_buffers(
        self, sender: Sender, mix: MixBuffers, payload: torch.Tensor | None
    ) -> None:
        member, kept = self.members[sender.worker], self.untrained.buffers
        if member.late_joiner and not member.has_buffers and kept is not None:
            # Buffers of a restarted script do not contain any training.
            self.replies.reply(sender, Buffers(), kept)
        else:
            self.replies.reply(sender, Buffers(), self.untrained.mix(mix, payload))
        member.has_buffers = True

    # ---- leaving ----

    def _on_leave(
        self, sender: Sender, leave: Leave, payload: torch.Tensor | None
    ) -> None:
        member = self.members[sender.worker]
        if member.begun:
            raise UsageError("leave: in the middle of a step")
        self.barrier.check_not_there("leave", sender.worker)
        self.pushes.check_late_units(
            "leave", sender.worker, member, member.clock, "it leaves"
        )
        self.members.leave(sender.worker)
        self._leaves.append(sender)
        self._after_departure()

    def _lose(self, worker: int) -> None:
        """Stop waiting for a worker, and send it nothing more."""
        self.members.lose(worker)
        self.barrier.forget(worker)
        self.load.forget(worker)
        self.shard.forget(worker)
        self._pulls = _without(worker, self._pulls)
        self._untrained_pulls = _without(worker, self._untrained_pulls)
        self._state_pulls = _without(worker, self._state_pulls)
        self._leaves = [sender for sender in self._leaves if sender.worker != worker]
        self.counts["workers lost"] += 1
        self._after_departure()

    def _after_departure(self) -> None:
        """Answer the workers that waited for one that has left."""
        if self.shard.is_held:
            self.shard.on_change()
            self._grant_pulls()
        self.reductions.finish_complete()
        if self.members.none_trains():
            leaves, self._leaves = self._leaves, []
            for sender in leaves:
                self.replies.reply(sender, Done())

    # ---- barriers and loads ----

    def _on_enter_barrier(
        self, sender: Sender, arrive: EnterBarrier, payload: torch.Tensor | None
    ) -> None:
        self.barrier.arrive(sender, arrive)
        if isinstance(self.shard.discipline, GroupServerDiscipline):
            # A group need not wait for workers at other groups' barriers.
            self.shard.on_change()

    def _advance_barrier(self) -> None:
        event = self.barrier.advance(self._waiting_to_pull())
        if event is BarrierEvent.MAY_PULL:
            self._grant_pulls()
            event = self.barrier.advance(self._waiting_to_pull())
        if event is BarrierEvent.NOTHING_TO_LOAD:
            self.counts["loads that nobody has brought"] += 1
            self._complete_load()
        elif event is BarrierEvent.STEPS_GO_ON:
            self.shard.on_change()
        # Steps may have ended without the workers at the barrier, or the barrier was passed.
        self._grant_pulls()

    def _on_load(
        self, sender: Sender, load: Load, payload: torch.Tensor | None
    ) -> None:
        is_whole = self.load.take_parameters(sender.worker, load, payload)
        self.replies.reply(sender, Done())
        if is_whole:
            self._complete_load()

    def _on_load_state(
        self, sender: Sender, load: LoadState, payload: torch.Tensor | None
    ) -> None:
        self.load.take_state(sender.worker, load, payload)
        self.replies.reply(sender, Done())

    def _on_load_untrained(
        self, sender: Sender, load: LoadUntrained, payload: torch.Tensor | None
    ) -> None:
        self.load.take_untrained(sender.worker, load, payload)
        self.replies.reply(sender, Done())

    def _complete_load(self) -> None:
        goes_on = self.shard.is_loaded
        self.load.apply()
        if goes_on:
            self.renew(self.barrier.step())
            self.barrier.has_loaded()
        self.shard.on_change()
        self._grant_pulls()

    def renew(self, step: int) -> None:
        """Continue with a new discipline, because other parameters were loaded before *step*."""
        assert self._first_join is not None
        discipline = self._new_discipline(self._first_join)
        assert discipline is not None
        self.shard.renew(discipline, step)

    # ---- pulls ----

    def _on_pull(
        self, sender: Sender, pull: Pull, payload: torch.Tensor | None
    ) -> None:
        self.shard.store.check_bucket(pull.bucket)
        self._go_on_with("pull", sender.worker, pull.step)
        step = max(pull.step, self.members[sender.worker].first_step)
        self._pulls.append((sender, msgspec.structs.replace(pull, step=step)))
        self._grant_pulls()

    def _begin_with(self, worker: int, step: int) -> None:
        """Set the next step that a worker reports.

        If it has sent nothing yet, that may be an earlier one than the server knew, because another
        server has admitted it. Raises `UsageError` for a step too far ahead.
        """
        member = self.members[worker]
        if step < member.clock == member.first_step and self.pushes.is_idle(worker):
            member.begins_with(step)
        self._go_on_with("keep-alive", worker, step)

    def _go_on_with(self, what: str, worker: int, step: int) -> None:
        """Let a worker continue with *step*, and wait for no earlier step of it.

        Example: it has joined, and another server is further than this one; or it came too late for
        its own step. Raises `UsageError` for a step too far ahead.
        """
        if step > self.members[worker].clock and self.pushes.is_idle(worker):
            self.members.check_step(what, step)
            self.members.goes_on_with(worker, step)
            self.shard.on_change()

    def _on_pull_buffers(
        self, sender: Sender, pull: PullBuffers, payload: torch.Tensor | None
    ) -> None:
        self._on_pull_untrained(sender, pull, payload)
        self.members[sender.worker].has_buffers = True

    def _on_pull_untrained(
        self,
        sender: Sender,
        pull: PullUntrained | PullBuffers,
        payload: torch.Tensor | None,
    ) -> None:
        self._untrained_pulls.append((sender, pull))
        self._grant_pulls()

    def _on_pull_state(
        self, sender: Sender, pull: PullState, payload: torch.Tensor | None
    ) -> None:
        store, clock = self.shard.store, self.members[sender.worker].clock
        store.check_bucket(pull.bucket)
        store.elements(pull.bucket, pull.units)
        # A later state would wait for pushes that cannot arrive while the worker waits.
        if self._waits_for_updates(pull) and pull.step > clock + 1:
            raise UsageError(
                f"pull-state: expected a step up to {clock + 1} of worker {sender.worker}, "
                f"whose next step is {clock}, got step {pull.step}"
            )
        self._state_pulls.append((sender, pull))
        self._grant_pulls()

    def _waiting_to_pull(self) -> set[int]:
        return {sender.worker for sender, _ in self._pulls}

    def _grant_pulls(self) -> None:
        """Answer all pulls that may be answered by now."""
        if self._untrained_pulls and self.shard.is_loaded:
            pulls, self._untrained_pulls = self._untrained_pulls, []
            for sender, untrained_pull in pulls:
                self._send_untrained(sender, untrained_pull)
        if self._pulls:
            self._grant_parameters()
        if self._state_pulls:
            self._grant_states()

    def _send_untrained(self, to: Sender, pull: PullUntrained | PullBuffers) -> None:
        if isinstance(pull, PullBuffers):
            self.replies.reply(to, Buffers(), self.untrained.buffers)
            return
        try:
            part = self.untrained.part(pull.start, pull.most)
        except UsageError as error:
            self.replies.reject(to, str(error))
            return
        self.replies.reply(to, Untrained(whole=self.untrained.bytes.numel()), part)

    def _grant_parameters(self) -> None:
        shard = self.shard
        waiting, self._pulls = self._pulls, []
        for sender, pull in waiting:
            worker = sender.worker
            member = self.members[worker]
            # A worker that has left gets the current parameters: it does no step with them.
            if member.leaving or (
                shard.is_loaded
                and self.barrier.may_pull(worker)
                and shard.may_pull(pull.step)
            ):
                member.has_parameters = True
                self._send_all(sender, pull, is_last=member.leaving)
            elif shard.fault:
                self.replies.reject(sender, shard.fault)
            else:
                self._pulls.append((sender, pull))

    def _send_all(self, to: Sender, pull: Pull, is_last: bool) -> None:
        """Send all of a bucket, and note that the worker holds it.

        The server does not note it for a pull that only peeks, or if the worker needs no more
        replies.
        """
        shard, bucket = self.shard, pull.bucket
        values, sequence = shard.store.parameters(bucket), 0
        if shard.compression is not None and is_last:
            shard.compression.forget(to.worker)
        elif shard.compression is not None and not pull.peek:
            sequence = shard.compression.given(to.worker, bucket, values)
        notice = shard.discipline.notice(bucket)
        shard.send_parameters(to, bucket, values, sequence, (), notice)

    def _grant_states(self) -> None:
        shard = self.shard
        waiting, self._state_pulls = self._state_pulls, []
        for sender, pull in waiting:
            waits = self._waits_for_updates(pull)
            if waits and shard.fault:
                self.replies.reject(sender, shard.fault)
            elif waits and not shard.discipline.has_updates(
                shard, pull.step, pull.bucket, pull.units or ()
            ):
                self._state_pulls.append((sender, pull))
            else:
                self._send_state(sender, pull)

    def _send_state(self, to: Sender, pull: PullState) -> None:
        try:
            entries, payload = self.shard.store.state(pull.bucket, pull.units)
        except UsageError as error:
            # The pull may have waited, while the current request is another worker's.
            self.replies.reject(to, str(error))
            return
        self.replies.reply(to, OptimizerState(entries=entries), payload)

    def _waits_for_updates(self, pull: PullState) -> bool:
        """Return whether a pull waits for updates before its step.

        It does if it is of some units. A whole bucket's state is sent as it is.
        """
        partial = self.shard.discipline.accepts_partial_pushes
        return pull.units is not None and partial

    # ---- workers that come back ----

    def wait_for_the_lost(self) -> None:
        """Expect lost workers to come back: a leave is answered only when all workers have left."""
        self.members.return_from_loss = True

    def missing(self) -> list[int]:
        """Return workers that must still come, or come back."""
        return self.members.missing()

    def is_over(self) -> bool:
        """Return whether workers were here, and none is active or must still come."""
        return self.members.is_over()

    # ---- snapshots ----

    def is_quiet(self) -> bool:
        """Return whether no push is unanswered, and no worker is in the middle of its pushes."""
        return not self.shard.unanswered and self.members.is_between_steps()

    def completed_step(self) -> int | None:
        """Return the first step that workers may do after a snapshot taken now, if any."""
        return self.shard.completed_step()

    def snapshot(self) -> dict[str, Any]:
        """Return the state for `restore`: copied tensors, and plain values.

        It is empty while there is no such state, or a step has ended for some buckets only.
        """
        shard = self.shard
        step = self.completed_step() if shard.is_loaded and not shard.fault else None
        if step is None:
            return {}
        return {
            "workers": self.workers,
            "join": self.saved_join(),
            "step": step,
            "counts": dict(self.counts),
            "store": shard.store.saved(),
            "rest": self.untrained.saved(),
            "load": shard.loads,
        }

    def restore(self, saved: dict[str, Any]) -> int:
        """Continue from a `snapshot`, before any worker has joined.

        Workers begin with its step, which is returned, or after their own gradients in it. Raises
        `UsageError` if it does not fit this server.
        """
        if saved["workers"] != self.workers:
            raise UsageError(
                f"the snapshot is of {saved['workers']} workers, and this job has "
                f"{self.workers}: start as many as before, or remove the file"
            )
        self.restore_join(saved["join"])
        self.shard.store.restore(saved["store"])
        self.untrained.restore(saved["rest"])
        self.shard.loads = int(saved["load"])
        self.counts.update(saved["counts"])
        self.resume(int(saved["step"]))
        return int(saved["step"])

    def resume(self, step: int) -> None:
        """Continue with *step*, and with each worker after its own gradients."""
        self.members.begin_with(step, self._own_steps())
        self.shard.resume(step)

    def _own_steps(self) -> dict[int, int]:
        """Return, by worker, the step after its last applied gradient."""
        return {w: self.shard.next_step(w) for w in range(self.workers)}

    def saved_join(self) -> torch.Tensor:
        """Return the description of the training, as bytes."""
        join = bytearray(msgspec.msgpack.encode(self._first_join))
        return torch.frombuffer(join, dtype=torch.uint8).clone()

    def restore_join(self, saved: torch.Tensor) -> None:
        """Restore the result of `saved_join`, before any worker has joined."""
        self._hold(msgspec.msgpack.decode(saved.numpy().tobytes(), type=Join))
        self._restored = True


def _without(worker: int, waiting: Sequence[tuple[Sender, Any]]) -> list[Any]:
    return [one for one in waiting if one[0].worker != worker]


# ---- description of the training ----

SAME = (
    *("options", "method", "clip_norm", "servers"),
    *("compression", "replies"),
    *("optimizer", "tensors", "dtypes", "units"),
)
"""The fields of `Join` that must be equal on all workers."""
LONGEST = 200
"""Characters of a value in messages; longer values are shown by a digest."""


def description_of(join: Join) -> dict[str, str]:
    """Return the description of the training as text, by the names of fields."""
    return {name: _short(repr(getattr(join, name))) for name in SAME}


def _short(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"of digest {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return the name of the first field that differs; empty if there is none."""
    return next((name for name in SAME if ours.get(name) != theirs.get(name)), "")


def _require_same(first: Join, join: Join, worker: int, restored: bool) -> None:
    """Raise `UsageError` unless *worker* has the first one's training.

    *restored*: the first description comes from a snapshot.
    """
    for what in SAME:
        ours, theirs = getattr(first, what), getattr(join, what)
        if ours == theirs:
            continue
        if isinstance(ours, list):
            pairs = zip_longest(ours, theirs, fillvalue="nothing")
            ours, theirs = next(p for p in pairs if p[0] != p[1])
        if restored:
            raise UsageError(
                f"the snapshot is of another training: {what} is {ours!r} there and "
                f"{theirs!r} for worker {worker}; give the script and the options that "
                "it was made with, or remove the file"
            )
        raise UsageError(
            f"workers train different things: {what} is {ours!r} for who joined "
            f"first and {theirs!r} for worker {worker}; build the same model, with "
            "the same options, on every worker"
        )
