"""Parameters on their servers, where a step comes in two stages: parts of buckets travel."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from paceline.interfaces import Piece, Reception, UnitPlace
from paceline.messages import (
    FIRST,
    SECOND,
    Measured,
    OptimizerState,
    Parameters,
    PullState,
    Push,
)
from paceline.server.remote import RemoteParameters
from paceline.server.shards import Part
from paceline.tensors import Bucket, stand_in_for, wire_bytes
from paceline.updater import TorchUpdater

SECOND_CHANNEL = "stage 2"
MOST_STATES = 4
"""No optimizer of torch has more tensors of its parameter's shape."""


class StagedParameters(RemoteParameters):
    """The `StagedRemote`: see `RemoteParameters`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.units = [
            [
                UnitPlace(Piece(unit.parameter, unit.start, unit.stop), start, stop)
                for part in parts
                for unit, start, stop in _bounds(part)
            ]
            for parts in self._plan
        ]
        self.deferred: list[list[int]] = [[] for _ in self._plan]
        self._firsts = [_firsts(parts) for parts in self._plan]
        # Stage 2 has memory of its own: backward writes into buckets meanwhile.
        self._second = [torch.empty(0) for _ in self._plan]
        self._packed = [torch.empty(0) for _ in self._plan]
        self._waiting: dict[int, list[_Sent]] = {FIRST: [], SECOND: []}
        self._states: list[_Sent] = []

    def unit_bytes(self, bucket: int) -> list[int]:
        whole = self._buckets[bucket].buffer
        size, elements = wire_bytes(whole), max(1, whole.numel())
        return [size * (p.stop - p.start) // elements for p in self.units[bucket]]

    def mirror(self) -> TorchUpdater:
        """An updater of this worker's own, for steps that are thrown away."""
        twin = copy.copy(self._optimizer)
        twin.state = defaultdict(dict)
        pieces = [place.piece for places in self.units for place in places]
        return TorchUpdater(twin, pieces)

    def push_units(
        self,
        bucket: Bucket,
        step: int,
        stage: int,
        numbers: Collection[int],
        measured: Measured | None = None,
    ) -> None:
        weight, hyperparameters = self._weight(), self._hyperparameters()
        self._pushed_step = step
        if bucket.last and stage == FIRST:
            self._untrained.blend(weight)
        for part, first in zip(
            self._plan[bucket.index], self._firsts[bucket.index], strict=True
        ):
            mine = [n for n in range(len(part.units)) if first + n in numbers]
            if stage == SECOND and not mine:
                continue
            whole = len(mine) == len(part.units)
            places = [self.units[bucket.index][first + n] for n in mine]
            payload, landing = self._memory(bucket, part, places, stage)
            message = Push(
                step=step,
                bucket=bucket.index,
                stage=stage,
                units=None if whole else mine,
                weight=weight,
                used=[
                    bucket.used[self._slot(bucket, part.units[number])]
                    for number in mine
                ],
                hyperparameters=hyperparameters,
                measured=measured,
            )
            channel = SECOND_CHANNEL if stage == SECOND else ""
            reception = self._endpoints[part.shard].request(
                message,
                payload if mine else None,
                landing if mine else None,
                channel=channel,
            )
            self._waiting[stage].append(
                _Sent(reception, bucket.index, first, mine, landing)
            )

    def arrived(self, stage: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Wait for all that was pushed in *stage*: bucket, number and flat values of each
        unit, which stand until the next push. After the first stage `deferred` is that of
        the next step."""
        told = self._agree_on_norm() if stage == FIRST else []
        waiting, self._waiting[stage] = self._waiting[stage], []
        for reception in told:
            reception.wait()
        for sent in waiting:
            answer = sent.reception.wait()
            assert isinstance(answer, Parameters), answer
            if stage == FIRST:
                self._defer(sent.bucket, sent.first, answer.deferred)
            start = 0
            for number in sent.units:
                place = self.units[sent.bucket][sent.first + number]
                stop = start + place.stop - place.start
                yield sent.bucket, sent.first + number, sent.landing[start:stop]
                start = stop

    def ask_states(self, units: Sequence[tuple[int, int]], step: int) -> None:
        places: dict[tuple[int, int], list[int]] = {}
        for bucket, number in units:
            firsts = self._firsts[bucket]
            at = max(i for i, first in enumerate(firsts) if first <= number)
            places.setdefault((bucket, at), []).append(number - firsts[at])
        for (bucket, at), mine in places.items():
            part, buffer = self._plan[bucket][at], self._buckets[bucket].buffer
            size = sum(part.units[number].elements for number in mine)
            into = torch.empty(MOST_STATES * size, dtype=buffer.dtype)
            if hasattr(buffer, "stands_for_bytes"):
                # What Adam has: nobody knows yet.
                stands = wire_bytes(buffer) * size // max(1, buffer.numel())
                stand_in_for(2 * stands, into)
            message = PullState(bucket=bucket, units=mine, step=step)
            reception = self._endpoints[part.shard].request(
                message, into=into, channel=SECOND_CHANNEL
            )
            first = self._firsts[bucket][at]
            self._states.append(_Sent(reception, bucket, first, mine, into))

    def states(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        waiting, self._states = self._states, []
        for sent in waiting:
            answer = sent.reception.wait()
            assert isinstance(answer, OptimizerState), answer
            for number, entries in zip(sent.units, answer.entries, strict=True):
                place = self.units[sent.bucket][sent.first + number]
                size, state = place.stop - place.start, dict[str, Any]()
                for name, value in entries:
                    if isinstance(value, int):
                        state[name] = sent.landing[value : value + size]
                    else:
                        state[name] = torch.tensor(value, dtype=torch.float32)
                yield sent.bucket, sent.first + number, state

    def buffers_arrived(self) -> None:
        """Wait for the model's buffers, if any are under way."""
        self._untrained.arrived()

    def written(self) -> None:
        """The method has written into the model."""
        self._remember_versions()

    def _pulled(self, number: int, part: Part, answer: Parameters) -> None:
        """Who joins is told what its first step defers."""
        at = self._plan[number].index(part)
        self._defer(number, self._firsts[number][at], answer.deferred)

    def _defer(self, bucket: int, first: int, told: Sequence[int]) -> None:
        """What a server has *told* of the part of a bucket whose first unit is *first*."""
        firsts = self._firsts[bucket]
        ends = [*firsts[1:], len(self.units[bucket])]
        theirs = range(first, ends[firsts.index(first)])
        kept = [n for n in self.deferred[bucket] if n not in theirs]
        self.deferred[bucket] = sorted(kept + [first + number for number in told])

    def _memory(
        self, bucket: Bucket, part: Part, places: Sequence[UnitPlace], stage: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent, and where its answer lands."""
        size = sum(place.stop - place.start for place in places)
        buffer, landing = bucket.buffer, self._landing[bucket.index]
        here = slice(part.start, part.start + size)
        whole = size == part.stop - part.start
        if stage == FIRST and whole:
            payload, into = buffer[here], landing[here]
        else:
            rooms = self._second if stage == SECOND else self._packed
            if rooms[bucket.index].numel() < buffer.numel():
                rooms[bucket.index] = torch.empty_like(buffer)
            payload = rooms[bucket.index][here]
            start = 0
            for place in places:
                stop = start + place.stop - place.start
                payload[start:stop].copy_(buffer[place.start : place.stop])
                start = stop
            into = payload if stage == SECOND else landing[here]
        if hasattr(buffer, "stands_for_bytes"):
            stands = wire_bytes(buffer) * size // max(1, buffer.numel())
            stand_in_for(stands, payload)
            stand_in_for(stands, into)
        return payload, into


class _Sent:
    """A request under way: *units* of the part whose first is number *first*."""

    def __init__(
        self,
        reception: Reception,
        bucket: int,
        first: int,
        units: Sequence[int],
        landing: torch.Tensor,
    ) -> None:
        self.reception, self.bucket, self.first = reception, bucket, first
        self.units, self.landing = units, landing


def _bounds(part: Part) -> Iterator[tuple[Any, int, int]]:
    """Each unit of a part, and where it is in its bucket's buffer."""
    start = part.start
    for unit in part.units:
        yield unit, start, start + unit.elements
        start += unit.elements


def _firsts(parts: Sequence[Part]) -> list[int]:
    """The number, within the bucket, of each part's first unit."""
    firsts, count = [], 0
    for part in parts:
        firsts.append(count)
        count += len(part.units)
    return firsts
