"""Which pieces of a model matter most: PGP, by how much the loss would change without one."""

from __future__ import annotations

import torch


class Importance:
    """Sum of abs(parameter x mean gradient), piece by piece, as of when it was rated last."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def rate(self, piece: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """The mean *gradient* belongs to the *parameter* as it is."""
        products = parameter.detach().reshape(-1) * gradient.reshape(-1)
        self.values[piece] = float(torch.linalg.vector_norm(products, 1))

    def order(self, count: int, seed: int) -> list[int]:
        """Pieces 0 to *count* - 1: the least important first, equal ones by their number.

        *seed* is for orders that are drawn.
        """
        return sorted(range(count), key=lambda one: (self.values.get(one, 0.0), one))
