"""The model's buffers on a server: mixed as they come."""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.messages import Blend


def blended(
    kept: torch.Tensor | None, blend: Blend, payload: torch.Tensor | None
) -> torch.Tensor:
    """What a server keeps once a worker's buffers are mixed in; the first ones, where it
    kept nothing. Raises `UsageError` for a payload that does not fit."""
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
    mixed = kept.clone()  # an answer may be on its way
    cut = blend.floats
    mixed[:cut].lerp_(payload[:cut], blend.weight)
    torch.maximum(mixed[cut:], payload[cut:], out=mixed[cut:])
    return mixed
