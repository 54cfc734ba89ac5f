"""A worker of OSP in both forms: its pieces, its messages, and its tentative step.

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
    """The steps of both forms. The deferred pieces are ``layout.deferred``."""

    def __init__(
        self, run: AnyRun, options: OSPOptions, updater: PartialOptimizer
    ) -> None:
        self.run, self.options, self.updater = run, options, updater
        self.layout = PieceLayout(run.buckets, updater)
        self.timer = StepTimer(options, run)
        self.correction = options.correction_class()
        self.steps = 0  # without those that only kept the others company
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
        """Guess the next values of these pieces, which hold their exact ones. Buckets hold the
        own gradient, or, where it is to be *scaled*, this worker's share of the mean."""
        if self.options.correction == "none" or not numbers:
            return
        own = [self.layout.gradient(number) for number in numbers]
        if scale != 1.0:
            for gradient in own:
                gradient.mul_(scale)
        pieces = self.layout.some(numbers)
        self._write(numbers, self.correction.values(self.updater, pieces, own, how))

    def _values(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """Views of these pieces in the model."""
        return self.updater.values(self.layout.some(numbers))

    def _copies(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """Copies of these pieces as the model has them."""
        return [value.clone() for value in self._values(numbers)]

    def _write(self, numbers: Iterable[int], values: Iterable[torch.Tensor]) -> None:
        """Put *values* of these pieces, flat or of their shapes, into the model."""
        for into, value in zip(self._values(numbers), values, strict=True):
            into.copy_(value.view(into.shape))

    def metrics(self) -> dict[str, float]:
        """*budget*: the part of the model that may be deferred; *deferred*: the part that is."""
        parts = self.layout.parts()
        whole = max(1, sum(parts.sizes))
        return {
            "budget": self.options.most * self.timer.budget.part,
            "deferred": parts.total(self.layout.deferred) / whole,
        }

    def _explain(self) -> None:
        """The training is over: say why nothing was deferred in it, if nothing was."""
        why = self.timer.why_nothing(self.steps)
        if why is not None and not self.has_deferred:
            self.run.report(why)


class Message(NamedTuple):
    """Some pieces' gradients, one after the other in *flat*; *parts*: each one's, by its
    number, as `PieceLayout.gradient` gives it."""

    flat: torch.Tensor
    parts: dict[int, torch.Tensor]


class PieceLayout:
    """The pieces of the optimizer's parameters, numbered alike on every rank.

    The *deferred* ones are equal on all ranks, and constant within a step. Parameters that the optimizer does
    not have are not sent.
    """

    def __init__(self, buckets: Sequence[Bucket], updater: PartialOptimizer) -> None:
        owners = [p for bucket in buckets for p in bucket.parameters]
        self.pieces = sorted(piece for p in owners for piece in updater.pieces_of(p))
        self._lengths = [piece.stop - piece.start for piece in self.pieces]
        self.deferred: list[int] = []
        self.changes = 0  # how often buckets, or what is deferred, have changed
        self.inside: list[list[int]] = []  # per bucket, in the order of its buffer
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
        """The planner has made new *buckets*."""
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
        """From the next step on these are deferred."""
        if list(numbers) != self.deferred:
            self.deferred = list(numbers)
            self.changes += 1

    def some(self, numbers: Iterable[int]) -> list[Piece]:
        """The pieces of these numbers."""
        return [self.pieces[number] for number in numbers]

    def parts(self) -> ModelPieces:
        """The pieces' sizes and buckets, for decisions."""
        buckets = [self._members[n][0].index for n in range(len(self.pieces))]
        return ModelPieces(self.sizes, buckets, len(self.inside))

    def gradient(self, number: int) -> torch.Tensor:
        """This worker's own gradient of a piece: a flat part of its bucket; or with the
        parameter's shape, where the elements of that lie in another order than its indices."""
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
        """The model's name of the parameter that a piece is of."""
        bucket, member, _ = self._members[number]
        return bucket.names[member]

    def by_name(self, parts: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a compressor keeps of pieces is kept under these names: a whole parameter's has its
        shape; a part of a matrix is a row."""
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
        """The pieces of parameters that took no part in the last backward pass."""
        members = self._members.items()
        return {number for number, (bucket, m, _) in members if not bucket.used[m]}

    def message(self, bucket: Bucket) -> Message:
        """The pieces of a bucket that are not deferred: a copy, unless that is all of it."""
        late, whole = set(self.deferred), bucket.buffer
        numbers = [n for n in self.inside[bucket.index] if n not in late]
        if sum(self._lengths[n] for n in numbers) == whole.numel():
            return Message(whole, {n: self.gradient(n) for n in numbers})
        return self._joined(numbers, bucket.index, whole)

    def late_messages(self) -> list[Message]:
        """All that is deferred: a copy for each kind of tensor."""
        kinds: dict[Hashable, list[int]] = {}
        for number in self.deferred:
            kinds.setdefault(kind_of(self._owner(number)), []).append(number)
        return [
            self._joined(numbers, kind, self._members[numbers[0]][0].buffer)
            for kind, numbers in kinds.items()
        ]

    def memory(self, key: Hashable, size: int, like: torch.Tensor) -> torch.Tensor:
        """Flat memory for *size* elements of the kind of *like*. A *key* gets the same memory
        again: new pages cost more than a copy."""
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
