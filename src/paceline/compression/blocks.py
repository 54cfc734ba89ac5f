"""Blocks: runs of a bucket's elements, each as whole numbers times a scale of its own.

What int8, int4 and qsgd are made of. With c a block's scale, its norm over the number of
levels, an element a travels as the whole number round(a / c); a block as its scale in float32
and its numbers in 8 or 4 bits.

Every tensor begins a block, and its last one is filled up with zeros: with a scale shared
across a border small elements beside large ones would be lost (of ResNet-50's gradients one
BatchNorm's would err by 12 % in int8, instead of 0.6 %). That costs 0.02 % of its bytes. Where tensors are tiny blocks are shorter, so that a bucket is as
few bytes as may be. Blocks depend on tensors' shapes alone, so that a number that is sent is
the same among however many workers.

All blocks of a bucket lie in a number of *rows* of equally many (one for each worker that
adds up, filled up with blocks of zeros), and a row's code is all of its scales, then all of
its numbers. Work is done in pieces of as many blocks as stay in a CPU's caches.

A block with an element that is not finite has a scale that is not a number, and so is none of
its elements, on whoever decodes it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from paceline.compression.counter_random import Chance
from paceline.compression.packing import Reader
from paceline.compression.quantizer import SCALE, Grain, mark
from paceline.interfaces import Shape

SMALLEST = 16
"""Of a block, in elements."""
PIECE = 2**18
"""Elements that are worked on at a time on a CPU."""


class Run(NamedTuple):
    """Elements that lie side by side in a tensor, and in a piece."""

    tensor: int
    start: int
    length: int
    place: int


@dataclass(frozen=True)
class Piece:
    """Some blocks of some rows: all blocks, or of one row. *shape*: rows, blocks, elements;
    *begin*: the number of its first element, padding counted; *runs*: what is not padding."""

    shape: tuple[int, int, int]
    begin: int
    runs: tuple[Run, ...]

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def padded(self) -> bool:
        return sum(run.length for run in self.runs) < self.size


@dataclass(frozen=True)
class Blocks:
    """The blocks of *block* elements of tensors of *sizes* (none of them 0), in so many
    *rows*, of which *at_once* are worked on at a time."""

    sizes: tuple[int, ...]
    rows: int
    block: int
    grain: Grain
    at_once: int

    @cached_property
    def count(self) -> int:
        """Blocks in a row."""
        return -(-_blocks_in(self.sizes, self.block) // self.rows)

    @property
    def row(self) -> int:
        """Bytes of a row's code."""
        return self.count * self.grain.bytes(self.block)

    def encode(
        self, parts: Sequence[torch.Tensor], chance: Chance | None = None
    ) -> torch.Tensor:
        """The flat code of *parts*, row by row: rounded to the nearest, or by *chance*."""
        device, wide = parts[0].device, wide_of(parts[0].dtype)
        code = torch.empty(self.rows * self.row, dtype=torch.uint8, device=device)
        scales, numbers = self._opened(code, self.rows)
        flats = [part.reshape(-1) for part in parts]
        room, work = self._room(wide, device), self._room(wide, device)
        for piece, scale, number in self._cut(scales, numbers):
            values = _taken(flats, piece, room).view(piece.shape)
            levels = work[: piece.size].view(piece.shape)
            self.grain.scale(values, levels, scale)
            self.grain.round(levels, number, chance, piece.begin)
        mark(scales)
        return code

    def decode(
        self, code: torch.Tensor, parts: Sequence[torch.Tensor], add: bool = False
    ) -> None:
        """Write what the flat *code* stands for into *parts*, or *add* it to them. Raises
        `UsageError` where it is none of such parts."""
        reader = Reader(code)
        code = reader.take(torch.uint8, self.rows * self.row)
        reader.end()
        scales, numbers = self._opened(code, self.rows)
        flats = [part.reshape(-1) for part in parts]
        wide = wide_of(parts[0].dtype)
        room = self._room(wide, parts[0].device)
        for piece, scale, number in self._cut(scales, numbers):
            place = None if add else _place(flats, piece, wide)
            values = (room[: piece.size] if place is None else place).view(piece.shape)
            self.grain.read(number, scale, values)
            if place is None:
                _put(values, flats, piece, add)
        _given_back(flats, parts)

    def add_up(
        self,
        codes: torch.Tensor,
        dtype: torch.dtype,
        row: int,
        chance: Chance | None = None,
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The code of the sum of *codes*, which everybody has of this *row* of tensors of type
        *dtype*, in the order of ranks; and, if somebody is to *keep* it, what that code stands
        for, less the sum."""
        (workers, _), device, wide = codes.shape, codes.device, wide_of(dtype)
        scales, numbers = self._opened(codes, workers)
        code = torch.empty(self.row, dtype=torch.uint8, device=device)
        own_scales, own_numbers = self._opened(code, 1)
        elements = self.count * self.block
        more = torch.empty(elements if keep else 0, dtype=wide, device=device)
        total, work = self._room(wide, device), self._room(wide, device)
        for first in range(0, self.count, self.at_once):
            some = slice(first, min(first + self.at_once, self.count))
            shape = (1, some.stop - first, self.block)
            size = shape[1] * self.block
            added = total[:size].view(shape).zero_()
            values = work[:size].view(shape)
            for rank in range(workers):
                one = slice(rank, rank + 1), some
                self.grain.read(numbers[one], scales[one], values)
                added.add_(values)
            own = slice(None), some
            self.grain.scale(added, values, own_scales[own])
            begin = row * elements + first * self.block
            self.grain.round(values, own_numbers[own], chance, begin)
            if keep:
                self.grain.read(own_numbers[own], own_scales[own], values)
                start = first * self.block
                torch.sub(values, added, out=more[start : start + size].view(shape))
        mark(own_scales)
        return code, more

    def add(self, more: torch.Tensor, row: int, parts: Sequence[torch.Tensor]) -> None:
        """Add *more* (flat, padding counted) to the elements of *row* in *parts*."""
        flats = [part.reshape(-1) for part in parts]
        piece = self._piece(row, 1, 0, self.count)
        _put(more.view(piece.shape), flats, piece, add=True)
        _given_back(flats, parts)

    # ---- where things are ----

    def _opened(
        self, code: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A code's scales (rows, blocks) and numbers (rows, blocks, bytes)."""
        if code.data_ptr() % SCALE or code.storage_offset() % SCALE:
            code = code.clone()  # float32 numbers begin at such addresses only
        whole = code.view(rows, self.row)
        head = self.count * SCALE
        scales = whole[:, :head].view(torch.float32)
        numbers = whole[:, head:].view(torch.int8).unflatten(1, (self.count, -1))
        return scales, numbers

    def _room(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = min(self.at_once, self.rows * self.count) * self.block
        return torch.empty(size, dtype=dtype, device=device)

    def _cut(
        self, scales: torch.Tensor, numbers: torch.Tensor
    ) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
        """All pieces, with their scales and numbers."""
        pieces = [piece for row in self._pieces for piece in row]
        cut: list[list[torch.Tensor]] = []
        for whole in (scales, numbers):
            rows = zip(whole.split(self._rows_at_once), self._pieces, strict=True)
            cut.append([one for row, some in rows for one in _split(row, some)])
        return zip(pieces, *cut, strict=True)

    @cached_property
    def _rows_at_once(self) -> int:
        """More than one where they are short."""
        return max(1, self.at_once // (8 * self.count))

    @cached_property
    def _pieces(self) -> list[list[Piece]]:
        """Row by row, or some rows in one piece."""
        step = self._rows_at_once
        if step > 1:
            return [
                [self._piece(row, min(step, self.rows - row), 0, self.count)]
                for row in range(0, self.rows, step)
            ]
        return [
            [
                self._piece(row, 1, first, min(self.at_once, stop - first))
                for start, stop in pairwise(self._borders(row))
                for first in range(start, stop, self.at_once)
            ]
            for row in range(self.rows)
        ]

    def _borders(self, row: int) -> list[int]:
        """Blocks of a row where whole blocks of a large tensor begin or end: a piece of these
        alone can be read where it lies."""
        borders = {0, self.count}
        for size, start in zip(self.sizes, self._starts, strict=True):
            whole = size // self.block
            if whole >= self.at_once // 8:
                first = start // self.block - row * self.count
                borders |= {first, first + whole}
        return sorted(border for border in borders if 0 <= border <= self.count)

    def _piece(self, row: int, rows: int, first: int, blocks: int) -> Piece:
        begin = (row * self.count + first) * self.block
        end = begin + rows * blocks * self.block
        runs = []
        number = bisect_right(self._starts, begin) - 1
        while number < len(self.sizes) and self._starts[number] < end:
            start = self._starts[number]
            low, high = max(begin, start), min(end, start + self.sizes[number])
            if low < high:
                runs.append(Run(number, low - start, high - low, low - begin))
            number += 1
        return Piece((rows, blocks, self.block), begin, tuple(runs))

    @cached_property
    def _starts(self) -> list[int]:
        """Of tensors, padding counted."""
        blocks = (-(-size // self.block) for size in self.sizes)
        return [0, *(self.block * number for number in accumulate(blocks))][:-1]


def blocks_of(
    shapes: Sequence[Shape], rows: int, block: int, grain: Grain, device: str = "cpu"
) -> Blocks:
    """Tensors of *shapes* (none of them empty) in blocks of at most *block* elements: of as
    many as make the fewest bytes."""
    return _blocks_of(tuple(map(math.prod, shapes)), rows, block, grain, device)


@lru_cache(maxsize=1024)
def _blocks_of(
    sizes: tuple[int, ...], rows: int, block: int, grain: Grain, device: str
) -> Blocks:
    while block > SMALLEST and _bytes(sizes, block // 2, grain) < _bytes(
        sizes, block, grain
    ):
        block //= 2
    at_once = max(1, PIECE // block) if device == "cpu" else 2**62 // block
    return Blocks(sizes, rows, block, grain, at_once)


def _split(row: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    return list(row.split([piece.shape[1] for piece in pieces], 1))


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The type to calculate in."""
    return torch.promote_types(dtype, torch.float32)


def _blocks_in(sizes: Sequence[int], block: int) -> int:
    return sum(-(-size // block) for size in sizes)


def _bytes(sizes: Sequence[int], block: int, grain: Grain) -> int:
    return _blocks_in(sizes, block) * grain.bytes(block)


def _place(
    flats: Sequence[torch.Tensor], piece: Piece, dtype: torch.dtype
) -> torch.Tensor | None:
    """The elements of *piece* as they lie in one tensor, if they do."""
    if len(piece.runs) != 1 or piece.padded:
        return None
    run = piece.runs[0]
    flat = flats[run.tensor]
    return flat.narrow(0, run.start, run.length) if flat.dtype == dtype else None


def _taken(
    flats: Sequence[torch.Tensor], piece: Piece, room: torch.Tensor
) -> torch.Tensor:
    """The elements of *piece*, flat: in *room*, if they do not lie in one tensor."""
    place = _place(flats, piece, room.dtype)
    if place is not None:
        return place
    taken = room[: piece.size]
    if piece.padded:
        taken.zero_()
    for run in piece.runs:
        given = flats[run.tensor].narrow(0, run.start, run.length)
        taken.narrow(0, run.place, run.length).copy_(given)
    return taken


def _put(
    values: torch.Tensor, flats: Sequence[torch.Tensor], piece: Piece, add: bool
) -> None:
    """Write *values* to where the elements of *piece* lie, or *add* them."""
    flat = values.view(-1)
    for run in piece.runs:
        target = flats[run.tensor].narrow(0, run.start, run.length)
        value = flat.narrow(0, run.place, run.length)
        if add:
            target.add_(value)
        else:
            target.copy_(value)


def _given_back(flats: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Tensors that have no flat view were worked on in copies."""
    for flat, part in zip(flats, parts, strict=True):
        if not part.is_contiguous():
            part.copy_(flat.view(part.shape))
