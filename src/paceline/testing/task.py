"""Problems with known ends: quadratics whose minima differ between workers, and a model
that counts."""

from __future__ import annotations

import torch


class Quadratic(torch.nn.Module):
    """``forward(centers)`` is the loss sum of h/2 (p - c)^2 over all parameters p.

    Curvatures h lie in 0.5 to 1.5 and are equal on all workers, so the mean loss has its
    minimum at the mean of the workers' centers. Tensors of several shapes; *dtypes* gives
    each of the three its type.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(4, 3, dtype=dtypes[0]))
        self.vector = torch.nn.Parameter(torch.zeros(5, dtype=dtypes[1]))
        self.scalar = torch.nn.Parameter(torch.zeros((), dtype=dtypes[2]))

    def forward(self, centers: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        position = 0
        for parameter in self.parameters():
            count = parameter.numel()
            own = slice(position, position + count)
            distance = parameter.reshape(-1).double() - centers[own].double()
            loss = loss + (curvatures()[own] / 2 * distance.square()).sum()
            position += count
        return loss


class Counting(torch.nn.Module):
    """Every element's gradient is one, always: under plain SGD the parameters say how many
    steps' gradients were applied to them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(4, 3))
        self.vector = torch.nn.Parameter(torch.zeros(5))
        self.scalar = torch.nn.Parameter(torch.zeros(()))

    def forward(self) -> torch.Tensor:
        return self.matrix.sum() + self.vector.sum() + self.scalar


SIZE = 18
"""Number of parameters of `Quadratic`."""


def curvatures() -> torch.Tensor:
    """The curvature h of each parameter."""
    return torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)


def centers_of(rank: int, step: int = 0) -> torch.Tensor:
    """Where the loss of worker *rank* has its minimum in *step* (0: in all steps)."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(SIZE, generator=generator)


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    """All parameters, as one copy in double precision."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
