"""Who is let into a training: workers that train what the first one does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import Discipline, Led, Sender
from paceline.interfaces.server_messages import Join, Joined
from paceline.parameter_server.state_machine.barriers import Meetings
from paceline.parameter_server.state_machine.checks import require_same
from paceline.parameter_server.state_machine.replies import Answers
from paceline.parameter_server.state_machine.shard import HeldShard

Make = Callable[[str, int], Discipline]
"""From a method's spec, and how many workers there are."""


class Admission:
    """The first worker, or a snapshot, says what is trained; the others must say the same.
    *make* makes the discipline from the first worker's spec, where there is none yet."""

    def __init__(
        self,
        workers: int,
        shard: HeldShard,
        meetings: Meetings,
        answers: Answers,
        make: Make | None,
    ) -> None:
        self._workers, self._shard = workers, shard
        self._meetings = meetings
        self._answers, self._make = answers, make
        self._first: Join | None = None
        self._restored = False

    def join(self, sender: Sender, join: Join) -> None:
        """A worker asks to take part. Raises `UsageError` for one that is here, and for one
        that trains something else."""
        worker, members = sender.worker, self._shard.members
        if members[worker].joined:
            raise UsageError(f"join: worker {worker} has joined before")
        if self._first is None:
            self._begin(join)
        else:
            require_same(self._first, join, worker, self._restored)
        if self._meetings.is_under_way() and not members.is_awaited(worker):
            self._meetings.put_off(worker, partial(self._admit, sender))
        else:
            self._admit(sender)

    def _begin(self, join: Join) -> None:
        discipline, follows = self._shard.discipline, False
        if self._make is not None and join.method:
            discipline = self._make(join.method, self._workers)
        if join.shard and isinstance(discipline, Led):
            discipline.follow()
            follows = True
        self._shard.hold(discipline, join)  # may refuse
        self._meetings.follows = follows
        self._first = join

    def _admit(self, sender: Sender) -> None:
        members, loads = self._shard.members, self._meetings.loads
        step, guest = members.begin, self._restored
        if not members.is_awaited(sender.worker):
            step = self._shard.discipline.first_step(self._shard)
            guest = guest or members.has_begun_training() or loads > 0
        own = self._shard.next_step(sender.worker)
        members.join(sender.worker, max(step, own), guest)
        loaded = self._shard.is_loaded
        over = members.has_left(sender.worker)
        joined = Joined(
            step=step, loaded=loaded, own=own, load=loads, guest=guest, over=over
        )
        self._answers.send(sender, joined)

    # ---- for a snapshot ----

    def saved(self) -> torch.Tensor:
        """What is trained, as bytes."""
        join = bytearray(msgspec.msgpack.encode(self._first))
        return torch.frombuffer(join, dtype=torch.uint8).clone()

    def restore(self, saved: torch.Tensor) -> None:
        """Take over what `saved` gave, before anybody has joined."""
        join = msgspec.msgpack.decode(saved.numpy().tobytes(), type=Join)
        discipline = self._shard.discipline
        if self._make is not None:
            discipline = self._make(join.method, self._workers)
        self._shard.hold(discipline, join)
        self._first, self._restored = join, True
