"""Groups of workers by hand: parses a method's key ``members``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from paceline.errors import UsageError
from paceline.interfaces import Groups

_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def read_members(text: str, workers: int) -> Groups:
    """Parse fixed groups: ``"0-3.8+4-7"`` has ranks 0 to 3 and 8 in group 0, and 4 to 7 in group 1.

    Args:
        text: The groups.
        workers: Number of workers.

    Raises:
        UsageError: A rank is named twice or not at all, or does not exist; or there are more groups
            than workers.
    """
    groups = text.split("+")
    if len(groups) > workers:
        raise UsageError(
            f"members={text}: expected at most {workers} groups, one a worker, got "
            f"{len(groups)}"
        )
    of: dict[int, int] = {}
    for number, group in enumerate(groups):
        for rank in _ranks(text, group, workers):
            if rank in of:
                raise UsageError(
                    f"members={text}: rank {rank} is named twice: expected each rank in one "
                    "group"
                )
            of[rank] = number
    missing = [rank for rank in range(workers) if rank not in of]
    if missing:
        raise UsageError(
            f"members={text}: rank {missing[0]} is in no group: expected each of the ranks 0 "
            f"to {workers - 1} in one"
        )
    return Groups(tuple(of[rank] for rank in range(workers)), len(groups))


def _ranks(text: str, group: str, workers: int) -> Iterator[int]:
    for part in group.split("."):
        match = _RANKS.fullmatch(part)
        if match is None:
            raise UsageError(
                f"members={text}: expected groups joined by '+', of ranks and ranges joined "
                f"by '.', such as 0-3.8+4-7, got {part!r}"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < workers:
            raise UsageError(
                f"members={text}: expected ranks 0 to {workers - 1}, and ranges that rise, "
                f"got {part!r}"
            )
        yield from range(first, last + 1)


def members_text(of: Sequence[int]) -> str:
    """Return the text that `read_members` reads: *of* has by rank the number of its group."""
    groups = []
    for group in range(max(of) + 1):
        members = (rank for rank, its in enumerate(of) if its == group)
        # Ranks that follow each other are as far from their places in the list.
        runs = groupby(enumerate(members), lambda pair: pair[1] - pair[0])
        parts = []
        for _, run in runs:
            ranks = [rank for _, rank in run]
            first, last = ranks[0], ranks[-1]
            parts.append(f"{first}-{last}" if last > first else f"{first}")
        groups.append(".".join(parts))
    return "+".join(groups)
