"""The means that a method asks for: what is sent, how it is formed, and who counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.buckets import Bucket, stand_alike
from paceline.collectives import reduce_scatter
from paceline.collectives.pending import PutBack
from paceline.core.compressed_average import Codes
from paceline.core.group_participation import GroupCall, GroupCalls
from paceline.core.participation import RollCall
from paceline.core.presence import Presence
from paceline.errors import UsageError
from paceline.interfaces import Comm, Pending, Rounds, Scattered


class Means:
    """Forms them over *comm*, round by round; *codes* is what gradients are compressed
    with, if they are."""

    def __init__(
        self,
        comm: Comm,
        presence: Presence,
        rounds: Rounds,
        roll_call: RollCall,
        group_calls: GroupCalls,
        codes: Codes | None,
    ) -> None:
        self._comm, self._presence, self._rhythm = comm, presence, rounds
        self._call, self._group_calls, self._codes = roll_call, group_calls, codes

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
        if self._rhythm.models_may_differ and not self._presence.active:
            buffer.zero_()  # of a step long ago, and it counted then
        named = {"": buffer} if parts is None else parts
        comm = self._queue(among, channel)
        if among is not None:
            call = self._group_calls.of(comm, bucket)
            pending = self._code(comm, buffer, bucket, named)
            self._group_calls.sent(call)
            return _GroupMean(call, pending, buffer)
        return self._sum(
            buffer,
            lambda: self._call.gradient_factor,
            lambda: self._code(comm, buffer, bucket, named),
            carries=not channel and (of is None or of.last),
        )

    def scatter_mean(
        self, gradients: Bucket | torch.Tensor, *, of: Bucket | None = None
    ) -> Scattered:
        """See `Run.scatter_mean`."""
        if self._codes is not None:
            raise UsageError(
                "a mean in two halves, and compression: halves are sent as they are; leave "
                "compression out, or use bsp"
            )
        buffer = gradients
        if isinstance(gradients, Bucket):
            of, buffer = gradients, gradients.buffer
        assert isinstance(buffer, torch.Tensor)
        call = self._call
        self._require_round()
        if call.is_answered:
            if call.gradient_factor != 1.0:
                buffer.mul_(call.gradient_factor)
            return reduce_scatter.scatter(self._comm, buffer, "sum")
        # One rank alone holds the element that carries the question, and its answer, until
        # the second half has told all.
        asks = (of is None or of.last) and call.wants(buffer)
        if asks:
            call.ask_inside(buffer)
        scattered = reduce_scatter.scatter(self._comm, buffer, "sum")
        return _ScatteredMean(call, scattered, buffer, asks)

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
        # Of a parameter: no step of autograd's.
        tensor = stand_alike(tensor.detach(), tensor)
        if not tensor.is_contiguous() and parts is None:
            # Other ranks may have it in another order: in its own, all have the same.
            row = stand_alike(tensor.contiguous(), tensor)
            return PutBack(
                self.average(row, among=among, channel=channel, name=name), row, tensor
            )
        comm = self._queue(among, channel)
        named = {name: tensor} if name else parts
        always = self._rhythm.is_nonblocking or among is not None

        def send() -> Pending:
            if named:
                return self._code(comm, tensor, None, named, counts=always)
            return comm.all_reduce(tensor, "sum")

        if always:
            tensor.mul_(1 / comm.size)
            return send()
        kept = None
        if self._presence.takes_part:
            tensor.mul_(1 / comm.size)
        else:
            kept = tensor.clone()  # what stays where nobody takes part
            tensor.zero_()
        return self._sum(
            tensor,
            lambda: self._call.equal_factor,
            send,
            carries=not channel,
            kept=kept,
        )

    def _queue(self, among: Comm | None, channel: str) -> Comm:
        comm = self._comm if among is None else among
        return comm.channel(channel) if channel else comm

    def _sum(
        self,
        buffer: torch.Tensor,
        factor: Callable[[], float],
        send: Callable[[], Pending],
        carries: bool,
        kept: torch.Tensor | None = None,
    ) -> Pending:
        """A sum of *buffer* among all workers, times *factor* once that is known; or what
        was *kept*, where nobody takes part. *carries*: it may carry the question who
        does."""
        call = self._call
        self._require_round()
        if call.is_answered:
            if kept is not None and call.nobody_takes_part:
                buffer.copy_(kept)
                return Nothing()  # all know it
            if factor() != 1.0:
                buffer.mul_(factor())
            return send()
        if carries and call.wants(buffer):
            call.ask_inside(buffer)
            pending = send()
            call.sent(pending)
        else:
            pending = send()
        return _Mean(call, pending, buffer, factor, kept)

    def _require_round(self) -> None:
        if self._call.is_later:
            raise UsageError(
                f"a mean among all workers before the update, with rounds of every="
                f"{self._rhythm.every} steps: their round is held in after_update. Ask "
                "there, where run.meets"
            )

    def _code(
        self,
        comm: Comm,
        buffer: torch.Tensor,
        bucket: Bucket | None,
        named: Mapping[str, torch.Tensor],
        counts: bool = False,
    ) -> Pending:
        """A sum of *buffer*, which is that of *bucket*, or consists of what is *named*.
        *counts*: this worker does, out of data or not."""
        codes = self._codes
        if codes is None or (
            comm.size == 1 and not codes.compressor.modifies_gradients
        ):
            return comm.all_reduce(buffer, "sum")
        if bucket is not None:
            named = dict(zip(bucket.names, bucket.views, strict=True))
        parts = list(named.values())
        pending = codes.sum(comm, buffer, parts, list(named), counts=counts)
        return pending or Nothing()

    def try_out(self, buffer: torch.Tensor, *, in_halves: bool = False) -> Pending:
        """A sum of a gradient that nobody wants, as `mean` forms it, or `scatter_mean` and then
        its gather: to be timed."""
        if in_halves:
            return reduce_scatter.scatter(self._comm, buffer, "sum").gather()
        if self._codes is None or self._comm.size == 1:
            return self._comm.all_reduce(buffer, "sum")
        return self._codes.try_out(self._comm, buffer) or Nothing()


class Nothing:
    """The `Pending` of what sends nothing."""

    def wait(self) -> None:
        """It is there."""

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        return work() or self


class _ScatteredMean:
    """The `Scattered` of a sum whose other half becomes a mean once it is known who takes part;
    *asks*: that travels in it."""

    def __init__(
        self, call: RollCall, scattered: Scattered, buffer: torch.Tensor, asks: bool
    ) -> None:
        self._call, self._scattered = call, scattered
        self._buffer, self._asks = buffer, asks
        self._gathered = False

    def gather(self) -> Pending:
        if self._gathered:
            raise UsageError(
                "gather() of a mean was called before: a mean is gathered once; wait for the "
                "Pending that the first call gave"
            )
        self._gathered = True
        pending = self._scattered.gather()
        if self._asks:
            self._call.sent(pending)
        call = self._call
        return _Mean(call, pending, self._buffer, lambda: call.gradient_factor, None)


class _GroupMean:
    """The `Pending` of a sum within a group, and then the mean of those of it who train."""

    __slots__ = ("_buffer", "_call", "_pending")

    def __init__(self, call: GroupCall, pending: Pending, buffer: torch.Tensor) -> None:
        self._call, self._buffer = call, buffer
        self._pending: Pending | None = pending

    def wait(self) -> None:
        if self._pending is None:
            return
        if not self._call.is_sent:
            raise UsageError(
                "a mean within a group was waited for before the last bucket of its step "
                "was delivered: who takes part in it is known only then. Wait in "
                "backward_ended, or later"
            )
        pending, self._pending = self._pending, None
        pending.wait()
        self._call.answer()
        if self._call.factor != 1.0:
            self._buffer.mul_(self._call.factor)

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        """Refused, as for a mean of all."""
        raise UsageError(_THEN)


_THEN = (
    "then() of a mean: who takes part in it is known only when the backward pass has "
    "ended; wait for it, or chain sums of `Run.comm`"
)


class _Mean:
    """The `Pending` of a sum that becomes a mean once it is known who takes part."""

    __slots__ = ("_buffer", "_call", "_factor", "_kept", "_pending")

    def __init__(
        self,
        call: RollCall,
        pending: Pending,
        buffer: torch.Tensor,
        factor: Callable[[], float],
        kept: torch.Tensor | None,
    ) -> None:
        self._call, self._buffer, self._factor = call, buffer, factor
        self._kept = kept
        self._pending: Pending | None = pending

    def wait(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        self._call.answer()
        if self._kept is not None and self._call.nobody_takes_part:
            self._buffer.copy_(self._kept)
        elif self._factor() != 1.0:
            self._buffer.mul_(self._factor())

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        """Refused: a mean is whole only once all of its round is in."""
        raise UsageError(_THEN)
