"""Shuffle: who is in a group with whom from step to step, where all links are alike.

The design is a function of the workers alone: nobody sends anything to agree on it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from paceline.errors import UsageError
from paceline.methods.ds_sync.groups import Groups, cut, in_order


def digits(members: Sequence[int], size: int) -> tuple[Groups, ...]:
    """Groups of those who differ in one digit of their number, a digit in each phase.

    Workers are numbered in base *size*. Where their number is a product of factors up to
    *size* (or *size* + 1, where that is needed), those are the radices and the groups, and all
    agree exactly after as many steps as there are digits: n = g^d takes d. Else groups are
    as equal as can be, and workers agree nearly.

    For 16 workers and a size of 4: the rows, then the columns of a 4x4 grid
    (Wang et al. 2020 ran 16; the grouping is our generalisation).
    """
    radices = _radices(len(members), size)
    if not radices:  # a prime factor is too large
        radices = [size] * max(1, _digits_of(len(members), size))
    strides = itertools.accumulate(radices[:-1], lambda a, b: a * b, initial=1)
    return tuple(
        in_order(cut([m for i in range(s) for m in members[i::s]], radix))
        for s, radix in zip(strides, radices, strict=True)
    )


def _digits_of(count: int, base: int) -> int:
    """How many digits number *count* things."""
    return next(d for d in itertools.count() if base**d >= count)


def _radices(count: int, size: int) -> list[int]:
    """Factors of *count* from 2 to *size*, the largest first; one more than *size* only where
    nothing else divides. Empty if there are none."""
    found = []
    while count > 1:
        fits = [*range(min(size, count), 1, -1), size + 1]
        factor = next((radix for radix in fits if count % radix == 0), None)
        if factor is None:
            return []
        found.append(factor)
        count //= factor
    return found or [1]


def shuffled(workers: Sequence[int], key: str) -> list[int]:
    """In an order that looks random and depends on *key* alone."""

    def place(worker: int) -> bytes:
        return hashlib.blake2b(f"{key} {worker}".encode(), digest_size=16).digest()

    return sorted(workers, key=place)


def check_size(size: int, count: int) -> None:
    """Raises `UsageError` for groups that *count* workers cannot form."""
    if size < 2:
        raise UsageError(
            f"size: expected groups of two or more workers, got {size}: a worker in a group "
            "of its own averages with nobody"
        )
    if count > 1 and size > count:
        raise UsageError(
            f"size: expected groups of 2 to {count} workers, as many as there are, got "
            f"{size}: say {count} to average over all of them in each step"
        )
