"""Numbers as 32-bit integers, block by block, so that sums are exact and never overflow.

After SwitchML (NSDI 2021; its public code's exponent quantizer). A block is the values of one
packet. With N workers:

    e = the smallest exponent with 2^e > max |x| in the block, over all workers
    f = (2^31 - N - 1) / (N 2^e)
    q = round(x f)          x' = (q_1 + ... + q_N) / f

*No overflow, by construction*: |q| <= |x| f + 1/2 < (2^31 - N - 1)/N + 1/2, so a sum of N is below
2^31 - N/2 - 1. The published code has f = (2^31 - 1)/(N 2^e), which N roundings may exceed. All
steps use double precision: in single precision x f could be off by up to 128 units before rounding.

*Error*: each rounding is off by 1/2 at most, so a sum is off by `FixedPoint.bound` = N/(2f). That
is about N^2 2^e / 2^32: for 16 workers 2^-24 of the block's largest value. The bound excludes the
final rounding to single precision.

*All workers* means all whose numbers are in one sum. If partial sums go from rack to rack, these
are the workers of all racks, and all of them must agree on the exponents.

*Values without an integer*: a block with a NaN, an infinity or a value of 2^127 or more has the
exponent `NOT_FINITE`, which is larger than all others. So all workers learn of it, none sends the
values, and all have NaN for the whole block. A block of zeros has the smallest exponent, whose
factor is a large, finite double.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

Array = NDArray[Any]
SMALLEST = -126
LARGEST = 127
NOT_FINITE = 1000
MOST_WORKERS = 1 << 16
"""With more workers, a value would have fewer than 15 bits."""


def exponents_of(blocks: Array) -> Array:
    """The exponent of each row of *blocks* (rows x elements, any float), as int16."""
    peaks = np.abs(blocks).max(axis=1).astype(np.float64)
    finite = np.isfinite(peaks)
    _, exponents = np.frexp(np.where(finite, peaks, 0.0))  # peak = m 2^e, m < 1
    exponents = np.maximum(exponents, SMALLEST)
    beyond = ~finite | (exponents > LARGEST)
    exponents[peaks == 0] = SMALLEST
    return np.where(beyond, NOT_FINITE, exponents).astype(np.int16)


@dataclass(frozen=True)
class FixedPoint:
    """The conversion between numbers and integers, for sums over *workers*."""

    workers: int

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise UsageError(
                f"{self.workers} workers: expected 1 to {MOST_WORKERS}; a 32-bit sum of more "
                "would leave too few bits to each. Sum groups of them first"
            )

    def factors(self, exponents: Array) -> Array:
        """The factor f of each block, as doubles; 0 for blocks that are not finite."""
        largest = 2.0**31 - self.workers - 1
        known = np.where(exponents == NOT_FINITE, 0, exponents)
        factors = largest / self.workers * np.exp2(-known.astype(np.float64))
        return np.where(exponents == NOT_FINITE, 0.0, factors)

    def to_integers(self, blocks: Array, exponents: Array) -> Array:
        """q of *blocks* (rows x elements) by the agreed *exponents*, as int32."""
        factors = self.factors(exponents)
        with np.errstate(invalid="ignore"):  # an infinity times zero
            scaled = np.multiply(blocks, factors[:, None], dtype=np.float64)
        scaled[factors == 0] = 0.0
        np.rint(scaled, out=scaled)
        return scaled.astype(np.int32)

    def to_numbers(self, sums: Array, exponents: Array) -> Array:
        """x' of *sums* (rows x elements), as single precision: the same bits everywhere."""
        factors = self.factors(exponents)
        with np.errstate(divide="ignore"):
            inverse = np.where(factors == 0, np.nan, 1.0 / factors)
        numbers = np.multiply(sums, inverse[:, None], dtype=np.float64)
        return numbers.astype(np.float32)

    def bound(self, exponents: Array) -> Array:
        """The largest error of a sum of each block, before its rounding to single precision:
        N/(2f)."""
        factors = self.factors(exponents)
        with np.errstate(divide="ignore"):
            return np.where(factors == 0, np.nan, self.workers / (2 * factors))
