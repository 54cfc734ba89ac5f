"""Gradients that have left: whether the script has changed them since.

A version counter tells for nothing that somebody has written; whether something else
stands there now, as after ``clip_grad_norm_`` with a bound above the norm, only the
contents tell. These are summed up, which costs about what a step of SGD does (180 ms for
400 MiB on one core): so in the first steps, and as long as scripts write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.interfaces import Bucket
from paceline.torch_internals import version_of

WATCHED_STEPS = 8
"""After so many steps without a write no contents are summed up any more, and a write is
taken for a change."""


class SentGradients:
    """What was sent in a step, to be compared when the step ends; *say* tells people."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._versions: dict[int, int] = {}
        self._contents: dict[int, torch.Tensor] = {}
        self._watch = WATCHED_STEPS
        self._told = False

    def remember(self, buckets: Sequence[Bucket]) -> None:
        """The buckets have been sent as they are now."""
        self._versions = {b.index: version_of(b.buffer) for b in buckets}
        self._contents.clear()
        if self._watch > 0:
            self._watch -= 1
            self._contents = {b.index: _contents(b.buffer) for b in buckets}

    def changed(self, buckets: Sequence[Bucket]) -> str | None:
        """The name of the first gradient that is no longer what was sent, or stands in one
        bucket with it."""
        written = False
        for bucket in buckets:
            for name, parameter, view in zip(
                bucket.names, bucket.parameters, bucket.views, strict=True
            ):
                if parameter.grad is not None and parameter.grad is not view:
                    return name
            if version_of(bucket.buffer) == self._versions[bucket.index]:
                continue
            before = self._contents.get(bucket.index)
            if before is None or not torch.equal(before, _contents(bucket.buffer)):
                return bucket.names[0]
            written = True
        if written:
            self._watch = WATCHED_STEPS
            if not self._told:
                self._told = True
                self._say(
                    "gradients were written to between backward() and step(), with the "
                    "values that they had (clip_grad_norm_ does that while its bound is "
                    "above the norm). They have been sent by then: a change is an error. "
                    "To clip, distribute(clip_norm=...)"
                )
        return None


def _contents(buffer: torch.Tensor) -> torch.Tensor:
    """What another content of a flat tensor would hardly have in common with this one: its
    sum in words of eight bytes; its sum as numbers, since changing all signs leaves the
    former as it is; and the bytes left over."""
    raw = buffer.detach().view(torch.uint8)
    words = raw.numel() // 8 * 8
    sums = raw[:words].view(torch.int64).sum(), buffer.detach().sum()
    return torch.cat([*(s.reshape(1).view(torch.uint8) for s in sums), raw[words:]])
