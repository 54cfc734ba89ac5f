"""SparseLoCo: what 30 local steps have moved, as few of its largest elements in 2 bits each.

Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo" (arXiv 2508.15706, 2025).
Each worker keeps what it has not sent yet, and forgets a part of it in each round; that takes
the place of an outer momentum, so there is none:

    e_i <- beta*e_i + (x - x_i);   c_i = Q(TopK(e_i))
    e_i <- e_i - c_i;   x <- x - eta*mean(c_i)

TopK takes the k largest elements of each chunk of a tensor, and Q rounds them to 2 bits.

It is `diloco` with other options, and the compression that it has unless another is named: top-k
in chunks of 4,096 elements with k = 64, and residuals with beta = 0.95, each a key of `compression`
(`compression=none` sends all of what has moved). The paper goes from 1 to 3 % of the elements and from
15 steps a round to 250; these values, H = 30 and eta = 1 are those of the family's published training code.

Ours: tensors of one dimension, and small ones, are sent as they are. The mean counts a worker
that has not sent an element as one that has sent a zero. Workers weigh what they have trained on.
What is left of the last round goes without a code, and what workers keep back then is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import MethodSummary
from paceline.methods.local_updates.method import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(LocalUpdates):
    """After every 30th step, an outer one with sparse differences."""

    name: ClassVar[str] = "sparse-loco"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="every worker, in every `every`-th step",
        sends="of what the parameters have moved 64 in 4,096 elements, once in `every` steps",
        guarantees="equal models after each round",
    )
    default_compression: ClassVar[str] = (
        "top-k:chunk=4096,density=0.015625,bits=2,decay=0.95"
    )

    every: int = 30
