"""The worker that both forms of OSP share: its pieces, messages and tentative step.

`all_reduce` and `parameter_server` define how gradients travel.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from paceline.interfaces import Hyperparameters, PartialOptimizer, Piece, Run
from paceline.interfaces.buckets import (
    Bucket,
    kind_of,
    stand_in_for,
    stands_in,
    view_in_bucket,
    wire_bytes,
)
from paceline.methods.osp.measurement import ModelPieces, StepTimer
from paceline.methods.osp.options import OSPOptions

AnyRun = TypeVar("AnyRun", bound=Run)


class OSPWorker(Generic[AnyRun]):
    """Runs the steps that both forms share. ``layout.deferred`` holds the deferred pieces."""

    def __init__(
        self, run: AnyRun, options: OSPOptions, updater: PartialOptimizer
    ) -> None:
        self.run, self.options, self.updater = run, options, updater
        self.layout = PieceLayout(run.buckets, updater)
        self.timer = StepTimer(options, run)
        self.correction = options.correction_class()
        # Steps with a batch of its own; shadow collectives do not count.
        self.steps = 0
        self.has_deferred = False

    def _send(self, bucket: Bucket) -> None:
        """Stage 1 of a bucket: send the pieces that are not deferred."""
        raise NotImplementedError

    def bucket_ready(self, bucket: Bucket) -> None:
        self.timer.bucket_ready()
        if self.options.overlap:
            self._send(bucket)

    def backward_ended(self) -> None:
        self.timer.mark()
        if not self.options.overlap:
            for bucket in self.run.buckets:
                self._send(bucket)

    def buckets_rebuilt(self) -> None:
        self.layout.follow(self.run.buckets)

    def _step_tentatively(
        self, numbers: Sequence[int], how: Hyperparameters, scale: float = 1.0
    ) -> None:
        """Replace the exact values of these pieces by tentative ones, with own gradients times *scale*."""
        if self.options.correction == "none" or not numbers:
            return
        own = [self.layout.gradient(number) for number in numbers]
        if scale != 1.0:
            for gradient in own:
                gradient.mul_(scale)
        pieces = self.layout.some(numbers)
        self._write(numbers, self.correction.values(self.updater, pieces, own, how))

    def _values(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """Return views of these pieces in the model."""
        return self.updater.values(self.layout.some(numbers))

    def _copies(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """Return copies of these pieces' current values."""
        return [value.clone() for value in self._values(numbers)]

    def _write(self, numbers: Iterable[int], values: Iterable[torch.Tensor]) -> None:
        """Write *values* of these pieces, flat or in their shapes, into the model."""
        for into, value in zip(self._values(numbers), values, strict=True):
            into.copy_(value.view(into.shape))

    def metrics(self) -> dict[str, float]:
        """Return the fractions of the model that may be deferred (``budget``) and are (``deferred``)."""
        parts = self.layout.parts()
        whole = max(1, sum(parts.sizes))
        return {
            "budget": self.options.most * self.timer.budget.part,
            "deferred": parts.total(self.layout.deferred) / whole,
        }

    def _explain(self) -> None:
        """At the end of training, report why no piece was ever deferred, if none was."""
        why = self.timer.why_nothing(self.steps)
        if why is not None and not self.has_deferred:
            self.run.report(why)


class Message(NamedTuple):
    """The gradients of some pieces in one flat tensor.

    Attributes:
        flat: The gradients, one after the other.
        parts: Each piece's view of *flat* by its number, shaped as in `PieceLayout.gradient`.
    """

    flat: torch.Tensor
    parts: dict[int, torch.Tensor]


class PieceLayout:
    """Maps the pieces of the optimizer's parameters to buckets, with the same numbers on every rank.

    The *deferred* pieces are the same on all ranks, and constant within a step. Parameters that the optimizer
    does not have are not sent.
    """

    def __init__(self, buckets: Sequence[Bucket], updater: PartialOptimizer) -> None:
        owners = [p for bucket in buckets for p in bucket.parameters]
        self.pieces = sorted(piece for p in owners for piece in updater.pieces_of(p))
        self._lengths = [piece.stop - piece.start for piece in self.pieces]
        self.deferred: list[int] = []
        # Counts changes of the buckets and of the deferred pieces.
        self.changes = 0
        # The pieces of each bucket, in the order of its buffer.
        self.inside: list[list[int]] = []
        # Per piece: its bucket, the number of its parameter there, and where it begins.
        self._members: dict[int, tuple[Bucket, int, int]] = {}
        self._updater = updater
        self._memory: dict[Hashable, torch.Tensor] = {}
        self.follow(buckets)
        self.sizes = []  # bytes on the network
        for number, length in enumerate(self._lengths):
            owner = self._owner(number)
            self.sizes.append(wire_bytes(owner) * length // owner.numel())

    def follow(self, buckets: Sequence[Bucket]) -> None:
        """Map the pieces to the planner's new *buckets*."""
        self.changes += 1
        self.inside = [[] for _ in buckets]
        numbers = {piece: number for number, piece in enumerate(self.pieces)}
        for bucket, inside in zip(buckets, self.inside, strict=True):
            offset = 0
            for member, parameter in enumerate(bucket.parameters):
                for piece in self._updater.pieces_of(parameter):
                    number = numbers[piece]
                    inside.append(number)
                    self._members[number] = bucket, member, offset + piece.start
                offset += parameter.numel()

    def defer(self, numbers: Sequence[int]) -> None:
        """Defer the pieces with these numbers from the next step on."""
        if list(numbers) != self.deferred:
            self.deferred = list(numbers)
            self.changes += 1

    def some(self, numbers: Iterable[int]) -> list[Piece]:
        """Return the pieces with these numbers."""
        return [self.pieces[number] for number in numbers]

    def parts(self) -> ModelPieces:
        """Return the pieces' sizes and buckets, for decisions."""
        buckets = [self._members[n][0].index for n in range(len(self.pieces))]
        return ModelPieces(self.sizes, buckets, len(self.inside))

    def gradient(self, number: int) -> torch.Tensor:
        """Return this worker's own gradient of a piece, as a view of its bucket.

        It is flat if the parameter is contiguous. Otherwise it has the parameter's shape.
        """
        return self._shaped(number, self._flat(number))

    def _flat(self, number: int) -> torch.Tensor:
        bucket, _, start = self._members[number]
        return bucket.buffer[start : start + self._lengths[number]]

    def _shaped(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        bucket, member, _ = self._members[number]
        if bucket.views[member].is_contiguous():
            return flat
        return view_in_bucket(flat, bucket.parameters[member])

    def name_of(self, number: int) -> str:
        """Return the name of a piece's parameter in the model."""
        bucket, member, _ = self._members[number]
        return bucket.names[member]

    def by_name(self, parts: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Name the gradients of pieces, for a compressor's error feedback.

        A whole parameter has its own shape. A part of a matrix is one row.
        """
        named = {}
        for number, part in parts.items():
            piece, owner = self.pieces[number], self._owner(number)
            name = self.name_of(number)
            if self._lengths[number] == owner.numel():
                named[name] = part.view(owner.shape)
            else:
                row = part if owner.dim() < 2 else part.view(1, -1)
                named[f"{name}[{piece.start}:{piece.stop}]"] = row
        return named

    def unused(self) -> set[int]:
        """Return the pieces of parameters that the last backward pass did not use."""
        members = self._members.items()
        return {number for number, (bucket, m, _) in members if not bucket.used[m]}

    def message(self, bucket: Bucket) -> Message:
        """Return the pieces of a bucket that are not deferred: a copy, unless they fill the bucket."""
        late, whole = set(self.deferred), bucket.buffer
        numbers = [n for n in self.inside[bucket.index] if n not in late]
        if sum(self._lengths[n] for n in numbers) == whole.numel():
            return Message(whole, {n: self.gradient(n) for n in numbers})
        return self._joined(numbers, bucket.index, whole)

    def late_messages(self) -> list[Message]:
        """Return copies of all deferred gradients, one message for each kind of tensor."""
        kinds: dict[Hashable, list[int]] = {}
        for number in self.deferred:
            kinds.setdefault(kind_of(self._owner(number)), []).append(number)
        return [
            self._joined(numbers, kind, self._members[numbers[0]][0].buffer)
            for kind, numbers in kinds.items()
        ]

    def memory(self, key: Hashable, size: int, like: torch.Tensor) -> torch.Tensor:
        """Return flat memory for *size* elements of the kind of *like*.

        The same *key* gets the same memory again, since new pages cost more than a copy.
        """
        kept = self._memory.get(key)
        if kept is None or kept.numel() < size or kind_of(kept) != kind_of(like):
            kept = self._memory[key] = like.new_empty(size)
        return kept[:size]

    def _joined(self, numbers: list[int], key: Hashable, like: torch.Tensor) -> Message:
        lengths = [self._lengths[number] for number in numbers]
        flat = self.memory(key, sum(lengths), like)
        if numbers:
            torch.cat([self._flat(number) for number in numbers], out=flat)
        if stands_in(like):
            stand_in_for(sum(self.sizes[number] for number in numbers), flat)
        parts = zip(numbers, flat.split(lengths), strict=True)
        return Message(flat, {n: self._shaped(n, part) for n, part in parts})

    def _owner(self, number: int) -> torch.nn.Parameter:
        bucket, member, _ = self._members[number]
        return bucket.parameters[member]
