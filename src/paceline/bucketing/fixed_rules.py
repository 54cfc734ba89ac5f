"""Bucket rules that need no measuring: sizes in gradient-ready order to lengths."""

from __future__ import annotations

from collections.abc import Sequence

DDP_FIRST_BYTES = 1024 * 1024
DDP_BYTES = 25 * 1024 * 1024


def wfbp(sizes: Sequence[float]) -> list[int]:
    """A bucket per tensor: wait-free backpropagation (Zhang et al., Poseidon, 2017)."""
    return [1] * len(sizes)


def single(sizes: Sequence[float]) -> list[int]:
    """One bucket, sent when backward has ended."""
    return [len(sizes)] if sizes else []


def ddp(sizes: Sequence[float]) -> list[int]:
    """PyTorch DDP's rule: a first bucket of 1 MiB, then buckets of 25 MiB.

    A bucket is closed by the tensor that brings it to its limit (torch's
    ``_compute_bucket_assignment_by_size`` over the ready order).
    """
    lengths = []
    limit, count, total = DDP_FIRST_BYTES, 0, 0.0
    for size in sizes:
        count, total = count + 1, total + size
        if total >= limit:
            lengths.append(count)
            limit, count, total = DDP_BYTES, 0, 0.0
    if count:
        lengths.append(count)
    return lengths
