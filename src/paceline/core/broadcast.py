"""Whole tensors and actions across all ranks: broadcast, average, gather, and `run_on_all`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from paceline.errors import PacelineError, UsageError
from paceline.interfaces import Comm, Runtime
from paceline.interfaces.buckets import by_kind, flatten, unflatten_into

MOST_GATHERED = 64 * 1024 * 1024
"""Largest number of bytes that a rank may send to all others in one message."""

T = TypeVar("T")

PIECE_BYTES = 25 * 1024 * 1024
"""Tensors are sent in pieces of about this size, in bytes: this bounds the copy's memory."""


def broadcast_tensors(
    comm: Comm, tensors: Sequence[torch.Tensor], source: int = 0
) -> None:
    """Give every rank the values of rank *source*. Collective."""
    for piece in pieces(tensors):
        flat = flatten(piece)
        comm.broadcast(flat, source).wait()
        if comm.rank != source:
            unflatten_into(flat, piece)


def average_tensors(
    comm: Comm, tensors: Sequence[torch.Tensor], counts: bool = True
) -> None:
    """Give every rank the mean of the values of those ranks that *count*. Collective."""
    whole = torch.tensor([float(counts)], dtype=torch.float64)
    if tensors:
        whole = whole.to(tensors[0].device)
    comm.all_reduce(whole, "sum").wait()
    for piece in pieces(tensors):
        flat = flatten(piece)
        if not counts:
            flat.zero_()
        comm.all_reduce(flat, "sum").wait()
        unflatten_into(flat.div_(whole.item()), piece)


def gather_bytes(own: bytes, device: torch.device) -> list[bytes]:
    """Gather every rank's bytes, in rank order. Collective over the default group.

    Unlike torch's object collectives it unpickles nothing. Raises `UsageError` on all ranks if one
    has more than `MOST_GATHERED` bytes: the others would have to allocate memory for them.
    """
    ranks = dist.get_world_size()
    sizes = torch.empty(ranks, dtype=torch.int64, device=device)
    dist.all_gather_single(sizes, torch.tensor([len(own)], device=device))
    longest = int(sizes.max())
    if longest > MOST_GATHERED or int(sizes.min()) < 0:
        raise UsageError(
            f"rank {int(sizes.argmax())} sends {longest} bytes to all others: expected at "
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


class _Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error on a rank, if any. *usage*: it was a `UsageError`."""

    failed: bool = False
    usage: bool = False
    message: str = ""


def run_on_all(runtime: Runtime, what: str, action: Callable[[], T]) -> T:
    """Run *action* on every worker, and return its result when all have run it. Collective.

    If it fails on one worker, all raise, so that no worker is alone in the next collective. If
    workers communicate only through servers, each runs it by itself.

    Args:
        runtime: This worker's.
        what: The name of the action in other workers' error messages.
        action: Called once, with no arguments.

    Raises:
        UsageError: The action raised one, on any worker.
        PacelineError: The action raised another error on another worker.
    """
    if runtime.server_only:
        return action()
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(action())
    except Exception as raised:
        error = raised
    mine = _Failure()
    if error is not None:
        message = f"{type(error).__name__}: {error}"
        mine = _Failure(True, isinstance(error, UsageError), message)
    device = next(runtime.registry.trainings[-1].model.parameters()).device
    everyone = gather_bytes(msgspec.msgpack.encode(mine), device)
    if error is not None:
        raise error
    for rank, encoded in enumerate(everyone):
        theirs = msgspec.msgpack.decode(encoded, type=_Failure)
        if theirs.failed:
            kind = UsageError if theirs.usage else PacelineError
            raise kind(f"{what} failed on rank {rank}: {theirs.message}")
    return result[0]


def pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split *tensors* into lists of one kind, each of about `PIECE_BYTES` bytes."""
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
