"""Streaming DiLoCo: the model travels in fragments, by turns, while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication" (2025). Each fragment has
its round of H steps, and they follow each other at distances of H/P; a mean is used tau steps
after it was sent, so that nobody waits for it; then a worker keeps a part alpha of its own:

    x_i <- alpha*x_i + (1 - alpha)*x

The peak of what a link carries is the largest fragment, so they are of about one size.
What a worker has done in the `delay` steps before a mean comes is lost but for the part that
it keeps (`keep_local`); that part counts in the next round's change once more. Defaults: tau 5,
alpha 0.5, H 100, outer learning rate 0.4 and momentum 0.9, as in the paper; its 4-bit codes
are `compression=`'s business.

Differs from the paper in that fragments are made of parameters by their sizes, and not of
every so many-th layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import MethodSummary
from paceline.methods.local_updates.method import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(LocalUpdates):
    """Every 25th step another quarter of the model leaves, and is used five steps later."""

    name: ClassVar[str] = "streaming-diloco"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="nobody, unless a mean takes longer than `delay` steps",
        sends="what one fragment has moved, once in `every`/`fragments` steps",
        guarantees="the outer parameters of each fragment are equal on all workers after its turn",
    )

    every: int = 100
    outer_learning_rate: float = 0.4
    outer_momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 4
    delay: int = 5
    keep_local: float = 0.5
