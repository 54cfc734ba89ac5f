"""int8 and int4: blocks of elements as integers times a scale, which their owners add up.

Per block, with s = max|a| / 127 (int4: 7): send round(a / s), and s. The blocks and the collective
are those of qgZ in ZeRO++ (Wang et al., 2023). Quantized numbers cannot be added, so each worker
owns a part of a bucket and adds it up:

1. An all-to-all sends all workers' quantized parts to their owners.
2. Each owner dequantizes them, adds them in float32 (float64 for float64 gradients), and quantizes
   the sum.
3. The quantized sums are gathered.

Among n workers each sends 2 (n - 1) / n of a quantized bucket, as a ring does.

All workers, including owners, use the quantized sums, so their results are bit-equal. The owner's
residual gets the error of the second quantization.

With stochastic rounding this is QSGD's quantizer (Alistarh et al., NeurIPS 2017, section 3.1), with
the maximum as the norm, as in practice in the paper's section 4, and without Elias coding.

Differences from qgZ: numbers are rounded to the nearest. There is one exchange, instead of one
within hosts and one between hosts. Tensors of all shapes are quantized.

- `Int8`, `Int4`: the compressors; `BlockCompressor`: their base class, shared with QSGD.
- `Blocks`: the layout of a bucket's blocks; encodes, decodes and adds them up.
- `Quantizer`: a block as integers times a scale.
- `CounterRng`: random numbers for stochastic rounding.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, NamedTuple

import torch

from paceline.compression.base import (
    COMMON,
    AllToAll,
    CompressorSummary,
    Gather,
    Leg,
    PerWorkerCompressor,
    RankInfo,
    Reader,
    Rounds,
    Shape,
    State,
    StateKind,
    at_least_float32,
    dense,
    is_lossy,
    real_type,
    sum_uncompressed,
)

# ---- integers times a scale ----

SCALE = 4
"""Bytes of a scale: a float32."""
TINY = torch.finfo(torch.float32).tiny
"""The smallest scale: its reciprocal is still a float32."""


@dataclass(frozen=True)
class Quantizer:
    """The precision of a block: integers from -*levels* to *levels*, of *bits* bits each.

    *levels* stands for the block's *norm*. All tensors have the shape (rows, blocks, elements);
    scales have the shape (rows, blocks).
    """

    levels: int
    bits: Literal[4, 8]
    norm: Literal["largest", "euclidean"]

    def bytes(self, block: int) -> int:
        """Bytes of one encoded block of *block* elements."""
        return SCALE + block * self.bits // 8

    def scale(
        self, values: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Compute the *scales* of blocks of *values*, and *levels*: values over scales."""
        if self.norm == "largest":
            norms = torch.abs(values, out=levels).amax(-1)
        else:  # squares of float32 overflow
            norms = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
        scales.copy_(norms.div_(self.levels).clamp_min_(TINY))
        torch.mul(values, scales.reciprocal().unsqueeze(-1), out=levels)

    def round(
        self,
        levels: torch.Tensor,
        numbers: torch.Tensor,
        rng: CounterRng | None,
        begin: int,
    ) -> None:
        """Round *levels* to integers, in *numbers*: stochastically with *rng*, else to the nearest."""
        if rng is None:
            levels.round_()
        else:
            rng.add_to(levels, begin)
            most = self.levels
            levels.floor_().clamp_(-most, most)
        if self.bits == 4:  # one of each two is the upper half of a byte
            low, high = levels.chunk(2, -1)
            levels = low.add_(high, alpha=16)
        numbers.copy_(levels)

    def read(
        self, numbers: torch.Tensor, scales: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Compute *values*: numbers times scales."""
        if self.bits == 4:
            low, high = values.chunk(2, -1)
            low.copy_(numbers)
            torch.mul(low, 1 / 16, out=high).round_()
            low.sub_(high, alpha=16)
        else:
            values.copy_(numbers)
        values.mul_(scales.unsqueeze(-1))


def propagate_nan(scales: torch.Tensor) -> None:
    """Turn infinite scales into NaN, so that all elements of such a block become NaN."""
    scales.add_(scales * 0)


# ---- blocks of a bucket ----

# Every tensor begins a new block, and its last block is padded with zeros. If tensors shared a
# scale, small elements beside large ones would be lost: in ResNet-50, a BatchNorm's gradient would
# have an error of 12 % in int8, instead of 0.6 %. The padding costs 0.02 % of its bytes. Blocks are
# shorter for tiny tensors, so that a bucket has as few bytes as possible. Blocks depend only on
# shapes, so quantized numbers do not depend on the number of workers.
#
# The blocks of a bucket are divided into *rows* with equally many blocks, one row for each worker
# that adds up; the last one is padded with blocks of zeros. An encoded row consists of all of its
# scales, then all of its numbers. Spans of as many blocks as fit a CPU's caches are processed at a
# time.
#
# A block with an element that is not finite has the scale NaN, so all of its elements are decoded
# as NaN.

SMALLEST = 16
"""Smallest block, in elements."""
ELEMENTS_AT_ONCE = 2**18
"""Elements that are processed at a time on a CPU."""


class TensorSlice(NamedTuple):
    """Elements that are contiguous in a tensor and in a span."""

    tensor: int
    start: int
    length: int
    place: int


@dataclass(frozen=True)
class BlockSpan:
    """Blocks that are processed together: all blocks of several rows, or some of one row.

    *shape*: rows, blocks, elements. *begin*: the index of the first element, including padding.
    *slices*: everything except padding.
    """

    shape: tuple[int, int, int]
    begin: int
    slices: tuple[TensorSlice, ...]

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def padded(self) -> bool:
        return sum(one.length for one in self.slices) < self.size


@dataclass(frozen=True)
class Blocks:
    """The blocks of tensors with these *sizes* (none is 0): *block* elements each, in *rows* rows.

    *at_once* blocks are processed at a time.
    """

    sizes: tuple[int, ...]
    rows: int
    block: int
    quantizer: Quantizer
    at_once: int

    @cached_property
    def count(self) -> int:
        """Blocks in a row."""
        return -(-_blocks_in(self.sizes, self.block) // self.rows)

    @property
    def row(self) -> int:
        """Bytes of an encoded row."""
        return self.count * self.quantizer.bytes(self.block)

    def encode(
        self, parts: Sequence[torch.Tensor], rng: CounterRng | None = None
    ) -> torch.Tensor:
        """Encode *parts*, row by row, as a flat tensor. Rounds stochastically with *rng*, else to the nearest."""
        device, wide = parts[0].device, at_least_float32(parts[0].dtype)
        code = torch.empty(self.rows * self.row, dtype=torch.uint8, device=device)
        scales, numbers = self._scales_and_numbers(code, self.rows)
        flats = [part.reshape(-1) for part in parts]
        workspace, work = self._workspace(wide, device), self._workspace(wide, device)
        for span, scale, number in self._split_code(scales, numbers):
            values = _gather_in(flats, span, workspace).view(span.shape)
            levels = work[: span.size].view(span.shape)
            self.quantizer.scale(values, levels, scale)
            self.quantizer.round(levels, number, rng, span.begin)
        propagate_nan(scales)
        return code

    def decode(
        self, code: torch.Tensor, parts: Sequence[torch.Tensor], add: bool = False
    ) -> None:
        """Decode the flat *code* into *parts*, or *add* it to them.

        Raises `UsageError` if its size does not fit.
        """
        reader = Reader(code)
        code = reader.take(torch.uint8, self.rows * self.row)
        reader.end()
        scales, numbers = self._scales_and_numbers(code, self.rows)
        flats = [part.reshape(-1) for part in parts]
        wide = at_least_float32(parts[0].dtype)
        workspace = self._workspace(wide, parts[0].device)
        for span, scale, number in self._split_code(scales, numbers):
            place = None if add else _view_in_place(flats, span, wide)
            values = (workspace[: span.size] if place is None else place).view(
                span.shape
            )
            self.quantizer.read(number, scale, values)
            if place is None:
                _scatter_out(values, flats, span, add)
        _copy_back(flats, parts)

    def add_up(
        self,
        codes: torch.Tensor,
        dtype: torch.dtype,
        row: int,
        rng: CounterRng | None = None,
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add up all workers' encoded *row* of tensors of type *dtype*, in the order of ranks.

        Returns the encoded sum and, with *keep*, its rounding error: the decoded sum minus the sum.
        """
        (workers, _), device, wide = codes.shape, codes.device, at_least_float32(dtype)
        scales, numbers = self._scales_and_numbers(codes, workers)
        code = torch.empty(self.row, dtype=torch.uint8, device=device)
        own_scales, own_numbers = self._scales_and_numbers(code, 1)
        elements = self.count * self.block
        more = torch.empty(elements if keep else 0, dtype=wide, device=device)
        total, work = self._workspace(wide, device), self._workspace(wide, device)
        for first in range(0, self.count, self.at_once):
            some = slice(first, min(first + self.at_once, self.count))
            shape = (1, some.stop - first, self.block)
            size = shape[1] * self.block
            added = total[:size].view(shape).zero_()
            values = work[:size].view(shape)
            for rank in range(workers):
                one = slice(rank, rank + 1), some
                self.quantizer.read(numbers[one], scales[one], values)
                added.add_(values)
            own = slice(None), some
            self.quantizer.scale(added, values, own_scales[own])
            begin = row * elements + first * self.block
            self.quantizer.round(values, own_numbers[own], rng, begin)
            if keep:
                self.quantizer.read(own_numbers[own], own_scales[own], values)
                start = first * self.block
                torch.sub(values, added, out=more[start : start + size].view(shape))
        propagate_nan(own_scales)
        return code, more

    def add(self, more: torch.Tensor, row: int, parts: Sequence[torch.Tensor]) -> None:
        """Add *more* (flat, including padding) to the elements of *row* in *parts*."""
        flats = [part.reshape(-1) for part in parts]
        span = self._span(row, 1, 0, self.count)
        _scatter_out(more.view(span.shape), flats, span, add=True)
        _copy_back(flats, parts)

    # ---- layout ----

    def _scales_and_numbers(
        self, code: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the scales (rows, blocks) and numbers (rows, blocks, bytes) in *code*."""
        if code.data_ptr() % SCALE or code.storage_offset() % SCALE:
            code = code.clone()  # float32 numbers must be aligned
        whole = code.view(rows, self.row)
        head = self.count * SCALE
        scales = whole[:, :head].view(torch.float32)
        numbers = whole[:, head:].view(torch.int8).unflatten(1, (self.count, -1))
        return scales, numbers

    def _workspace(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = min(self.at_once, self.rows * self.count) * self.block
        return torch.empty(size, dtype=dtype, device=device)

    def _split_code(
        self, scales: torch.Tensor, numbers: torch.Tensor
    ) -> Iterator[tuple[BlockSpan, torch.Tensor, torch.Tensor]]:
        """All spans, with their scales and numbers."""
        spans = [span for row in self._spans for span in row]
        cut: list[list[torch.Tensor]] = []
        for whole in (scales, numbers):
            rows = zip(whole.split(self._rows_at_once), self._spans, strict=True)
            cut.append([one for row, some in rows for one in _split(row, some)])
        return zip(spans, *cut, strict=True)

    @cached_property
    def _rows_at_once(self) -> int:
        """Rows that are processed together: more than one if they are short."""
        return max(1, self.at_once // (8 * self.count))

    @cached_property
    def _spans(self) -> list[list[BlockSpan]]:
        """The spans row by row; a span may have several rows."""
        step = self._rows_at_once
        if step > 1:
            return [
                [self._span(row, min(step, self.rows - row), 0, self.count)]
                for row in range(0, self.rows, step)
            ]
        return [
            [
                self._span(row, 1, first, min(self.at_once, stop - first))
                for start, stop in pairwise(self._borders(row))
                for first in range(start, stop, self.at_once)
            ]
            for row in range(self.rows)
        ]

    def _borders(self, row: int) -> list[int]:
        """Blocks of a row at which the whole blocks of a large tensor begin or end.

        A span of such blocks alone is contiguous in the tensor, and needs no copy.
        """
        borders = {0, self.count}
        for size, start in zip(self.sizes, self._starts, strict=True):
            whole = size // self.block
            if whole >= self.at_once // 8:
                first = start // self.block - row * self.count
                borders |= {first, first + whole}
        return sorted(border for border in borders if 0 <= border <= self.count)

    def _span(self, row: int, rows: int, first: int, blocks: int) -> BlockSpan:
        begin = (row * self.count + first) * self.block
        end = begin + rows * blocks * self.block
        slices = []
        number = bisect_right(self._starts, begin) - 1
        while number < len(self.sizes) and self._starts[number] < end:
            start = self._starts[number]
            low, high = max(begin, start), min(end, start + self.sizes[number])
            if low < high:
                slices.append(TensorSlice(number, low - start, high - low, low - begin))
            number += 1
        return BlockSpan((rows, blocks, self.block), begin, tuple(slices))

    @cached_property
    def _starts(self) -> list[int]:
        """The first index of each tensor, including padding."""
        blocks = (-(-size // self.block) for size in self.sizes)
        return [0, *(self.block * number for number in accumulate(blocks))][:-1]


def blocks_of(
    shapes: Sequence[Shape],
    rows: int,
    block: int,
    quantizer: Quantizer,
    device: str = "cpu",
) -> Blocks:
    """Blocks for tensors with these *shapes* (none is empty), of at most *block* elements.

    The size of blocks is the one with the fewest bytes.
    """
    return _blocks_of(tuple(map(math.prod, shapes)), rows, block, quantizer, device)


@lru_cache(maxsize=1024)
def _blocks_of(
    sizes: tuple[int, ...], rows: int, block: int, quantizer: Quantizer, device: str
) -> Blocks:
    while block > SMALLEST and _bytes(sizes, block // 2, quantizer) < _bytes(
        sizes, block, quantizer
    ):
        block //= 2
    at_once = max(1, ELEMENTS_AT_ONCE // block) if device == "cpu" else 2**62 // block
    return Blocks(sizes, rows, block, quantizer, at_once)


def _split(row: torch.Tensor, spans: Sequence[BlockSpan]) -> list[torch.Tensor]:
    return list(row.split([span.shape[1] for span in spans], 1))


def _blocks_in(sizes: Sequence[int], block: int) -> int:
    return sum(-(-size // block) for size in sizes)


def _bytes(sizes: Sequence[int], block: int, quantizer: Quantizer) -> int:
    return _blocks_in(sizes, block) * quantizer.bytes(block)


def _view_in_place(
    flats: Sequence[torch.Tensor], span: BlockSpan, dtype: torch.dtype
) -> torch.Tensor | None:
    """A view of the elements of *span*, if they are contiguous in one tensor; else None."""
    if len(span.slices) != 1 or span.padded:
        return None
    one = span.slices[0]
    flat = flats[one.tensor]
    return flat.narrow(0, one.start, one.length) if flat.dtype == dtype else None


def _gather_in(
    flats: Sequence[torch.Tensor], span: BlockSpan, workspace: torch.Tensor
) -> torch.Tensor:
    """The elements of *span* as a flat tensor. It is in *workspace* unless one tensor holds them."""
    place = _view_in_place(flats, span, workspace.dtype)
    if place is not None:
        return place
    gathered = workspace[: span.size]
    if span.padded:
        gathered.zero_()
    for one in span.slices:
        given = flats[one.tensor].narrow(0, one.start, one.length)
        gathered.narrow(0, one.place, one.length).copy_(given)
    return gathered


def _scatter_out(
    values: torch.Tensor, flats: Sequence[torch.Tensor], span: BlockSpan, add: bool
) -> None:
    """Write *values* into the elements of *span*, or *add* them."""
    flat = values.view(-1)
    for one in span.slices:
        target = flats[one.tensor].narrow(0, one.start, one.length)
        value = flat.narrow(0, one.place, one.length)
        if add:
            target.add_(value)
        else:
            target.copy_(value)


def _copy_back(flats: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Copy results back into tensors without a flat view, for which copies were used."""
    for flat, part in zip(flats, parts, strict=True):
        if not part.is_contiguous():
            part.copy_(flat.view(part.shape))


# ---- random numbers ----

# The n-th number is a function of a key and n: SplitMix64 (Steele, Lea and Flood, "Fast splittable
# pseudorandom number generators", OOPSLA 2014, figure 16) of key + n times the golden ratio. So the
# only state is a count, other random generators are not used, and all devices draw the same.
#
# Each tensor has two streams of keys, one for each worker and one that all workers share, and counts
# its draws. A bucket draws from the streams of its first tensor.

SEED = 0
"""Seed of all streams."""

A_WORD = 4
"""Random numbers per 64-bit word."""


@dataclass(frozen=True)
class CounterRng:
    """Random numbers between 0 and 1, in steps of 2^-16. *key* is a signed 64-bit integer."""

    key: int

    def add_to(self, values: torch.Tensor, begin: int) -> None:
        """Add a random number to each of *values* (contiguous), from random number *begin* on.

        *begin* and the number of values are multiples of `A_WORD`.
        """
        steps = _steps(values.numel() // A_WORD, values.device)
        z = steps + _signed(self.key + begin // A_WORD * _GOLDEN)
        shifted = torch.empty_like(z)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            torch.bitwise_right_shift(z, shift, out=shifted)
            shifted.bitwise_and_(2 ** (64 - shift) - 1)  # torch shifts the sign in
            z.bitwise_xor_(shifted)
            if factor != 1:
                z.mul_(factor)
        drawn = z.view(torch.int16).view(values.shape)  # from -2^15 to 2^15 - 1
        values.add_(drawn, alpha=2.0**-16).add_(0.5 + 2.0**-17)


def new_streams(name: str, rank: int) -> State:
    """A tensor's new streams: its state, with which no number is drawn twice."""
    common = {"stream": _key(SEED, name), "draws": 0}
    return {"stream": _key(SEED, name, rank), COMMON: common}


def next_streams(states: Sequence[State]) -> tuple[CounterRng, CounterRng]:
    """A bucket's next random numbers: this worker's own, and those that all workers share."""
    first = states[0]
    own, common = first["stream"], first[COMMON]
    draws = common["draws"]
    for state in states:
        state[COMMON]["draws"] += 1
    return CounterRng(_key(own, draws)), CounterRng(_key(common["stream"], draws))


def resume_streams(state: State, former: Sequence[State]) -> None:
    """Continue after the draws of *former* workers."""
    if former:
        state[COMMON]["draws"] = max(old[COMMON]["draws"] for old in former)


def _key(*what: int | str) -> int:
    """A signed 64-bit hash of *what*."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _signed(number: int) -> int:
    """The lowest 64 bits of *number* as a signed integer, torch's int64."""
    return (number + 2**63) % 2**64 - 2**63


def _steps(words: int, device: torch.device) -> torch.Tensor:
    """Multiples of the golden ratio."""
    if device.type == "cpu" and words <= _MANY:
        return _many_steps()[:words]
    return torch.arange(words, dtype=torch.int64, device=device).mul_(_GOLDEN)


@cache
def _many_steps() -> torch.Tensor:
    return torch.arange(_MANY, dtype=torch.int64).mul_(_GOLDEN)


_MANY = 2**16
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


# ---- compressors ----


class BlockCompressor(PerWorkerCompressor):
    """Encodes blocks of elements. Subclasses define the quantizer, and how workers average.

    With stochastic rounding, a tensor's state has its streams of random numbers.
    """

    quantizer: ClassVar[Quantizer]
    block: ClassVar[int]
    """Largest number of elements with one scale: a power of two."""

    def inherit_state(
        self, state: State, former: Sequence[State], workers: int
    ) -> None:
        """Continue after the random numbers that were drawn."""
        if state:
            resume_streams(state, former)

    def _blocks(self, parts: Sequence[torch.Tensor], rows: int = 1) -> Blocks:
        shapes, device = [part.shape for part in parts], parts[0].device
        return blocks_of(shapes, rows, self.block, self.quantizer, device.type)

    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        mine = next_streams(states)[0] if states[0] else None
        return self._blocks(parts).encode(parts, mine)

    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        self._blocks(parts).decode(code, parts, add)

    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        return blocks_of(shapes, 1, self.block, self.quantizer).row


@dataclass(frozen=True, kw_only=True)
class Int8(BlockCompressor):
    """Quantizes blocks of elements to 8-bit integers times a scale, which their owners add up.

    Tensors of 8 bits or fewer, and integers, are summed uncompressed. A block with a number that is
    not finite becomes NaN in the result.

    Attributes:
        rounding: ``nearest`` sends elements below 1/254 of a block's largest (int4: 1/14) as zero in
            every step, unless there is error feedback. ``stochastic`` rounds up or down at random, so
            that the expected result is exact.
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"

    name: ClassVar[str] = "int8"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Sends blocks of 256 elements as 8-bit integers times a scale.",
        source="Wang et al., ZeRO++ (2023); Alistarh et al., QSGD (NeurIPS 2017)",
        use_when=(
            "links are slow, and `powersgd` loses too much accuracy; `rounding=stochastic` for "
            "servers, and for workers that come and go"
        ),
        sends="1 byte per element and 4 per block, to the worker that sums this part, and back",
        loses=(
            "in each element up to 1/254 of its block's largest element, and up to 1/254 of the "
            "largest in the sum's block (twice these with stochastic rounding)"
        ),
        limits=("A block with an element that is not finite becomes NaN.",),
    )
    quantizer: ClassVar[Quantizer] = Quantizer(levels=127, bits=8, norm="largest")
    block: ClassVar[int] = 256
    decoding: ClassVar[float] = 5.5

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def rounds(self) -> int:
        return 2

    @property
    def state(self) -> StateKind:
        return "own" if self.rounding == "stochastic" else "none"

    def memory_passes(self, workers: int) -> tuple[float, float]:
        # Measured on one core of a CPU, relative to a copy of a tensor (2 passes).
        first, second = (5.0, 3.0) if self.rounding == "nearest" else (16.0, 11.0)
        return first, self.decoding + second / workers

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        if not is_lossy(kind):
            return dense(kept, kind)
        if not kept:
            return ()
        row = blocks_of(kept, workers, self.block, self.quantizer).row
        return Leg("all-to-all", workers * row), Leg("gather", row)

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        if self.rounding == "nearest":
            return {}
        return new_streams(name, rank)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        exact, coded, own = self._split(parts, states)
        exact_sent, coded_sent = None, None
        if sent is not None:
            exact_sent, coded_sent, _ = self._split(sent, states)
        yield from sum_uncompressed(exact, exact_sent)
        if not coded:
            return
        blocks = self._blocks(coded, place.workers)
        mine, shared = next_streams(own) if own[0] else (None, None)
        code = blocks.encode(coded, mine)

        theirs = yield AllToAll(code)

        total, lost = blocks.add_up(
            theirs, coded[0].dtype, place.rank, shared, keep=coded_sent is not None
        )
        everyone = yield Gather(total)

        blocks.decode(everyone.view(-1), coded)
        if coded_sent is not None:
            blocks.decode(code, coded_sent)
            blocks.add(lost, place.rank, coded_sent)


@dataclass(frozen=True, kw_only=True)
class Int4(Int8):
    """As int8, with 4 bits: integers from -7 to 7, two in a byte."""

    name: ClassVar[str] = "int4"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Sends blocks of 256 elements as 4-bit integers times a scale.",
        source="Wang et al., ZeRO++ (2023); Alistarh et al., QSGD (NeurIPS 2017)",
        use_when="`int8` still sends too much, or a local method sends parameter changes",
        sends="half a byte per element and 4 bytes per block, to the worker that sums this part, and back",
        loses=(
            "in each element up to 1/14 of its block's largest element, and up to 1/14 of the "
            "largest in the sum's block (twice these with stochastic rounding)"
        ),
        limits=("A block with an element that is not finite becomes NaN.",),
    )
    quantizer: ClassVar[Quantizer] = Quantizer(levels=7, bits=4, norm="largest")
    decoding: ClassVar[float] = 8.5
