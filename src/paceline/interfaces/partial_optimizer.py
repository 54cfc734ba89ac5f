"""Parameters and their updates: what an optimizer is to whoever applies it in pieces.

`paceline.parameter_server.optim.partitioned` implements `Updater` over a torch optimizer. Methods that update use it
on workers, and servers on their part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Hyperparameters = Sequence[Mapping[str, Any]]
"""What ``param_groups`` held at one moment, group by group, without the parameters."""


@dataclass(frozen=True, order=True)
class Piece:
    """Elements [*start*, *stop*) of the flattened parameter number *parameter*, counted
    in the order in which the optimizer's ``param_groups`` list them."""

    parameter: int
    start: int
    stop: int


class Updater(Protocol):
    """The optimizer, applied piece by piece: on a worker, or on a server.

    Law: applying a step's pieces in several calls, in any order, or later with the
    gradients and hyperparameters of then, gives the bits of one plain optimizer step.

    A call that is refused (`UsageError`) has changed nothing. After an error of the
    optimizer itself some of the call's pieces may have been updated, unless it ran with
    ``commit=False``; the training cannot go on after it.
    """

    def apply(
        self,
        pieces: Sequence[Piece],
        gradients: Sequence[torch.Tensor],
        hyperparameters: Hyperparameters,
        commit: bool = True,
    ) -> list[torch.Tensor]:
        """Do one optimizer step on just these pieces; returns an empty list.

        ``gradients[i]`` belongs to ``pieces[i]``: flat, or of the piece's shape. It is
        only read. The parameters change in place. With ``commit=False`` neither they nor
        the optimizer's state change, and the values that they would have got are
        returned, one new tensor of the piece's shape for each piece.
        """
        ...

    def pieces_of(self, parameter: torch.nn.Parameter) -> Sequence[Piece]:
        """The pieces of one parameter, in order; none if the optimizer does not have it."""
        ...

    def group_of(self, piece: Piece) -> int:
        """The number of the parameter group that a piece is in."""
        ...

    def values(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Each piece's elements of its parameter: views, to read and to write."""
        ...

    def stamps(self, pieces: Sequence[Piece]) -> list[int]:
        """A number for each piece that becomes another one when anybody writes into its
        parameter (through ``.data`` nobody notices)."""
        ...

    def hyperparameters(self) -> list[dict[str, Any]]:
        """A snapshot of every group's hyperparameters as of now, to keep or to send."""
        ...

    def state(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The optimizer's own state of each piece, by name: what is written into it, or
        into its tensors, is what the next step uses. Empty before a piece's first step,
        for most optimizers. Ask again after a checkpoint was loaded."""
        ...
