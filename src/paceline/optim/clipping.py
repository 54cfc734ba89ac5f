"""Clips gradients by their common norm, as ``torch.nn.utils.clip_grad_norm_`` does.

Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks" (ICML
2013), algorithm 1: g <- g * min(1, limit / |g|), over all tensors together.

- `clip_`: clips tensors in place.
- `sum_of_squares`, `clip_factor`: the two halves of it, for gradients in several places.
- `check_clip_norm`: checks the option.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.errors import UsageError

_TINY = 1e-6
"""torch adds this to the norm before it divides by the norm."""


def check_clip_norm(limit: float) -> None:
    """Raise `UsageError` unless *limit* is above 0; infinity clips nothing."""
    if not limit > 0:
        raise UsageError(
            f"clip_norm={limit}: expected the largest norm that a gradient may have, a "
            "number above 0; leave it out to clip nothing"
        )


def clip_factor(squares: float, limit: float) -> float:
    """Return the factor that scales a gradient to the largest norm.

    Args:
        squares: The sum of squares over all elements of the gradient.
        limit: The largest norm that the gradient may have.

    Returns:
        A factor of at most 1. It is 0 or NaN if the gradient is not finite.
    """
    wanted = limit / (math.sqrt(squares) + _TINY)
    return 1.0 if wanted > 1 else wanted


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> float:
    """Return the sum of squares over all elements of *tensors*.

    It is computed in double precision, so the order of the tensors hardly affects it.
    """
    return math.fsum(_squares(tensor) for tensor in tensors)


def _squares(tensor: torch.Tensor) -> float:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return float(norm) ** 2


def clip_(tensors: Sequence[torch.Tensor], limit: float) -> None:
    """Scale *tensors* in place so that their common norm is at most *limit*."""
    if not tensors or limit == math.inf:
        return
    factor = clip_factor(sum_of_squares(tensors), limit)
    if factor != 1.0:
        for tensor in tensors:
            tensor.mul_(factor)
