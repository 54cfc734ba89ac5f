"""How workers learn who trains, and which tensors were used, beside the means they form.

A worker has something to tell when a tensor took no part in its backward pass, or when it
is out of data. It must tell the others before any of them uses the mean, in a round that
everybody else thinks ordinary. So each round asks whether anybody has something to tell:

- *inside a sum*: where a plain sum of real numbers on processors travels anyway, among all
  workers. Who asks makes its last element NaN, and so is its sum on every rank. Nothing
  extra is sent. (A flag in every message would be padding, for everybody in each step.)
- *beside it*: one small message between the hosts' processors: for what no NaN survives
  (lossy codes, sums of integers, groups), and for devices, which nobody should wait for to read
  an element.

Where somebody asked all hold a ballot: which ranks train, which tensors were used anywhere,
and the true value of that element. A genuine NaN costs a ballot and stays a NaN. Ordinary
rounds hold none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from paceline.buckets import Bucket
from paceline.core.presence import Presence
from paceline.errors import UsageError
from paceline.interfaces import Comm, Pending

BEHIND = -1.0
"""The vote of a rank that has left with a step due; 0: without; else its weight."""
LAST = -2.0
"""The vote of a rank that is out of data, and has trained since the last round."""


class RollCall:
    """One worker's part in them. *control* is where messages beside the means go,
    *ballots* where ballots do, if that is another queue, and
    *device* where their tensors are: the host, unless nothing moves those; *buckets* are those of the step, and none where their use is nobody's business."""

    def __init__(
        self,
        presence: Presence,
        comm: Comm,
        control: Comm | None,
        buckets: Callable[[], Sequence[Bucket]],
        device: torch.device,
        ballots: Comm | None = None,
    ) -> None:
        self._presence, self._comm, self._control = presence, comm, control
        self._ballots = ballots or control or comm
        self._device = device
        self._buckets = buckets
        self.gradient_factor = self.equal_factor = 1.0
        """What sums are multiplied with, of gradients and of what counts equally: not 1
        where some ranks take no part, since a mean is over those that do."""
        self.is_answered = True
        self.is_later = False
        """Whether this step's round, if it is one, is held after the update: now, nobody
        can be asked who takes part."""
        self._may_ask = False
        self._flag: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._element: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        self._vote_of_now = 0.0
        self._used: list[float] | None = []  # None: this worker has no gradients
        self._takes_part = True

    def begin(self) -> None:
        """A round begins: who takes part in it is not known yet."""
        self.gradient_factor = self.equal_factor = 1.0
        self.is_answered = self._may_ask = False
        self._flag = self._pending = self._element = self._own = None

    def all_is_known(self) -> None:
        """What this worker may have to tell is known: the next sum may carry it."""
        # Noted now: it may have ended its training when the answer is asked for.
        self._may_ask = True
        self._vote_of_now = self._own_vote()
        self._takes_part = self._presence.takes_part
        self._used = None
        if self._presence.active:
            buckets = self._buckets()
            self._used = [float(flag) for bucket in buckets for flag in bucket.used]
        if self._control is not None:
            self._ask_beside(self._control)

    def wants(self, buffer: torch.Tensor) -> bool:
        """Whether a sum of *buffer* among all is to carry the question."""
        return (
            self._may_ask
            and self._pending is None
            and self._element is None
            and buffer.device.type == "cpu"
            and buffer.numel() > 0
            and (buffer.is_floating_point() or buffer.is_complex())
        )

    def ask_inside(self, buffer: torch.Tensor) -> None:
        """Ask, if this worker has something to tell. Call before *buffer* is sent, and
        `sent` once what brings its sum to all ranks is under way: for a sum in two halves,
        the second."""
        self._element = _last_element(buffer)
        self._own = self._element.clone()
        if self._has_something_to_tell():
            self._element.fill_(math.nan)

    def sent(self, pending: Pending) -> None:
        """The sum that carries the question is under way."""
        self._pending = pending

    def answer(self) -> None:
        """Learn who takes part in this round; hold a ballot if anybody asked. Afterwards
        ``bucket.used`` says which tensors were used on any rank. Collective."""
        if self.is_answered:
            return
        if not self._may_ask:
            raise UsageError(
                "a mean was waited for before the last bucket of its step was delivered: "
                "who takes part in it is known only then. Wait in backward_ended, or later"
            )
        if self._pending is None:
            if self._element is not None:
                raise UsageError(
                    "a mean was waited for before the last bucket of its step was gathered: "
                    "who takes part in it travels in that half. Issue the gather of the last "
                    "bucket (Scattered.gather) before the first wait"
                )
            self._ask_beside(self._comm)
        assert self._pending is not None
        self._pending.wait()
        self.is_answered = True
        if self._somebody_asked():
            self._vote()

    @property
    def nobody_takes_part(self) -> bool:
        """Whether the round that was answered is nobody's: all are out of data."""
        return not self._presence.participants

    # ---- one round ----

    def _ask_beside(self, comm: Comm) -> None:
        self._flag = torch.tensor(
            [float(self._has_something_to_tell())], device=self._device
        )
        self._pending = comm.all_reduce(self._flag, "max")

    def _has_something_to_tell(self) -> bool:
        return self._used is None or not all(self._used)

    def _somebody_asked(self) -> bool:
        if self._flag is not None:
            return bool(self._flag.item())
        assert self._element is not None
        return math.isnan(self._element.item())

    def _vote(self) -> None:
        presence, n = self._presence, self._comm.size
        buckets = self._buckets()
        tensors = sum(len(bucket.used) for bucket in buckets)
        device = self._device if self._own is None else self._own.device
        ballot = torch.zeros(n + tensors + 1, dtype=torch.float64, device=device)
        ballot[self._comm.rank] = self._vote_of_now
        if self._used is not None:
            ballot[n:-1] = torch.tensor(self._used, dtype=torch.float64)
        if self._takes_part and self._own is not None:
            ballot[-1:] = self._own
        self._ballots.all_reduce(ballot, "sum").wait()

        if self._element is not None:
            self._element.copy_(ballot[-1:])
        votes = ballot.tolist()
        last = [rank for rank in range(n) if votes[rank] == LAST]
        trains = [rank for rank in range(n) if votes[rank] > 0]
        presence.participants = sorted(trains + last)
        presence.behind = [rank for rank in range(n) if votes[rank] == BEHIND]
        presence.somebody_trains = bool(trains)
        flags = iter(votes[n:-1])
        for bucket in buckets:
            bucket.used[:] = [next(flags) > 0 for _ in bucket.used]
        whole = math.fsum(votes[rank] for rank in trains)
        count = len(presence.participants)
        self.gradient_factor = 1 / whole if 0 < len(trains) < n else 1.0
        self.equal_factor = n / count if 0 < count < n else 1.0

    def _own_vote(self) -> float:
        presence = self._presence
        if presence.active:
            return presence.weight
        if presence.unsent:
            return LAST
        return BEHIND if presence.step_is_due else 0.0


def _last_element(buffer: torch.Tensor) -> torch.Tensor:
    """The element that carries the question, as a real tensor of size 1."""
    flat = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    return flat.view(-1)[-1:]
