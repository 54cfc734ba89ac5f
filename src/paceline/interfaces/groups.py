"""Group servers: each holds the whole model for the workers of its group, and they pass on to
each other what they have applied.

A method whose servers are so says its `Groups` (`UpdatesOnServer.groups`), and its discipline is
`Meshed`: it says what is to be passed on, and applies what comes. `paceline.parameter_server.groups.server` carries
it: each parcel arrives once at each server, whatever connections do meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.errors import UsageError
from paceline.interfaces.discipline import Discipline, Shard
from paceline.interfaces.partial_optimizer import Hyperparameters

SpeedClass = Literal["fastest", "middle", "slowest"]


class Groups(NamedTuple):
    """Who is in which group. A later *version* replaces an earlier one.

    *of*: by rank, the number of the worker's group, which is the number of its server. A server
    may have no workers. *servers*: how many servers there are. *speeds*: by group, its class;
    empty while nobody knows.
    """

    of: tuple[int, ...]
    servers: int
    version: int = 0
    speeds: tuple[SpeedClass, ...] = ()

    def members(self, group: int) -> list[int]:
        """The workers of a group, in rank order."""
        return [rank for rank, its in enumerate(self.of) if its == group]


_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def read_members(text: str, workers: int) -> Groups:
    """Groups by hand: ``"0-3.8+4-7"`` has ranks 0 to 3 and 8 in group 0, and 4 to 7 in
    group 1.

    Raises `UsageError` for a rank that is named twice, or not at all, or that there is not, and
    for more groups than workers.
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
    """What `read_members` reads: *of* has by rank the number of its group."""
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


class Parcel(NamedTuple):
    """What one server has applied to a bucket, and the others have not yet.

    *values*: flat, of all the bucket's units: the mean of *gradients* gradients, by weight, whose
    weights add up to *weight*. *used*: per unit, whether any of them has it. *hyperparameters*: see
    `GradientSum`. *steps*: by worker whose gradients are in it: those of all steps before this one
    are in it, or in an earlier one. The server fills that in.
    """

    bucket: int
    gradients: int
    weight: float
    used: Sequence[bool]
    hyperparameters: Hyperparameters
    values: torch.Tensor
    steps: Mapping[int, int] = MappingProxyType({})


@runtime_checkable
class Meshed(Discipline, Protocol):
    """A discipline whose server is one of several that hold the whole model each."""

    @property
    def groups(self) -> Groups:
        """As this server knows them."""
        ...

    def is_server(self, number: int) -> None:
        """This is the server of group *number*. Called before anything else."""
        ...

    def outgoing(self, shard: Shard) -> list[Parcel]:
        """What is to be passed on by now. Called after each event; what was returned is not
        owed any more."""
        ...

    def owed(self, shard: Shard) -> list[Parcel]:
        """Everything that was not passed on yet, whether it is time or not: all meet, or this
        group has no workers any more."""
        ...

    def incoming(self, shard: Shard, source: int, parcel: Parcel) -> None:
        """Server *source* has passed this on: it comes once, and in the order of its sending."""
        ...

    def words(self, shard: Shard) -> bytes:
        """What the other servers are to know beside, in the method's own bytes; empty while
        there is nothing new. Called after each event."""
        ...

    def heard(self, shard: Shard, source: int, words: bytes) -> None:
        """Server *source* has said this. Raises `UsageError` for what makes no sense: then
        nothing has changed."""
        ...
