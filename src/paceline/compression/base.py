"""The interface of compressors: `Compressor`, its base classes, and buckets as flat tensors.

- `Compressor`: forms the average of a bucket, as a generator of collectives.
- `PerWorkerCompressor`: one worker's compressed gradient can be decompressed by itself, as servers do.
- `GatheredCompressor`: workers gather all compressed gradients, decompress them, and add them up.
- `NoCompression`: sends tensors uncompressed.

A compressor yields a `Sum`, `Gather` or `AllToAll` of a compressed tensor, its *code*. The caller
performs that collective and sends back its result. So a compressor does not depend on the collective
algorithm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from paceline.errors import UsageError
from paceline.interfaces import Consistency, SpeedClass

# ---- requests for collectives ----


@dataclass(frozen=True)
class Sum:
    """Requests the sum of *code* over workers. The result is in *code*'s own memory."""

    code: torch.Tensor


@dataclass(frozen=True)
class Gather:
    r"""Requests the *code* of every worker.

    The result is a tensor of shape (workers, \*code.shape), in the order of ranks.
    """

    code: torch.Tensor


@dataclass(frozen=True)
class AllToAll:
    """Requests that each rank gets one row of every worker's *code*.

    *code* is flat. It consists of as many equal rows as there are workers; row i goes to rank i. The
    result has all workers' rows for this rank: a tensor of shape (workers, elements of a row), in
    the order of ranks.
    """

    code: torch.Tensor


Request = Sum | Gather | AllToAll

Rounds = Generator[Request, torch.Tensor, None]
"""The average of one bucket: a generator that yields requests and gets the collectives' results."""


@dataclass(frozen=True)
class RankInfo:
    """The worker that compresses: *rank* among *workers*."""

    rank: int
    workers: int


@dataclass(frozen=True)
class Leg:
    """One collective of a bucket's average. *size*: bytes of one worker's compressed tensor."""

    kind: Literal["sum", "gather", "all-to-all"]
    size: float


Shape = Sequence[int]
"""The shape of a tensor."""

StateKind = Literal["none", "own", "common"]
"""The state that a compressor has between steps.

- ``"none"``: no state.
- ``"own"``: state that differs between workers; it may also have common state.
- ``"common"``: state that is equal on all workers.
"""

State = dict[str, Any]
"""The state of one tensor: tensors on that tensor's device, numbers, strings, and dicts of them.

It is empty without state. State that is equal on all workers is under the key `COMMON`, at any
depth. Example: ``{"residual": e, "code": {"common": {"steps": 3}}}``.
"""

COMMON = "common"


class CompressorSummary(NamedTuple):
    """The description of a compressor, for ``paceline list compressors``, docs and reports.

    Attributes:
        sends: Completes "A worker sends ...".
        loses: Completes "The result lacks ...".
        purpose: One sentence of at most 80 letters, without a subject.
        source: The papers: authors, short title, venue and year.
        use_when: Completes "Use it when ...".
        limits: Sentences: costs, refusals, differences from the paper.
    """

    sends: str
    loses: str
    purpose: str = ""
    source: str = ""
    use_when: str = ""
    limits: tuple[str, ...] = ()


def require_at_least(least: int, key: str, value: int) -> None:
    """Raise `UsageError` if the *value* of a *key* is below *least*."""
    if value < least:
        raise UsageError(f"{key}: expected {least} or more, got {value}")


# ---- compressors ----


class Compressor(ABC):
    """Compresses the tensors of an average: a frozen dataclass of hyperparameters.

    It never changes: all mutable state is in the `State` of each tensor. Subclasses define `name`,
    `memory_passes`, `wire_bytes` and `average`. The other members have defaults, for a biased
    compressor without state.

    Laws, which `paceline.testing.check_compressor` checks:

    - Zeros stay zeros. A worker whose tensors are zero does not change the others' result.
    - All workers get bit-equal results.
    - If an element is not finite on any worker, it is not finite in the result.
    - Shapes and types stay.
    - Compressed sizes depend on shapes, types and common state, and never on values.

    Example:
        `average` of a cast to 16 bits; `paceline.compression` has complete compressors::

            def average(self, parts, states, place, sent=None):
                code = torch.cat([part.reshape(-1) for part in parts]).to(torch.bfloat16)
                total = yield Sum(code)
                for part, its in zip(parts, total.split([p.numel() for p in parts])):
                    part.copy_(its.view(part.shape))
    """

    consistency: ClassVar[Consistency] = "lossy"
    """The consistency of compressed averages."""

    error_feedback_by_default: ClassVar[bool] = False
    """Whether it has error feedback by default."""

    warmup_steps_by_default: ClassVar[int] = 0
    """Number of first steps in which gradients are sent uncompressed, by default."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The registry's name: lower case, with hyphens."""

    @property
    def takes_error_feedback(self) -> bool:
        """Whether error feedback may be added to it.

        False if the compressor keeps its own memory of errors, or is unbiased. Make it a class
        attribute if it holds for all compressors of a class.
        """
        return True

    @property
    def linear(self) -> bool:
        """Whether it only yields `Sum`.

        Then the sum of compressed gradients is the compressed sum, so a ring, a server or a switch
        can add them.
        """
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the expected result is the sum itself."""
        return False

    @property
    def rounds(self) -> int:
        """Number of successive collectives of one bucket, in `steady_state`.

        A bucket may need fewer, for example if all its tensors are sent uncompressed.
        """
        return 1

    @property
    def state(self) -> StateKind:
        """The kind of state that it has between steps."""
        return "none"

    @property
    def contributes_without_data(self) -> bool:
        """Whether a worker that is out of data still compresses with its own state.

        True if results contain a part of its earlier gradients. Otherwise it contributes zeros, and
        nothing of its state.
        """
        return False

    @property
    def modifies_gradients(self) -> bool:
        """Whether it changes gradients beyond compression, for example by momentum.

        Then a single worker uses it, too.
        """
        return False

    @abstractmethod
    def memory_passes(self, workers: int) -> tuple[float, float]:
        """Estimate the cost of compression and decompression, in passes over the tensors' memory.

        Virtual time uses it if the compressor was not measured.

        Args:
            workers: Number of workers that average.

        Returns:
            The time until the first message is ready, and the time of everything after it. The unit
            is the time in which the tensors' bytes are read or written once.
        """

    @abstractmethod
    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        """Return the collectives that average a bucket, in `steady_state`.

        Args:
            shapes: Shapes of the bucket's tensors.
            dtype: Their type.
            workers: Number of workers that average.

        Returns:
            The successive collectives, with sizes in bytes. If sizes alternate between steps, their
            mean.
        """

    def warmup_wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[tuple[int, Sequence[Leg]]]:
        """Return the collectives of the first steps, if they send more than `wire_bytes`.

        Args:
            shapes: Shapes of the bucket's tensors.
            dtype: Their type.
            workers: Number of workers that average.

        Returns:
            For each stage the number of its steps, and the collectives of one step as in
            `wire_bytes`. Empty if there are no such steps.
        """
        return ()

    def with_epoch(self, steps: int | None) -> Compressor:
        """Return this compressor for a training whose epochs have *steps* steps.

        It differs if the compressor depends on epochs and the user has not set their length.

        Args:
            steps: Steps of an epoch of the sampler; None if unknown.
        """
        return self

    def steady_state(self) -> Compressor:
        """Return this compressor without its warm-up, in which it sends more."""
        return self

    def for_speed(self, speed: SpeedClass) -> Compressor:
        """Return this compressor for a worker whose group has a speed class.

        It differs if the sent size depends on the class. Decompression does not depend on the class,
        and states continue.

        Args:
            speed: The class of the worker's group.
        """
        return self

    def for_replies(self) -> Compressor:
        """Return the compressor of servers' replies (``replies=deltas``), which workers decode.

        It compresses alike in all steps and speed classes, since a reply does not belong to a step
        of its worker.
        """
        return self

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that *optimizer* can use its results.

        Raises:
            UsageError: It cannot.
        """
        return

    def check_differences(self) -> None:
        """Check that it can compress parameter changes of local updates, and not only gradients.

        Raises:
            UsageError: It can only compress gradients.
        """
        return

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        """Make the state of one tensor, before its first average.

        Args:
            like: A tensor with its shape, type and device.
            name: The tensor's name: unique, and equal on all workers.
            rank: This worker's rank, for state that must differ between workers.

        Returns:
            The state; empty if the tensor needs none.
        """
        return {}

    @abstractmethod
    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        """Average the tensors of one bucket over ``place.workers`` workers.

        Yielded tensors are flat, contiguous and not empty; without anything to send it yields
        nothing. Until the generator resumes, a yielded tensor belongs to the caller.

        Args:
            parts: Tensors of one type, on one device, with any strides. They hold this worker's
                share of the mean: its gradient times its weight. When the generator has ended, they
                hold the sum of all workers' shares.
            states: The states of *parts*, which change in place.
            place: This worker's rank, and the number of workers that average.
            sent: Tensors like *parts*, if the caller needs this worker's decompressed contribution,
                for example for error feedback. When the generator has ended, they hold it. The sum
                of all workers' *sent* is the result.

        Yields:
            `Sum`, `Gather` or `AllToAll` of a compressed tensor. Each resumes with its result.
        """

    def inherit_state(
        self, state: State, former: Sequence[State], workers: int
    ) -> None:
        """Continue from the states of a job with another number of workers.

        Args:
            state: A new state from `init_state`; changes in place.
            former: The states of this tensor on all former workers, in the order of ranks.
            workers: Number of workers from now on.
        """
        return


@dataclass(frozen=True, kw_only=True)
class SkipsSmallTensors(Compressor):
    """Sends small tensors, and those of one dimension, uncompressed: compression would save too little.

    Attributes:
        small: Tensors with fewer elements than this, and tensors of one dimension, are sent uncompressed; 0: none are.
    """

    small: int = 1024

    def __post_init__(self) -> None:
        """Check the values."""
        require_at_least(0, "small", self.small)

    @property
    def rounds(self) -> int:
        """One for compressed tensors, and one for uncompressed ones."""
        return 2 if self.small else 1


class PerWorkerCompressor(Compressor):
    """A compressor whose output can be decompressed per worker, as servers do with pushes.

    A compressed gradient is a flat tensor of bytes. Its size depends only on shapes and common
    state.

    Subclasses write `_encode`, `_decode`, `_size` and `average`. The first three get real
    floating-point tensors that are not empty and, with a field *small*, not small. Small tensors,
    and those that allow no loss, precede the compressed ones without compression.
    """

    small: int = 0

    @abstractmethod
    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        """Compress *parts* into a flat tensor of `_size` bytes."""

    @abstractmethod
    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        """Decompress *code* into *parts*, or *add* it to them.

        *parts* have the shapes of the compressed tensors, whose type was *dtype*; their own type may
        be wider. Raises `UsageError` if *code* is too short or too long (`Reader` does that), or if
        it holds an impossible number, such as an index outside of a tensor.
        """

    @abstractmethod
    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """Bytes of the compressed tensors."""

    def code_bytes(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """Return the size of one compressed gradient in bytes, in `steady_state`.

        Args:
            shapes: Shapes of the tensors that are compressed together.
            dtype: Their type.
        """
        kept, kind = real_type(shapes, dtype)
        plain, large = split_shapes(kept, kind, self.small)
        code = self._size(large, kind) if large else 0
        return elements(plain) * kind.itemsize + code

    def encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        """Compress this worker's tensors.

        Args:
            parts: The tensors; they do not change.
            states: The states of *parts*, which change in place.

        Returns:
            The compressed gradient, as a flat tensor of bytes.
        """
        plain, large, own = self._split(parts, states)
        codes = [to_bytes(*plain)] if plain else []
        if large:
            codes.append(self._encode(large, own))
        return torch.cat(codes) if len(codes) != 1 else codes[0]

    def decode(
        self, code: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool = False
    ) -> None:
        """Decompress *code* into *parts*.

        Args:
            code: A compressed gradient. It may come from a network.
            parts: Tensors with the shapes and types of the compressed ones; overwritten.
            add: Add to *parts* instead.

        Raises:
            UsageError: *code* is no compressed gradient of such tensors.
        """
        plain, large, _ = self._split(parts, [{}] * len(parts))
        reader = Reader(code)
        for part in plain:
            value = reader.take(part.dtype, part.numel()).view(part.shape)
            part.add_(value) if add else part.copy_(value)
        if large:
            self._decode(reader.rest(), large, large[0].dtype, add)
        else:
            reader.end()

    def _split(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[State]]:
        """Divide into uncompressed tensors, compressed tensors, and the states of the latter."""
        kept = [s for part, s in zip(parts, states, strict=True) if part.numel()]
        plain, large, own = [], [], []
        for part, state in zip(reals(parts), kept, strict=True):
            if is_encoded(part.shape, part.dtype, self.small):
                large.append(part)
                own.append(state)
            else:
                plain.append(part)
        return plain, large, own


class GatheredCompressor(PerWorkerCompressor):
    """Averages by gathering: every worker decompresses all workers' gradients and adds them up.

    It adds in the order of ranks, so that results are bit-equal on all workers. Small tensors, and
    those that allow no loss, are summed uncompressed.
    """

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        plain, large = split_shapes(kept, kind, self.small)
        code = (Leg("gather", self._size(large, kind)),) if large else ()
        return (*dense(plain, kind), *code)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        plain, large, own = self._split(parts, states)
        plain_sent, large_sent = (None, None)
        if sent is not None:
            plain_sent, large_sent, _ = self._split(sent, states)
        # Compress before the first wait, while the backward pass still runs.
        code = self._encode(large, own) if large else None
        if code is not None and large_sent is not None:
            self._decode(code, large_sent, large[0].dtype, add=False)
        yield from sum_uncompressed(plain, plain_sent)
        if code is not None:
            everyone = yield Gather(code)
            self._add_up(everyone, large)

    def _add_up(self, everyone: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Decompress all workers' gradients, and add them up in at least 32 bits."""
        dtype, wide = parts[0].dtype, list(parts)
        if dtype.itemsize < 4:
            count = elements([part.shape for part in parts])
            whole = torch.empty(count, dtype=torch.float32, device=parts[0].device)
            wide = views_of(whole, parts)
        for number, code in enumerate(everyone):
            self._decode(code, wide, dtype, add=number > 0)
        if wide[0] is not parts[0]:
            put(whole, parts)


@dataclass(frozen=True, kw_only=True)
class NoCompression(Compressor):
    """Sums tensors of any type uncompressed."""

    name: ClassVar[str] = "none"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Sends gradients as they are.",
        use_when="links are fast, or the result must be exact",
        sends="every element in its own type",
        loses="nothing",
    )
    consistency: ClassVar[Consistency] = "exact"
    linear: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True
    takes_error_feedback: ClassVar[bool] = False

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 0.0, 0.0

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        return dense(shapes, dtype)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        own = None if sent is None else reals(sent)
        yield from sum_uncompressed(reals(parts), own)


def sum_uncompressed(
    parts: Sequence[torch.Tensor], sent: Sequence[torch.Tensor] | None
) -> Rounds:
    """Sum *parts* uncompressed, in one collective. They are real and not empty, see `reals`."""
    if not parts:
        return
    whole = flat(parts)
    if sent is not None:
        put(whole, sent)
    total = yield Sum(whole)
    put(total, parts)


# ---- a bucket as one flat tensor, and as bytes ----

CPU_CHUNK = 2**16
"""Elements that are processed at a time on a CPU.

Intermediate results then stay in its caches, and need no new memory.
"""


def extremes(part: torch.Tensor) -> torch.Tensor:
    """The smallest and the largest real number in *part*, as a tensor of shape (2,).

    They are NaN if an element is NaN, and 0 without elements.
    """
    if not part.numel():
        return torch.zeros(2, dtype=part.dtype, device=part.device)
    real = torch.view_as_real(part) if part.is_complex() else part
    return torch.stack(real.aminmax())


def reals(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """*parts* without empty tensors; complex ones as views on pairs of real numbers."""
    return [
        torch.view_as_real(part) if part.is_complex() else part
        for part in parts
        if part.numel()
    ]


def flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements of *parts* (not empty, of one type) as one flat tensor.

    It is a view if they are neighbours in memory, as in a bucket; else a copy.
    """
    view = _side_by_side(parts)
    return torch.cat([part.reshape(-1) for part in parts]) if view is None else view


def views_of(code: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views on the flat tensor *code* with the shapes of *parts*."""
    pieces = code.split([part.numel() for part in parts])
    return [p.view(part.shape) for p, part in zip(pieces, parts, strict=True)]


def put(code: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy the flat tensor *code* into *parts*, in their type."""
    view = _side_by_side(parts)
    if view is None:
        for part, place in zip(parts, views_of(code, parts), strict=True):
            part.copy_(place)
    elif view.data_ptr() != code.data_ptr():  # else it is their own memory
        view.copy_(code)


def is_small(shape: Shape, small: int) -> bool:
    """Whether a tensor of this *shape* is sent uncompressed by a compressor with the key *small*.

    It is if it has at most one dimension, or fewer than *small* elements. With *small* = 0 no tensor
    is small.
    """
    return small > 0 and (len(shape) <= 1 or math.prod(shape) < small)


def is_lossy(dtype: torch.dtype) -> bool:
    """Whether tensors of this type may be compressed.

    Integers, and floating-point types of 8 bits or fewer, are summed uncompressed.
    """
    return dtype.is_floating_point and dtype.itemsize > 1


def is_encoded(shape: Shape, dtype: torch.dtype, small: int) -> bool:
    """Whether a tensor is compressed. Small tensors and integers are summed uncompressed."""
    return is_lossy(dtype) and not is_small(shape, small)


def split_shapes(
    kept: Sequence[Shape], dtype: torch.dtype, small: int
) -> tuple[list[Shape], list[Shape]]:
    """Divide shapes from `real_type` into those of uncompressed and of compressed tensors."""
    plain = [shape for shape in kept if not is_encoded(shape, dtype, small)]
    return plain, [shape for shape in kept if is_encoded(shape, dtype, small)]


def flat_zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros for the real elements of *like*: a flat tensor of at least 32 bits."""
    real = torch.view_as_real(like) if like.is_complex() else like
    wide = at_least_float32(real.dtype)
    return torch.zeros(real.numel(), dtype=wide, device=real.device)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: with 16 bits, small numbers would be lost when added to large ones."""
    return torch.promote_types(dtype, torch.float32)


def elements(shapes: Sequence[Shape]) -> int:
    """Number of elements of all tensors with these *shapes*."""
    return sum(math.prod(shape) for shape in shapes)


def real_type(
    shapes: Sequence[Shape], dtype: torch.dtype
) -> tuple[list[Shape], torch.dtype]:
    """Shapes and type of the result of `reals`, for tensors with these *shapes* and this type."""
    kept: list[Shape] = [shape for shape in shapes if math.prod(shape)]
    if not dtype.is_complex:
        return kept, dtype
    return [(*shape, 2) for shape in kept], dtype.to_real()


def dense(shapes: Sequence[Shape], dtype: torch.dtype) -> tuple[Leg, ...]:
    """The collectives of tensors that are summed uncompressed."""
    size = elements(shapes) * dtype.itemsize
    return (Leg("sum", size),) if size else ()


def to_bytes(*tensors: torch.Tensor) -> torch.Tensor:
    """The bytes of *tensors*, one after the other, as one flat tensor of uint8."""
    rows = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


class Reader:
    """Reads tensors from bytes that `to_bytes` has written."""

    def __init__(self, code: torch.Tensor) -> None:
        self._code, self._position = code, 0

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The next *count* elements of type *dtype*. Raises `UsageError` if the bytes end before."""
        start, stop = self._position, self._position + count * dtype.itemsize
        if stop > self._code.numel():
            raise UsageError(
                f"a compressed gradient of {self._code.numel()} bytes ends before byte {stop}: "
                "expected one of tensors with the same shapes, and with the same options"
            )
        self._position = stop
        part = self._code[start:stop]
        if part.data_ptr() % dtype.itemsize:
            part = part.clone()  # numbers must be aligned to their size
        return part.view(dtype)

    def rest(self) -> torch.Tensor:
        """All remaining bytes."""
        start, self._position = self._position, self._code.numel()
        return self._code[start:]

    def end(self) -> None:
        """Raise `UsageError` if bytes remain."""
        left = self._code.numel() - self._position
        if left:
            raise UsageError(
                f"a compressed gradient of {self._code.numel()} bytes has {left} too many: "
                "expected one of tensors with the same shapes, and with the same options"
            )


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat view on *parts*, if they are neighbours in one storage; else None."""
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
