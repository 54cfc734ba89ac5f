"""Which tensors matter most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Importance = Literal["product", "inverse", "random"]


def product(parameter: torch.Tensor, gradient: torch.Tensor) -> float:
    """PGP: I = sum of |p g|, by how much the loss would change without the tensor."""
    pair = parameter.detach().reshape(-1) * gradient.reshape(-1)
    return float(torch.linalg.vector_norm(pair, 1))


def ranking(kind: Importance, values: Sequence[float], seed: int) -> list[int]:
    """The least important first; equal ones by their number."""
    if kind == "random":
        generator = torch.Generator().manual_seed(seed)
        order: list[int] = torch.randperm(len(values), generator=generator).tolist()
        return order
    sign = 1 if kind == "product" else -1
    return sorted(
        range(len(values)), key=lambda number: (sign * values[number], number)
    )
