"""A bucket's tensors as one flat code, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

BLOCK = 2**16
"""Elements that are worked on at a time on a CPU: what is made in between stays in its
caches, and in memory that it has already."""


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same elements of several tensors with equally many, in flat views, some at a
    time. Raises `RuntimeError` for a tensor that has no flat view."""
    size = BLOCK if tensors[0].device.type == "cpu" else tensors[0].numel()
    return zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)


def extremes(part: torch.Tensor) -> torch.Tensor:
    """The smallest and the largest real number in *part*, in a tensor of shape (2,): not a
    number where one element is none, 0 where there are no elements."""
    if not part.numel():
        return torch.zeros(2, dtype=part.dtype, device=part.device)
    real = torch.view_as_real(part) if part.is_complex() else part
    return torch.stack(real.aminmax())


def reals(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """*parts* without those that are empty; complex ones as views on pairs of real
    numbers."""
    return [
        torch.view_as_real(part) if part.is_complex() else part
        for part in parts
        if part.numel()
    ]


def flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements of *parts* (not empty, of one type) in one flat tensor: a view where they
    lie side by side, as in a bucket, else a copy."""
    view = _side_by_side(parts)
    return torch.cat([part.reshape(-1) for part in parts]) if view is None else view


def places(code: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views on the flat *code* with the shapes of *parts*."""
    pieces = code.split([part.numel() for part in parts])
    return [p.view(part.shape) for p, part in zip(pieces, parts, strict=True)]


def put(code: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write the flat *code* into *parts*, in their type."""
    view = _side_by_side(parts)
    if view is None:
        for part, place in zip(parts, places(code, parts), strict=True):
            part.copy_(place)
    elif view.data_ptr() != code.data_ptr():  # else it is their own memory
        view.copy_(code)


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat view on *parts*, if they are neighbours in one storage."""
    first = parts[0]
    start = position = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if (
            not part.is_contiguous()
            or part.storage_offset() != position
            or part.untyped_storage().data_ptr() != storage
        ):
            return None
        position += part.numel()
    return first.as_strided((position - start,), (1,))
