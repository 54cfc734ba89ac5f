"""OSP's hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.methods.osp.budget import GrowthKind
from paceline.methods.osp.importance import Importance

INTERVAL = 20
"""Steps from one decision to the next."""

FADES = 0.98
"""While nothing is seen of the network it is taken for a little faster each time: conditions
may have improved, and then less needs to be deferred."""

FINEST = 16
SMALLEST_BYTES = 64 * 1024
"""Smaller pieces are made only if *chunk* says so."""


@dataclass(frozen=True, kw_only=True)
class OSPOptions:
    """*overlap*: stage 1 while backward still runs; without, after it (the paper's form).
    *defer*: ``"measured"``, what fits behind one computation, beyond what backward hides
    anyway; ``"nothing"``: stage 1 only, which is bsp; ``"most"``: always as much as *most*
    allows (with ``most=1`` everything: delayed synchronous training with local prediction).
    *most*: the largest part of the model that may be deferred. *budget*: how it grows, with
    the fall of the loss, linearly in *ramp* steps, or not at all.
    *order*: deferred first is what is ready last, since that is what a step waits for (``"time"``), or what is
    least important (``"importance"``, the paper's). *importance*, which otherwise decides between what is ready at the
    same time: of a tensor, Σ|parameter x mean gradient| (``"product"``), or that
    reversed, or ``"random"``, for comparison. *correction*: what a worker does to deferred tensors until
    their mean arrives: a step of the optimizer with its own gradient (``"local"``), with the mean of that
    and an average of past mean gradients (``"average"``), with its own gradient times the
    learning rate alone (``"plain"``), or nothing (``"none"``).
    *state*: of an optimizer whose state servers have, and which cannot be
    mirrored from how parameters move (all but SGD): ``"pull"`` it for what is deferred, so that
    the tentative step is that optimizer's own, or ``"predict"``: repeat the last step. Does not
    matter to collective=native.
    *chunk*: larger tensors are cut into pieces of at most so many bytes; of a small model, into
    pieces of at most a part in `FINEST` of it, so that no tensor is too large to be deferred."""

    overlap: bool = True
    defer: Literal["measured", "nothing", "most"] = "measured"
    most: float = 0.8
    budget: GrowthKind = "loss"
    ramp: int = 500
    order: Literal["time", "importance"] = "time"
    importance: Importance = "product"
    correction: Literal["local", "average", "plain", "none"] = "local"
    state: Literal["pull", "predict"] = "pull"
    chunk: int = 4 * 1024 * 1024

    def piece_bytes(self, total: int) -> int:
        """The most that a piece has, of a model of *total* bytes."""
        return min(self.chunk, max(SMALLEST_BYTES, total // FINEST))

    def __post_init__(self) -> None:
        if not 0 <= self.most <= 1:
            raise UsageError(
                f"osp:most={self.most}: expected a part of the model, between 0 and 1"
            )
        if self.ramp < 1:
            raise UsageError(f"osp:ramp={self.ramp}: expected 1 or more steps")
        if self.chunk < 1:
            raise UsageError(f"osp:chunk={self.chunk}: expected 1 or more bytes")
