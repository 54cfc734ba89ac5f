"""Sparse codes: of each tensor some values, and then their places, in as many bytes as the largest
place takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.compression.packing import (
    Reader,
    dense,
    extremes,
    is_lossy,
    is_small,
    real_type,
    reals,
)
from paceline.compression.selection import Cut, cut
from paceline.compression.value_bins import decode_values, encode_values, size_of_values
from paceline.errors import UsageError
from paceline.interfaces import Coding, Gather, Leg, Shape, State


class Row(NamedTuple):
    """One tensor of a bucket: a real *part*, its *state*, and where what is sent of it is
    wanted, if anywhere."""

    part: torch.Tensor
    state: State
    own: torch.Tensor | None


def rows_of(
    parts: Sequence[torch.Tensor],
    states: Sequence[State],
    sent: Sequence[torch.Tensor] | None,
) -> list[Row]:
    """What `Compressor.average` is given, by tensor, without those that are empty."""
    kept = [s for part, s in zip(parts, states, strict=True) if part.numel()]
    owns = [None] * len(kept) if sent is None else reals(sent)
    return [Row(*row) for row in zip(reals(parts), kept, owns, strict=True)]


Picked = tuple[torch.Tensor, torch.Tensor]
"""Of one tensor flat places, and the values there."""


def size_of(cuts: Sequence[Cut], dtype: torch.dtype, bits: int = 32) -> int:
    """The bytes of a code of tensors of this type. *bits*: see `encode_values`."""
    return sum(
        size_of_values(one.count, dtype, bits) + one.count * one.width for one in cuts
    )


def coded(
    picked: Sequence[Picked],
    cuts: Sequence[Cut],
    bits: int = 32,
) -> torch.Tensor:
    """The code of what was *picked*: of each tensor places, and the values there."""
    pieces = []
    for (places, values), of in zip(picked, cuts, strict=True):
        pieces += encode_values(values, bits)
        if of.width:
            pieces.append(_places_to_bytes(places, of))
    return torch.cat(pieces)


def opened(
    code: torch.Tensor, cuts: Sequence[Cut], dtype: torch.dtype, bits: int = 32
) -> list[Picked]:
    """Places and values of each tensor. Raises `UsageError` where *code* has another size than
    it should, or a place that is outside."""
    reader, picked = Reader(code), []
    for of in cuts:
        values = decode_values(reader, of.count, dtype, bits)
        picked.append((_bytes_to_places(reader, of, code.device), values))
    reader.end()
    return picked


def add_at(
    part: torch.Tensor, places: torch.Tensor, values: torch.Tensor, add: bool = True
) -> None:
    """Add *values* to *part* at flat *places*; or to zeros, where not *add*."""
    whole = part.view(-1) if part.is_contiguous() else part.reshape(-1).clone()
    if not add:
        whole.zero_()
    whole.index_add_(0, places, values.to(whole.dtype))
    if not part.is_contiguous():
        part.copy_(whole.view(part.shape))


def _places_to_bytes(places: torch.Tensor, of: Cut) -> torch.Tensor:
    within = places if of.chunk == of.elements else places % of.chunk
    lowest_first = within.view(torch.uint8).view(-1, 8)
    return lowest_first[:, : of.width].reshape(-1)


def _bytes_to_places(reader: Reader, of: Cut, device: torch.device) -> torch.Tensor:
    if not of.width:
        return torch.arange(of.elements, device=device)
    given = reader.take(torch.uint8, of.count * of.width).view(of.count, of.width)
    lowest_first = given.new_zeros(of.count, 8)
    lowest_first[:, : of.width] = given
    within = lowest_first.view(torch.int64).view(-1)
    places = within
    if of.chunk < of.elements:
        rows = torch.arange(of.count, device=device) // of.each
        places = within + rows * of.chunk
    if bool((within >= of.chunk).any() | (places >= of.elements).any()):
        raise UsageError(
            f"a code has a place outside of its tensor of {of.elements:,} elements: expected "
            "one of tensors of the same shapes, made with the same options"
        )
    return places


def traffic_of(
    shapes: Sequence[Shape], dtype: torch.dtype, small: int, density: float
) -> Sequence[Leg]:
    """A sum of what is *small*, and everybody's largest elements of all else."""
    kept, kind = real_type(shapes, dtype)
    if not is_lossy(kind):
        return dense(kept, kind)
    plain = [shape for shape in kept if is_small(shape, small)]
    large = [shape for shape in kept if not is_small(shape, small)]
    cuts = [cut(math.prod(shape), density) for shape in large]
    code = (Leg("gather", size_of(cuts, kind)),) if cuts else ()
    return (*dense(plain, kind), *code)


def add_everybodys(
    picked: Sequence[Picked],
    cuts: Sequence[Cut],
    totals: Sequence[torch.Tensor],
) -> Coding:
    """What all workers have *picked*, added to *totals* in the order of ranks."""
    dtype = picked[0][1].dtype
    everyone = yield Gather(coded(picked, cuts))
    for code in everyone:
        theirs = opened(code, cuts, dtype)
        for total, (places, values) in zip(totals, theirs, strict=True):
            add_at(total, places, values)


def passes_to_add_up(density: float, workers: int) -> float:
    """What it takes to add up so many *workers*' codes, beside a copy (2 passes): measured on one
    core of a CPU, where an element at any place costs as much as many side by side."""
    return 1.0 + 180.0 * density * workers


def keep_where(counts: torch.Tensor, state: State, key: str, new: torch.Tensor) -> None:
    """What *state* has under *key* becomes *new*, if that *counts* (a truth value). On a CPU,
    where it costs nothing to look, nothing is copied."""
    if counts.device.type != "cpu":
        torch.where(counts, new, state[key], out=state[key])
    elif counts:
        state[key] = new


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether every number in *tensors* is finite: a tensor of one truth value."""
    return torch.stack([extremes(tensor) for tensor in tensors]).isfinite().all()
