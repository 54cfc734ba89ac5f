"""The page on all compressors, made from the registry."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.compression import COMPRESSORS, shared_keys

_HEAD = """# Compressors

Made by `paceline list compressors` from the registry; do not edit. What each costs and gains is in
[compression.md](compression.md). What is sent of a mean of gradients:
`distribute(compression="int8:error_feedback=true")`, or `--method bsp:compression=int8,compression.error_feedback=true`.
*Consistency*: what a mean of gradients so coded promises ([plan.md](plan.md#classes)).
A gradient is divided by the number of workers (or weighted by its samples) before it is coded.

*Linear*: sums of codes are codes of sums, so codes are all-reduced; others are gathered, and every worker adds up
all of them. *Unbiased*: the expected result is the mean itself. *State*: what is kept between steps; each worker's
*own* is saved in each worker's part of a checkpoint.

`ef21`, `ef-sign` and `qsgd` (`compression/contrib`) are there to compare with: no measurement recommends them. `plan` and `auto` do not
search them. They run where you name them.

| compression | consistency | keys | linear | unbiased | rounds | state | sends | loses |
|---|---|---|---|---|---|---|---|---|
"""

_RESIDUALS = """
## Residuals

`error_feedback=true` goes with every row that has that key: what a code leaves out of a gradient is added to the next one. It
keeps as many elements again as the model has parameters, on every worker. `warmup_steps=100` sends gradients as they are in the
first 100 steps.

An object of `paceline.compression` has the same defaults as its name. Wrappers say otherwise:

| `distribute(compression=...)` | error feedback (residuals) |
|---|---|
| `TopK(density=0.01)` | yes, as `"top-k:density=0.01"` |
| `Exactly(TopK(density=0.01))` | no, as `"top-k:density=0.01,error_feedback=false"` |
| `Int4()` | no, as `"int4"` |
| `ErrorFeedback(Int4(), decay=0.9)` | yes, as `"int4:error_feedback=true,decay=0.9"` |

An object that is wrapped in `ErrorFeedback` or `Later(code, steps)` is taken as it is. A class of your own says by
`error_feedback_by_default` and `warmup_steps_by_default` what it has without a wrapper.

Residuals (error feedback): what a lossy code left out is added to the next gradient.

Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); analysed by
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes"
(ICML 2019), algorithm 2. Per tensor, with g this worker's share of the mean and C its code:

    a = g + e;  send C(a);  e = a - decoded C(a)

so that at every step the sum of all results plus the sum of all residuals is the sum of all
gradients: what is sent late is not lost.

Differs from the paper in that the learning rate is outside the residual (as in PowerSGD): the
two are the same while it stays constant. Each worker subtracts what its own code stands for,
and not the mean: residuals then stay small where workers' data differ. A tensor whose gradient
is zero in every element sends nothing, and keeps its residual: it was not used in this step,
or its worker is out of data. Where a result is not finite residuals stay as they were, on all
workers, since a GradScaler skips that step.

With a *decay* below 1 the residual fades, e = decay * (a - decoded C(a)), as where it stands in for
momentum (local updates with sparse differences): then the sums above no longer agree.
"""


def compression_page() -> str:
    """Markdown: one row per registered compressor."""
    rows = []
    for name, cls in sorted(COMPRESSORS.items()):
        shape: Any = cls
        keys = [
            f"`{f.name}={str(f.default).lower()}`" for f in dataclasses.fields(shape)
        ]
        keys += [f"`{key}={text}`" for key, text in shared_keys(cls).items()]
        one = shape()
        cells = [
            f"`{name}`",
            one.consistency,
            ", ".join(keys) or "-",
            "yes" if one.linear else "no",
            "yes" if one.unbiased else "no",
            str(one.rounds),
            one.state,
            *one.summary,
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return _HEAD + "\n".join(rows) + "\n" + _RESIDUALS
