"""Tensors that travel together: what methods average beside gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.interfaces import Run
from paceline.interfaces.buckets import (
    by_kind,
    stand_for_the_same,
    stand_in_for,
    stands_in,
    wire_bytes,
)


class Flat:
    """One flat buffer over *tensors* of one kind, in their order.

    *dtype*: the buffer's type, where it is not theirs: float32 for the differences of
    half-precision parameters, for example. ``views[i]`` is the part of ``buffer`` with the
    shape of ``tensors[i]``. The buffer is not the tensors: `take` copies them in, `put` back.
    Where tensors stand in for larger ones, so does the buffer. ``of`` are the tensors as they
    were given.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None
    ) -> None:
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
        """Without gradients, and where they are now: who writes ``p.data = ...`` gives a
        parameter other memory, as optimizers that look ahead do, and cuDNN's flat weights."""
        return [tensor.detach() for tensor in self.of]

    @property
    def bytes(self) -> int:
        """What the buffer is on the network."""
        return wire_bytes(self.buffer)

    def take(self) -> None:
        """Copy the tensors into the buffer."""
        with torch.no_grad():
            for view, tensor in zip(self.views, self.of, strict=True):
                view.copy_(tensor)

    def put(self) -> None:
        """Copy the buffer back into the tensors."""
        with torch.no_grad():
            for tensor, view in zip(self.of, self.views, strict=True):
                tensor.copy_(view)


def flats(run: Run, extra: Iterable[torch.Tensor] = ()) -> list[Flat]:
    """A `Flat` for the parameters of each planned bucket, in bucket order, and then one for
    each kind among *extra*, which are of floating point. Make them anew in
    ``buckets_rebuilt``."""
    return [
        *(Flat(bucket.parameters) for bucket in run.buckets),
        *(Flat(tensors) for tensors in by_kind(list(extra))),
    ]
