"""A model's buffers, such as BatchNorm statistics: rank 0's become those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.broadcast import pieces
from paceline.core.settings import ModuleBuffers
from paceline.interfaces import Comm, Pending
from paceline.interfaces.buckets import flatten, unflatten_into


class BufferSync:
    """Makes a model's buffers (BatchNorm statistics) equal on all ranks in each step.

    They are sent at the end of a backward pass, when forward passes are over. So the model after a
    step equals the model at the start of the next one, also in an evaluation on one rank. They
    travel while the optimizer steps. They are written into the model when no gradient needs the old
    ones any more.
    """

    def __init__(
        self, comm: Comm, buffers: Sequence[torch.Tensor], setting: ModuleBuffers
    ) -> None:
        shared = comm.size > 1 and setting != "local"
        self._comm = comm
        self._buffers = list(buffers) if shared else []
        self._under_way: list[tuple[Pending, torch.Tensor, list[torch.Tensor]]] = []

    @property
    def has_any(self) -> bool:
        """Whether any buffer is shared."""
        return bool(self._buffers)

    def start(self, source: int) -> None:
        """Send rank *source*'s buffers to all ranks. Collective."""
        for pending, _, _ in self._under_way:
            # If a step has several passes, only the last one's buffers count.
            pending.wait()
        self._under_way.clear()
        for piece in pieces(self._buffers):
            flat = flatten(piece)
            pending = self._comm.broadcast(flat, source)
            into = piece if self._comm.rank != source else []
            self._under_way.append((pending, flat, into))

    def apply(self) -> None:
        """Wait for the buffers that were sent, and copy them into the model."""
        for pending, flat, into in self._under_way:
            pending.wait()
            if into:
                unflatten_into(flat, into)
        self._under_way.clear()
