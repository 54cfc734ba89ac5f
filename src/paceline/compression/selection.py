"""The largest elements of a tensor.

Elements are compared by the bits of their magnitudes, in which infinity is above all numbers, and
what is not a number above that: so it is taken, and seen. Of equal ones the first are taken, so
that a replay takes the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from paceline.compression.packing import BLOCK
from paceline.errors import UsageError


@dataclass(frozen=True)
class Cut:
    """How much of one tensor is sent: of every *chunk* of its *elements* the largest *each*,
    and of what is over after the last whole chunk as large a part; *count* in all."""

    elements: int
    chunk: int
    each: int
    count: int

    @property
    def width(self) -> int:
        """Bytes of a place, counted from its chunk's start; 0 where all are sent."""
        if self.count == self.elements:
            return 0
        return ((self.chunk - 1).bit_length() + 7) // 8


@cache
def cut(elements: int, density: float, chunk: int = 0) -> Cut:
    """Of a tensor of so many *elements* the part *density* is sent, at least one element; of
    each *chunk*, if there are any."""
    chunk = min(chunk, elements) or elements
    each = _part(chunk, density)
    count = elements // chunk * each
    if elements % chunk:
        count += _part(elements % chunk, density)
    return Cut(elements, chunk, each, count)


def _part(elements: int, density: float) -> int:
    return max(1, round(elements * density))


def require_density(density: float) -> None:
    """Raise `UsageError` for what is no part of a tensor."""
    if not 0 < density <= 1:
        raise UsageError(
            f"density: expected the part of a tensor's elements that is sent, above 0 and up "
            f"to 1, got {density}"
        )


def pick(values: torch.Tensor, of: Cut) -> torch.Tensor:
    """The places in the flat *values* that are sent: int64, from low to high."""
    if of.count == of.elements:
        return torch.arange(of.elements, device=values.device)
    if of.chunk == of.elements:
        return largest(values, of.count)
    whole = of.elements // of.chunk * of.chunk
    rows = values[:whole].view(-1, of.chunk)
    at_once = max(1, BLOCK // of.chunk) if values.device.type == "cpu" else len(rows)
    found = [_first(_magnitudes(some), of.each) for some in rows.split(at_once)]
    starts = torch.arange(0, whole, of.chunk, device=values.device)
    places = [torch.cat(found).add_(starts.unsqueeze(1)).view(-1)]
    if whole < of.elements:
        over = of.count - places[0].numel()
        places.append(largest(values[whole:], over).add_(whole))
    return torch.cat(places)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the *count* largest elements of the flat *values*, from low to high."""
    if values.device.type == "cpu":
        likely = _likely(values, count)
        if likely is not None:
            chosen = _first(
                _magnitudes(values.index_select(0, likely)).unsqueeze(0), count
            )
            return likely[chosen.view(-1)]
    return _first(_magnitudes(values).unsqueeze(0), count).view(-1)


def _first(magnitudes: torch.Tensor, each: int) -> torch.Tensor:
    """The columns of the *each* largest in every row, from low to high."""
    least = magnitudes.topk(each, dim=1, sorted=False).values.amin(1, keepdim=True)
    enough = magnitudes >= least
    rows, columns = magnitudes.shape
    if magnitudes.device.type == "cpu":
        places = _true_places(enough.view(-1))
        if places.numel() == rows * each:  # no ties
            return places.view(rows, each).remainder_(columns)
    above = magnitudes > least
    equal = enough & ~above
    missing = each - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= missing))
    places = torch.nonzero_static(chosen.view(-1), size=rows * each)
    return places.view(rows, each).remainder_(columns)


_STRIDE = 61
"""Every so manieth element is looked at for a threshold: a prime, so that all rows and columns of
a matrix have a part in it."""


def _likely(values: torch.Tensor, count: int) -> torch.Tensor | None:
    """Places of somewhat more than *count* elements, with all of the largest among them: those
    above a threshold that a sample gives. None where it would be no quicker."""
    sample = _magnitudes(values[::_STRIDE])
    expected = count / _STRIDE
    # As many of the sample as are there by chance at most in one of 30,000 tensors.
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank > sample.numel() // 4:
        return None
    floor = int(sample.topk(rank, sorted=False).values.min())
    found, start = [], 0
    for block in values.split(BLOCK):
        found.append(_true_places(_magnitudes(block) >= floor).add_(start))
        start += block.numel()
    places = torch.cat(found)
    return places if places.numel() >= count else None


def _true_places(values: torch.Tensor) -> torch.Tensor:
    """Where the flat *values*, on a CPU, are true: numpy finds it in a third of the time."""
    return torch.from_numpy(np.flatnonzero(values.numpy()))


_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers in the order of the elements' magnitudes."""
    whole = values.contiguous().view(_WHOLE[values.itemsize])
    return whole & torch.iinfo(whole.dtype).max
