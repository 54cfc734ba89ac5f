"""A model spread over servers, from one worker's side: which part of it lies where, and what
lies there. `layout` says which servers hold a part."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Endpoint, Piece, Told, UnitPlace
from paceline.interfaces.buckets import Bucket, stand_alike, wire_bytes
from paceline.interfaces.server_messages import Hyperparameters, Parameters, Unit
from paceline.parameter_server.client.layout import Copies, Layout, SharedOut
from paceline.parameter_server.client.shards import Part, split
from paceline.parameter_server.optim.partitioned import (
    IMPLEMENTATION,
    PartitionedOptimizer,
)
from paceline.torch_internals import version_of

_NOT_SENT = {"params", "param_names", *IMPLEMENTATION}
"""Entries of ``param_groups`` that a server has, or decides, itself."""


@dataclass(frozen=True, eq=False)
class HeldPart:
    """What one shard has of one bucket: elements [*start*, *stop*) of its buffer, whose
    *units* are the bucket's from number *first* on. *slots*: per unit, which of the bucket's
    parameters it is of."""

    bucket: int
    shard: int
    start: int
    stop: int
    first: int
    units: tuple[Unit, ...]
    slots: tuple[int, ...]

    def own(self, numbers: Collection[int] | None) -> list[int]:
        """Of the bucket's units (all, or these), those that are here, counted from 0."""
        every = range(len(self.units))
        if numbers is None:
            return list(every)
        return [unit for unit in every if self.first + unit in numbers]


class Spread:
    """Buckets, spread over *endpoints*; no unit has more than *most_bytes*, where the
    optimizer can be applied to less. *group*: each endpoint holds all of them, and this
    worker's has that number; None: they share them out.

    Answers land in memory of their own (*on_host*: of the processor), and are then put into the
    model.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizer: torch.optim.Optimizer,
        endpoints: Sequence[Endpoint],
        most_bytes: int | None,
        on_host: bool = False,
        group: int | None = None,
    ) -> None:
        self.buckets = list(buckets)
        self.optimizer = optimizer
        self.endpoints = endpoints
        shards = len(endpoints) if group is None else 1
        plan = split(buckets, optimizer, shards, most_bytes)
        used = sorted({part.shard for parts in plan for part in parts})
        self.layout: Layout = SharedOut(used)
        if group is not None:
            self.layout = Copies(len(endpoints), group)
        self.first = used[0]
        """The shard whose servers have what nobody trains, too."""
        self.owners: dict[int, torch.nn.Parameter] = {}
        """The parameters, by the numbers that units have."""
        self.parts = [
            self._held_parts(bucket, parts)
            for bucket, parts in zip(buckets, plan, strict=True)
        ]
        self.units = [
            [
                UnitPlace(Piece(unit.parameter, unit.start, unit.stop), start, stop)
                for part in parts
                for unit, start, stop in _bounds(part)
            ]
            for parts in self.parts
        ]
        where = torch.device("cpu") if on_host else None
        self.landing = [
            stand_alike(torch.empty_like(b.buffer, device=where), b.buffer)
            for b in buckets
        ]
        self._told: dict[tuple[int, int], bytes] = {}
        """By bucket and shard."""
        self._turns: dict[tuple[int, int], int] = {}
        """The same, of what this worker holds."""
        self._versions: list[list[int]] = []
        self._updates: dict[tuple[int, int], int] = {}
        """Of a shard's part of a bucket, with what this worker holds of it."""

    def _held_parts(self, bucket: Bucket, parts: Sequence[Part]) -> list[HeldPart]:
        numbers = dict.fromkeys(unit.parameter for part in parts for unit in part.units)
        self.owners |= zip(numbers, bucket.parameters, strict=True)
        slots = {number: slot for slot, number in enumerate(numbers)}
        held, first = [], 0
        for part in parts:
            held.append(
                HeldPart(
                    bucket=bucket.index,
                    shard=part.shard,
                    start=part.start,
                    stop=part.stop,
                    first=first,
                    units=part.units,
                    slots=tuple(slots[unit.parameter] for unit in part.units),
                )
            )
            first += len(part.units)
        return held

    # ---- what lies where ----

    def home(self, part: HeldPart) -> int:
        """The server that this worker pushes a part to, and pulls it from."""
        return self.layout.home(part.shard)

    def endpoint(self, part: HeldPart) -> Endpoint:
        """This worker's end of it."""
        return self.endpoints[self.home(part)]

    def pulled(self, servers: Collection[int] | None = None) -> list[HeldPart]:
        """What this worker pulls from these servers, or from all, bucket by bucket."""
        every = [part for parts in self.parts for part in parts]
        if servers is None:
            return every
        return [part for part in every if self.home(part) in servers]

    def held(self, servers: Collection[int]) -> list[tuple[int, HeldPart]]:
        """What these servers hold, with the number of each, bucket by bucket."""
        return [
            (server, part)
            for part in self.pulled()
            for server in self.layout.holders(part.shard)
            if server in servers
        ]

    def on(self, server: int) -> list[list[HeldPart]]:
        """What one server holds of each bucket."""
        holders = self.layout.holders
        return [
            [part for part in parts if server in holders(part.shard)]
            for parts in self.parts
        ]

    def places(self, part: HeldPart, units: Sequence[int]) -> list[UnitPlace]:
        """Where some units of a part are in its bucket's buffer."""
        return [self.units[part.bucket][part.first + unit] for unit in units]

    def part_of(self, bucket: int, unit: int) -> HeldPart:
        """The part that a bucket's unit is in."""
        return max(
            (part for part in self.parts[bucket] if part.first <= unit),
            key=lambda part: part.first,
        )

    def landing_of(self, part: HeldPart) -> torch.Tensor:
        return cut(self.landing[part.bucket], part.start, part.stop)

    def unit_bytes(self, bucket: int) -> list[int]:
        whole = self.buckets[bucket].buffer
        size, elements = wire_bytes(whole), max(1, whole.numel())
        return [size * (p.stop - p.start) // elements for p in self.units[bucket]]

    def move(self, group: int) -> None:
        """This worker is in another group from now on, and has yet to pull from its server:
        what the one before has told is of no use there. Raises `UsageError` where there are no
        groups, or no such one."""
        if not isinstance(self.layout, Copies):
            raise UsageError("move: this method's servers are not one for each group")
        self.layout.move(group)
        self._told.clear()
        self._turns.clear()

    # ---- what servers tell ----

    def hear(self, part: HeldPart, answer: Parameters) -> None:
        """A server has answered a main push, or a pull, with its parameters."""
        self.hear_words(part, answer)
        self.hear_turn(part, answer.turn)

    def hear_words(self, part: HeldPart, answer: Parameters) -> None:
        """What a server has told beside its answer."""
        self._told[part.bucket, part.shard] = answer.told
        self._updates[part.bucket, part.shard] = answer.version

    def updates_by_others(self, part: HeldPart, answer: Parameters) -> int:
        """How many there were on the server since what this worker held before this *answer* to a
        push, which was one, too. To be asked before it is heard."""
        before = self._updates.get((part.bucket, part.shard), answer.version)
        return max(0, answer.version - before - 1)

    def hear_turn(self, part: HeldPart, turn: int) -> None:
        """What this worker holds of a part is of that turn now."""
        self._turns[part.bucket, part.shard] = turn

    def turn(self, part: HeldPart) -> int:
        """See `Parameters.turn`."""
        return self._turns.get((part.bucket, part.shard), 0)

    def told(self, bucket: int) -> list[Told]:
        return [
            Told(
                range(part.first, part.first + len(part.units)),
                self._told.get((bucket, part.shard), b""),
            )
            for part in self.parts[bucket]
        ]

    # ---- the optimizer ----

    def hyperparameters(self) -> Hyperparameters:
        return [
            {
                name: _plain(name, value)
                for name, value in group.items()
                if name not in _NOT_SENT
            }
            for group in self.optimizer.param_groups
        ]

    def own_optimizer(self) -> PartitionedOptimizer:
        twin = copy.copy(self.optimizer)
        twin.state = defaultdict(dict)
        pieces = [place.piece for places in self.units for place in places]
        return PartitionedOptimizer(twin, pieces)

    # ---- the model ----

    def put(self, number: int) -> None:
        """What has landed of a bucket becomes the model's."""
        bucket = self.buckets[number]
        sizes = [parameter.numel() for parameter in bucket.parameters]
        with torch.no_grad():
            for parameter, part in zip(
                bucket.parameters, self.landing[number].split(sizes), strict=True
            ):
                parameter.copy_(part.view(parameter.shape))

    def put_all(self) -> None:
        for number in range(len(self.buckets)):
            self.put(number)
        self.remember_versions()

    def lay_out(self) -> None:
        """Put the model into the memory where answers land, as far as the script has written
        it: what it has not written may be older than what has landed."""
        now = self._present_versions()
        for number, bucket in enumerate(self.buckets):
            views = self.landing[number].split([p.numel() for p in bucket.parameters])
            for slot, (view, parameter) in enumerate(
                zip(views, bucket.parameters, strict=True)
            ):
                before = self._versions[number] if self._versions else None
                if before is None or before[slot] != now[number][slot]:
                    view.copy_(parameter.detach().reshape(-1))

    @property
    def was_put(self) -> bool:
        """Whether the model has ever held the servers' parameters."""
        return bool(self._versions)

    def remember_versions(self) -> None:
        """What the model holds now was not written by the script."""
        self._versions = self._present_versions()

    def check_unwritten(self, method: str) -> None:
        """Raise `UsageError` where the script has written into a parameter since the last
        step: the next answer would write over it, and nobody else would ever see it."""
        if not self._versions:
            return
        for bucket, before in zip(self.buckets, self._versions, strict=True):
            for name, parameter, version in zip(
                bucket.names, bucket.parameters, before, strict=True
            ):
                if version_of(parameter) != version:
                    raise UsageError(
                        f"parameter {name!r} was written to since step(): under {method} "
                        "servers hold the parameters, and what is written here reaches "
                        "nobody. Evaluate other weights in a copy of the model, or inside "
                        "`with optimizer.consolidated():`, which takes back what is "
                        "written; to change them for all, call load_state_dict on every "
                        "worker, or write before distribute, or after finish()"
                    )

    def _present_versions(self) -> list[list[int]]:
        return [[version_of(p) for p in bucket.parameters] for bucket in self.buckets]


def cut(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A part of a bucket's buffer; of one that stands for more bytes, its share."""
    return stand_alike(flat[start:stop], flat)


def _bounds(part: HeldPart) -> Iterator[tuple[Unit, int, int]]:
    """Each unit of a part, and where it is in its bucket's buffer."""
    start = part.start
    for unit in part.units:
        yield unit, start, start + unit.elements
        start += unit.elements


def _plain(name: str, value: Any) -> Any:
    """A hyperparameter as a message can hold it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"hyperparameter {name!r}: expected a number, a truth value or a list of them for "
        f"an optimizer that lives on a server, got {type(value).__name__}"
    )
