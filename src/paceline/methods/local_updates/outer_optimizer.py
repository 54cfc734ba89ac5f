"""The outer optimizer: one step on the parameters that all workers share.

Its arithmetic is that of ``torch.optim.SGD``, operation by operation, so that nothing differs:

    u <- b*u + D;   x <- x - eta*(D + b*u)   (Nesterov)   or   x - eta*u

D is what the inner steps have moved, in the mean over workers: where they began, minus where
they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def outer_step(
    anchor: torch.Tensor,
    momentum: torch.Tensor | None,
    change: torch.Tensor,
    *,
    learning_rate: float,
    factor: float,
    nesterov: bool,
) -> None:
    """Move *anchor* (x) by the mean *change* (D), in place. *momentum* is u, and *factor* b;
    None: without. *change* is used up. All are of one shape."""
    if momentum is not None:
        momentum.mul_(factor).add_(change)
        change = change.add_(momentum, alpha=factor) if nesterov else momentum
    anchor.add_(change, alpha=-learning_rate)


def rescaled_step(
    anchor: torch.Tensor,
    momentum: torch.Tensor,
    change: torch.Tensor,
    sizes: Sequence[int],
    rates: Sequence[float],
    *,
    learning_rate: float,
    factor: float,
    nesterov: bool,
) -> None:
    """The same with u in units of the inner learning rates: those of now, *rates*, of
    consecutive parts with so many elements.

        u <- b*u + D/lr;   x <- x - eta*lr*u

    Wang et al., "SlowMo" (ICLR 2020), algorithm 1. A part whose rate is 0 has no such unit:
    it takes the plain mean, and its u stays.
    """
    parts = zip(
        anchor.split(list(sizes)),
        momentum.split(list(sizes)),
        change.split(list(sizes)),
        rates,
        strict=True,
    )
    for x, u, moved, rate in parts:
        if rate == 0:
            x.sub_(moved)
            continue
        outer_step(
            x,
            u,
            moved.div_(rate),
            learning_rate=learning_rate * rate,
            factor=factor,
            nesterov=nesterov,
        )
