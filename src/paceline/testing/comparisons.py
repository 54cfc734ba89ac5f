"""What the laws of compressors compare: results that are close, states that are as declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.interfaces import COMMON, Compressor
from paceline.testing.lockstep import Workers, gradients
from paceline.testing.problems import require


def workers_of(
    compressor: Compressor, workers: int = 3, dtype: torch.dtype = torch.float32
) -> Workers:
    return Workers(compressor, [part.to(dtype) for part in gradients(1)[0]], workers)


def require_close(
    found: Sequence[Any], expected: Sequence[Any], rounding: float, otherwise: str
) -> None:
    for a, b in zip(found, expected, strict=True):
        if b.numel():
            difference = (a - b).abs().max().item()
            allowed = rounding * (1.0 + b.abs().max().item())
            require(difference <= allowed, f"{otherwise}: by {difference:.2g}")


def require_states(workers: Workers) -> None:
    kind = workers.compressor.state
    first, *others = workers.states
    kept = [state for state in first if state]  # perhaps of matrices alone
    require(bool(kept) == (kind != "none"), f"declares state {kind!r}, keeps {kept}")
    for state in kept:
        _require_plain(state)
    for other in others:
        if kind == "common":
            require(_equal(first, other), "common state differs between workers")
        require(
            _equal(_common(first), _common(other)),
            "what is under the key 'common' differs between workers",
        )


def _common(value: Any) -> Any:
    """What is common in a state, as texts and tensors."""
    if isinstance(value, list):
        return [_common(one) for one in value]
    return {
        key: one if key == COMMON else _common(one)
        for key, one in value.items()
        if isinstance(one, dict)
    }


def _require_plain(value: object) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _require_plain(inner)
        return
    require(
        isinstance(value, (torch.Tensor, int, float, str)),
        f"a state holds a {type(value).__name__}: expected tensors, numbers, texts, and "
        "dicts of those",
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)
