"""OSP's hyperparameters, and the two rules that comparisons replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from paceline.errors import UsageError
from paceline.interfaces import Hyperparameters, PartialOptimizer, Piece

LEAST_PIECES = 16
SMALLEST_BYTES = 64 * 1024
"""Smaller pieces are made only if *chunk* says so."""


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

    def values(
        self,
        updater: PartialOptimizer,
        pieces: Sequence[Piece],
        own: Sequence[torch.Tensor],
        how: Hyperparameters,
    ) -> list[torch.Tensor]:
        """What to compute with. The *pieces* hold the exact values P(i)."""
        return updater.apply(pieces, own, how, commit=False)

    def arrived(self, pieces: Sequence[Piece], means: Sequence[torch.Tensor]) -> None:
        """These were the mean gradients. Under ``collective=native`` only."""


EPOCHS = 10
"""The loss is averaged over this part of the ramp."""


@dataclass(frozen=True, kw_only=True)
class OSPOptions:
    """Every key but ``collective``, which chooses one of OSP's two forms.

    Attributes:
        overlap: Average the early gradients during backward. Without, after it: the paper's form.
        defer: ``measured``: what one step's computation hides, beyond what backward hides already. ``nothing``:
            no gradient, which is bsp. ``most``: as much as *most* allows.
        most: The largest share of the model that may be deferred.
        budget: How the deferred share grows: as the loss falls (``loss``), over *ramp* steps (``linear``), or
            it is whole from the start (``constant``).
        ramp: Steps over which a linear budget grows.
        order: What is deferred first: gradients that are ready last (``time``), or the least important ones
            (``importance``, as in the paper).
        correction: Parameters of a deferred gradient until its mean arrives: a step with the worker's own
            gradient (``local``), or no step (``none``).
        chunk: Bytes of a piece; larger tensors are cut. Pieces of a small model are smaller.
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
    """Comparisons take others: ``benchmarks/papers/osp_comparisons.py``."""

    def piece_bytes(self, total: int) -> int:
        """The most that a piece has, of a model of *total* bytes."""
        return min(self.chunk, max(SMALLEST_BYTES, total // LEAST_PIECES))

    @property
    def learns_for(self) -> int:
        """Steps until it defers what it will: the budget is whole, or what it follows has been seen to
        fall, and two decisions were made."""
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
