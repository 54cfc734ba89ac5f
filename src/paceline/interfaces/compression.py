"""Compression: how the tensors of an average are encoded.

`paceline.compression` implements `Compressor`. The code that forms an average drives the
compressor's generator: every yield is one collective, and the generator never learns which one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.interfaces.method import Consistency
from paceline.interfaces.server import SpeedClass

__all__ = [
    "COMMON",
    "Asked",
    "Coding",
    "Compressor",
    "CompressorSummary",
    "Exchange",
    "Gather",
    "Leg",
    "PerWorkerCompressor",
    "Place",
    "Shape",
    "State",
    "StateKind",
    "Sum",
]


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
class Exchange:
    """Asks that each rank gets one row of *code*.

    *code* has as many equal rows as there are workers, one after the other; row i goes to rank
    i. The rows of all workers for this one come back: a tensor of shape (workers, elements of a
    row), in the order of ranks.
    """

    code: torch.Tensor


Asked = Sum | Gather | Exchange

Coding = Generator[Asked, torch.Tensor, None]
"""The average of one bucket: yields codes, is sent the results of the collectives, and ends."""


@dataclass(frozen=True)
class Place:
    """Which worker encodes: *rank* among *workers*."""

    rank: int
    workers: int


@dataclass(frozen=True)
class Leg:
    """One collective of a bucket's average: *size* is the bytes of one worker's whole code."""

    kind: Literal["sum", "gather", "exchange"]
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
    """A compressor's row in the table of compressors, in words."""

    sends: str
    loses: str


@runtime_checkable
class Compressor(Protocol):
    """How the tensors of an average are encoded: a frozen dataclass of hyperparameters.

    It holds no state of its own: all that changes between steps is in the `State` of each
    tensor. Subclasses inherit `init` and `inherit`, which fit a compressor without state.

    Laws, which `paceline.testing.check_compressor` checks:

    - Zeros stay zeros. A worker whose tensors are zero changes no other worker's result.
    - All workers end with the same bits.
    - A number that is not finite on any worker is not finite in the result.
    - Shapes and types stay.
    - Sizes of codes depend on shapes, types and common state, and never on numbers.

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
    def takes_error_feedback(self) -> bool:
        """Whether error feedback may be added to it.

        False where it has a memory of its own, or needs none; then a class attribute where that
        holds for all compressors of a class.
        """
        return True

    @property
    def name(self) -> str:
        """The registry's name: lower case, with hyphens."""
        ...

    @property
    def linear(self) -> bool:
        """Whether it yields `Sum` only.

        Sums of codes are codes of sums then, so that a ring, a server or a switch may add codes
        up on the way.
        """
        ...

    @property
    def unbiased(self) -> bool:
        """Whether the expected result is the sum itself."""
        ...

    @property
    def rounds(self) -> int:
        """How many collectives follow each other in one bucket, once `settled`.

        A bucket whose tensors are all sent in one way may take fewer.
        """
        ...

    @property
    def first_steps(self) -> int:
        """In how many first steps of a training gradients are sent uncompressed."""
        return 0

    @property
    def decodes_per_worker(self) -> bool:
        """Whether one worker's code can be decoded by itself.

        Then `encode` and `decode` are there, so that it may be pushed to a server.
        """
        return False

    @property
    def state(self) -> StateKind:
        """What it keeps between steps."""
        ...

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

    def passes(self, workers: int) -> tuple[float, float]:
        """Estimate what encoding and decoding cost, in passes over the tensors' memory.

        Virtual time charges it where nobody has measured the compressor.

        Args:
            workers: Number of workers that average.

        Returns:
            The time until the first code is there, and the time of all that follows; each
            over the time in which the tensors' bytes are read or written once.
        """
        ...

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        """Say which collectives the average of a bucket takes, once `settled`.

        Args:
            shapes: Of the bucket's tensors.
            dtype: Their type.
            workers: Number of workers that average.

        Returns:
            The collectives, one after the other, with sizes in bytes. Where codes take turns,
            the mean of them.
        """
        ...

    def warm_up_traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[tuple[int, Sequence[Leg]]]:
        """Say what the first steps send where that is more than `traffic`.

        Args:
            shapes: Of the bucket's tensors.
            dtype: Their type.
            workers: Number of workers that average.

        Returns:
            Stage by stage, for how many steps, and the collectives of each of them as `traffic`
            has them. Empty where there are no such steps.
        """
        return ()

    def in_epochs(self, steps: int | None) -> Compressor:
        """Return this compressor for a training whose sampler's epoch has so many *steps*.

        It differs where what is sent depends on epochs, and the user has not set their length.

        Args:
            steps: Steps of an epoch; None where neither is known.
        """
        return self

    def settled(self) -> Compressor:
        """Return this compressor in steady state: without first steps in which more is sent."""
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
        """Return the compressor of servers' answers (``replies=deltas``), which workers decode.

        It encodes alike in all steps and speed classes, since an answer belongs to no step of
        its worker.
        """
        return self

    def suits(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that its results are for that *optimizer*.

        Raises:
            UsageError: They are not.
        """
        return

    def suits_differences(self) -> None:
        """Check that it encodes what local updates have moved, and not gradients alone.

        Raises:
            UsageError: It encodes gradients alone.
        """
        return

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        """Make the state of one tensor, before its first average.

        Args:
            like: A tensor of its shape, type and device.
            name: Unique, and the same on all workers.
            rank: This worker's, for state that is to differ between workers.

        Returns:
            The state; empty where nothing is kept.
        """
        return {}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
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
            `Sum`, `Gather` or `Exchange` of a code; each resumes with its result.
        """
        ...

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """Take over the states of a job that had another number of workers.

        Args:
            state: Fresh from `init`; changes in place.
            former: The states of this tensor on all former workers, in the order of ranks.
            workers: Number of workers from now on.
        """
        return


@runtime_checkable
class PerWorkerCompressor(Compressor, Protocol):
    """A compressor whose codes mean the same to every decoder: what a worker pushes to a server.

    Codes are flat tensors of bytes, whose size depends on shapes and common state alone.
    """

    def code_bytes(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """Return the bytes of one code, once `settled`.

        Args:
            shapes: Of the tensors that are encoded together.
            dtype: Their type.
        """
        ...

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
        ...

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
        ...
