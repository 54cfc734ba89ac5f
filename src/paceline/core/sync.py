"""Whole tensors between all ranks: one rank's values, or everybody's mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from paceline.core.settings import ModuleBuffers
from paceline.errors import UsageError
from paceline.interfaces import Comm, Pending
from paceline.interfaces.buckets import by_kind, flatten, unflatten_into

MOST_GATHERED = 64 * 1024 * 1024
"""Bytes that a rank tells all others in one piece."""

PIECE_BYTES = 25 * 1024 * 1024
"""Tensors travel in pieces of about this size: bounds the copy's memory."""


def broadcast_tensors(
    comm: Comm, tensors: Sequence[torch.Tensor], source: int = 0
) -> None:
    """Give every rank the values of rank *source*. Collective."""
    for piece in _pieces(tensors):
        flat = flatten(piece)
        comm.broadcast(flat, source).wait()
        if comm.rank != source:
            unflatten_into(flat, piece)


def mean_of_tensors(
    comm: Comm, tensors: Sequence[torch.Tensor], counts: bool = True
) -> None:
    """Give every rank the mean of the values of those ranks that *count*. Collective."""
    whole = torch.tensor([float(counts)], dtype=torch.float64)
    if tensors:
        whole = whole.to(tensors[0].device)
    comm.all_reduce(whole, "sum").wait()
    for piece in _pieces(tensors):
        flat = flatten(piece)
        if not counts:
            flat.zero_()
        comm.all_reduce(flat, "sum").wait()
        unflatten_into(flat.div_(whole.item()), piece)


def gather_bytes(own: bytes, device: torch.device) -> list[bytes]:
    """Every rank's bytes, in rank order: data, where torch's object collectives would
    unpickle what comes. Collective over the default group. Raises `UsageError`, on all ranks, where
    one has more than `MOST_GATHERED`: others would have to make room for it."""
    ranks = dist.get_world_size()
    sizes = torch.empty(ranks, dtype=torch.int64, device=device)
    dist.all_gather_single(sizes, torch.tensor([len(own)], device=device))
    longest = int(sizes.max())
    if longest > MOST_GATHERED or int(sizes.min()) < 0:
        raise UsageError(
            f"rank {int(sizes.argmax())} has {longest} bytes to tell all others: expected at "
            f"most {MOST_GATHERED}"
        )
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(own)] = torch.frombuffer(
        bytearray(own) or bytearray(1), dtype=torch.uint8
    )[: len(own)]
    everyone = torch.empty(ranks * longest, dtype=torch.uint8, device=device)
    if longest:
        dist.all_gather_single(everyone, padded)
    return [
        part[: int(size)].cpu().numpy().tobytes()
        for part, size in zip(everyone.view(ranks, longest), sizes, strict=True)
    ]


class SharedBuffers:
    """A model's buffers (BatchNorm's statistics), made common to all ranks step by step.

    They are sent when a backward pass ends: forward passes are over then, and whoever
    looks at the model after the step, in an evaluation on one rank alone too, sees what
    the next step begins with. They are put into the model only when nobody can need
    the old ones for gradients, and travel while the optimizer steps.
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
        """Whether anything is shared."""
        return bool(self._buffers)

    def send(self, source: int) -> None:
        """Rank *source*'s values go on their way. Collective."""
        for pending, _, _ in self._under_way:
            pending.wait()  # of several passes before a step the last one's count
        self._under_way.clear()
        for piece in _pieces(self._buffers):
            flat = flatten(piece)
            pending = self._comm.broadcast(flat, source)
            into = piece if self._comm.rank != source else []
            self._under_way.append((pending, flat, into))

    def put(self) -> None:
        """Wait for what was sent, and put it into the model."""
        for pending, flat, into in self._under_way:
            pending.wait()
            if into:
                unflatten_into(flat, into)
        self._under_way.clear()


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for group in by_kind(tensors):
        piece: list[torch.Tensor] = []
        size = 0
        for tensor in group:
            piece.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= PIECE_BYTES:
                yield piece
                piece, size = [], 0
        if piece:
            yield piece
