"""A bucket's tensors as one flat code, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.errors import UsageError
from paceline.interfaces import Leg, Shape

BLOCK = 2**16
"""Elements that are worked on at a time on a CPU: what is made in between stays in its
caches, and in memory that it has already."""


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


def is_small(shape: Shape, small: int) -> bool:
    """Whether a tensor of this *shape* is sent as it is, by a code that leaves alone what has
    one dimension or none, or fewer than *small* elements; nothing is where that is 0."""
    return small > 0 and (len(shape) <= 1 or math.prod(shape) < small)


def is_lossy(dtype: torch.dtype) -> bool:
    """Whether codes may lose anything of tensors of this type: whole numbers, and those of 8
    bits or fewer, are summed as they are."""
    return dtype.is_floating_point and dtype.itemsize > 1


def elements(shapes: Sequence[Shape]) -> int:
    """Of all tensors of these *shapes*."""
    return sum(math.prod(shape) for shape in shapes)


def real_type(
    shapes: Sequence[Shape], dtype: torch.dtype
) -> tuple[list[Shape], torch.dtype]:
    """What `reals` makes of tensors of these *shapes*, and of this type."""
    kept: list[Shape] = [shape for shape in shapes if math.prod(shape)]
    if not dtype.is_complex:
        return kept, dtype
    return [(*shape, 2) for shape in kept], dtype.to_real()


def dense(shapes: Sequence[Shape], dtype: torch.dtype) -> tuple[Leg, ...]:
    """The traffic of tensors that are summed as they are."""
    size = elements(shapes) * dtype.itemsize
    return (Leg("sum", size),) if size else ()


def to_bytes(*tensors: torch.Tensor) -> torch.Tensor:
    """The bytes of *tensors*, one after the other, as one flat tensor of uint8."""
    rows = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


class Reader:
    """Takes from a code what `to_bytes` has put there."""

    def __init__(self, code: torch.Tensor) -> None:
        self._code, self._position = code, 0

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The next *count* elements of type *dtype*. Raises `UsageError` where the code is
        too short."""
        start, stop = self._position, self._position + count * dtype.itemsize
        if stop > self._code.numel():
            raise UsageError(
                f"a code of {self._code.numel()} bytes ends before byte {stop}: expected "
                "one of tensors of the same shapes, made with the same options"
            )
        self._position = stop
        part = self._code[start:stop]
        if part.data_ptr() % dtype.itemsize:
            part = part.clone()  # numbers lie at multiples of their size
        return part.view(dtype)

    def rest(self) -> torch.Tensor:
        """All that has not been taken, as bytes."""
        start, self._position = self._position, self._code.numel()
        return self._code[start:]

    def end(self) -> None:
        """Raise `UsageError` unless all has been taken."""
        left = self._code.numel() - self._position
        if left:
            raise UsageError(
                f"a code of {self._code.numel()} bytes has {left} too many: expected one of "
                "tensors of the same shapes, made with the same options"
            )


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
