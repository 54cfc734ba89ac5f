"""LGP: what a worker computes with while the mean gradients of some pieces are under way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.interfaces import Hyperparameters, Piece, Updater


class LocalStep:
    """A step of the optimizer with the worker's own gradient, of which the optimizer's state
    learns nothing: p(i+1) = P(i) - eta g_k(i) under plain SGD."""

    def step(
        self,
        updater: Updater,
        pieces: Sequence[Piece],
        own: Sequence[torch.Tensor],
        hyperparameters: Hyperparameters,
    ) -> None:
        """Take it, of *pieces* that hold the exact values P(i) before."""
        write(
            updater, pieces, updater.apply(pieces, own, hyperparameters, commit=False)
        )

    def arrived(self, pieces: Sequence[Piece], means: Sequence[torch.Tensor]) -> None:
        """These were the mean gradients. Under ``collective=native`` only."""


def write(
    updater: Updater, pieces: Sequence[Piece], values: Sequence[torch.Tensor]
) -> None:
    """Copy *values*, flat or of the pieces' shapes, into the model."""
    with torch.no_grad():
        for into, value in zip(updater.values(pieces), values, strict=True):
            into.copy_(value.view(into.shape))
