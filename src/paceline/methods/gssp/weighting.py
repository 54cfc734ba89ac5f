"""What an update of a part of the samples is to the optimizer.

A push has the gradient of a part w of a step's samples: 1/n where all have as many. The optimizer
on the server steps once for each. With the learning rate times w (as under asp and ssp) as many
samples move parameters as far as under bsp, decay included; what becomes shorter is the horizon
of momentum, which is counted in updates.

Momentum in samples
-------------------
`by_samples` keeps the horizon, too: an update of weight w forgets m^w of what is there, so that
updates of weights that add up to 1 forget m together. For SGD,

    v = m^w v + c g;    x = x - lr d v

and c and d follow from what a gradient is to do, whatever the weights of those that come after
it: move x by lr w / (1 - m) times itself in all, as it does under bsp. Updates of weights w_1,
w_2, ... after it move x by

    lr c g (d(w) + sum over j of d(w_j) m^(w_1 + ... + w_j))

and the sum is the same for all weights if d(w_j) m^(w_j) = A (1 - m^(w_j)): then it telescopes to
A. With c = d = 1 for w = 1, which is bsp's step,

    d = (m^(1-w) - m) / (1 - m);    c = w m^(w-1)

With Nesterov's form, x = x - lr d (c g + m^w v), in the same way

    d = (m^(2-2w) - m^(2-w)) / (1 - m);    c = w m^(2w-2)

The gradient is scaled by c and so is the decay that is added to it; lr is scaled by d. The first
update, for which torch takes the gradient as momentum, needs no other rule. Under constant
gradients x ends where bsp ends up to what is under way in v; bsp's v is a step old on average.

For Adam and its kind: b^w for both betas, and lr times w. Their correction of the first steps
counts updates; it is exact where all weights are equal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from paceline.errors import UsageError
from paceline.interfaces import Hyperparameters

FORGOTTEN = 20.0
"""What a momentum forgets e^-20 of is gone in any type; a parcel may be of many steps, if a line
was cut, and m^-w huge."""


class Weighted(NamedTuple):
    """An update with these *hyperparameters*, at so many times (*rate*) their learning rates,
    by so many times (*gradient*) the gradient."""

    hyperparameters: Hyperparameters
    rate: float
    gradient: float = 1.0


def by_updates(hyperparameters: Hyperparameters, weight: float) -> Weighted:
    """Momentum's horizon is in updates."""
    return Weighted(hyperparameters, weight)


def by_samples(hyperparameters: Hyperparameters, weight: float) -> Weighted:
    """Momentum's horizon is in samples. Raises `UsageError` for optimizers of which that is not
    known, and where groups of parameters differ in their momentum."""
    kinds = {
        (momentum, bool(h.get("nesterov")))
        for h in hyperparameters
        if (momentum := _momentum(h))
    }
    if len(kinds) > 1:
        raise UsageError(
            "momentum=samples: expected one momentum for all groups of parameters, got "
            f"{', '.join(str(momentum) for momentum, _ in sorted(kinds))}; use momentum=updates"
        )
    rate, gradient = weight, 1.0
    if kinds:
        momentum, nesterov = kinds.pop()
        if not 0 < momentum < 1:
            raise UsageError(
                f"momentum=samples: expected a momentum below 1, got {momentum}"
            )
        rate, gradient = _of_momentum(momentum, nesterov, weight)
    groups = [_scaled(h, weight, rate, gradient) for h in hyperparameters]
    return Weighted(groups, 1.0, gradient)


def _of_momentum(m: float, nesterov: bool, weight: float) -> tuple[float, float]:
    """d and c, as above."""
    w = _exponent(m, weight)
    if nesterov:
        return (m ** (2 - 2 * w) - m ** (2 - w)) / (1 - m), weight * m ** (2 * w - 2)
    return (m ** (1 - w) - m) / (1 - m), weight * m ** (w - 1)


def _exponent(momentum: float, weight: float) -> float:
    """The weight; not beyond that at which all is forgotten."""
    return min(weight, FORGOTTEN / -math.log(momentum))


def _scaled(how: Any, weight: float, rate: float, gradient: float) -> dict[str, Any]:
    if "betas" in how:
        betas = [beta**weight for beta in how["betas"]]
        return {**how, "betas": betas, "lr": how["lr"] * weight}
    decay = how.get("weight_decay", 0.0) * gradient
    if momentum := _momentum(how):
        momentum **= _exponent(momentum, weight)
    else:
        # The gradient is scaled for the other groups.
        rate = weight / gradient if gradient else 0.0
    return {
        **how,
        "lr": how["lr"] * rate,
        "momentum": momentum,
        "weight_decay": decay,
    }


def _momentum(how: Any) -> float:
    """Of one group of parameters; 0 where it has none."""
    if "betas" in how:
        return 0.0
    if "dampening" not in how:
        raise UsageError(
            "momentum=samples: expected SGD, or Adam or another optimizer with betas; use "
            "momentum=updates"
        )
    return float(how["momentum"])
