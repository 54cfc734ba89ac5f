"""What a compressor is: `Compressor`, its base classes, and how buckets become flat codes.

- `Compressor`: forms the average of a bucket, as a generator of collectives.
- `PerWorkerCompressor`: one worker's code can be decoded by itself, as servers do.
- `GatheredCompressor`: workers gather all codes, and decode and add them up.
- `NoCompression`: sends tensors as they are.

A compressor yields `Sum`, `Gather` or `AllToAll` of a code; whoever drives the generator performs
that collective and sends back its result. So the compressor never learns which algorithm runs.
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

# ---- what is sent ----


@dataclass(frozen=True)
class Sum:
    """Asks for the sum of *code* over workers. It comes back in *code*'s own memory."""

    code: torch.Tensor


@dataclass(frozen=True)
class Gather:
    r"""Asks for the *code* of every worker.

    A tensor of shape (workers, \*code.shape) comes back, in the order of ranks.
    """

    code: torch.Tensor


@dataclass(frozen=True)
class AllToAll:
    """Asks that each rank gets one row of *code*.

    *code* has as many equal rows as there are workers, one after the other; row i goes to rank
    i. The rows of all workers for this one come back: a tensor of shape (workers, elements of a
    row), in the order of ranks.
    """

    code: torch.Tensor


Request = Sum | Gather | AllToAll

Rounds = Generator[Request, torch.Tensor, None]
"""The average of one bucket: yields requests, is sent the results of the collectives, and ends."""


@dataclass(frozen=True)
class RankInfo:
    """Which worker encodes: *rank* among *workers*."""

    rank: int
    workers: int


@dataclass(frozen=True)
class Leg:
    """One collective of a bucket's average: *size* is the bytes of one worker's whole code."""

    kind: Literal["sum", "gather", "all-to-all"]
    size: float


Shape = Sequence[int]
"""A tensor's."""

StateKind = Literal["none", "own", "common"]
"""What a compressor keeps between steps: nothing, something of each worker's own (and perhaps
something common beside it), something equal on all workers."""

State = dict[str, Any]
"""What is kept of one tensor: tensors on that tensor's device, numbers, texts, and dicts of
those; empty where nothing is. What is equal on all workers is under the key `COMMON`, at any
depth. Example: ``{"residual": e, "code": {"common": {"steps": 3}}}``."""

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
    """Raise `UsageError` where the number under *key* is below *least*."""
    if value < least:
        raise UsageError(f"{key}: expected {least} or more, got {value}")


# ---- compressors ----


class Compressor(ABC):
    """Encodes the tensors of an average: a frozen dataclass of hyperparameters.

    It holds no state of its own: all that changes between steps is in the `State` of each
    tensor. Subclasses define `name`, `memory_passes`, `wire_bytes` and `average`; the other
    members have defaults, for a compressor without state whose results are biased.

    Laws, which `paceline.testing.check_compressor` checks:

    - Zeros stay zeros. A worker whose tensors are zero changes no other worker's result.
    - All workers end with the same bits.
    - A number that is not finite on any worker is not finite in the result.
    - Shapes and types stay.
    - Compressed sizes depend on shapes, types and common state, and never on numbers.

    Example:
        The part of a cast to 16 bits that encodes; `paceline.compression` has whole ones::

            def average(self, parts, states, place, sent=None):
                code = torch.cat([part.reshape(-1) for part in parts]).to(torch.bfloat16)
                total = yield Sum(code)
                for part, its in zip(parts, total.split([p.numel() for p in parts])):
                    part.copy_(its.view(part.shape))
    """

    consistency: ClassVar[Consistency] = "lossy"
    """The consistency of averages that are compressed so."""

    error_feedback_by_default: ClassVar[bool] = False
    """Whether it has error feedback where the user does not say."""

    warmup_steps_by_default: ClassVar[int] = 0
    """In how many first steps gradients are sent uncompressed where the user does not say."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The registry's name: lower case, with hyphens."""

    @property
    def takes_error_feedback(self) -> bool:
        """Whether error feedback may be added to it.

        False where it has a memory of its own, or needs none; then a class attribute where that
        holds for all compressors of a class.
        """
        return True

    @property
    def linear(self) -> bool:
        """Whether it yields `Sum` only.

        Then the compressed sum is the sum of compressed gradients, so that a ring, a server or a switch may add them
        up on the way.
        """
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the expected result is the sum itself."""
        return False

    @property
    def rounds(self) -> int:
        """How many collectives follow each other in one bucket, in `steady_state`.

        A bucket whose tensors are all sent in one way may take fewer.
        """
        return 1

    @property
    def state(self) -> StateKind:
        """What it keeps between steps."""
        return "none"

    @property
    def contributes_without_data(self) -> bool:
        """Whether a worker that is out of data, and sends zeros, goes on with its own state.

        True where results have a share of what it sent before. Else it sends nothing of its
        state.
        """
        return False

    @property
    def modifies_gradients(self) -> bool:
        """Whether it does more to gradients than to send less of them, such as momentum.

        Then one worker by itself uses it, too.
        """
        return False

    @abstractmethod
    def memory_passes(self, workers: int) -> tuple[float, float]:
        """Estimate what encoding and decoding cost, in passes over the tensors' memory.

        Virtual time charges it where nobody has measured the compressor.

        Args:
            workers: Number of workers that average.

        Returns:
            The time until the first code is there, and the time of all that follows; each
            over the time in which the tensors' bytes are read or written once.
        """

    @abstractmethod
    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        """Say which collectives the average of a bucket takes, in `steady_state`.

        Args:
            shapes: Of the bucket's tensors.
            dtype: Their type.
            workers: Number of workers that average.

        Returns:
            The collectives, one after the other, with sizes in bytes. Where codes take turns,
            the mean of them.
        """

    def warm_up_wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[tuple[int, Sequence[Leg]]]:
        """Say what the first steps send where that is more than `wire_bytes`.

        Args:
            shapes: Of the bucket's tensors.
            dtype: Their type.
            workers: Number of workers that average.

        Returns:
            Stage by stage, for how many steps, and the collectives of each of them as `wire_bytes`
            has them. Empty where there are no such steps.
        """
        return ()

    def with_epoch(self, steps: int | None) -> Compressor:
        """Return this compressor for a training whose sampler's epoch has so many *steps*.

        It differs where what is sent depends on epochs, and the user has not set their length.

        Args:
            steps: Steps of an epoch; None where neither is known.
        """
        return self

    def steady_state(self) -> Compressor:
        """Return this compressor without first steps in which more is sent."""
        return self

    def for_speed(self, speed: SpeedClass) -> Compressor:
        """Return this compressor for a worker whose group is of a speed class.

        It differs where what is sent depends on the class. A decoder need not know the class,
        and states go on.

        Args:
            speed: The class of the worker's group.
        """
        return self

    def for_replies(self) -> Compressor:
        """Return the compressor of servers' replies (``replies=deltas``), which workers decode.

        It encodes alike in all steps and speed classes, since a reply belongs to no step of
        its worker.
        """
        return self

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that its results are for that *optimizer*.

        Raises:
            UsageError: They are not.
        """
        return

    def check_differences(self) -> None:
        """Check that it encodes what local updates have moved, and not gradients alone.

        Raises:
            UsageError: It encodes gradients alone.
        """
        return

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        """Make the state of one tensor, before its first average.

        Args:
            like: A tensor of its shape, type and device.
            name: Unique, and the same on all workers.
            rank: This worker's, for state that is to differ between workers.

        Returns:
            The state; empty where nothing is kept.
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
        """Average the tensors of one bucket, among ``place.workers``.

        Codes are flat and contiguous, and never empty: where there is nothing to send nothing is
        yielded. A code belongs to the driver of the generator until it is resumed.

        Args:
            parts: Tensors of one type, on one device, with any strides. They hold this worker's
                share of the mean: its gradient times its weight. Once the generator has ended
                they hold the sum of all workers' shares.
            states: Of each of *parts*; change in place.
            place: This worker's rank, and how many workers average.
            sent: Tensors like *parts*, where the caller wants to know what this worker's codes
                stand for; once the generator has ended they hold that. The sum of all workers'
                *sent* is the result.

        Yields:
            `Sum`, `Gather` or `AllToAll` of a code; each resumes with its result.
        """

    def inherit_state(
        self, state: State, former: Sequence[State], workers: int
    ) -> None:
        """Take over the states of a job that had another number of workers.

        Args:
            state: Fresh from `init_state`; changes in place.
            former: The states of this tensor on all former workers, in the order of ranks.
            workers: Number of workers from now on.
        """
        return


@dataclass(frozen=True, kw_only=True)
class SkipsSmallTensors(Compressor):
    """Sends small tensors, and those of one dimension, as they are: compression would save too little.

    Attributes:
        small: Tensors with fewer elements, and those of one dimension, are sent as they are; 0: none.
    """

    small: int = 1024

    def __post_init__(self) -> None:
        """Check the values."""
        require_at_least(0, "small", self.small)

    @property
    def rounds(self) -> int:
        """One for codes, and one for what is sent as it is."""
        return 2 if self.small else 1


class PerWorkerCompressor(Compressor):
    """A compressor whose codes mean the same to every decoder: what a worker pushes to a server.

    Codes are flat tensors of bytes, whose size depends on shapes and common state alone.

    Subclasses write `_encode`, `_decode`, `_size` and `average`. The first three get real tensors
    of floating point that are neither empty nor, where they have a field *small*, small. Small
    tensors, and those of which nothing may be lost, stand as they are in front of the code.
    """

    small: int = 0

    @abstractmethod
    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        """A flat code of bytes, of `_size`."""

    @abstractmethod
    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        """Decode *code* into *parts*, or add it to them.

        *parts* have the shapes of what was encoded, whose type was *dtype*; their own may be wider.
        Raises `UsageError` where *code* is too short or too long (`Reader` does), or where a
        number in it cannot be, such as an index outside of a tensor.
        """

    @abstractmethod
    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """The bytes of a code."""

    def code_bytes(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """Return the bytes of one code, in `steady_state`.

        Args:
            shapes: Of the tensors that are encoded together.
            dtype: Their type.
        """
        kept, kind = real_type(shapes, dtype)
        plain, large = split_shapes(kept, kind, self.small)
        code = self._size(large, kind) if large else 0
        return elements(plain) * kind.itemsize + code

    def encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        """Encode tensors by themselves.

        Args:
            parts: Stay as they are.
            states: Of each of *parts*; change in place.

        Returns:
            One code, in bytes.
        """
        plain, large, own = self._split(parts, states)
        codes = [to_bytes(*plain)] if plain else []
        if large:
            codes.append(self._encode(large, own))
        return torch.cat(codes) if len(codes) != 1 else codes[0]

    def decode(
        self, code: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool = False
    ) -> None:
        """Decode *code* into *parts*.

        Args:
            code: May come from a network.
            parts: Have the shapes and types of what was encoded; overwritten.
            add: Add to *parts* instead.

        Raises:
            UsageError: *code* is no code of such parts.
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
        """What is sent as it is, what is encoded, and the states of that."""
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
    """Averages by gathering: every worker decodes all workers' codes and adds them up.

    It adds in the order of ranks, so that all workers end with the same bits. Small tensors, and
    those of which nothing may be lost, are summed as they are.
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
        # Encoding comes before the first wait, beside the backward pass.
        code = self._encode(large, own) if large else None
        if code is not None and large_sent is not None:
            self._decode(code, large_sent, large[0].dtype, add=False)
        yield from sum_uncompressed(plain, plain_sent)
        if code is not None:
            everyone = yield Gather(code)
            self._add_up(everyone, large)

    def _add_up(self, everyone: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """All workers' codes, decoded, and added up in at least 32 bits."""
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
    """Tensors are summed as they are, whatever their type."""

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
    """One sum of *parts* as they are. They are real, and not empty; see `reals`."""
    if not parts:
        return
    whole = flat(parts)
    if sent is not None:
        put(whole, sent)
    total = yield Sum(whole)
    put(total, parts)


# ---- a bucket as one flat tensor, and as bytes ----

CPU_CHUNK = 2**16
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


def views_of(code: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views on the flat *code* with the shapes of *parts*."""
    pieces = code.split([part.numel() for part in parts])
    return [p.view(part.shape) for p, part in zip(pieces, parts, strict=True)]


def put(code: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write the flat *code* into *parts*, in their type."""
    view = _side_by_side(parts)
    if view is None:
        for part, place in zip(parts, views_of(code, parts), strict=True):
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


def is_encoded(shape: Shape, dtype: torch.dtype, small: int) -> bool:
    """Whether a compressor encodes such a tensor; it sums small ones and whole numbers as they
    are."""
    return is_lossy(dtype) and not is_small(shape, small)


def split_shapes(
    kept: Sequence[Shape], dtype: torch.dtype, small: int
) -> tuple[list[Shape], list[Shape]]:
    """Shapes, from `real_type`, of the tensors that are sent as they are, and of the encoded
    ones."""
    plain = [shape for shape in kept if not is_encoded(shape, dtype, small)]
    return plain, [shape for shape in kept if is_encoded(shape, dtype, small)]


def flat_zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros for the real elements of *like*, flat, in a type in which many can be added up."""
    real = torch.view_as_real(like) if like.is_complex() else like
    wide = at_least_float32(real.dtype)
    return torch.zeros(real.numel(), dtype=wide, device=real.device)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: 16 bits would lose what is small beside what it is added to."""
    return torch.promote_types(dtype, torch.float32)


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
