"""Who takes part in the means of gradients within a group, and which tensors it has used.

A group's workers tell each other in each step, in one small message that follows their
last bucket: how much each one's gradients weigh (nothing, of one that is out of data), and
which tensors it used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.buckets import Bucket
from paceline.core.presence import Presence
from paceline.interfaces import Comm, Pending


class GroupCalls:
    """One worker's, of the step under way. *buckets* are those of the step, *device* where
    messages are moved."""

    def __init__(
        self,
        presence: Presence,
        buckets: Callable[[], Sequence[Bucket]],
        device: torch.device,
    ) -> None:
        self._presence, self._buckets, self._device = presence, buckets, device
        self._calls: dict[Comm, GroupCall] = {}
        self._is_known = False

    def begin(self) -> None:
        """A step begins."""
        self._calls.clear()
        self._is_known = False

    def all_is_known(self) -> None:
        """The last bucket was delivered."""
        self._is_known = True
        for call in self._calls.values():
            call.send(self._own_vote())

    def of(self, comm: Comm, bucket: Bucket | None) -> GroupCall:
        """The call of a group; *bucket* is averaged in it."""
        call = self._calls.get(comm)
        if call is None:
            call = self._calls[comm] = GroupCall(comm, self._buckets)
        if bucket is not None:
            call.buckets.append(bucket)
        return call

    def sent(self, call: GroupCall) -> None:
        """A mean was issued in that group; its message follows the last one."""
        if self._is_known:
            call.send(self._own_vote())

    def _own_vote(self) -> torch.Tensor:
        presence = self._presence
        votes = [presence.weight if presence.active else 0.0]
        for bucket in self._buckets():
            votes += [float(used and presence.active) for used in bucket.used]
        return torch.tensor(votes, dtype=torch.float64, device=self._device)


class GroupCall:
    """The message of one group in one step."""

    def __init__(self, comm: Comm, buckets: Callable[[], Sequence[Bucket]]) -> None:
        self._comm, self._of_step = comm, buckets
        self.buckets: list[Bucket] = []
        self.factor = 1.0
        """What makes of a sum of shares the mean of those who train."""
        self._votes = torch.zeros(0)
        self._pending: Pending | None = None
        self._is_answered = False

    def send(self, vote: torch.Tensor) -> None:
        """Say what this worker has to, once."""
        if self._pending is None:
            self._votes = vote
            self._pending = self._comm.all_reduce(vote, "sum")

    @property
    def is_sent(self) -> bool:
        """Whether this worker's part is known, and was said."""
        return self._pending is not None

    def answer(self) -> None:
        """Learn the factor, and which tensors of this group's buckets anybody used."""
        assert self._pending is not None
        self._pending.wait()
        if self._is_answered:
            return
        self._is_answered = True
        weight, *used = self._votes.tolist()
        self.factor = 1 / weight if weight else 1.0
        flags = iter(used)
        for bucket in self._of_step():
            together = [next(flags) > 0 for _ in bucket.used]
            if any(bucket is one for one in self.buckets):
                bucket.used[:] = together
