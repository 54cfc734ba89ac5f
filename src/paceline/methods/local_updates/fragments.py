"""What a worker keeps: fragments of the model, each with its anchor and outer momentum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.errors import UsageError
from paceline.interfaces import Pending, Run
from paceline.interfaces.buckets import by_kind, wire_bytes
from paceline.methods.flat_tensors import Flat
from paceline.methods.local_updates.options import Options

HALF = (torch.float16, torch.bfloat16)


@dataclass
class Since:
    """What this worker has trained on since a mean was formed."""

    begins: int = 0
    """The number of the first step after it."""
    weight: float = 0.0
    """Of the samples of these steps; one step of an even share counts as 1."""

    def share(self, step: int) -> float:
        """What this worker weighs in a mean after *step*: 1 for an even share of the samples
        of all its steps."""
        return self.weight / (step + 1 - self.begins)

    def begin(self, step: int) -> None:
        """A mean was formed, of what there was before *step*."""
        self.begins, self.weight = step, 0.0

    def saved(self, step: int) -> list[float]:
        """What a restart before *step* needs."""
        return [step - self.begins, self.weight]

    @classmethod
    def loaded(cls, step: int, saved: Sequence[float]) -> Since:
        """What was saved, before *step*."""
        ago, weight = saved
        return cls(step - int(ago), weight)


@dataclass
class Part:
    """A fragment. *anchors* (x) and *momenta* (u): one for each of *parameters*, or none.
    Both are float32 where the parameters have half of its bits. *statistics*: buffers that
    are averaged with it; *counters*: those of whole numbers."""

    parameters: list[Flat]
    statistics: list[Flat] = field(default_factory=list)
    counters: list[Flat] = field(default_factory=list)
    anchors: list[torch.Tensor] = field(default_factory=list)
    momenta: list[torch.Tensor] = field(default_factory=list)
    averaged: list[torch.Tensor] = field(default_factory=list)
    """Statistics of the last mean: those that belong to the anchor."""
    since: Since = field(default_factory=Since)
    rounds: int = 0

    def take_anchor(self) -> None:
        """Begin anew from the model, as it is."""
        for flat, anchor in zip(self.parameters, self.anchors, strict=True):
            flat.take()
            anchor.copy_(flat.buffer)
        for momentum in self.momenta:
            momentum.zero_()
        for flat, last in zip(self.statistics, self.averaged, strict=True):
            flat.take()
            last.copy_(flat.buffer)

    def put_anchor(self) -> None:
        """The anchor becomes the model's parameters, and its statistics the model's. The
        flat buffers stay as they are: a mean may be on its way in them."""
        values = [*self.anchors, *self.averaged]
        flats = [*self.parameters, *self.statistics]
        for flat, value in zip(flats, values, strict=True):
            for tensor, own in pairs(flat, value):
                tensor.copy_(own)

    def put_counters(self) -> None:
        """The largest that anybody has counted; a worker may have gone on since it was sent."""
        for flat in self.counters:
            for tensor, found in zip(flat.tensors, flat.views, strict=True):
                tensor.copy_(torch.maximum(tensor.to(found.dtype), found))

    def is_at_anchor(self) -> bool:
        """Whether the model holds it, as far as its types can."""
        return all(
            torch.equal(tensor, own.to(tensor.dtype))
            for flat, anchor in zip(self.parameters, self.anchors, strict=True)
            for tensor, own in pairs(flat, anchor)
        )

    @property
    def flats(self) -> list[Flat]:
        """All that of the model it covers."""
        return [*self.parameters, *self.statistics, *self.counters]

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each of its tensors, and what that holds now."""
        tensors = [tensor for flat in self.flats for tensor in flat.of]
        return [(tensor, tensor.detach().clone()) for tensor in tensors]


@dataclass
class Flight:
    """A mean under way: of part number *part*, to be used after step *due*. *weights* becomes
    the mean of what workers weigh, and of how many still train; *share* is what this one
    weighs. *moments*: of the inner optimizer's state, where that is averaged, too."""

    part: int
    due: int
    weights: torch.Tensor
    pending: list[Pending] = field(default_factory=list)
    moments: list[Flat] = field(default_factory=list)
    share: float = 0.0

    def wait(self) -> None:
        for pending in self.pending:
            pending.wait()
        self.pending.clear()


def pairs(
    flat: Flat, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of *flat*, and what *values*, of the buffer's shape, have for it."""
    parts = values.split([tensor.numel() for tensor in flat.of])
    for tensor, part in zip(flat.tensors, parts, strict=True):
        yield tensor, part.view(tensor.shape)


def beginning(flat: Flat, anchor: torch.Tensor) -> torch.Tensor:
    """Where workers that took *anchor* have begun: in the parameters' own type."""
    there = flat.of[0].dtype
    return anchor if there == anchor.dtype else anchor.to(there).to(anchor.dtype)


def wide(tensors: Sequence[torch.Tensor]) -> Flat:
    """Over tensors of one kind, in a type in which small differences last."""
    half = tensors[0].dtype in HALF
    return Flat(tensors, torch.float32 if half else None)


def _counter(tensors: Sequence[torch.Tensor]) -> Flat:
    """Flags travel as numbers: nothing else has a maximum."""
    flags = tensors[0].dtype == torch.bool
    return Flat(tensors, torch.uint8 if flags else None)


def make_parts(options: Options, run: Run) -> list[Part]:
    """The model in fragments: planned buckets where it is one."""
    if options.fragments == 1:
        parts = [Part([wide(bucket.parameters) for bucket in run.buckets])]
    else:
        parts = [
            Part([wide(tensors) for tensors in by_kind(share)])
            for share in deal_out(options, run.parameters)
        ]
    real = [b for b in run.own_buffers if b.is_floating_point() or b.is_complex()]
    whole = [b for b in run.own_buffers if not any(b is other for other in real)]
    parts[0].statistics = [Flat(tensors) for tensors in by_kind(real)]
    parts[0].counters = [_counter(tensors) for tensors in by_kind(whole)]
    if options.keeps_anchor:
        for part in parts:
            part.anchors = [torch.empty_like(flat.buffer) for flat in part.parameters]
            part.averaged = [torch.empty_like(f.buffer) for f in part.statistics]
            if options.outer_momentum:
                part.momenta = [torch.empty_like(anchor) for anchor in part.anchors]
            part.take_anchor()
    return parts


def deal_out(
    options: Options, parameters: Sequence[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    """Fragments of about one size, since the largest one decides what a link must carry: the
    largest parameter first, to the smallest fragment. So neighbours of one size are in
    different ones, as the paper's strided fragments have it."""
    count = options.fragments
    if count > len(parameters):
        raise UsageError(
            f"{options.name}:fragments={count}: the model has {len(parameters)} parameters, "
            "and a fragment has one at least"
        )
    sizes = [0] * count
    members: list[list[int]] = [[] for _ in range(count)]
    order = sorted(range(len(parameters)), key=lambda i: -wire_bytes(parameters[i]))
    for index in order:
        least = min(range(count), key=lambda n: (sizes[n], n))
        sizes[least] += wire_bytes(parameters[index])
        members[least].append(index)
    return [[parameters[i] for i in sorted(own)] for own in members]


# ---- what a checkpoint keeps of them ----


def by_parameter(
    run: Run, flats: Sequence[Flat], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Each parameter's part of *values*, which are of the shape of the flats' buffers, or
    none."""
    number = {id(parameter): i for i, parameter in enumerate(run.parameters)}
    found = [
        (number[id(parameter)], own)
        for flat, value in zip(flats, values, strict=bool(values))
        for parameter, (_, own) in zip(flat.of, pairs(flat, value), strict=True)
    ]
    return [own for _, own in sorted(found, key=lambda entry: entry[0])]


def means(run: Run, part: Part) -> list[torch.Tensor]:
    """What the flat buffers of a part hold: for the parameters, in the model's order, and then
    for all else."""
    buffers = [flat.buffer for flat in part.parameters]
    rest = [flat.buffer for flat in (*part.statistics, *part.counters)]
    return by_parameter(run, part.parameters, buffers) + rest


def put(own: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> None:
    """What was saved, into its place."""
    for tensor, value in zip(own, there, strict=True):
        tensor.copy_(value)
