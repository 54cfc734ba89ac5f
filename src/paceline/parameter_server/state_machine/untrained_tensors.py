"""What a model holds beside what is trained, on a server: frozen parameters and buffers.

A server does not know what they are: it keeps the bytes that the first worker, or the leader of
a load, has brought, and gives them to workers that join. Buffers change in training
(BatchNorm's statistics): they are mixed as they come, and given to workers that join as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import UsageError
from paceline.interfaces.server_messages import Blend

MOST_BYTES = 16 << 20
"""In one message."""


class HeldRest:
    """Bytes that were loaded, and the buffers as they were mixed since."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.buffers: torch.Tensor | None = None
        """In double precision; None before the first worker has sent its own."""

    def load(self, parts: Sequence[torch.Tensor]) -> None:
        """Take over what a worker has brought, part by part: its buffers are the ones to go
        on from."""
        self.bytes = torch.cat(list(parts))
        self.buffers = None

    def part(self, start: int, most: int) -> torch.Tensor:
        """At most so many bytes from *start* on. Raises `UsageError` for a place where there
        are none."""
        if not 0 <= start <= self.bytes.numel() or most < 0:
            raise UsageError(
                f"pull-rest: expected a start of at most {self.bytes.numel()}, got "
                f"{start} and {most} bytes"
            )
        return self.bytes[start : start + min(most, MOST_BYTES)]

    def blend(self, blend: Blend, payload: torch.Tensor | None) -> torch.Tensor:
        """Mix a worker's buffers in; returns what is kept then."""
        self.buffers = blended(self.buffers, blend, payload)
        return self.buffers

    # ---- for a snapshot ----

    def saved(self) -> dict[str, torch.Tensor | None]:
        """Tensors that are never written again, and need no copy."""
        return {"bytes": self.bytes, "buffers": self.buffers}

    def restore(self, saved: dict[str, torch.Tensor | None]) -> None:
        """Take over what `saved` gave."""
        kept = saved["bytes"]
        assert kept is not None
        self.bytes, self.buffers = kept, saved["buffers"]


def blended(
    kept: torch.Tensor | None, blend: Blend, payload: torch.Tensor | None
) -> torch.Tensor:
    """A worker's buffers mixed into those that were *kept*; the worker's, where none were.
    Numbers that are equal in both stay so to the bit, infinities too. Raises `UsageError` for
    a payload that does not fit."""
    if payload is None or payload.dtype != torch.float64:
        raise UsageError("blend: expected a payload in double precision")
    if not 0 <= blend.floats <= payload.numel() or not 0 <= blend.weight <= 1:
        raise UsageError(f"blend: {blend.floats} floats, weight {blend.weight}")
    if kept is None:
        return payload
    if kept.numel() != payload.numel():
        raise UsageError(
            f"blend: expected {kept.numel()} values, got {payload.numel()}"
        )
    cut = blend.floats
    mine, theirs = kept[:cut], payload[:cut]
    # An answer may be on its way with what is kept: it is not written to.
    mixed = torch.where(mine == theirs, mine, mine.lerp(theirs, blend.weight))
    return torch.cat([mixed, torch.maximum(kept[cut:], payload[cut:])])
