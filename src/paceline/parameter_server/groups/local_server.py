"""The parameter server of one group's workers, inside a group server.

`LocalServer` is a `ParameterServer` that also applies updates of other group servers, and returns
its own updates for them. Server 0 holds back the replies that end a barrier or the training, until
all servers have one model (`membership.ConsistentCut`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from paceline.errors import UsageError
from paceline.interfaces import (
    Discipline,
    GroupServerDiscipline,
    GroupUpdate,
    Reply,
    Sender,
)
from paceline.interfaces.buckets import stand_in_for, wire_bytes
from paceline.interfaces.server_messages import (
    BarrierPassed,
    BufferUpdate,
    Done,
    EnterBarrier,
    GradientUpdate,
    Join,
    Leave,
    Manifest,
    MixBuffers,
    Parameters,
    Push,
    Rejected,
)
from paceline.parameter_server.state_machine.server import (
    MakeDiscipline,
    ParameterServer,
)
from paceline.parameter_server.state_machine.store import State

A_LOAD = 1 << 40
"""A load counts for more than all gradients before it in `LocalServer.progress`."""


class LocalServer(ParameterServer):
    """The server of group *number* for the workers of that group.

    Events of other servers may cause replies to workers: `take_replies` returns them. Methods for
    other servers act at the time `shard.now`.

    Args:
        number: The number of the group, and of its server.
        workers: Number of the job's workers, of all groups.
        make_discipline: As for `ParameterServer`. Disciplines must be `GroupServerDiscipline`s.
        name: The server's name in its log.
    """

    def __init__(
        self,
        number: int,
        workers: int,
        make_discipline: MakeDiscipline,
        name: str = "server",
    ) -> None:
        super().__init__(workers, make_discipline, name)
        self.number = number
        self.held_replies: list[Reply] = []
        """Replies that wait for the end of a consistent cut."""
        self.gradients = 0
        """Number of gradients in updates, of this server and of others. All servers count the
        same."""
        self.mixed_floats = 0
        """Number of the first buffers that are averaged."""
        self._ready: list[Reply] = []
        """Replies that events of other servers have caused."""
        self._leaving: set[Sender] = set()
        """Leave requests whose reply is held back or not made yet."""
        self._pushing: set[int] = set()
        """Workers that push to this server, as far as it knows."""
        self._old_weight = 1.0
        """The share of the buffers that the other servers already have."""
        self.barrier.sees_all = False
        # A worker from another group may have done many steps there.
        self.members.most_steps_ahead = A_LOAD

    # ---- its discipline ----

    @property
    def discipline(self) -> GroupServerDiscipline | None:
        """The discipline; None before the first worker has joined."""
        if not self.shard.is_held:
            return None
        return cast(GroupServerDiscipline, self.shard.discipline)

    def _new_discipline(self, join: Join) -> Discipline | None:
        discipline = super()._new_discipline(join)
        if discipline is None:
            return None
        if not isinstance(discipline, GroupServerDiscipline):
            raise UsageError(
                f"group server {self.number}: expected a method whose servers hold the whole "
                "model for a group of workers each, got one with "
                f"{type(discipline).__name__}: start its servers as kind 'server'"
            )
        discipline.serve_group(self.number)
        return discipline

    # ---- progress ----

    @property
    def progress(self) -> int:
        """A number that grows with each change of the model; -1 without parameters."""
        if not self.shard.is_loaded:
            return -1
        return self.shard.loads * A_LOAD + self.gradients

    def has_workers(self) -> bool:
        """Return whether workers use this server, or are about to.

        They do if a member of the group trains or is to come, or if any worker still pushes here.
        Also True while no worker trains at all.
        """
        trains, discipline = self.members.trains(), self.discipline
        if discipline is None or not trains or self._pushing:
            return True
        return not set(discipline.groups.members(self.number)).isdisjoint(trains)

    def completed_step(self) -> int | None:
        """Return the step as a single server does, but for this group's workers only.

        Other groups may be far behind or ahead.
        """
        step, discipline = super().completed_step(), self.discipline
        if step is None or discipline is None or discipline.groups.servers == 1:
            return step
        members = self.members
        own = (
            max(members.first_step(worker), self.shard.next_step(worker))
            for worker in members.trains() or members.missing()
        )
        return min(own, default=step)

    # ---- requests of workers ----

    def _on_push(
        self, sender: Sender, push: Push, payload: torch.Tensor | None
    ) -> None:
        self._pushing.add(sender.worker)
        super()._on_push(sender, push, payload)

    def _on_leave(
        self, sender: Sender, leave: Leave, payload: torch.Tensor | None
    ) -> None:
        self._leaving.add(sender)
        self._pushing.discard(sender.worker)
        super()._on_leave(sender, leave, payload)

    def _lose(self, worker: int) -> None:
        self._pushing.discard(worker)
        super()._lose(worker)

    def _on_enter_barrier(
        self, sender: Sender, arrive: EnterBarrier, payload: torch.Tensor | None
    ) -> None:
        self.members.check_step("enter-barrier", arrive.step)
        super()._on_enter_barrier(sender, arrive, payload)
        if arrive.step:
            # A worker from another group sends its step: this server has not seen its pushes.
            self._begin_with(sender.worker, arrive.step)

    def _on_mix_buffers(
        self, sender: Sender, mix: MixBuffers, payload: torch.Tensor | None
    ) -> None:
        before = self.untrained.buffers
        super()._on_mix_buffers(sender, mix, payload)
        if self.untrained.buffers is not before:
            self._old_weight *= 1 - mix.weight
            self.mixed_floats = mix.floats

    # ---- replies ----

    def _finish(self) -> list[Reply]:
        ready = self.take_replies()
        for reply in super()._finish():
            self._notice_move(reply)
            held = self._is_held_back(reply)
            (self.held_replies if held else ready).append(reply)
        return ready

    def _notice_move(self, reply: Reply) -> None:
        """Note a worker that gets its last reply here, and pushes to another group from now on."""
        worker, discipline = reply.to.worker, self.discipline
        if worker not in self._pushing or not isinstance(reply.message, Parameters):
            return
        assert discipline is not None
        if discipline.groups.of[worker] != self.number:
            self._pushing.discard(worker)

    def _is_held_back(self, reply: Reply) -> bool:
        """Return whether the reply ends a barrier or the training.

        All workers wait for each other at server 0.
        """
        if self.number:
            return False
        if isinstance(reply.message, BarrierPassed):
            return True
        return isinstance(reply.message, Done) and reply.to in self._leaving

    def take_replies(self) -> list[Reply]:
        """Return the replies that events of other servers have caused, once."""
        ready, self._ready = self._ready, []
        return ready

    def release(self) -> None:
        """Send the replies that were held back, after a consistent cut."""
        self._ready += [
            reply
            for reply in self.held_replies
            if self.members.is_alive(reply.to.worker, reply.to.incarnation)
        ]
        self.held_replies.clear()
        self._leaving.clear()

    def give_up(self, reason: str) -> None:
        """Reject every waiting request, because training cannot continue."""
        self.shard.fault = self.shard.fault or reason
        self._stop()
        rejected = Rejected(reason=reason)
        self._ready += [reply._replace(message=rejected) for reply in self.held_replies]
        self.held_replies.clear()
        for sender in self._leaves:
            self.replies.reject(sender, reason)
        self._leaves.clear()
        self._ready += self.replies.take()

    # ---- updates for other servers ----

    def take_updates(self, everything: bool) -> list[GroupUpdate]:
        """Return the updates that are due; *everything*: all that other servers lack."""
        discipline, shard = self.discipline, self.shard
        if discipline is None or not shard.is_loaded or shard.fault:
            return []
        take = (
            discipline.take_all_updates if everything else discipline.take_due_updates
        )
        updates = take(shard)
        self.gradients += sum(update.gradients for update in updates)
        news = shard.store.take_news
        return [update._replace(steps=news(update.bucket)) for update in updates]

    def take_buffer_update(self) -> tuple[BufferUpdate, torch.Tensor] | None:
        """Return the buffers, if workers have sent theirs since the last call."""
        buffers, old = self.untrained.buffers, self._old_weight
        if buffers is None or old == 1.0:
            return None
        self._old_weight = 1.0
        return BufferUpdate(weight=1 - old, floats=self.mixed_floats), buffers

    def take_notice(self) -> bytes:
        """Return the discipline's notice to the other servers; empty if there is none."""
        if self.discipline is None or not self.shard.is_loaded:
            return b""
        return self.discipline.encode_notice(self.shard)

    def on_wire(self, bucket: int, payload: torch.Tensor) -> torch.Tensor:
        """Return a payload about *bucket* that counts as many bytes on the network as the real one.

        In a simulation, tensors of the model may be smaller than their counted bytes.
        """
        store = self.shard.store
        elements = max(1, store.flats[bucket].numel())
        size = store.bytes[bucket] * payload.numel() // elements
        return payload if wire_bytes(payload) == size else stand_in_for(size, payload)

    # ---- updates of other servers ----

    def apply_update(
        self,
        source: int,
        update: GradientUpdate | BufferUpdate,
        payload: torch.Tensor | None,
    ) -> None:
        """Apply an update that server *source* has applied.

        Raises:
            UsageError: It does not fit, and nothing has changed.
        """
        if isinstance(update, BufferUpdate):
            mix = MixBuffers(weight=update.weight, floats=update.floats)
            self.untrained.mix(mix, payload)
            self.mixed_floats = update.floats
            return
        checked = self._checked(update, payload)
        assert self.discipline is not None
        self.discipline.apply_update(self.shard, source, checked)
        self.shard.store.note_applied_elsewhere(update.bucket, update.steps)
        self.gradients += update.gradients
        self._end_peer_event()

    def _checked(
        self, update: GradientUpdate, payload: torch.Tensor | None
    ) -> GroupUpdate:
        store = self.shard.store
        values = store.fitting("update", update.bucket, payload)
        units = len(store.numbers(update.bucket, None))
        if len(update.used) != units:
            raise UsageError(
                f"update: expected {units} used bits, got {len(update.used)}"
            )
        if not 0 <= update.weight < math.inf or update.gradients < 0:
            raise UsageError(
                "update: expected a finite weight and a number of gradients of 0 or more, got "
                f"{update.weight} and {update.gradients}"
            )
        store.check_hyperparameters(update.hyperparameters)
        if not all(map(self.members.is_one, update.steps)):
            raise UsageError(
                f"update: expected steps of workers 0 to {self.workers - 1}, got steps of workers "
                f"{sorted(update.steps)}"
            )
        return GroupUpdate(
            bucket=update.bucket,
            gradients=update.gradients,
            weight=update.weight,
            used=update.used,
            hyperparameters=update.hyperparameters,
            values=values,
            steps=update.steps,
        )

    def on_notice(self, source: int, notice: bytes) -> None:
        """Pass a *notice* of server *source*'s discipline to the discipline.

        Raises:
            UsageError: The discipline cannot read it, and nothing has changed.
        """
        assert self.discipline is not None
        self.discipline.on_notice(self.shard, source, notice)
        self._end_peer_event()

    def _end_peer_event(self) -> None:
        """Send the replies that the discipline now permits."""
        self.shard.apply_ready_updates()
        self._grant_pulls()
        self._ready = self._finish()

    # ---- state transfer ----

    def adopt_state(
        self,
        manifest: Manifest,
        parameters: Sequence[torch.Tensor],
        states: Sequence[Sequence[State]],
        untrained: torch.Tensor,
        buffers: torch.Tensor | None,
    ) -> None:
        """Continue with the whole state of another server.

        Args:
            manifest: The other server's manifest; its parts fit.
            parameters: By bucket that this server holds, in their order.
            states: The optimizer states, in the same order.
            untrained: The untrained tensors, as bytes.
            buffers: The mixed buffers, if any.
        """
        shard, store = self.shard, self.shard.store
        for bucket, values, state in zip(
            shard.buckets, parameters, states, strict=True
        ):
            store.load(bucket, values)
            store.put_state(bucket, state)
            version = max(store.versions[bucket], manifest.versions[bucket])
            store.versions[bucket] = version
        self.untrained.bytes, self.untrained.buffers = untrained, buffers
        self.mixed_floats, self._old_weight = manifest.floats, 1.0
        self.gradients = manifest.gradients
        if manifest.loads > shard.loads:
            # The other server has loaded other parameters: start again with them.
            self.renew(manifest.step)
            shard.loads = manifest.loads
            shard.on_change()
        store.set_applied(manifest.applied)
        self.members.begin_later(self._own_steps())
        self._end_peer_event()

    def snapshot(self) -> dict[str, Any]:
        saved = super().snapshot()
        return saved and {**saved, "gradients": self.gradients}

    def restore(self, saved: dict[str, Any]) -> int:
        step = super().restore(saved)
        self.gradients = int(saved["gradients"])
        return step
