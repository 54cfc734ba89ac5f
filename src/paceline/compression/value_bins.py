"""Values in few bits: bins around their mean, whose own means are sent beside them.

What SparseLoCo's published code does with the elements that top-k keeps (arXiv 2508.15706), and
hivemind with whole tensors: 2^bits bins over six standard deviations around the mean; a value
becomes the mean of its bin. So less is left of each bin's values than there was of them.
"""

from __future__ import annotations

import torch

from paceline.compression.packing import Reader, to_bytes
from paceline.errors import UsageError

BITS = (2, 4, 16, 32)
SPREAD = 6.0
"""Standard deviations that all bins cover together."""


def require_bits(bits: int) -> None:
    """Raise `UsageError` for what `encode_values` does not take."""
    if bits not in BITS:
        raise UsageError(f"bits: expected one of {BITS} a value, got {bits}")


def encode_values(values: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """The bytes of *values* (flat, not empty) in pieces. *bits*: 32 for their own type, whatever
    that is; 16 for bfloat16, where their own is wider; 4 or 2 for bins."""
    if bits > 4:
        return [to_bytes(values.to(_type_of(values.dtype, bits)))]
    book, numbers = _binned(values.to(_wide(values.dtype)), 2**bits)
    return [to_bytes(book), _packed(numbers, bits)]


def decode_values(
    reader: Reader, count: int, dtype: torch.dtype, bits: int
) -> torch.Tensor:
    """*count* values of what was of type *dtype*, in the type in which they travelled. Raises
    `UsageError` where the code is too short."""
    if bits > 4:
        return reader.take(_type_of(dtype, bits), count)
    book = reader.take(_wide(dtype), 2**bits)
    packed = reader.take(torch.uint8, _packed_size(count, bits))
    return book[_unpacked(packed, bits)[:count]]


def size_of_values(count: int, dtype: torch.dtype, bits: int) -> int:
    """Bytes of so many encoded values."""
    if bits > 4:
        return count * _type_of(dtype, bits).itemsize
    book = _wide(dtype).itemsize << bits
    return book + _packed_size(count, bits)


def _binned(values: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bins' means, and the number of each value's bin."""
    mean = values.mean()
    wide = (values - mean).square().mean().sqrt() * (SPREAD / bins)
    wide = torch.where(wide > 0, wide, torch.ones_like(wide))
    numbers = ((values - mean) / wide).round_().add_(bins // 2)
    numbers = numbers.nan_to_num_(0).clamp_(0, bins - 1).to(torch.uint8)
    # Bin by bin, and not by adding to places: the order of a sum is the same in a replay. What
    # is not finite makes all bins not finite.
    means = []
    for number in range(bins):
        inside = (numbers == number).to(values.dtype)
        means.append((values * inside).sum() / inside.sum().clamp_(min=1))
    return torch.stack(means), numbers


def _packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers below 2^bits, some in each byte."""
    together = 8 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.numel() % together))
    rows = padded.view(-1, together)
    packed = rows[:, 0].clone()
    for column in range(1, together):
        packed |= rows[:, column] << (bits * column)
    return packed


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    numbers = (packed.unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    return numbers.view(-1).long()


def _packed_size(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _type_of(dtype: torch.dtype, bits: int) -> torch.dtype:
    return torch.bfloat16 if bits == 16 and dtype.itemsize > 2 else dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
