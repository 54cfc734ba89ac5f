"""Shuffle: who is in a group with whom from step to step, where all links are alike.

Each design is a function of the workers alone, `random_groups` also of (seed, step, version):
nobody sends anything to agree on it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import lru_cache

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


def pairs(members: Sequence[int]) -> tuple[Groups, ...]:
    """The alternating pairs of the authors' four-worker code: {0,1} {2,3}, then {0,3} {1,2}
    (Wang et al. 2020, v1), for any number of workers.

    Those with even numbers stay, those with odd numbers move round by 0, 1, 3, 7, ... places:
    what a worker holds is then a mean over 2, 4, 8, 16, ... neighbours. Powers of two agree
    exactly after log2(n) steps, others nearly. The last of an odd number of workers joins
    another pair each time.
    """
    half = len(members) // 2
    if half <= 1:
        return (in_order([members]),)
    phases = []
    for number in range(1 + _digits_of(half, 2)):
        moved = 2**number - 1
        groups = [
            [members[2 * k], members[2 * ((k + moved) % half) + 1]] for k in range(half)
        ]
        if len(members) % 2:
            groups[number % half].append(members[-1])
        phases.append(in_order(groups))
    return tuple(phases)


def fixed(members: Sequence[int], size: int) -> tuple[Groups, ...]:
    """The same groups in each step: they never agree. Only a control for experiments."""
    return (in_order(cut(members, size)),)


@lru_cache(maxsize=256)
def random_groups(
    members: tuple[int, ...], size: int, seed: int, step: int, version: int
) -> Groups:
    """Any partition into groups of *size* is as likely as any other, in each step anew.

    The order is that of a hash, which is the same on every machine and in every release.
    """
    return in_order(cut(shuffled(members, f"{seed} {version} {step}"), size))


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
