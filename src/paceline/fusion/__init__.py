"""In which pieces the gradient travels: rules that need no measuring.

A rule turns the gradients' sizes, in gradient-ready order, into bucket lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from paceline.errors import UsageError, unknown

DDP_FIRST_BYTES = 1024 * 1024
DDP_BYTES = 25 * 1024 * 1024


def wfbp(sizes: Sequence[int]) -> list[int]:
    """A bucket per tensor: wait-free backpropagation (Zhang et al., Poseidon, 2017)."""
    return [1] * len(sizes)


def single(sizes: Sequence[int]) -> list[int]:
    """One bucket, sent when backward has ended."""
    return [len(sizes)]


def ddp(sizes: Sequence[int]) -> list[int]:
    """PyTorch DDP's rule: a first bucket of 1 MiB, then buckets of 25 MiB.

    A bucket is closed by the tensor that brings it to its limit (torch's
    ``_compute_bucket_assignment_by_size`` over the ready order).
    """
    lengths = []
    limit, count, total = DDP_FIRST_BYTES, 0, 0
    for size in sizes:
        count, total = count + 1, total + size
        if total >= limit:
            lengths.append(count)
            limit, count, total = DDP_BYTES, 0, 0
    if count:
        lengths.append(count)
    return lengths


RULES: dict[str, Callable[[Sequence[int]], list[int]]] = {
    "ddp": ddp,
    "single": single,
    "wfbp": wfbp,
}


def check_rule(rule: str) -> str:
    """Return *rule* if it exists; raises `UsageError` naming those that do."""
    if rule not in RULES:
        raise UsageError(unknown("fusion rule", rule, RULES))
    return rule


def group(
    rule: str, sizes: Sequence[int], kinds: Sequence[Hashable]
) -> list[list[int]]:
    """Buckets as lists of positions in ready order.

    Tensors of different *kinds* never share a bucket: each kind is planned by itself, and
    buckets are ordered by the tensor that completes them.
    """
    members: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        members.setdefault(kind, []).append(position)
    groups: list[list[int]] = []
    for positions in members.values():
        start = 0
        for length in RULES[check_rule(rule)]([sizes[p] for p in positions]):
            groups.append(positions[start : start + length])
            start += length
    return sorted(groups, key=lambda positions: positions[-1])
