"""Sparse tensors: the largest elements of each tensor, with their indices.

- `select`: the indices of the largest elements, exactly as many as `TopKShape` says.
- `encode_sparse`, `decode_sparse`: values in their own type or in 2 bits, then indices. An index has
  as many bytes as the largest one needs.
- `sum_gathered`: gathers all workers' sparse tensors and adds them up.

Elements are compared by the bits of their magnitudes. In this order infinity is above all numbers,
and NaN above infinity: so both are selected, and show in the result. Of equal elements the first
ones are selected, so that a replay selects the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from paceline.compression.base import (
    CPU_CHUNK,
    Gather,
    Leg,
    Reader,
    Rounds,
    Shape,
    State,
    at_least_float32,
    dense,
    extremes,
    real_type,
    reals,
    split_shapes,
    to_bytes,
)
from paceline.errors import UsageError

# ---- selection ----


@dataclass(frozen=True)
class TopKShape:
    """The number of a tensor's elements that are sent.

    Of each chunk of *chunk* elements, the *each* largest are sent, and the same share of the
    elements after the last whole chunk: *count* of all *elements*.
    """

    elements: int
    chunk: int
    each: int
    count: int

    @property
    def width(self) -> int:
        """Bytes of an index, which counts from its chunk's start; 0 if all elements are sent."""
        if self.count == self.elements:
            return 0
        return ((self.chunk - 1).bit_length() + 7) // 8


@cache
def top_k_shape(elements: int, density: float, chunk: int = 0) -> TopKShape:
    """The shape for a tensor of *elements* elements, of which the share *density* is sent.

    At least one element of the tensor is sent, or of each *chunk* (0: no chunks).
    """
    chunk = min(chunk, elements) or elements
    each = _part(chunk, density)
    count = elements // chunk * each
    if elements % chunk:
        count += _part(elements % chunk, density)
    return TopKShape(elements, chunk, each, count)


def _part(elements: int, density: float) -> int:
    return max(1, round(elements * density))


def require_density(density: float) -> None:
    """Raise `UsageError` for a *density* that is not above 0 and up to 1."""
    if not 0 < density <= 1:
        raise UsageError(
            f"density: expected the share of a tensor's elements that is sent, above 0 and up "
            f"to 1, got {density}"
        )


def select(values: torch.Tensor, of: TopKShape) -> torch.Tensor:
    """Select the indices in the flat *values* that are sent: int64, ascending."""
    if of.count == of.elements:
        return torch.arange(of.elements, device=values.device)
    if of.chunk == of.elements:
        return largest(values, of.count)
    whole = of.elements // of.chunk * of.chunk
    rows = values[:whole].view(-1, of.chunk)
    at_once = (
        max(1, CPU_CHUNK // of.chunk) if values.device.type == "cpu" else len(rows)
    )
    found = [_first(_magnitudes(some), of.each) for some in rows.split(at_once)]
    starts = torch.arange(0, whole, of.chunk, device=values.device)
    indices = [torch.cat(found).add_(starts.unsqueeze(1)).view(-1)]
    if whole < of.elements:
        over = of.count - indices[0].numel()
        indices.append(largest(values[whole:], over).add_(whole))
    return torch.cat(indices)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the *count* largest elements of the flat *values*, ascending."""
    if values.device.type == "cpu":
        likely = _likely(values, count)
        if likely is not None:
            chosen = _first(
                _magnitudes(values.index_select(0, likely)).unsqueeze(0), count
            )
            return likely[chosen.view(-1)]
    return _first(_magnitudes(values).unsqueeze(0), count).view(-1)


def _first(magnitudes: torch.Tensor, each: int) -> torch.Tensor:
    """The columns of the *each* largest elements in every row, ascending."""
    least = magnitudes.topk(each, dim=1, sorted=False).values.amin(1, keepdim=True)
    enough = magnitudes >= least
    rows, columns = magnitudes.shape
    if magnitudes.device.type == "cpu":
        indices = _true_indices(enough.view(-1))
        if indices.numel() == rows * each:  # no ties
            return indices.view(rows, each).remainder_(columns)
    above = magnitudes > least
    equal = enough & ~above
    missing = each - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= missing))
    indices = torch.nonzero_static(chosen.view(-1), size=rows * each)
    return indices.view(rows, each).remainder_(columns)


_STRIDE = 61
"""The distance of sampled elements: a prime, so that the sample covers all rows and columns of a matrix."""


def _likely(values: torch.Tensor, count: int) -> torch.Tensor | None:
    """Indices of somewhat more than *count* elements, which include the largest *count*.

    These are the elements above a threshold from a sample. None if that would not be faster.
    """
    sample = _magnitudes(values[::_STRIDE])
    expected = count / _STRIDE
    # By chance, more of the sample are among the largest only in one of 30,000 tensors.
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank > sample.numel() // 4:
        return None
    floor = int(sample.topk(rank, sorted=False).values.min())
    found, start = [], 0
    for block in values.split(CPU_CHUNK):
        found.append(_true_indices(_magnitudes(block) >= floor).add_(start))
        start += block.numel()
    indices = torch.cat(found)
    return indices if indices.numel() >= count else None


def _true_indices(values: torch.Tensor) -> torch.Tensor:
    """The indices of true elements of the flat *values* on a CPU. numpy takes a third of torch's time."""
    return torch.from_numpy(np.flatnonzero(values.numpy()))


_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Integers with the order of the elements' magnitudes."""
    whole = values.contiguous().view(_WHOLE[values.itemsize])
    return whole & torch.iinfo(whole.dtype).max


# ---- sparse tensors as bytes ----


class TensorRow(NamedTuple):
    """One tensor of a bucket: a real *part*, its *state*, and the tensor *own* for the sent values.

    *own* is None if the caller does not need these.
    """

    part: torch.Tensor
    state: State
    own: torch.Tensor | None


def rows_of(
    parts: Sequence[torch.Tensor],
    states: Sequence[State],
    sent: Sequence[torch.Tensor] | None,
) -> list[TensorRow]:
    """The arguments of `Compressor.average` by tensor, without empty tensors."""
    kept = [s for part, s in zip(parts, states, strict=True) if part.numel()]
    owns = [None] * len(kept) if sent is None else reals(sent)
    return [TensorRow(*row) for row in zip(reals(parts), kept, owns, strict=True)]


def owns_of(rows: Sequence[TensorRow]) -> list[torch.Tensor] | None:
    """The tensors *own* of *rows*; None if the caller does not need the sent values."""
    return [row.own for row in rows if row.own is not None] or None


IndicesAndValues = tuple[torch.Tensor, torch.Tensor]
"""Flat indices in one tensor, and the values there."""


def select_largest(
    parts: Sequence[torch.Tensor], top_ks: Sequence[TopKShape]
) -> list[IndicesAndValues]:
    """Select the largest elements of each of *parts*, in its own type."""
    selected = []
    for part, of in zip(parts, top_ks, strict=True):
        values = part.reshape(-1)
        indices = select(values, of)
        selected.append((indices, values.index_select(0, indices)))
    return selected


def sparse_bytes(
    top_ks: Sequence[TopKShape], dtype: torch.dtype, bits: int = 32
) -> int:
    """Bytes of sparse tensors of this type. *bits*: see `encode_values`."""
    return sum(
        size_of_values(one.count, dtype, bits) + one.count * one.width for one in top_ks
    )


def encode_sparse(
    selected: Sequence[IndicesAndValues],
    top_ks: Sequence[TopKShape],
    bits: int = 32,
) -> torch.Tensor:
    """Encode *selected* indices and values of each tensor as bytes."""
    pieces = []
    for (indices, values), of in zip(selected, top_ks, strict=True):
        pieces += encode_values(values, bits)
        if of.width:
            pieces.append(_indices_to_bytes(indices, of))
    return torch.cat(pieces)


def decode_sparse(
    code: torch.Tensor, top_ks: Sequence[TopKShape], dtype: torch.dtype, bits: int = 32
) -> list[IndicesAndValues]:
    """Decode indices and values of each tensor.

    Raises `UsageError` if *code* has a wrong size, or an index is outside of its tensor.
    """
    reader, selected = Reader(code), []
    for of in top_ks:
        values = decode_values(reader, of.count, dtype, bits)
        selected.append((_bytes_to_indices(reader, of, code.device), values))
    reader.end()
    return selected


def add_at(
    part: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, add: bool = True
) -> None:
    """Add *values* to *part* at flat *indices*. Without *add*, *part* is set to zero before."""
    whole = part.view(-1) if part.is_contiguous() else part.reshape(-1).clone()
    if not add:
        whole.zero_()
    whole.index_add_(0, indices, values.to(whole.dtype))
    if not part.is_contiguous():
        part.copy_(whole.view(part.shape))


def _indices_to_bytes(indices: torch.Tensor, of: TopKShape) -> torch.Tensor:
    within = indices if of.chunk == of.elements else indices % of.chunk
    lowest_first = within.view(torch.uint8).view(-1, 8)
    return lowest_first[:, : of.width].reshape(-1)


def _bytes_to_indices(
    reader: Reader, of: TopKShape, device: torch.device
) -> torch.Tensor:
    if not of.width:
        return torch.arange(of.elements, device=device)
    given = reader.take(torch.uint8, of.count * of.width).view(of.count, of.width)
    lowest_first = given.new_zeros(of.count, 8)
    lowest_first[:, : of.width] = given
    within = lowest_first.view(torch.int64).view(-1)
    indices = within
    if of.chunk < of.elements:
        rows = torch.arange(of.count, device=device) // of.each
        indices = within + rows * of.chunk
    if bool((within >= of.chunk).any() | (indices >= of.elements).any()):
        raise UsageError(
            f"a compressed gradient has an index outside of its tensor of {of.elements:,} "
            "elements: expected one of tensors with the same shapes, and with the same options"
        )
    return indices


def sparse_wire_bytes(
    shapes: Sequence[Shape], dtype: torch.dtype, small: int, density: float
) -> Sequence[Leg]:
    """The collectives of sparse averages: a sum of *small* tensors, and a gather for the others."""
    kept, kind = real_type(shapes, dtype)
    plain, large = split_shapes(kept, kind, small)
    top_ks = [top_k_shape(math.prod(shape), density) for shape in large]
    code = (Leg("gather", sparse_bytes(top_ks, kind)),) if top_ks else ()
    return (*dense(plain, kind), *code)


def sum_gathered(
    selected: Sequence[IndicesAndValues],
    top_ks: Sequence[TopKShape],
    totals: Sequence[torch.Tensor],
) -> Rounds:
    """Add the *selected* elements of all workers to *totals*, in the order of ranks."""
    dtype = selected[0][1].dtype
    everyone = yield Gather(encode_sparse(selected, top_ks))
    for code in everyone:
        theirs = decode_sparse(code, top_ks, dtype)
        for total, (indices, values) in zip(totals, theirs, strict=True):
            add_at(total, indices, values)


def passes_of_gathered(density: float, workers: int) -> float:
    """Passes over memory to add up the sparse tensors of *workers* workers; a copy takes 2 passes.

    Measured on one core of a CPU, where a scattered element costs as much as many neighbours.
    """
    return 1.0 + 180.0 * density * workers


def keep_where(counts: torch.Tensor, state: State, key: str, new: torch.Tensor) -> None:
    """Set the *key* of *state* to *new* if *counts*, a tensor of one bool, is true.

    On a CPU, where reading it costs nothing, nothing is copied.
    """
    if counts.device.type != "cpu":
        torch.where(counts, new, state[key], out=state[key])
    elif counts:
        state[key] = new


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether every number in *tensors* is finite, as a tensor of one bool."""
    return torch.stack([extremes(tensor) for tensor in tensors]).isfinite().all()


# ---- values in 2 bits ----

# There are four bins around the values' mean. Each value is replaced by the mean of its bin: the
# four means are sent, and each value's bin number. SparseLoCo's published code does so with the
# elements that top-k selects (arXiv 2508.15706), hivemind with whole tensors. The bins cover six
# standard deviations around the mean. The error of each bin is smaller than its values.

WHOLE = 32
"""Value of the key *bits* for values in their own type, of any size."""
BITS = 2
BINS = 1 << BITS
TOGETHER = 8 // BITS
"""Bin numbers in a byte."""
SPREAD = 6.0
"""Standard deviations that all bins cover together."""


def require_bits(bits: int) -> None:
    """Raise `UsageError` for a number of *bits* that `encode_values` does not support."""
    if bits not in (BITS, WHOLE):
        raise UsageError(f"bits: expected {BITS} or {WHOLE} a value, got {bits}")


def encode_values(values: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Encode *values* (flat, not empty) as pieces of bytes.

    *bits*: 32 for values in their own type, of any size; 2 for bins.
    """
    if bits == WHOLE:
        return [to_bytes(values)]
    book, numbers = _binned(values.to(at_least_float32(values.dtype)))
    return [to_bytes(book), _packed(numbers)]


def decode_values(
    reader: Reader, count: int, dtype: torch.dtype, bits: int
) -> torch.Tensor:
    """Decode *count* values, which had the type *dtype*, in the type in which they were sent.

    Raises `UsageError` if the bytes end before.
    """
    if bits == WHOLE:
        return reader.take(dtype, count)
    book = reader.take(at_least_float32(dtype), BINS)
    packed = reader.take(torch.uint8, _packed_size(count))
    return book[_unpacked(packed)[:count]]


def size_of_values(count: int, dtype: torch.dtype, bits: int) -> int:
    """Bytes of *count* encoded values."""
    if bits == WHOLE:
        return count * dtype.itemsize
    return BINS * at_least_float32(dtype).itemsize + _packed_size(count)


def _binned(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The means of the bins, and the bin number of each value."""
    mean = values.mean()
    wide = (values - mean).square().mean().sqrt() * (SPREAD / BINS)
    wide = torch.where(wide > 0, wide, torch.ones_like(wide))
    numbers = ((values - mean) / wide).round_().add_(BINS // 2)
    numbers = numbers.nan_to_num_(0).clamp_(0, BINS - 1).to(torch.uint8)
    # Sum bin by bin, not by index_add: the order of additions is the same in a replay. A value that
    # is not finite makes all bins not finite.
    means = []
    for number in range(BINS):
        inside = (numbers == number).to(values.dtype)
        means.append((values * inside).sum() / inside.sum().clamp_(min=1))
    return torch.stack(means), numbers


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Bin numbers, four in each byte."""
    padded = torch.nn.functional.pad(numbers, (0, -numbers.numel() % TOGETHER))
    rows = padded.view(-1, TOGETHER)
    packed = rows[:, 0].clone()
    for column in range(1, TOGETHER):
        packed |= rows[:, column] << (BITS * column)
    return packed


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 8, BITS, dtype=torch.uint8, device=packed.device)
    numbers = (packed.unsqueeze(1) >> shifts) & (BINS - 1)
    return numbers.view(-1).long()


def _packed_size(count: int) -> int:
    return -(-count // TOGETHER)
