"""Values in 2 bits: four bins around their mean, whose own means are sent beside them.

What SparseLoCo's published code does with the elements that top-k keeps (arXiv 2508.15706), and
hivemind with whole tensors: bins over six standard deviations around the mean; a value
becomes the mean of its bin. So less is left of each bin's values than there was of them.
"""

from __future__ import annotations

import torch

from paceline.compression.packing import Reader, to_bytes
from paceline.errors import UsageError

WHOLE = 32
"""Says that values travel in their own type, whatever that is."""
BITS = 2
BINS = 1 << BITS
TOGETHER = 8 // BITS
"""Numbers of bins in a byte."""
SPREAD = 6.0
"""Standard deviations that all bins cover together."""


def require_bits(bits: int) -> None:
    """Raise `UsageError` for what `encode_values` does not take."""
    if bits not in (BITS, WHOLE):
        raise UsageError(f"bits: expected {BITS} or {WHOLE} a value, got {bits}")


def encode_values(values: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """The bytes of *values* (flat, not empty) in pieces. *bits*: 32 for their own type, whatever
    that is; 2 for bins."""
    if bits == WHOLE:
        return [to_bytes(values)]
    book, numbers = _binned(values.to(_wide(values.dtype)))
    return [to_bytes(book), _packed(numbers)]


def decode_values(
    reader: Reader, count: int, dtype: torch.dtype, bits: int
) -> torch.Tensor:
    """*count* values of what was of type *dtype*, in the type in which they travelled. Raises
    `UsageError` where the code is too short."""
    if bits == WHOLE:
        return reader.take(dtype, count)
    book = reader.take(_wide(dtype), BINS)
    packed = reader.take(torch.uint8, _packed_size(count))
    return book[_unpacked(packed)[:count]]


def size_of_values(count: int, dtype: torch.dtype, bits: int) -> int:
    """Bytes of so many encoded values."""
    if bits == WHOLE:
        return count * dtype.itemsize
    return BINS * _wide(dtype).itemsize + _packed_size(count)


def _binned(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bins' means, and the number of each value's bin."""
    mean = values.mean()
    wide = (values - mean).square().mean().sqrt() * (SPREAD / BINS)
    wide = torch.where(wide > 0, wide, torch.ones_like(wide))
    numbers = ((values - mean) / wide).round_().add_(BINS // 2)
    numbers = numbers.nan_to_num_(0).clamp_(0, BINS - 1).to(torch.uint8)
    # Bin by bin, and not by adding to places: the order of a sum is the same in a replay. What
    # is not finite makes all bins not finite.
    means = []
    for number in range(BINS):
        inside = (numbers == number).to(values.dtype)
        means.append((values * inside).sum() / inside.sum().clamp_(min=1))
    return torch.stack(means), numbers


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of bins, four in each byte."""
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
