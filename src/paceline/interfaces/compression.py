"""Compression: what is sent of a mean's tensors.

`paceline.compression` implements `Compressor`; whoever forms a mean drives its generator:
every yield is one collective, and the generator never learns which one.
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
    """Asks for all workers' *code*: a tensor of shape (workers, \\*code.shape), in the order
    of ranks."""

    code: torch.Tensor


@dataclass(frozen=True)
class Exchange:
    """Asks that row i of *code*, which has as many equal rows as there are workers, one
    after the other, goes to rank i. What all have for this worker comes back: a tensor of
    shape (workers, elements of a row), in the order of ranks."""

    code: torch.Tensor


Asked = Sum | Gather | Exchange

Coding = Generator[Asked, torch.Tensor, None]
"""One bucket on its way: yields codes, is sent what became of them, and ends."""


@dataclass(frozen=True)
class Place:
    """Who codes: which *rank* among how many *workers*."""

    rank: int
    workers: int


@dataclass(frozen=True)
class Leg:
    """One collective of a bucket's mean: *size* is the bytes of one worker's whole code."""

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
    """What is sent of a mean's tensors: a frozen dataclass of hyperparameters.

    It holds no state of its own: all that changes between steps is in the `State` of each
    tensor. Subclasses inherit `init` and `inherit`, which fit a compressor without state.

    Laws (`paceline.testing.check_compressor` holds them): zeros stay zeros. A worker whose
    tensors are zero changes nobody's result. All workers end with the same bits. A number
    that is not finite on any worker is not finite in the result. Shapes and types stay.
    Sizes of codes depend on shapes, types and common state, and never on numbers.
    """

    consistency: ClassVar[Consistency] = "lossy"
    """What becomes of gradients that travel so."""

    error_feedback_by_default: ClassVar[bool] = False
    """Whether it goes with `residuals` where nobody says otherwise."""

    warmup_steps_by_default: ClassVar[int] = 0
    """In how many steps gradients are sent as they are, first, where nobody says otherwise."""

    @property
    def takes_error_feedback(self) -> bool:
        """Not, where it has a memory of its own, or needs none. A class attribute, where that
        is so of all compressors of a class."""
        return True

    @property
    def name(self) -> str:
        """The registry's: lower case, with hyphens."""
        ...

    @property
    def linear(self) -> bool:
        """Whether it yields `Sum` only: sums of codes are codes of sums, so that a ring, a
        server or a switch may add codes up on the way."""
        ...

    @property
    def unbiased(self) -> bool:
        """Whether the expected result is the sum itself."""
        ...

    @property
    def rounds(self) -> int:
        """How many collectives follow each other in one bucket, once `settled`: where all that
        is in it is sent in one way, maybe fewer."""
        ...

    @property
    def first_steps(self) -> int:
        """In how many steps of a training gradients are sent as they are, first."""
        return 0

    @property
    def decodes_per_worker(self) -> bool:
        """Whether one worker's code can be decoded by itself: `encode` and `decode` are
        there, so that it may be pushed to a server."""
        return False

    @property
    def state(self) -> StateKind: ...

    @property
    def contributes_without_data(self) -> bool:
        """Whether a worker that is out of data, and sends zeros, goes on with its own state: so
        where results have a share of what it sent before. Else it sends nothing that it kept."""
        return False

    @property
    def modifies_gradients(self) -> bool:
        """Whether it does more to gradients than to send less of them, such as momentum: so one
        worker by itself uses it, too."""
        return False

    def passes(self, workers: int) -> tuple[float, float]:
        """What coding and decoding cost, among so many *workers*: the time until the first
        code is there, and the time of all that follows, over the time in which the tensors'
        bytes are read or written once. Virtual time charges it where nobody has measured
        it."""
        ...

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        """What a bucket of tensors of these *shapes* and this type takes, once `settled`: one
        after the other. One whose codes take turns says their mean."""
        ...

    def warm_up_traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[tuple[int, Sequence[Leg]]]:
        """What first steps take in which more is sent than `traffic` says: stage by stage, of how
        many steps, and as `traffic` of each of them. None where there are no such steps."""
        return ()

    def in_epochs(self, steps: int | None) -> Compressor:
        """The same in a training whose sampler's epoch has so many *steps*: where what is sent
        depends on that, and the user has not said it. None: as where neither is known."""
        return self

    def settled(self) -> Compressor:
        """The same long after its start: without first steps in which more is sent."""
        return self

    def for_speed(self, speed: SpeedClass) -> Compressor:
        """The same, for a worker whose group is of that class: where what is sent depends on it.
        Whoever decodes its codes need not know the class, and states go on."""
        return self

    def for_replies(self) -> Compressor:
        """What servers answer with (``replies=deltas``), and workers decode: the same in
        all steps and classes, since answers are no steps of whom they are for."""
        return self

    def suits(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `UsageError` where its results are not for that *optimizer*."""
        return

    def suits_differences(self) -> None:
        """Raise `UsageError` where its codes are of gradients alone, and not of what local
        updates have moved."""
        return

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        """The state of one tensor, before its first mean. *name* is unique and the same on
        all workers; *rank* is this worker's, for what is to differ between workers."""
        return {}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        """Form the mean of one bucket's tensors, among ``place.workers``.

        *parts*, all of one type and on one device, hold this worker's share of the mean
        (its gradient times its weight); once the generator has ended they hold the sum of
        all workers' shares. *states* belong to *parts*, and change in place. *sent*:
        tensors like *parts*, if anybody wants to know, that are to hold what this worker's
        own codes stand for: the sum of all workers' *sent* is the result.

        Codes are flat and contiguous, and never empty: where there is nothing to send
        nothing is yielded. A code is whoever drives the generator's until it is resumed.
        """
        ...

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """A job goes on with another number of workers. *state*, fresh from `init`, takes
        over what each of the now *workers* workers is to have of *former*: the states of
        this tensor on all former workers, in the order of ranks."""
        return


@runtime_checkable
class PerWorkerCompressor(Compressor, Protocol):
    """A compressor whose codes mean the same to everybody: what a worker pushes to a server.

    Codes are flat tensors of bytes, whose size depends on shapes and common state alone.
    """

    def code_bytes(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """The bytes of one code of tensors of these *shapes* and this type, once `settled`."""
        ...

    def encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        """One code of *parts*, which stay as they are; *states* change in place."""
        ...

    def decode(
        self, code: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool = False
    ) -> None:
        """What *code* stands for, into *parts* (*add*: added to them), which have the shapes
        and types of what was encoded.

        Raises `UsageError` where it is no code of such parts: it may be from a network.
        """
        ...
