"""All-reduce in three stages, two of which stay in the racks.

1. Reduce-scatter in each rack: of its g ranks, each holds the rack's sum of one g-th.
2. All-reduce across racks: the ranks that hold the same part form a ring; all of these
   rings run side by side.
3. All-gather in each rack.

Rings in all stages. Over the uplink of a rack 2 (r - 1) / r of the buffer leave for r racks,
however many ranks are in it, as in "Massively Distributed SGD: ImageNet/ResNet-50 Training in
a Flash" (Mikami et al. 2018), whose torus is the same for racks of equal size. In racks of
different sizes ranks hold parts of different lengths: the buffer is cut where any
rack's parts end, and each piece has a holder, and so one member of its ring, in each rack.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from paceline.collectives.composition import Among, InTurn, SideBySide
from paceline.collectives.schedules import Ring, offset_of
from paceline.errors import UsageError
from paceline.interfaces import Schedule


def grouped(racks: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks of each rack, in the order of racks' first ranks."""
    members: dict[int, list[int]] = {}
    for rank, rack in enumerate(racks):
        members.setdefault(rack, []).append(rank)
    return [tuple(ranks) for ranks in members.values()]


def racks_or_rows(ranks: int, racks: Sequence[int] | None) -> tuple[int, ...]:
    """*racks*; where nobody knows them, rows of about the root of n *ranks* each.

    Raises `UsageError` where they are not of so many ranks.
    """
    if racks is None:
        width = math.isqrt(ranks - 1) + 1 if ranks > 1 else 1
        return tuple(rank // width for rank in range(ranks))
    if len(racks) != ranks:
        raise UsageError(
            f"racks: expected one for each of {ranks} ranks, got {len(racks)}: the cluster "
            "that was described has another number of workers"
        )
    return tuple(racks)


@lru_cache(maxsize=256)
def hierarchical(size: int, racks: tuple[int, ...]) -> Schedule:
    """The schedule over *size* units; ``racks[i]`` is the rack of rank i."""
    ranks, groups = len(racks), grouped(racks)
    if len(groups) in (1, ranks) or not size:
        return Ring(ranks, size)

    def in_racks(gather: bool) -> Schedule:
        # A reduce-scatter with a shift of one leaves part i at rank i of the rack, where
        # an all-gather without shift takes it from.
        rings = (
            Ring(len(m), size, rounds=1, gather=gather, shift=0 if gather else 1)
            for m in groups
        )
        return SideBySide(
            tuple(
                Among(ranks, m, ring)
                for m, ring in zip(groups, rings, strict=True)
                if len(m) > 1
            )
        )

    starts = [[offset_of(size, len(m), i) for i in range(len(m))] for m in groups]
    cuts = sorted({start for parts in starts for start in parts} | {size})
    across = SideBySide(
        tuple(
            Among(
                ranks,
                tuple(
                    m[bisect_right(parts, start) - 1]
                    for m, parts in zip(groups, starts, strict=True)
                ),
                Ring(len(groups), stop - start),
                start,
            )
            for start, stop in pairwise(cuts)
        )
    )
    return InTurn((in_racks(False), across, in_racks(True)))
