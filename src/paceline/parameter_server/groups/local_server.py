"""The part of a group server that serves its workers: a `ParameterServer` that is told what
other servers have applied, and whose answers may be held back until all servers agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import Answer, Discipline, Meshed, Parcel, Sender
from paceline.interfaces.buckets import stand_in_for, wire_bytes
from paceline.interfaces.server_messages import (
    Arrive,
    Blend,
    Buffers,
    Done,
    Gradients,
    Join,
    Leave,
    Met,
    Parameters,
    Push,
    Refused,
)
from paceline.parameter_server.state_machine.admission import Make
from paceline.parameter_server.state_machine.checks import in_words
from paceline.parameter_server.state_machine.server import ParameterServer

NOW = 0.0
"""A deadline that has passed."""
A_LOAD = 1 << 40
"""It counts for more than all gradients before it."""


class Home(ParameterServer):
    """The server of group *number* as its workers know it.

    With *meets* it holds back what ends a meeting and a training. What events of other servers
    set off leaves with `on_timer`: so whoever stands between it and its workers sees it.
    """

    def __init__(
        self,
        number: int,
        workers: int,
        discipline: Discipline | None = None,
        name: str = "server",
        make: Make | None = None,
        meets: bool = False,
    ) -> None:
        def made(method: str, count: int) -> Discipline:
            assert make is not None
            return _meshed(make(method, count), number)

        super().__init__(
            workers,
            None if discipline is None else _meshed(discipline, number),
            name,
            None if make is None else made,
            remembers=False,
        )
        self._meetings.sees_all = False
        self._members.most_steps_ahead = (
            A_LOAD  # who comes from another group has done many
        )
        self.number = number
        self.held: list[Answer] = []
        """What is held back."""
        self.is_still = False
        """Nothing happens by itself for a while."""
        self._meets = meets
        self._out: list[Answer] = []
        self._left: set[Sender] = set()
        """The leaves that are unanswered."""
        self._here: set[int] = set()
        """Workers that push to this server, as far as is known."""
        self._old = 1.0
        """The part of the buffers that was here when they were last passed on."""
        self._floats = 0
        self.gradients = 0
        """How many were passed on, here or to here: all servers count alike."""

    # ---- what leaves ----

    def _done(self) -> list[Answer]:
        out, self._out = self._out, []
        meshed = self.meshed
        for answer in super()._done():
            worker, message = answer.to.worker, answer.message
            if isinstance(message, Parameters) and worker in self._here:
                assert meshed is not None
                if meshed.groups.of[worker] != self.number:
                    self._here.discard(worker)  # it was told where it is to push
            back = self._meets and self._is_held_back(answer)
            (self.held if back else out).append(answer)
        return out

    def _is_held_back(self, answer: Answer) -> bool:
        if isinstance(answer.message, Met):
            return True
        return isinstance(answer.message, Done) and answer.to in self._left

    def _leave(self, sender: Sender, leave: Leave) -> None:
        self._left.add(sender)
        self._here.discard(sender.worker)
        super()._leave(sender, leave)

    def _arrive(self, sender: Sender, arrive: Arrive) -> None:
        self._members.check_step("arrive", arrive.step)
        super()._arrive(sender, arrive)
        if arrive.step:
            # Who pushes elsewhere says itself how far it is: who came back may have missed it.
            self._pulls.begin_with(sender.worker, arrive.step)

    def _push(self, sender: Sender, push: Push, payload: torch.Tensor | None) -> None:
        self._here.add(sender.worker)
        super()._push(sender, push, payload)

    def _lose(self, worker: int) -> None:
        self._here.discard(worker)
        super()._lose(worker)

    def on_done(self, worker: int, now: float) -> list[Answer]:
        # These answers leave with `on_timer`: so whoever stands around this server sees them.
        self._out = super().on_done(worker, now)
        return []

    @property
    def has_answers(self) -> bool:
        """Whether events of other servers have set off answers."""
        return bool(self._out)

    def next_deadline(self) -> float | None:
        if self._out:
            return NOW
        return None if self.is_still else super().next_deadline()

    def on_timer(self, now: float) -> list[Answer]:
        if self._out:
            answers, self._out = self._out, []
            return answers
        return super().on_timer(now)

    def release(self) -> None:
        """Let go of what is held back."""
        self._out += [a for a in self.held if self._is_here(a.to)]
        self.held.clear()
        self._left.clear()

    def give_up(self, reason: str) -> None:
        """Training cannot go on: everybody that waits is refused."""
        self.shard.fault = self.shard.fault or reason
        self._stop()
        refused = Refused(reason=reason)
        self._out += [a._replace(message=refused) for a in self.held]
        self.held.clear()
        for sender in self._leaves:
            self._answers.refuse(sender, reason)
        self._leaves.clear()
        self._out += self._answers.taken_out()

    def _is_here(self, sender: Sender) -> bool:
        return self._members.is_alive(sender.worker, sender.incarnation)

    # ---- its discipline ----

    @property
    def meshed(self) -> Meshed | None:
        """The discipline, once something is trained."""
        return cast(Meshed, self.shard.discipline) if self.shard.is_held else None

    @property
    def is_loaded(self) -> bool:
        return self.shard.is_loaded

    @property
    def loads(self) -> int:
        """How many loads there were since the first one."""
        return self._meetings.loads

    @property
    def progress(self) -> int:
        """How much has happened to the model; -1 where there is none."""
        if not self.is_loaded:
            return -1
        return self.loads * A_LOAD + self.gradients

    def has_workers(self) -> bool:
        """Whether a member of its group trains, or is to come, or somebody still pushes here;
        also where nobody trains at all."""
        trains, meshed = self._members.trains(), self.meshed
        if meshed is None or not trains or self._here:
            return True
        return not set(meshed.groups.members(self.number)).isdisjoint(trains)

    # ---- what is passed on ----

    def outgoing(self, everything: bool, now: float) -> list[Parcel]:
        """What is to be passed on by now, or all that was not yet."""
        meshed, shard = self.meshed, self.shard
        if meshed is None or not shard.is_loaded or shard.fault:
            return []
        shard.now = now
        parcels = meshed.owed(shard) if everything else meshed.outgoing(shard)
        self.gradients += sum(parcel.gradients for parcel in parcels)
        news = shard.store.take_news
        return [parcel._replace(steps=news(parcel.bucket)) for parcel in parcels]

    def standing(self, bucket: int, payload: torch.Tensor) -> torch.Tensor:
        """The same, as many bytes on the network as that much of a bucket is."""
        store = self.shard.store
        elements = max(1, store.flats[bucket].numel())
        size = store.bytes[bucket] * payload.numel() // elements
        return payload if wire_bytes(payload) == size else stand_in_for(size, payload)

    def buffers_to_pass(self) -> tuple[Buffers, torch.Tensor] | None:
        """The buffers, if workers have mixed theirs in since this was last called."""
        kept, old = self._rest.buffers, self._old
        if kept is None or old == 1.0:
            return None
        self._old = 1.0
        return Buffers(weight=1 - old, floats=self._floats), kept

    def is_last_bucket(self, bucket: int) -> bool:
        return bucket == self.shard.buckets[-1]

    def words(self, now: float) -> bytes:
        """What the other servers are to know beside."""
        meshed = self.meshed
        if meshed is None or not self.is_loaded:
            return b""
        self.shard.now = now
        return meshed.words(self.shard)

    def take(
        self,
        source: int,
        what: Gradients | Buffers,
        payload: torch.Tensor | None,
        now: float,
    ) -> None:
        """Another server has applied this. Raises `UsageError`, with nothing changed, for what
        does not fit."""
        self.shard.now = now
        if isinstance(what, Buffers):
            blend = Blend(weight=what.weight, floats=what.floats)
            self._rest.blend(blend, payload)
            self._floats = what.floats
            return
        parcel = self._checked(what, payload)
        meshed = self.meshed
        assert meshed is not None
        meshed.incoming(self.shard, source, parcel)
        self.shard.store.note_applied_elsewhere(parcel.bucket, parcel.steps)
        self.gradients += parcel.gradients
        self._has_heard()

    def _checked(self, what: Gradients, payload: torch.Tensor | None) -> Parcel:
        store = self.shard.store
        values = store.fitting("parcel", what.bucket, payload)
        units = len(store.numbers(what.bucket, None))
        if len(what.used) != units:
            raise UsageError(
                f"parcel: expected {units} used bits, got {len(what.used)}"
            )
        if not 0 <= what.weight < math.inf or what.gradients < 0:
            raise UsageError(
                "parcel: expected a finite weight and a number of gradients of 0 or more, got "
                f"{what.weight} and {what.gradients}"
            )
        store.check_hyperparameters(what.hyperparameters)
        if not all(map(self._members.is_one, what.steps)):
            raise UsageError(
                f"parcel: steps of workers {sorted(what.steps)}, where there are "
                f"{self.workers}"
            )
        return Parcel(
            bucket=what.bucket,
            gradients=what.gradients,
            weight=what.weight,
            used=what.used,
            hyperparameters=what.hyperparameters,
            values=values,
            steps=what.steps,
        )

    def hear(self, source: int, words: bytes, now: float) -> None:
        """Another server's discipline has said this. Raises `UsageError` for what makes no
        sense to this one."""
        meshed = self.meshed
        assert meshed is not None
        self.shard.now = now
        meshed.heard(self.shard, source, words)
        self._has_heard()

    def _has_heard(self) -> None:
        """The discipline may let somebody go by now."""
        self.shard.settle()
        self._let_go()
        self._out = self._done()

    def _blend(
        self, sender: Sender, blend: Blend, payload: torch.Tensor | None
    ) -> None:
        before = self._rest.buffers
        super()._blend(sender, blend, payload)
        if self._rest.buffers is not before:
            self._old *= 1 - blend.weight
            self._floats = blend.floats

    # ---- all of it ----

    def ended(self) -> int | None:
        """As `HeldShard.ended`, but for workers of all groups: those of another one may be far
        behind this one's, or far ahead."""
        step, meshed, members = super().ended(), self.meshed, self._members
        if step is None or meshed is None or meshed.groups.servers == 1:
            return step
        here = members.trains() or members.missing()
        own = (
            max(members.first_step(worker), self.shard.next_step(worker))
            for worker in here
        )
        return min(own, default=step)

    def snapshot(self) -> dict[str, Any]:
        saved = super().snapshot()
        return saved and {**saved, "gradients": self.gradients}

    def restore(self, saved: dict[str, Any]) -> int:
        step = super().restore(saved)
        self.gradients = int(saved["gradients"])
        return step

    def renew(self, step: int, loads: int) -> None:
        """Other parameters were loaded, on another server: begin again with them."""
        self.shard.renew(step)
        self._meetings.loads = loads
        self.shard.changed()

    def let_go(self) -> None:
        """Parameters have come from another server: answer who waits for them."""
        self._has_heard()

    def saved(self) -> torch.Tensor:
        """What is trained, as bytes."""
        return self._admission.saved()

    def in_words(self) -> dict[str, str]:
        """The same, for people and peers."""
        saved = self.saved().numpy().tobytes()
        return in_words(msgspec.msgpack.decode(saved, type=Join))

    def hold(self, join: torch.Tensor, step: int) -> None:
        """Hold what another server has said is trained: workers begin with *step*. Raises
        `UsageError` as a worker's join does."""
        self._admission.restore(join)
        self.resume(step)

    def has_applied(self, applied: Mapping[int, Mapping[int, int]]) -> None:
        """These workers' gradients are in what another server had, and this one has now."""
        self.shard.store.set_applied(applied)
        self._members.begin_later(self._own_steps())

    @property
    def rest(self) -> Any:
        """What nobody trains."""
        return self._rest

    @property
    def floats(self) -> int:
        """So many of the buffers are mixed."""
        return self._floats

    def has_rest(
        self, kept: torch.Tensor, buffers: torch.Tensor | None, floats: int
    ) -> None:
        """Take over what nobody trains, and buffers."""
        self._rest.bytes, self._rest.buffers = kept, buffers
        self._floats, self._old = floats, 1.0


def _meshed(discipline: Discipline, number: int) -> Discipline:
    if not isinstance(discipline, Meshed):
        raise UsageError(
            f"group server {number}: expected a method whose servers hold the whole model "
            f"for a group of workers each, got one with {type(discipline).__name__}: start "
            "its servers as kind 'server'"
        )
    discipline.is_server(number)
    return discipline
