"""OSP's hyperparameters, and its two replaceable rules: importance and local correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from paceline.errors import UsageError
from paceline.interfaces import Hyperparameters, PartialOptimizer, Piece

LEAST_PIECES = 16
SMALLEST_BYTES = 64 * 1024
"""The size limit of pieces is at least this, unless *chunk* is smaller."""


class Importance:
    """Rates pieces by PGP, the sum of abs(parameter x mean gradient).

    PGP estimates how much the loss would change without a piece.

    Attributes:
        values: The last rating of each piece, by its number.
    """

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def rate(self, piece: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Rate a piece by its parameter and mean gradient.

        Args:
            piece: The piece's number.
            parameter: The values for which *gradient* was computed.
            gradient: The mean gradient, with as many elements as *parameter*.
        """
        products = parameter.detach().reshape(-1) * gradient.reshape(-1)
        self.values[piece] = float(torch.linalg.vector_norm(products, 1))

    def order(self, count: int, seed: int) -> list[int]:
        """Sort the pieces 0 to *count* - 1 by importance, the least important first.

        Args:
            count: Number of pieces.
            seed: Seed for subclasses that draw a random order; not used here.

        Returns:
            The numbers of all pieces. Pieces of equal importance are in the order of their numbers.
        """
        return sorted(range(count), key=lambda one: (self.values.get(one, 0.0), one))


class LocalStep:
    """Corrects deferred pieces locally (LGP) until their averages arrive.

    The worker computes with a tentative step of the optimizer, taken with its own gradient: under plain SGD,
    p(i+1) = P(i) - eta g_k(i). The tentative step does not change the optimizer's state.
    """

    def values(
        self,
        updater: PartialOptimizer,
        pieces: Sequence[Piece],
        own: Sequence[torch.Tensor],
        how: Hyperparameters,
    ) -> list[torch.Tensor]:
        """Return the tentative values of *pieces*.

        Args:
            updater: The optimizer of the pieces.
            pieces: Pieces that hold their exact values P(i).
            own: This worker's own gradient of each piece.
            how: The hyperparameters of the step.
        """
        return updater.apply(pieces, own, how, commit=False)

    def arrived(self, pieces: Sequence[Piece], means: Sequence[torch.Tensor]) -> None:
        """Receive the mean gradients of *pieces*, before they are applied.

        Called only if the collective is not ``parameter-server``.
        """


EPOCHS = 10
"""The loss is averaged over one part in this many of the ramp."""


@dataclass(frozen=True, kw_only=True)
class OSPOptions:
    """Every key but ``collective``, which chooses one of OSP's two forms.

    Attributes:
        overlap: Average the early gradients during backward. If false, average them after backward, as the paper does.
        defer: ``measured``: as many gradients as one step's computation hides, beyond those that
            backward already hides. ``nothing``: no gradient, as bsp. ``most``: as many as the key
            *most* allows.
        most: The largest share of the model that may be deferred.
        budget: Growth of the deferred share: as the loss falls (``loss``), over *ramp* steps
            (``linear``), or none, with the whole share from the start (``constant``).
        ramp: Steps over which a linear budget grows.
        order: Gradients that are deferred first: those ready last (``time``), or the least
            important ones (``importance``, as in the paper).
        correction: Parameters of a deferred gradient until its mean arrives: a step with the worker's own
            gradient (``local``), or no step (``none``).
        chunk: Bytes of a piece; larger tensors are cut into pieces. In a small model pieces are smaller.
    """

    overlap: bool = True
    defer: Literal["measured", "nothing", "most"] = "measured"
    most: float = 0.8
    budget: Literal["loss", "linear", "constant"] = "loss"
    ramp: int = 500
    order: Literal["time", "importance"] = "time"
    correction: Literal["local", "none"] = "local"
    chunk: int = 4 * 1024 * 1024

    interval: ClassVar[int] = 20
    """Steps from one decision to the next."""
    importance_class: ClassVar[type[Importance]] = Importance
    correction_class: ClassVar[type[LocalStep]] = LocalStep
    """``benchmarks/papers/osp_comparisons.py`` replaces both classes."""

    def piece_bytes(self, total: int) -> int:
        """Return the largest size of a piece in bytes, for a model of *total* bytes."""
        return min(self.chunk, max(SMALLEST_BYTES, total // LEAST_PIECES))

    @property
    def learns_for(self) -> int:
        """Steps until the steady state.

        By then the budget is whole, or the loss that it follows was averaged twice. Two decisions follow.
        """
        seen = {"constant": 0, "linear": self.ramp, "loss": 2 * (self.ramp // EPOCHS)}
        return seen[self.budget] + 2 * self.interval

    def __post_init__(self) -> None:
        if not 0 <= self.most <= 1:
            raise UsageError(
                f"osp:most={self.most}: expected a part of the model, between 0 and 1"
            )
        if self.ramp < 1:
            raise UsageError(f"osp:ramp={self.ramp}: expected 1 or more steps")
        if self.chunk < 1:
            raise UsageError(f"osp:chunk={self.chunk}: expected 1 or more bytes")
