"""Barriers of all active workers: to load, or to reach a consistent cut.

A worker *arrives*: its request is answered when all active workers have arrived. Then no message is
in flight: each worker has the replies to all of its requests, and sends nothing.

- A *meet* is only that. The reply tells the lowest rank that it leads.
- At a *load*, the lowest rank of the workers that bring state leads. It gets its reply first, and
  sends the state from which all continue. When that is complete it takes effect, gradients of dead
  workers are dropped, and the others get their replies. If the leader dies before, the next one
  leads. Each worker then pulls the loaded state, and arrives once more: no worker sends a gradient
  before all have it.

Workers that come back
----------------------
A worker that comes back while others have arrived joins after the barrier. One that has joined and
has no parameters yet gets them then, or earlier if workers that have yet to arrive wait for its
gradients. A meet does not wait for a worker that has come back at a step which the others have yet
to do: it may have missed the point of the meet. Example: workers 0 and 1 meet after step 4; worker
2 died before, and has come back with step 5.

A point at which only some arrive
---------------------------------
The barrier does not wait for workers that have left. All others may still arrive, and it waits for
them, with two exceptions:

- All missing workers wait for those that have arrived, so none will come. A meet ends with the
  workers that are there; a load is refused. (If a step may end without some workers, it ends
  without those that have arrived, and the others come, too.)
- A worker without a step waits to load, and another one does steps: its script does not load there.
  That is refused, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto

import torch

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.interfaces.server_messages import (
    BarrierPassed,
    EnterBarrier,
    Load,
    LoadState,
    LoadUntrained,
)
from paceline.parameter_server.state_machine.pushes import PushOrder
from paceline.parameter_server.state_machine.replies import ReplyQueue
from paceline.parameter_server.state_machine.shard import ModelShard
from paceline.parameter_server.state_machine.store import State, UntrainedTensors

HOW_TO_LOAD = "every worker that trains calls paceline.load, or load_state_dict, after the same step"


class BarrierEvent(Enum):
    """The server's next action after `Barrier.advance`."""

    NOTHING = auto()
    NOTHING_TO_LOAD = auto()
    """All workers wait for a load, and none has anything to load: the load is complete."""
    MAY_PULL = auto()
    """Workers that have just joined may pull now; then check the barrier again."""
    STEPS_GO_ON = auto()
    """Steps end without the workers that wait here, so the discipline's active workers have
    changed."""


class Barrier:
    """The present barrier, if any."""

    def __init__(
        self, shard: ModelShard, pushes: PushOrder, replies: ReplyQueue
    ) -> None:
        self.leader: int | None = None
        """The worker that loads now; None: no worker does."""
        self.follows = False
        """Whether another server decides which workers a push waits for: then a push may be
        answered before any other arrives."""
        self.sees_all = True
        """Whether all workers push to this server, so that it knows which have trained."""
        self._shard = shard
        self._members = shard.members
        self._pushes = pushes
        self._replies = replies
        self._arrived: dict[int, tuple[Sender, EnterBarrier]] = {}
        self._members.at_barrier = self._arrived.keys()
        self._pulling: set[int] = set()
        """Workers that have not confirmed yet that they pulled the loaded state."""
        self._lets_pull = False
        """Whether a joining worker gets parameters although others are at the barrier."""
        self._postponed: dict[int, Sender] = {}
        self.admissible: list[Sender] = []
        """Workers with postponed joins that may join now."""

    # ---- events ----

    def arrive(self, sender: Sender, arrive: EnterBarrier) -> None:
        """Note a worker's arrival.

        Raises `UsageError` in the middle of a step, and for a worker that confirms a load without
        having been at it.
        """
        member = self._members[sender.worker]
        if arrive.kind != "meet":
            self._shard.check_held()
        if self._shard.fault:
            raise UsageError(self._shard.fault)
        if member.begun or member.leaving:
            raise UsageError(
                "enter-barrier: in the middle of a step, or after the last one"
            )
        self.check_not_there("enter-barrier", sender.worker)
        if arrive.kind == "pulled" and sender.worker not in self._pulling:
            raise UsageError(f"enter-barrier: worker {sender.worker} was not at a load")
        self._arrived[sender.worker] = sender, arrive

    def check_not_there(self, what: str, worker: int) -> None:
        """Raise `UsageError` for another request of a worker that has arrived."""
        if worker in self._arrived:
            raise UsageError(f"{what}: worker {worker} is at a barrier")

    def step(self) -> int:
        """Return the latest of the next steps of workers that have arrived."""
        return max(self._members[worker].clock for worker in self._arrived)

    def is_under_way(self) -> bool:
        return bool(self._arrived or self._pulling)

    def may_pull(self, worker: int) -> bool:
        """Return whether a worker may get parameters now.

        Workers at a load come first. A worker that has joined while others had arrived waits until
        the barrier ends.
        """
        if self._pulling:
            return worker in self._pulling
        member = self._members[worker]
        held = self._arrived and member.late_joiner and not member.has_parameters
        return self._lets_pull or not held

    def is_idle(self) -> bool:
        """Return whether `advance` has no work."""
        return not (
            self._arrived or self._pulling or self._postponed or self._lets_pull
        )

    def postpone(self, sender: Sender) -> None:
        """Let a worker that comes back join after the barrier.

        Raises `UsageError` for a worker that has asked before.
        """
        if sender.worker in self._postponed:
            raise UsageError(f"join: worker {sender.worker} has asked to join before")
        self._postponed[sender.worker] = sender

    def forget(self, worker: int) -> None:
        """Remove a lost worker."""
        self._arrived.pop(worker, None)
        self._postponed.pop(worker, None)
        self._members.left_out.discard(worker)
        self._pulling.discard(worker)
        if worker == self.leader:
            self.leader = None

    def has_loaded(self) -> None:
        """Note that the leader's load has taken effect."""
        self._shard.loads += 1
        self._pulling = set(self._arrived)
        if self.leader is not None:
            # Its request was answered before.
            del self._arrived[self.leader]
            self.leader = None
        self._release()

    # ---- workers at the barrier ----

    def advance(self, waiting_to_pull: Collection[int]) -> BarrierEvent:
        """Check after a change whether all workers have arrived.

        *waiting_to_pull* are the workers that wait for parameters.
        """
        if self.leader is not None or not self._pulling.issubset(self._arrived):
            return BarrierEvent.NOTHING
        if self._pulling or not self._arrived:
            self._end()
            return BarrierEvent.NOTHING
        purposes: set[str] = {arrive.kind for _, arrive in self._arrived.values()}
        missing = [w for w in self._members.trains() if self._is_awaited(w, purposes)]
        if missing:
            return self._look_for_mistakes(missing, purposes, waiting_to_pull)
        if not all(self._pushes.owes_nothing(worker) for worker in self._arrived):
            # Late units of their last steps are in flight.
            return BarrierEvent.NOTHING
        if len(purposes) > 1:
            self.give_up(self._different_purposes())
        elif "meet" in purposes:
            self._end()
        else:
            return self._choose_leader()
        return BarrierEvent.NOTHING

    def _is_awaited(self, worker: int, purposes: set[str]) -> bool:
        if worker in self._arrived:
            return False
        if not self._members.has_joined(worker):
            return True
        member = self._members[worker]
        if member.late_joiner and not member.has_parameters:
            # It gets its first parameters after the barrier.
            return False
        missed = member.late_joiner and member.first_step >= self.step()
        return not (missed and purposes == {"meet"})

    def _choose_leader(self) -> BarrierEvent:
        brings = [w for w, (_, arrive) in self._arrived.items() if arrive.brings]
        if not brings:
            return BarrierEvent.NOTHING_TO_LOAD
        self.leader = min(brings)
        sender, _ = self._arrived[self.leader]
        passed = BarrierPassed(leads=True, load=self._shard.loads)
        self._replies.reply(sender, passed)
        return BarrierEvent.NOTHING

    def _end(self) -> None:
        """End the barrier: all workers have arrived."""
        self._pulling, self._lets_pull = set(), False
        self._release()
        self._admit_postponed()

    def _release(self) -> None:
        """Answer the workers that have no reply yet."""
        self._members.left_out = set()
        arrived = self._taken()
        for worker, (sender, arrive) in arrived.items():
            leads = arrive.kind == "meet" and worker == min(arrived)
            self._replies.reply(
                sender, BarrierPassed(leads=leads, load=self._shard.loads)
            )

    def _taken(self) -> dict[int, tuple[Sender, EnterBarrier]]:
        """Return the workers that have arrived, and clear them."""
        arrived = dict(self._arrived)
        self._arrived.clear()
        return arrived

    def _admit_postponed(self) -> None:
        self.admissible += self._postponed.values()
        self._postponed = {}

    # ---- missing workers ----

    def _look_for_mistakes(
        self,
        missing: Sequence[int],
        purposes: set[str],
        waiting_to_pull: Collection[int],
    ) -> BarrierEvent:
        discipline = self._shard.discipline
        if purposes == {"meet"} and discipline.finishes_without_stragglers:
            # A step ends without the workers at the barrier, so that the others reach it, too.
            if self._members.left_out == self._arrived.keys():
                return BarrierEvent.NOTHING
            self._members.left_out = set(self._arrived)
            return BarrierEvent.STEPS_GO_ON
        if all(self._waits_for_others(w, waiting_to_pull) for w in missing):
            clipped = self._shard.clipped
            if discipline.next_deadline() is not None or self.follows:
                return BarrierEvent.NOTHING
            if clipped is not None and clipped.is_under_way():
                return BarrierEvent.NOTHING
            if purposes == {"meet"}:
                self._end()
                return BarrierEvent.NOTHING
            # The others may wait for the worker that has joined.
            if not self._lets_pull:
                self._lets_pull = True
                return BarrierEvent.MAY_PULL
            self.give_up(
                f"{self._here()} to load, and {_workers(missing)} for them, in the middle "
                f"of training: {HOW_TO_LOAD}"
            )
            return BarrierEvent.NOTHING
        if self.sees_all and purposes == {"load"}:
            self._look_for_trained(missing)
        return BarrierEvent.NOTHING

    def _look_for_trained(self, missing: Sequence[int]) -> None:
        """Give up if a worker without a step waits to load, and another one has done a step."""
        fresh = [w for w in self._arrived if not self._has_trained(w)]
        passed = [w for w in missing if self._has_trained(w)]
        fresh = [w for w in fresh if not self._members[w].late_joiner]
        if fresh and passed:
            self.give_up(
                f"{self._here()} to load before the first step, and "
                f"{_workers(passed, 'has', 'have')} begun to train without it: {HOW_TO_LOAD}"
            )

    def _waits_for_others(self, worker: int, waiting_to_pull: Collection[int]) -> bool:
        return self._members.has_joined(worker) and (
            self._pushes.can_only_wait(worker) or worker in waiting_to_pull
        )

    def _has_trained(self, worker: int) -> bool:
        if not self._members.has_joined(worker):
            return False
        member = self._members[worker]
        return bool(member.begun) or member.clock > member.first_step

    def _here(self) -> str:
        return _workers(sorted(self._arrived), "waits", "wait")

    def _different_purposes(self) -> str:
        purposes = {"load": "to load", "meet": "to save"}
        parts = []
        for purpose, text in purposes.items():
            here = [w for w, (_, a) in self._arrived.items() if a.kind == purpose]
            parts.append(f"{_workers(sorted(here), 'waits', 'wait')} {text}")
        return f"{' and '.join(parts)}: all have to do the same after the same step"

    def give_up(self, reason: str) -> None:
        """Reject all requests that wait at the barrier or for a push, because it cannot end."""
        self._members.left_out = set()
        arrived = self._taken()
        self._lets_pull = False
        waiting = [sender for sender, _ in arrived.values()] + self._pushes.give_up()
        for sender in waiting:
            self._replies.reject(sender, reason)
        self._admit_postponed()


class PendingLoad:
    """The present load, by one worker: the first with parameters, or later a barrier's leader.

    A load comes in many messages, and its worker may die between two of them. So nothing of it
    takes effect before the last bucket's parameters have arrived, and then all of it does at once.
    """

    def __init__(
        self,
        shard: ModelShard,
        untrained: UntrainedTensors,
        barrier: Barrier,
    ) -> None:
        self._shard, self._untrained, self._barrier = shard, untrained, barrier
        self._clear()

    def _clear(self) -> None:
        self._worker: int | None = None
        self._parameters: dict[int, torch.Tensor] = {}
        self._states: dict[int, list[State]] = {}
        self._parts: list[torch.Tensor] = []

    # ---- loads ----

    def take_parameters(
        self, worker: int, load: Load, payload: torch.Tensor | None
    ) -> bool:
        """Store a bucket's parameters; return whether the load is complete.

        Raises `UsageError` for parameters that do not fit, or from a worker that must not load.
        """
        self._check_may_load("load", worker)
        store = self._shard.store
        parameters = store.fitting("load", load.bucket, payload)
        self._go_on(worker)
        self._parameters[load.bucket] = parameters
        return self._parameters.keys() == set(store.buckets)

    def take_state(
        self, worker: int, load: LoadState, payload: torch.Tensor | None
    ) -> None:
        """Store a bucket's optimizer state. Raises `UsageError` if it does not fit."""
        self._check_may_load("load-state", worker)
        store = self._shard.store
        states = store.fitting_state(load.bucket, load.entries, payload)
        self._go_on(worker)
        self._states[load.bucket] = states

    def take_untrained(
        self, worker: int, load: LoadUntrained, payload: torch.Tensor | None
    ) -> None:
        """Store a part of the untrained tensors.

        Raises `UsageError` for a part that does not follow the one before.
        """
        self._check_may_load("load-untrained", worker)
        if payload is None or payload.dtype != torch.uint8:
            raise UsageError("load-untrained: expected a payload of bytes")
        parts = self._parts if worker == self._worker else []
        here = sum(part.numel() for part in parts)
        if load.start != here:
            raise UsageError(
                f"load-untrained: expected the part that begins at byte {here}, got one that begins "
                f"at byte {load.start}"
            )
        self._go_on(worker)
        self._parts.append(payload)

    def _check_may_load(self, what: str, worker: int) -> None:
        """Raise `UsageError` if this worker must not load now."""
        if self._shard.is_loaded and worker != self._barrier.leader:
            raise UsageError(
                f"{what}: this server has parameters, and others go on from them: "
                f"{HOW_TO_LOAD}"
            )

    def _go_on(self, worker: int) -> None:
        """Continue this worker's load; drop the messages of another worker's load."""
        if self._worker != worker:
            self._clear()
            self._worker = worker

    def forget(self, worker: int) -> None:
        """Drop the load of a lost worker."""
        if worker == self._worker:
            self._clear()

    # ---- a complete load ----

    def apply(self) -> None:
        """Let all loaded state take effect.

        Active workers are at the barrier, and have no message in flight: stored gradients are of
        dead workers.
        """
        store = self._shard.store
        if self._parts:
            self._untrained.load(self._parts)
        for bucket, states in self._states.items():
            store.put_state(bucket, states)
        for bucket, parameters in self._parameters.items():
            store.load(bucket, parameters)
        self._clear()


def _workers(workers: Sequence[int], one: str = "waits", more: str = "wait") -> str:
    named = ", ".join(map(str, workers))
    several = len(workers) > 1
    return f"worker{'s' if several else ''} {named} {more if several else one}"
