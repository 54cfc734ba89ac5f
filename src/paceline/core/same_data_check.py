"""Whether all workers train on the same data, as a script for one process does on each.

Nothing fails then, and nothing is gained: every gradient is the mean. So the first steps
are looked at, on rank 0, by what it sends and gets anyway; later ones cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.interfaces import Bucket

STEPS = 3
"""In so many steps the gradient is to be the mean before anything is said."""

MOST_STEPS = 10
"""Gradients that tell nothing (zeros, one number) are waited out for so long."""

SAMPLE = 64
DIFFERENT = 8
"""Numbers that are looked at; and how many of them are to be different, since models that
were made to be timed have gradients that do not depend on any data."""


class SameData:
    """Compares rank 0's gradient with the mean, as long as *watching*; *say* tells people,
    once. *buckets* and *share*: the step's, and what this rank's gradient is multiplied
    with in them."""

    def __init__(
        self,
        watching: bool,
        workers: int,
        say: Callable[[str], None],
        buckets: Callable[[], Sequence[Bucket]],
        share: Callable[[], float],
    ) -> None:
        self.watching = watching
        self._buckets, self._share = buckets, share
        self._workers, self._say = workers, say
        self._own: tuple[int, torch.Tensor] | None = None
        self._equal = self._steps = 0

    def bucket_leaves(self, bucket: Bucket) -> None:
        """*bucket* is about to be sent, with this rank's share of the mean in it."""
        if not self.watching:
            return
        largest = max(self._buckets(), key=lambda one: one.buffer.numel())
        share = self._share()
        if bucket is largest and share:
            self._own = bucket.index, _sample(bucket) / share

    def means_are_there(self) -> None:
        """The buckets hold means."""
        if self._own is None:
            return
        (index, own), self._own = self._own, None
        mean = _sample(self._buckets()[index])
        self._steps += 1
        if len(mean[mean.isfinite() & (mean != 0)].unique()) >= DIFFERENT:
            rounding = torch.finfo(mean.dtype).eps * (16 + self._workers)
            self.watching = torch.allclose(
                own, mean, rtol=min(0.25, rounding), atol=0.0, equal_nan=True
            )
            self._equal += 1
        if self.watching and self._equal == STEPS:
            self._say(
                f"in {STEPS} steps rank 0's gradient was the mean of all "
                f"{self._workers}: do all workers train on the same data? Then they do "
                "the work of one. Give each its share: paceline.Sampler, or torch's "
                "DistributedSampler"
            )
            self.watching = False
        if self._steps == MOST_STEPS:
            self.watching = False


def _sample(bucket: Bucket) -> torch.Tensor:
    """A copy of some numbers, from all over the bucket."""
    flat = bucket.buffer
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()
