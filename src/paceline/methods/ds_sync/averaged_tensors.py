"""What is averaged: parameters, and BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.interfaces import Comm, Run
from paceline.interfaces.buckets import by_kind
from paceline.methods.ds_sync.parameter_exchange import BufferParcel, Parcel
from paceline.methods.flat_tensors import Flat

HALF = (torch.float16, torch.bfloat16)


class Shares:
    """One worker's parcels. *largest*: the most members that a group has."""

    def __init__(self, run: Run, largest: int) -> None:
        self.parameters = [
            Parcel(_flat(bucket.parameters, largest), bucket.names)
            for bucket in run.buckets
        ]
        """By the number of their buckets."""
        self.buffers = [
            BufferParcel(
                Flat(kind), [f"buffers {number}.{i}" for i in range(len(kind))]
            )
            for number, kind in enumerate(by_kind(floating(run.own_buffers)))
        ]

    @property
    def all(self) -> list[Parcel]:
        """In the order in which they are sent: what a forward pass needs first goes first, and
        buckets are in the order of backward."""
        return [*self.buffers, *reversed(self.parameters)]

    def send(
        self, run: Run, group: Comm, when_in: Callable[[], None] | None = None
    ) -> None:
        """Everything leaves; *when_in* is called when the last mean is in."""
        for parcel in self.all:
            parcel.send(run, group)
        if when_in is not None:
            self.all[-1].follow(when_in)

    def put(self) -> None:
        """Put all means that are due where they belong."""
        for parcel in self.all:
            parcel.put()

    def put_buffers(self) -> None:
        """Put those that are due of the model's buffers."""
        for parcel in self.buffers:
            parcel.put()

    def stamp(self) -> None:
        """The parameters are as they were sent, though they were written to since."""
        for parcel in self.parameters:
            parcel.stamp()

    def drop(self) -> None:
        """All has been replaced."""
        for parcel in self.all:
            parcel.drop()

    def wait(self) -> None:
        """Return when all means are in; none is put."""
        for parcel in self.all:
            parcel.wait()

    def save(self) -> dict[str, torch.Tensor]:
        """The means that are due."""
        return {key: value for one in self.all for key, value in one.save().items()}

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """Go on from these."""
        for parcel in self.all:
            parcel.load(saved)


def floating(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have a mean, and elements."""
    return [
        one
        for one in tensors
        if (one.is_floating_point() or one.is_complex()) and one.numel()
    ]


def _flat(parameters: Sequence[torch.Tensor], largest: int) -> Flat:
    """Half the sum of two numbers is rounded once in any type; of more, each sum of two is,
    unless they are added in single precision."""
    wide = largest > 2 and parameters[0].dtype in HALF
    return Flat(parameters, torch.float32 if wide else None)
