"""The two rules of OSP that comparisons replace: which pieces matter, and what to guess."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.interfaces import Hyperparameters, Piece, Updater


class Importance:
    """PGP: sum of abs(parameter x mean gradient), by how much the loss would change without
    a piece. *values*: of each piece, as of when it was rated last."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def rate(self, piece: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """The mean *gradient* belongs to the *parameter* as it is."""
        products = parameter.detach().reshape(-1) * gradient.reshape(-1)
        self.values[piece] = float(torch.linalg.vector_norm(products, 1))

    def order(self, count: int, seed: int) -> list[int]:
        """Pieces 0 to *count* - 1: the least important first, equal ones by their number.
        *seed* is for orders that are drawn."""
        return sorted(range(count), key=lambda one: (self.values.get(one, 0.0), one))


class LocalStep:
    """LGP: while the means of some pieces are under way, a worker computes with a step of the
    optimizer with its own gradient: p(i+1) = P(i) - eta g_k(i) under plain SGD. The
    optimizer's state learns nothing of it."""

    def step(
        self,
        updater: Updater,
        pieces: Sequence[Piece],
        own: Sequence[torch.Tensor],
        how: Hyperparameters,
    ) -> None:
        """Take it, of *pieces* that hold the exact values P(i) before."""
        write(updater, pieces, updater.apply(pieces, own, how, commit=False))

    def arrived(self, pieces: Sequence[Piece], means: Sequence[torch.Tensor]) -> None:
        """These were the mean gradients. Under ``collective=native`` only."""


def write(
    updater: Updater, pieces: Sequence[Piece], values: Sequence[torch.Tensor]
) -> None:
    """Copy *values*, flat or of the pieces' shapes, into the model."""
    with torch.no_grad():
        for into, value in zip(updater.values(pieces), values, strict=True):
            into.copy_(value.view(into.shape))
