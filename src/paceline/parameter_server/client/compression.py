"""The worker's half of compression to and from servers: see `state_machine.compression`."""

from __future__ import annotations

import math

import torch

from paceline.compression import GradientCompression, State
from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import CompressionListener, CompressionStage, SpeedClass
from paceline.interfaces.buckets import (
    Bucket,
    stand_in_for,
    stands_in,
    wire_bytes,
    wire_shape,
)
from paceline.interfaces.server_messages import Parameters, Replies, Unit
from paceline.parameter_server.client.partition import BucketPart, Partition, cut
from paceline.parameter_server.state_machine.compression import (
    check_decodes_per_worker,
    code_bytes,
    views,
)


class ClientCompression:
    """Compresses the pushes of worker *rank*, and decompresses the *replies* of servers.

    *listener* is called for each compression and decompression.
    """

    def __init__(
        self,
        compression: GradientCompression,
        rank: int,
        partition: Partition,
        replies: Replies,
        listener: CompressionListener | None,
    ) -> None:
        self.compression = check_decodes_per_worker(compression)
        self._replies = check_decodes_per_worker(compression.for_replies())
        self._rank, self._partition, self._listener = rank, partition, listener
        self._differs = replies == "deltas"
        self._states: dict[str, State] = {}
        self._shares = [torch.empty(0)] * len(partition.buckets)
        """By bucket: memory for this worker's share of the average."""
        self._rooms: dict[BucketPart, torch.Tensor] = {}
        """Buffers for received deltas."""
        self._sizes: dict[tuple[BucketPart, GradientCompression], int] = {}

    # ---- pushes ----

    def set_speed_class(self, speed: SpeedClass) -> None:
        """Set the speed class of this worker's group, which may change the size of pushes.

        Compressor states and replies continue.
        """
        self.compression = self.compression.for_speed(speed)

    def encode(
        self, bucket: Bucket, gradient: torch.Tensor, part: BucketPart, weight: float
    ) -> torch.Tensor:
        """Compress a part of a bucket's *gradient*, times this worker's *weight*."""
        flat = cut(gradient, part.start, part.stop)
        self._charge(self.compression, flat, "encode")
        # Error feedback needs this worker's own decompressed gradient.
        if self.compression.error_feedback:
            self._charge(self.compression, flat, "decode")
        if stands_in(flat):
            return stand_in_for(self._size(part, self.compression), flat)
        if weight != 1.0:
            share = self._share(bucket)[part.start : part.stop]
            flat = torch.mul(flat, weight, out=share)
        parts = views(flat, part.units)
        names = [self._name(part, number) for number in range(len(parts))]
        states = [
            self._state(name, like) for name, like in zip(names, parts, strict=True)
        ]
        return self.compression.encode(parts, states)

    def _share(self, bucket: Bucket) -> torch.Tensor:
        if self._shares[bucket.index].numel() < bucket.buffer.numel():
            self._shares[bucket.index] = torch.empty_like(bucket.buffer)
        return self._shares[bucket.index]

    def _state(self, name: str, like: torch.Tensor) -> State:
        if self.compression.state == "none":
            return {}
        if name not in self._states:
            self._states[name] = self.compression.init_state(like, name, self._rank)
        return self._states[name]

    def _name(self, part: BucketPart, number: int) -> str:
        """Return a tensor's name; for a part of one, with the range of its elements."""
        unit = part.units[number]
        name = self._partition.buckets[part.bucket].names[part.slots[number]]
        return name if unit.shape is not None else f"{name}[{unit.start}:{unit.stop}]"

    # ---- replies ----

    def room(self, part: BucketPart) -> torch.Tensor:
        """Return the memory for the reply to a push."""
        received = self._partition.received_part(part)
        if not self._differs:
            return received
        if stands_in(received):
            return stand_in_for(self._size(part, self._replies), received)
        if part not in self._rooms:
            size = self._size(part, self._replies)
            self._rooms[part] = torch.empty(size, dtype=torch.uint8)
        return self._rooms[part]

    def decode(self, part: BucketPart, reply: Parameters) -> None:
        """Decompress the *reply* to a push: add a difference to this worker's parameters."""
        if not self._differs:
            return
        sequence = self._partition.sequence(part)
        received = self._partition.received_part(part)
        if reply.sequence <= sequence:
            # This worker has pulled since.
            return
        if reply.sequence != sequence + 1:
            raise PeerLostError(
                f"bucket {part.bucket}: difference number {reply.sequence} has come "
                f"after number {sequence}: a reply of server "
                f"{self._partition.home[part.shard]} is missing"
            )
        self._partition.note_sequence(part, reply.sequence)
        self._charge(self._replies, received, "decode")
        if stands_in(received):
            return
        difference = torch.empty_like(received)
        self._replies.decode(self._rooms[part], views(difference, part.units))
        received.add_(difference)

    def _charge(
        self,
        compression: GradientCompression,
        tensors: torch.Tensor,
        stage: CompressionStage,
    ) -> None:
        if self._listener is not None:
            self._listener.compressed(compression, 1, wire_bytes(tensors), stage)

    def _size(self, part: BucketPart, compression: GradientCompression) -> int:
        """Return the compressed bytes of a part, or of the larger one that it represents."""
        if (part, compression) not in self._sizes:
            bucket = self._partition.buckets[part.bucket]
            shapes = [
                _shape(unit, bucket.views[slot])
                for unit, slot in zip(part.units, part.slots, strict=True)
            ]
            dtype = bucket.buffer.dtype
            self._sizes[part, compression] = code_bytes(compression, shapes, dtype)
        return self._sizes[part, compression]

    # ---- state in checkpoints ----

    @property
    def states(self) -> dict[str, State]:
        """Compressor states by the names of tensors, or of parts of them."""
        return self._states

    @states.setter
    def states(self, saved: dict[str, State]) -> None:
        known = {name for name, _ in self.tensors()}
        for name in saved:
            if name not in known:
                raise UsageError(
                    f"the checkpoint holds what compression {self.compression.name!r} keeps "
                    f"of {name!r}, and here servers hold other parts of tensors: load it "
                    "with as many servers, and the same bucket rule, as saved it"
                )
        self._states = saved

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors as compressors see them."""
        return [
            (self._name(part, number), like)
            for parts in self._partition.parts
            for part in parts
            for number, like in enumerate(
                views(
                    self._partition.buckets[part.bucket].buffer[part.start : part.stop],
                    part.units,
                )
            )
        ]


def _shape(unit: Unit, gradient: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a unit of *gradient* for compressors, or of the unit that it represents."""
    shape = wire_shape(gradient)
    if unit.shape is not None:
        return shape
    return 1, math.ceil(math.prod(shape) * unit.elements / gradient.numel())
