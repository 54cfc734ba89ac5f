"""Whole tensors between all ranks: rank 0's values, or everybody's mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.interfaces import Comm
from paceline.tensors import by_kind, flatten, unflatten_into

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


def average_tensors(comm: Comm, tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the mean of floating-point tensors, and the maximum of whole
    numbers (counters). Collective."""
    for piece in _pieces(tensors):
        flat = flatten(piece)
        real = flat.is_floating_point() or flat.is_complex()
        if flat.dtype == torch.bool:
            flat = flat.to(torch.uint8)
        comm.all_reduce(flat, "mean" if real else "max").wait()
        unflatten_into(flat, piece)


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
