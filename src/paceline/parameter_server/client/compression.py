"""A worker's half of codes between it and its servers: see `state_machine.compression`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from paceline.compression import make, pure
from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import (
    CodingStage,
    Compressor,
    PerWorkerCompressor,
    SpeedClass,
    State,
)
from paceline.interfaces.buckets import (
    Bucket,
    stand_in_for,
    stands_in,
    wire_bytes,
    wire_shape,
)
from paceline.interfaces.server_messages import Parameters, Replies, Unit
from paceline.parameter_server.client.partition import HeldPart, Spread, cut
from paceline.parameter_server.state_machine.compression import code_bytes, views
from paceline.parameter_server.state_machine.compression_checks import (
    check_decodes_per_worker,
)

Charge = Callable[[Compressor, int, float, CodingStage], None]
"""Is told what was coded and decoded, see `Compute.coded`."""


class Encoding:
    """What the worker of *rank* pushes of a model that is *spread* over servers, with the
    compressor of a *spec*, and what it makes of their *answers*. *charge* is told
    of codes, if they take time."""

    def __init__(
        self,
        spec: str,
        rank: int,
        spread: Spread,
        replies: Replies,
        charge: Charge,
    ) -> None:
        self.compressor = check_decodes_per_worker(make(spec))
        self._pure = check_decodes_per_worker(pure(self.compressor))
        self._answers = check_decodes_per_worker(self.compressor.for_replies())
        self._rank, self._spread, self._charge = rank, spread, charge
        self._differs = replies == "deltas"
        self._states: dict[str, State] = {}
        self._shares = [torch.empty(0)] * len(spread.buckets)
        """By bucket: memory for this worker's share of the mean."""
        self._rooms: dict[HeldPart, torch.Tensor] = {}
        """Where differences land."""
        self._sizes: dict[tuple[HeldPart, PerWorkerCompressor], int] = {}

    # ---- pushes ----

    def has_speed(self, speed: SpeedClass) -> None:
        """This worker's group is of that class: what it pushes from now on may have another
        size. What it keeps goes on, and so do answers."""
        self.compressor = check_decodes_per_worker(self.compressor.for_speed(speed))
        self._pure = check_decodes_per_worker(pure(self.compressor))

    def pushed(
        self, bucket: Bucket, gradient: torch.Tensor, part: HeldPart, weight: float
    ) -> torch.Tensor:
        """The code of a part of a bucket's *gradient*, at this worker's *weight*."""
        flat = cut(gradient, part.start, part.stop)
        self._charge(self.compressor, 1, wire_bytes(flat), "encode")
        if self.compressor is not self._pure:  # residuals are what its own code leaves
            self._charge(self.compressor, 1, wire_bytes(flat), "decode")
        if stands_in(flat):
            return stand_in_for(self._size(part, self._pure), flat)
        if weight != 1.0:
            share = self._share(bucket)[part.start : part.stop]
            flat = torch.mul(flat, weight, out=share)
        parts = views(flat, part.units)
        names = [self._name(part, number) for number in range(len(parts))]
        states = [
            self._state(name, like) for name, like in zip(names, parts, strict=True)
        ]
        return self.compressor.encode(parts, states)

    def _share(self, bucket: Bucket) -> torch.Tensor:
        if self._shares[bucket.index].numel() < bucket.buffer.numel():
            self._shares[bucket.index] = torch.empty_like(bucket.buffer)
        return self._shares[bucket.index]

    def _state(self, name: str, like: torch.Tensor) -> State:
        if self.compressor.state == "none":
            return {}
        if name not in self._states:
            self._states[name] = self.compressor.init(like, name, self._rank)
        return self._states[name]

    def _name(self, part: HeldPart, number: int) -> str:
        """A tensor's name; of a part of one, with the elements that it has."""
        unit = part.units[number]
        name = self._spread.buckets[part.bucket].names[part.slots[number]]
        return name if unit.shape is not None else f"{name}[{unit.start}:{unit.stop}]"

    # ---- answers ----

    def room(self, part: HeldPart) -> torch.Tensor:
        """Where the answer to a push lands."""
        landing = self._spread.landing_of(part)
        if not self._differs:
            return landing
        if stands_in(landing):
            return stand_in_for(self._size(part, self._answers), landing)
        if part not in self._rooms:
            size = self._size(part, self._answers)
            self._rooms[part] = torch.empty(size, dtype=torch.uint8)
        return self._rooms[part]

    def arrived(self, part: HeldPart, answer: Parameters) -> None:
        """An answer to a push has landed: a difference is added to what this worker holds."""
        if not self._differs:
            return
        turn, landing = self._spread.turn(part), self._spread.landing_of(part)
        if answer.turn <= turn:
            return  # this worker has pulled since
        if answer.turn != turn + 1:
            raise PeerLostError(
                f"bucket {part.bucket}: a difference has come with turn {answer.turn}, and "
                f"the one before with {turn}: an answer of server "
                f"{self._spread.home(part)} is missing"
            )
        self._spread.hear_turn(part, answer.turn)
        self._charge(self._answers, 1, wire_bytes(landing), "decode")
        if stands_in(landing):
            return
        difference = torch.empty_like(landing)
        self._answers.decode(self._rooms[part], views(difference, part.units))
        landing.add_(difference)

    def _size(self, part: HeldPart, code: PerWorkerCompressor) -> int:
        """The bytes of a code of what a part has, or stands for."""
        if (part, code) not in self._sizes:
            bucket = self._spread.buckets[part.bucket]
            shapes = [
                _shape(unit, bucket.views[slot])
                for unit, slot in zip(part.units, part.slots, strict=True)
            ]
            dtype = bucket.buffer.dtype
            self._sizes[part, code] = code_bytes(code, shapes, dtype)
        return self._sizes[part, code]

    # ---- what a checkpoint keeps ----

    @property
    def states(self) -> dict[str, State]:
        """By the names of tensors, or of parts of them."""
        return self._states

    @states.setter
    def states(self, saved: dict[str, State]) -> None:
        known = {name for name, _ in self.tensors()}
        for name in saved:
            if name not in known:
                raise UsageError(
                    f"the checkpoint holds what compression {self.compressor.name!r} keeps "
                    f"of {name!r}, and here servers hold other parts of tensors: load it "
                    "with as many servers, and the same bucket rule, as saved it"
                )
        self._states = saved

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """What codes see: names, and tensors of the same shape."""
        return [
            (self._name(part, number), like)
            for parts in self._spread.parts
            for part in parts
            for number, like in enumerate(
                views(
                    self._spread.buckets[part.bucket].buffer[part.start : part.stop],
                    part.units,
                )
            )
        ]


def _shape(unit: Unit, gradient: torch.Tensor) -> tuple[int, ...]:
    """What a code sees of a unit of *gradient*, or of what that stands for."""
    shape = wire_shape(gradient)
    if unit.shape is not None:
        return shape
    return 1, math.ceil(math.prod(shape) * unit.elements / gradient.numel())
