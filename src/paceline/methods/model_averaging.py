"""Averages of models: flat messages over tensors, and the weighted mean of all workers' models.

Methods that average parameters (DS-Sync, local updates, DASO) use these two classes:

- `FlatTensors`: one buffer over tensors of one kind, sent as one message.
- `ModelAverager`: the mean of parameters and BatchNorm statistics, and the maximum of counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Self

import torch

from paceline.interfaces import Comm, Pending, Run
from paceline.interfaces.buckets import (
    by_kind,
    stand_for_the_same,
    stand_in_for,
    stands_in,
    wire_bytes,
)


class FlatTensors:
    """One flat buffer over tensors of one kind, in their order.

    The buffer is memory of its own: `gather_in` copies the tensors into it, and `scatter_out`
    copies it back. Where tensors stand in for larger ones, so does the buffer.

    Attributes:
        of: The tensors, as they were given.
        buffer: All their elements, flat.
        views: ``views[i]`` is the part of *buffer* with the shape of ``of[i]``.

    Example:
        flat = FlatTensors(bucket.parameters)
        flat.gather_in()
        run.average(flat.buffer).wait()
        flat.scatter_out()
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None
    ) -> None:
        """Make the buffer, all zeros.

        Args:
            tensors: Of one type, on one device; one at least.
            dtype: Of the buffer, where it is not the tensors': see `widen_half`.
        """
        self.of = list(tensors)
        first = self.of[0]
        sizes = [tensor.numel() for tensor in self.of]
        kind = dtype or first.dtype
        self.buffer = torch.zeros(sum(sizes), dtype=kind, device=first.device)
        if any(stands_in(tensor) for tensor in tensors):
            size = sum(wire_bytes(tensor) for tensor in tensors)
            stand_in_for(size * kind.itemsize // first.element_size(), self.buffer)
        self.views = [
            part.view(tensor.shape)
            for part, tensor in zip(self.buffer.split(sizes), self.of, strict=True)
        ]
        for view, tensor in zip(self.views, self.of, strict=True):
            stand_for_the_same(view, tensor)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors without gradients, where they are now.

        ``p.data = ...`` gives a parameter other memory. Lookahead optimizers do that, and
        cuDNN's flat weights.
        """
        return [tensor.detach() for tensor in self.of]

    @property
    def bytes(self) -> int:
        """Bytes of the buffer on the network."""
        return wire_bytes(self.buffer)

    def gather_in(self) -> None:
        """Copy the tensors into the buffer."""
        with torch.no_grad():
            for view, tensor in zip(self.views, self.of, strict=True):
                view.copy_(tensor)

    def scatter_out(self) -> None:
        """Copy the buffer back into the tensors."""
        with torch.no_grad():
            for tensor, view in zip(self.of, self.views, strict=True):
                tensor.copy_(view)


def widen_half(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for the half-precision types: sums and small differences need its bits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def flatten_buckets(run: Run, extra: Iterable[torch.Tensor] = ()) -> list[FlatTensors]:
    """Make a message for the parameters of each bucket, and one for each kind of other tensors.

    Buckets may be rebuilt: make the messages anew in ``buckets_rebuilt``.

    Args:
        run: The training.
        extra: Other tensors of floating point, BatchNorm statistics for example.
    """
    return [
        *(FlatTensors(bucket.parameters) for bucket in run.buckets),
        *(FlatTensors(tensors) for tensors in by_kind(list(extra))),
    ]


class ModelAverager:
    """The tensors of a model, or of a part of it, that workers average.

    Sums of half-precision numbers are formed in float32.

    Attributes:
        parameters: Messages of parameters.
        statistics: Messages of buffers that have a mean: BatchNorm's running statistics.
        counters: Messages of buffers of whole numbers, or flags. All workers take the maximum.
    """

    def __init__(
        self,
        parameters: Iterable[Sequence[torch.Tensor]],
        buffers: Iterable[torch.Tensor] = (),
    ) -> None:
        """Make the messages.

        Args:
            parameters: Groups of tensors of one kind; a message each.
            buffers: Of the model, of any type.
        """
        some = [buffer for buffer in buffers if buffer.numel()]
        real = [b for b in some if b.is_floating_point() or b.is_complex()]
        whole = [b for b in some if not (b.is_floating_point() or b.is_complex())]
        self.parameters = [_wide(tensors) for tensors in parameters]
        self.statistics = [_wide(tensors) for tensors in by_kind(real)]
        self.counters = [_countable(tensors) for tensors in by_kind(whole)]

    @classmethod
    def of_model(cls, run: Run) -> Self:
        """Make the messages of a training's whole model, its parameters by buckets."""
        return cls([bucket.parameters for bucket in run.buckets], run.own_buffers)

    @property
    def flats(self) -> list[FlatTensors]:
        """All messages."""
        return [*self.parameters, *self.statistics, *self.counters]

    def mean(
        self, comm: Comm, share: float, statistics_share: float | None = None
    ) -> None:
        """Put the weighted mean of all models of *comm* into the model. Collective.

        Args:
            comm: The workers.
            share: This worker's weight, of the sum of all. With 0 a worker learns the mean, and
                its own numbers do not count, finite or not.
            statistics_share: The same for statistics, where it is another one.
        """
        of_statistics = share if statistics_share is None else statistics_share
        pending: list[Pending] = []
        for flats, weight in (
            (self.parameters, share),
            (self.statistics, of_statistics),
        ):
            for flat in flats:
                if weight:
                    flat.gather_in()
                    flat.buffer.mul_(weight)
                else:
                    flat.buffer.zero_()
                pending.append(comm.all_reduce(flat.buffer, "sum"))
        for flat in self.counters:
            flat.gather_in()
            pending.append(comm.all_reduce(flat.buffer, "max"))
        for one in pending:
            one.wait()
        for flat in self.flats:
            flat.scatter_out()

    def scatter_counters(self) -> None:
        """Put the counters that have arrived into the model, or its own where those are larger.

        A worker may have counted on since they were sent.
        """
        for flat in self.counters:
            for tensor, found in zip(flat.tensors, flat.views, strict=True):
                tensor.copy_(torch.maximum(tensor.to(found.dtype), found))

    def snapshot(self) -> Callable[[], None]:
        """Copy the tensors, and return a function that puts the copies back."""
        tensors = [tensor for flat in self.flats for tensor in flat.of]
        copies = [tensor.detach().clone() for tensor in tensors]

        def restore() -> None:
            with torch.no_grad():
                for tensor, copied in zip(tensors, copies, strict=True):
                    tensor.copy_(copied)

        return restore


def _wide(tensors: Sequence[torch.Tensor]) -> FlatTensors:
    return FlatTensors(tensors, widen_half(tensors[0].dtype))


def _countable(tensors: Sequence[torch.Tensor]) -> FlatTensors:
    """Flags travel as numbers: nothing else has a maximum."""
    flags = tensors[0].dtype == torch.bool
    return FlatTensors(tensors, torch.uint8 if flags else None)
