"""Active workers and used tensors, exchanged beside the averages of a round.

A worker has something to report when a tensor took no part in its backward pass, or when it is out of
data. The others must know before they use the average, in a round that looks ordinary to them. There
are three protocols, by the method's rounds:

- `Participation`: all workers, in every round. Each round asks whether any worker has something to
  report, and only then holds a ballot. PyTorch DDP's ``Join`` costs an all-reduce in every step.
- `GroupParticipation`: groups that average gradients among themselves. One small message follows
  their last bucket.
- `DelayedParticipation`: methods whose workers never wait for all. All workers vote every so many
  rounds, and use the result at the next vote.
"""

from __future__ import annotations

import math

import torch

from paceline.core.context import TrainingContext
from paceline.errors import UsageError
from paceline.interfaces import Bucket, Comm, Pending

_LEFT_BEFORE_STEP = -1.0
"""The vote of a rank that has left between ``backward()`` and ``step()``.

A rank that has left elsewhere votes 0, and an active one its weight.
"""
_LAST = -2.0
"""The vote of a rank that is out of data, and has trained since the last round."""


class Participation:
    """One worker's part in the rounds of all workers.

    Each round asks whether any worker has something to report:

    - *inside a sum*: if all workers sum uncompressed real numbers in host memory anyway. A rank
      with something to report sets the last element to NaN, so the sum of it is NaN on every rank.
      Nothing extra is sent. (A flag in every message would be padding in each step.)
    - *beside the sum*: one small message between hosts. It serves sums that do not preserve a NaN
      (lossy compression, integers, groups). It also serves devices, which would stall if the host
      read an element.

    If any worker has something to report, all hold a ballot. It yields the active workers, the
    tensors used on any rank, and the true value of that element. A genuine NaN costs a ballot and
    stays a NaN. Ordinary rounds hold no ballot.
    """

    def __init__(self, context: TrainingContext) -> None:
        comm, rounds, device = context.comm, context.rounds, context.device
        self._context, self._workers, self._comm = context, context.workers, comm
        self._votes_on_tensors = rounds.is_every_step
        beside = context.compressed or device.type != "cpu" or rounds.is_nonblocking
        self.control: Comm | None = None
        """Sends the messages beside the sums; None: the question travels inside a sum."""
        if beside and comm.size > 1 and rounds.every:
            self.control = comm.channel("control")
        self._ballots: Comm = self.control or comm
        if context.waits_in_forward and self.control is None:
            # Ranks out of data vote at another point of the program, so ballots need a separate
            # channel.
            self._ballots = comm.channel("ballots")
        self._device = control_device(context)
        self._represented = context.runtime.weights
        self.gradient_factor = self.equal_factor = 1.0
        """Factors that turn sums into means once active workers are known.

        The first is for gradients, the second for averages with equal weights. They are not 1 if
        some ranks are inactive.
        """
        self.is_resolved = True
        self.is_later = False
        """Whether the step's round, if any, comes after the update: active workers are unknown now."""
        self._may_ask = False
        self._flag: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._element: torch.Tensor | None = None
        self._own: float | None = None
        """This worker's own value of that element."""
        self._own_vote = 0.0
        self._used: list[float] | None = []  # None: this worker has no gradients
        self._counts = True

    def begin_round(self) -> None:
        """Begin a round: its active workers are not known yet."""
        self.gradient_factor = self.equal_factor = 1.0
        self.is_resolved = self._may_ask = False
        self._flag = self._pending = self._element = self._own = None

    def flags_complete(self) -> None:
        """Note this worker's report, which is complete now: the next sum may carry it."""
        # Noted now, because this worker may have finished when the answer arrives.
        self._may_ask = True
        self._own_vote = self._vote()
        self._counts = self._workers.counts
        self._used = None
        if self._workers.active:
            self._used = [flag for bucket in self._buckets for flag in bucket.used]
        if self.control is not None:
            self._ask_beside(self.control)

    def can_attach(self, buffer: torch.Tensor) -> bool:
        """Whether a sum of *buffer* over all workers should carry the question."""
        return (
            self._may_ask
            and self._pending is None
            and self._element is None
            and buffer.device.type == "cpu"
            and buffer.numel() > 0
            and (buffer.is_floating_point() or buffer.is_complex())
        )

    def attach(self, buffer: torch.Tensor) -> None:
        """Put the question into *buffer*, if this worker has something to report.

        Call it before *buffer* is sent, and `attached` when its sum is in flight to all ranks. For
        a sum in two halves, that is the second half.
        """
        self._element = _last_element(buffer)
        self._own = self._element.item()
        if self._has_something_to_report():
            self._element.fill_(math.nan)

    def attached(self, pending: Pending) -> None:
        """Note the sum in flight that carries the question."""
        self._pending = pending

    def resolve(self) -> None:
        """Learn the active workers of this round; hold a ballot if any worker asked. Collective.

        Afterwards ``bucket.used`` says which tensors were used on any rank.
        """
        if self.is_resolved:
            return
        if not self._may_ask:
            raise UsageError(
                "a mean was waited for before the last bucket of its step was delivered: "
                "its active workers are known only then. Wait in backward_ended, or later"
            )
        if self._pending is None:
            if self._element is not None:
                raise UsageError(
                    "a mean was waited for before the last bucket of its step was gathered: "
                    "the exchange of active workers travels in that half. Issue the gather of "
                    "the last bucket (ReduceScatter.gather) before the first wait"
                )
            self._ask_beside(self._comm)
        assert self._pending is not None
        self._pending.wait()
        self.is_resolved = True
        if self._any_worker_asked():
            self._hold_ballot()

    def factor(self, equally: bool) -> float:
        """The factor that turns a sum into a mean over the active workers of the resolved round.

        *equally*: each has weight 1; otherwise each has its own weight.
        """
        return self.equal_factor if equally else self.gradient_factor

    @property
    def none_are_active(self) -> bool:
        """Whether all workers are out of data in the round that was resolved."""
        return not self._workers.participants

    @property
    def _buckets(self) -> list[Bucket]:
        """The step's buckets; none if rounds do not exchange which tensors were used."""
        return self._context.buckets if self._votes_on_tensors else []

    def _ask_beside(self, comm: Comm) -> None:
        self._flag = torch.tensor(
            [float(self._has_something_to_report())], device=self._device
        )
        self._pending = comm.all_reduce(self._flag, "max")

    def _has_something_to_report(self) -> bool:
        return self._used is None or not all(self._used)

    def _any_worker_asked(self) -> bool:
        if self._flag is not None:
            return bool(self._flag.item())
        assert self._element is not None
        return math.isnan(self._element.item())

    def _hold_ballot(self) -> None:
        workers, n = self._workers, self._comm.size
        buckets = self._buckets
        tensors = sum(len(bucket.used) for bucket in buckets)
        device = self._device if self._element is None else self._element.device
        ballot = torch.zeros(n + tensors + 1, dtype=torch.float64, device=device)
        ballot[self._comm.rank] = self._own_vote
        if self._used is not None:
            ballot[n:-1] = torch.tensor(self._used, dtype=torch.float64)
        if self._counts and self._own is not None:
            ballot[-1] = self._own
        self._ballots.all_reduce(ballot, "sum").wait()

        if self._element is not None:
            self._element.copy_(ballot[-1:])
        # Vectorized, because each of n workers reads n votes.
        votes = ballot[:n]
        represented = self._represented
        # The sum has counted a representative's vote once for each worker that it represents.
        if represented is not None:
            for rank, times in represented.items():
                votes[rank] /= times
        trains = votes > 0
        weights = votes[trains].tolist()
        workers.participants = _ranks(trains | (votes == _LAST))
        workers.left_before_step = _ranks(votes == _LEFT_BEFORE_STEP)
        workers.anyone_active = bool(weights)
        flags = iter(ballot[n:-1].tolist())
        for bucket in buckets:
            bucket.used[:] = [next(flags) > 0 for _ in bucket.used]
        count = len(workers.participants)
        if represented is not None:
            count = sum(represented[rank] for rank in workers.participants)
            weights = [
                float(votes[rank]) * times
                for rank, times in represented.items()
                if votes[rank] > 0
            ]
        whole = math.fsum(weights)
        self.gradient_factor = 1 / whole if 0 < len(weights) < n else 1.0
        self.equal_factor = n / count if 0 < count < n else 1.0

    def _vote(self) -> float:
        workers = self._workers
        if workers.active:
            return workers.weight
        if workers.unsent_steps:
            return _LAST
        return _LEFT_BEFORE_STEP if workers.step_pending else 0.0


class DelayedParticipation:
    """A vote of all workers every few rounds, for which no worker waits.

    All workers use a vote's result at the next vote, so in the same round.

    Example: votes are held every 16 rounds. A worker that is out of data in round 20 votes so in
    round 32. From round 48 on the others' groups do not contain it. Until then it takes part with
    its model.
    """

    def __init__(self, context: TrainingContext, control: Comm, every: int) -> None:
        self._workers, self._control, self._every = context.workers, control, every
        self.rounds = 0
        """Number of rounds so far."""
        self._ballot = torch.zeros(0)
        self._pending: Pending | None = None

    def begin_round(self) -> bool:
        """Returns whether this round has a vote. Collective."""
        self.rounds += 1
        if self.rounds % self._every:
            return False
        workers = self._workers
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            votes = self._ballot.tolist()
            workers.participants = [rank for rank, vote in enumerate(votes) if vote]
            workers.anyone_active = any(votes)
        if workers.anyone_active:
            self._ballot = torch.zeros(self._control.size)
            self._ballot[self._control.rank] = float(workers.active)
            self._pending = self._control.all_reduce(self._ballot, "sum")
        return True


class GroupParticipation:
    """One worker's part in groups that average gradients among themselves.

    In each step the workers of a group exchange one small message after their last bucket. It has
    each worker's weight (0 if it is out of data), and the tensors that it used.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context, self._device = context, control_device(context)
        self._votes: dict[Comm, GroupVote] = {}
        self._flags_complete = False

    def begin_step(self) -> None:
        """Begin a step."""
        self._votes.clear()
        self._flags_complete = False

    def flags_complete(self) -> None:
        """Send this worker's votes: the last bucket was delivered."""
        self._flags_complete = True
        for vote in self._votes.values():
            vote.send(self._own())

    def vote_of(self, group: Comm, bucket: Bucket | None) -> GroupVote:
        """The vote of *group* in this step, in which *bucket* is averaged."""
        vote = self._votes.get(group)
        if vote is None:
            vote = self._votes[group] = GroupVote(group, self._context)
        if bucket is not None:
            vote.buckets.append(bucket)
        return vote

    def mean_issued(self, vote: GroupVote) -> None:
        """Send the group's vote if the last bucket was delivered: votes follow the last mean."""
        if self._flags_complete:
            vote.send(self._own())

    def _own(self) -> torch.Tensor:
        workers = self._context.workers
        values = [workers.weight if workers.active else 0.0]
        for bucket in self._context.buckets:
            values += [float(used and workers.active) for used in bucket.used]
        return torch.tensor(values, dtype=torch.float64, device=self._device)


class GroupVote:
    """The message of one group in one step."""

    def __init__(self, group: Comm, context: TrainingContext) -> None:
        self._group, self._context = group, context
        self.buckets: list[Bucket] = []
        self.factor = 1.0
        """Factor that turns a sum of shares into the mean over active workers."""
        self._votes = torch.zeros(0)
        self._pending: Pending | None = None
        self._is_resolved = False

    def send(self, own: torch.Tensor) -> None:
        """Send this worker's vote, once."""
        if self._pending is None:
            self._votes = own
            self._pending = self._group.all_reduce(own, "sum")

    @property
    def is_sent(self) -> bool:
        """Whether this worker's vote was sent."""
        return self._pending is not None

    def resolve(self) -> None:
        """Learn the factor, and which tensors of this group's buckets were used on any rank."""
        assert self._pending is not None
        self._pending.wait()
        if self._is_resolved:
            return
        self._is_resolved = True
        weight, *used = self._votes.tolist()
        self.factor = 1 / weight if weight else 1.0
        flags = iter(used)
        for bucket in self._context.buckets:
            together = [next(flags) > 0 for _ in bucket.used]
            if any(bucket is one for one in self.buckets):
                bucket.used[:] = together


def control_device(context: TrainingContext) -> torch.device:
    """The device of control messages: the host, so that they do not disturb a device that computes.

    It is the training's device if only NCCL was initialized.
    """
    on_host = context.comm.moves_host_tensors
    return torch.device("cpu") if on_host else context.device


def _ranks(chosen: torch.Tensor) -> list[int]:
    return chosen.nonzero().view(-1).tolist()


def _last_element(buffer: torch.Tensor) -> torch.Tensor:
    """The element that carries the question, as a real tensor of size 1."""
    flat = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return flat.view(-1)[-1:] if flat.dim() > 1 else flat[-1:]
