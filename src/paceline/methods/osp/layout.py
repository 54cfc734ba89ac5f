"""Which piece of the model lies where: in its bucket, and in the messages of both stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.interfaces import Piece, Updater, UpdatingRun
from paceline.methods.osp.choice import Parts
from paceline.tensors import Bucket, Kind, kind_of, stand_in_for, wire_bytes

Room = Callable[[int, torch.Tensor], torch.Tensor]
"""From a number of elements and a model tensor: memory for a message."""


@dataclass
class Message:
    """Some pieces' gradients, one after the other in *flat*; ``stops[i]`` is where
    piece ``numbers[i]`` ends."""

    flat: torch.Tensor
    numbers: list[int]
    stops: list[int]

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Every piece's number, and its part of `flat`."""
        start = 0
        for number, stop in zip(self.numbers, self.stops, strict=True):
            yield number, self.flat[start:stop]
            start = stop


@dataclass(frozen=True)
class _Place:
    """Where a piece is: elements [*start*, *stop*) of its bucket's buffer."""

    number: int
    start: int
    stop: int


class Layout:
    """The pieces of the optimizer's parameters, numbered alike on every rank, and those
    that are *deferred*: equal on all ranks, and constant within a step.

    Parameters that the optimizer does not have are sent to nobody.
    """

    def __init__(self, run: UpdatingRun, updater: Updater) -> None:
        owners = [p for bucket in run.buckets for p in bucket.parameters]
        pairs = [(piece, p) for p in owners for piece in updater.pieces_of(p)]
        pairs.sort(key=lambda pair: pair[0])
        self.pieces: list[Piece] = [piece for piece, _ in pairs]
        self._owners = [owner for _, owner in pairs]
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}
        names = {
            id(parameter): name
            for bucket in run.buckets
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
        }
        self._names = [names[id(owner)] for owner in self._owners]
        self.sizes = [
            wire_bytes(owner) * (piece.stop - piece.start) // owner.numel()
            for piece, owner in pairs
        ]
        self.deferred: list[int] = []
        self.changes = 0
        """How often buckets, or what is deferred, have changed."""
        self._updater = updater
        self._buckets: Sequence[Bucket] = ()
        self._places: list[list[_Place]] = []
        self._place_of: dict[int, tuple[Bucket, _Place]] = {}
        self._first: list[_Copies] = []
        self._room: dict[int, torch.Tensor] = {}
        self.follow(run)

    def owner_of(self, number: int) -> int:
        """The id of the parameter that a piece is of."""
        return id(self._owners[number])

    def name_of(self, piece: Piece) -> str:
        """The model's name of the parameter that a piece is of."""
        return self._names[self._numbers[piece]]

    def follow(self, run: UpdatingRun) -> None:
        """Notice where the planner has made new buckets."""
        if run.buckets is self._buckets:
            return
        self._buckets = run.buckets
        self._room.clear()
        self._places = [self._pieces_in(bucket) for bucket in run.buckets]
        self._place_of = {
            place.number: (bucket, place)
            for bucket, places in zip(run.buckets, self._places, strict=True)
            for place in places
        }
        self._plan()

    def defer(self, numbers: Sequence[int]) -> None:
        """From the next step on these are deferred."""
        if list(numbers) != self.deferred:
            self.deferred = list(numbers)
            self._plan()

    def parts(self) -> Parts:
        """The pieces as `choose` wants them."""
        buckets = [0] * len(self.pieces)
        for number, (bucket, _) in self._place_of.items():
            buckets[number] = bucket.index
        return Parts(self.sizes, buckets, len(self._buckets))

    def gradient(self, number: int) -> torch.Tensor:
        """This worker's own gradient of a piece: a flat part of its bucket."""
        bucket, place = self._place_of[number]
        return bucket.buffer[place.start : place.stop]

    def deferred_by_kind(self) -> dict[Kind, list[int]]:
        """What can share a message."""
        kinds: dict[Kind, list[int]] = {}
        for number in self.deferred:
            kinds.setdefault(kind_of(self._owners[number]), []).append(number)
        return kinds

    def message(self, bucket: Bucket) -> Message:
        """What is not deferred of a bucket: a copy, unless that is all of it."""
        copies = self._first[bucket.index]
        if copies.elements == bucket.buffer.numel():
            return Message(bucket.buffer, copies.numbers, copies.stops)
        room = self._room.get(bucket.index)
        if room is None:
            room = self._room[bucket.index] = torch.empty_like(bucket.buffer)
        flat = room[: copies.elements]
        for source, target in copies.runs:
            flat[target].copy_(bucket.buffer[source])
        if hasattr(bucket.buffer, "stands_for_bytes"):
            stand_in_for(copies.bytes, flat)
        return Message(flat, copies.numbers, copies.stops)

    def pack(self, numbers: Sequence[int], room: Room) -> Message:
        """A copy of some pieces' gradients, of one kind."""
        own = [self.gradient(number) for number in numbers]
        flat = room(sum(part.numel() for part in own), own[0])
        stops: list[int] = []
        start = 0
        for part in own:
            stops.append(start + part.numel())
            flat[start : stops[-1]].copy_(part)
            start = stops[-1]
        if any(hasattr(self._owners[n], "stands_for_bytes") for n in numbers):
            stand_in_for(sum(self.sizes[n] for n in numbers), flat)
        return Message(flat, list(numbers), stops)

    def _pieces_in(self, bucket: Bucket) -> list[_Place]:
        places, offset = [], 0
        for parameter in bucket.parameters:
            for piece in self._updater.pieces_of(parameter):
                number = self._numbers[piece]
                places.append(_Place(number, offset + piece.start, offset + piece.stop))
            offset += parameter.numel()
        return places

    def _plan(self) -> None:
        self.changes += 1
        out = set(self.deferred)
        self._first = [
            _Copies.of([p for p in places if p.number not in out], self.sizes)
            for places in self._places
        ]


@dataclass
class _Copies:
    """How a bucket's first message is put together: whole runs at a time."""

    numbers: list[int]
    stops: list[int]
    runs: list[tuple[slice, slice]]
    bytes: int

    @property
    def elements(self) -> int:
        return self.stops[-1] if self.stops else 0

    @classmethod
    def of(cls, places: Sequence[_Place], sizes: Sequence[int]) -> _Copies:
        stops: list[int] = []
        spans: list[
            list[int]
        ] = []  # start and stop in the bucket, start in the message
        end = 0
        for place in places:
            if spans and spans[-1][1] == place.start:
                spans[-1][1] = place.stop
            else:
                spans.append([place.start, place.stop, end])
            end += place.stop - place.start
            stops.append(end)
        return cls(
            numbers=[place.number for place in places],
            stops=stops,
            runs=[
                (slice(start, stop), slice(at, at + stop - start))
                for start, stop, at in spans
            ],
            bytes=sum(sizes[place.number] for place in places),
        )
