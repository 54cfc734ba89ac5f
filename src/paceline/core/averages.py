"""The averages that a method asks for: messages, scaling, and active workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.collectives.pending import PutBack
from paceline.collectives.reduce_scatter import reduce_scatter
from paceline.core.compressed_average import CompressedAverage
from paceline.core.context import TrainingContext
from paceline.core.participation import GroupParticipation, GroupVote, Participation
from paceline.errors import UsageError
from paceline.interfaces import Comm, Pending, ReduceScatter
from paceline.interfaces.buckets import Bucket, stand_alike


class Averages:
    """Forms averages over all workers or a group: `Run.mean`, `Run.scatter_mean` and `Run.average`.

    *compression* compresses gradients; None sends them uncompressed.
    """

    def __init__(
        self,
        context: TrainingContext,
        participation: Participation,
        groups: GroupParticipation,
        compression: CompressedAverage | None,
    ) -> None:
        self._context, self._comm = context, context.comm
        self._participation, self._groups = participation, groups
        self._compression = compression

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed. They are sent in whole buckets then."""
        return self._compression is not None

    def mean(
        self,
        gradients: Bucket | torch.Tensor,
        *,
        of: Bucket | None = None,
        among: Comm | None = None,
        channel: str = "",
        parts: Mapping[str, torch.Tensor] | None = None,
    ) -> Pending:
        """See `Run.mean`."""
        bucket, buffer = None, gradients
        if isinstance(gradients, Bucket):
            bucket = of = gradients
            buffer = gradients.buffer
        assert isinstance(buffer, torch.Tensor)
        if self._context.rounds.models_may_differ and not self._context.workers.active:
            # This worker is out of data: its stale gradient was already applied.
            buffer.zero_()
        named = {"": buffer} if parts is None else parts
        comm = self._queue(among, channel)
        if among is not None:
            vote = self._groups.vote_of(comm, bucket)
            pending = self._send(comm, buffer, bucket, named)
            self._groups.mean_issued(vote)
            return _GroupMean(vote, pending, buffer)
        carries = not channel and (of is None or of.last)
        return self._sum(comm, buffer, bucket, named, carries)

    def scatter_mean(
        self, gradients: Bucket | torch.Tensor, *, of: Bucket | None = None
    ) -> ReduceScatter:
        """See `Run.scatter_mean`."""
        if self._compression is not None:
            raise UsageError(
                "run.scatter_mean, a mean in two halves, cannot be compressed. Leave "
                "compression out, or use bsp"
            )
        buffer = gradients
        if isinstance(gradients, Bucket):
            of, buffer = gradients, gradients.buffer
        assert isinstance(buffer, torch.Tensor)
        participation = self._participation
        self._require_round()
        if participation.is_resolved:
            if participation.gradient_factor != 1.0:
                buffer.mul_(participation.gradient_factor)
            return reduce_scatter(self._comm, buffer, "sum")
        # The exchange of active workers travels in one element. After the first half only one
        # rank holds it; the others get it with the second half.
        asks = (of is None or of.last) and participation.can_attach(buffer)
        if asks:
            participation.attach(buffer)
        scattered = reduce_scatter(self._comm, buffer, "sum")
        return _ScatteredMean(participation, scattered, buffer, asks)

    def average(
        self,
        tensor: torch.Tensor,
        *,
        among: Comm | None = None,
        channel: str = "",
        name: str = "",
        parts: Mapping[str, torch.Tensor] | None = None,
    ) -> Pending:
        """See `Run.average`."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise UsageError(
                f"average: expected a tensor of floating point, got {tensor.dtype}"
            )
        # Detach: autograd must not record the averaging of a parameter.
        tensor = stand_alike(tensor.detach(), tensor)
        if not tensor.is_contiguous() and parts is None:
            # Ranks may store the tensor in different orders; a contiguous copy has one order on
            # all.
            row = stand_alike(tensor.contiguous(), tensor)
            return PutBack(
                self.average(row, among=among, channel=channel, name=name), row, tensor
            )
        comm = self._queue(among, channel)
        named = {name: tensor} if name else parts
        if self._context.rounds.is_nonblocking or among is not None:
            tensor.mul_(1 / comm.size)
            return self._send(comm, tensor, None, named, counts=True)
        kept = None
        if self._context.workers.counts:
            tensor.mul_(1 / comm.size)
        else:
            kept = tensor.clone()  # the result if no worker is active
            tensor.zero_()
        return self._sum(
            comm, tensor, None, named, not channel, equally=True, kept=kept
        )

    def _queue(self, among: Comm | None, channel: str) -> Comm:
        comm = self._comm if among is None else among
        return comm.channel(channel) if channel else comm

    def _sum(
        self,
        comm: Comm,
        buffer: torch.Tensor,
        bucket: Bucket | None,
        named: Mapping[str, torch.Tensor] | None,
        carries: bool,
        *,
        equally: bool = False,
        kept: torch.Tensor | None = None,
    ) -> Pending:
        """Sum *buffer* over all workers, and scale it to an average once active workers are known.

        *kept* is the result if no worker is active. *carries*: the sum may carry the exchange of
        active workers. *equally*: each active worker has weight 1 instead of its own weight.
        """
        participation = self._participation
        self._require_round()
        if participation.is_resolved:
            if kept is not None and participation.none_are_active:
                buffer.copy_(kept)
                return DonePending()  # all ranks know that no worker is active
            factor = participation.factor(equally)
            if factor != 1.0:
                buffer.mul_(factor)
            return self._send(comm, buffer, bucket, named)
        if carries and participation.can_attach(buffer):
            participation.attach(buffer)
            pending = self._send(comm, buffer, bucket, named)
            participation.attached(pending)
        else:
            pending = self._send(comm, buffer, bucket, named)
        return ScaledPending(participation, pending, buffer, equally, kept)

    def _require_round(self) -> None:
        if self._participation.is_later:
            raise UsageError(
                f"a mean over all workers before the update, with Rounds(every="
                f"{self._context.rounds.every}): the round is held in after_update. Ask for "
                "the mean there, if run.is_round"
            )

    def _send(
        self,
        comm: Comm,
        buffer: torch.Tensor,
        bucket: Bucket | None,
        named: Mapping[str, torch.Tensor] | None,
        *,
        counts: bool = False,
    ) -> Pending:
        """Sum *buffer* over *comm*, compressed if its tensors have names.

        The names are those of *bucket*, or the keys of *named*. *counts*: this worker's values
        count, even if it is out of data.
        """
        compression = self._compression
        if compression is None or not (named or bucket):
            return comm.all_reduce(buffer, "sum")
        if comm.size == 1 and not compression.compression.code.modifies_gradients:
            return comm.all_reduce(buffer, "sum")
        if bucket is not None:
            named = dict(zip(bucket.names, bucket.views, strict=True))
        assert named is not None
        parts, names = list(named.values()), list(named)
        pending = compression.sum(comm, buffer, parts, names, counts=counts)
        return pending or DonePending()

    def benchmark(self, buffer: torch.Tensor, *, in_halves: bool = False) -> Pending:
        """Sum a buffer as `mean` does, or as `scatter_mean` and its gather do, only to time it."""
        if in_halves:
            return reduce_scatter(self._comm, buffer, "sum").gather()
        if self._compression is None or self._comm.size == 1:
            return self._comm.all_reduce(buffer, "sum")
        return self._compression.benchmark(self._comm, buffer) or DonePending()


class DonePending:
    """The `Pending` of an operation that sends nothing."""

    def wait(self) -> None:
        """Return at once."""

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        return work() or self


class _ScatteredMean:
    """The `ReduceScatter` of a sum that its gather scales to a mean over active workers.

    *asks*: the exchange of active workers travels in it.
    """

    def __init__(
        self,
        participation: Participation,
        scattered: ReduceScatter,
        buffer: torch.Tensor,
        asks: bool,
    ) -> None:
        self._participation, self._scattered = participation, scattered
        self._buffer, self._asks = buffer, asks
        self._gathered = False

    def gather(self) -> Pending:
        if self._gathered:
            raise UsageError(
                "gather() of a mean was called twice: expected one call. Wait for the "
                "Pending that the first call returned"
            )
        self._gathered = True
        pending = self._scattered.gather()
        if self._asks:
            self._participation.attached(pending)
        return ScaledPending(self._participation, pending, self._buffer)


class _GroupMean:
    """The `Pending` of a sum within a group, scaled to the mean over its active workers."""

    __slots__ = ("_buffer", "_pending", "_vote")

    def __init__(self, vote: GroupVote, pending: Pending, buffer: torch.Tensor) -> None:
        self._vote, self._buffer = vote, buffer
        self._pending: Pending | None = pending

    def wait(self) -> None:
        if self._pending is None:
            return
        if not self._vote.is_sent:
            raise UsageError(
                "a mean within a group was waited for before the last bucket of its step "
                "was delivered: its active workers are known only then. Wait in "
                "backward_ended, or later"
            )
        pending, self._pending = self._pending, None
        pending.wait()
        self._vote.resolve()
        if self._vote.factor != 1.0:
            self._buffer.mul_(self._vote.factor)

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        """Refused, as for a mean over all workers."""
        raise UsageError(_THEN)


_THEN = (
    "then() of a mean: its active workers are known only when the backward pass has "
    "ended. Wait for the mean, or chain sums of `Run.comm`"
)


class ScaledPending:
    """The `Pending` of a sum that is scaled to a mean once active workers are known."""

    __slots__ = ("_buffer", "_equally", "_kept", "_participation", "_pending")

    def __init__(
        self,
        participation: Participation,
        pending: Pending,
        buffer: torch.Tensor,
        equally: bool = False,
        kept: torch.Tensor | None = None,
    ) -> None:
        self._participation, self._buffer = participation, buffer
        self._equally, self._kept = equally, kept
        self._pending: Pending | None = pending

    def wait(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        participation = self._participation
        participation.resolve()
        if self._kept is not None and participation.none_are_active:
            self._buffer.copy_(self._kept)
            return
        factor = participation.factor(self._equally)
        if factor != 1.0:
            self._buffer.mul_(factor)

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        """Refused: the mean needs the round's active workers, which are known later."""
        raise UsageError(_THEN)
