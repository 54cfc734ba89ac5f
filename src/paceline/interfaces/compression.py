"""Compression: what is sent of a mean's tensors.

`paceline.compression` implements `Compressor`; whoever forms a mean drives its generator:
every yield is one collective, and the generator never learns which one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Sum:
    """Asks for the sum of *code* over workers. It comes back in *code*'s own memory."""

    code: torch.Tensor


@dataclass(frozen=True)
class Gather:
    """Asks for all workers' *code*: a tensor of shape (workers, \\*code.shape), in the order
    of ranks."""

    code: torch.Tensor


Coding = Generator[Sum | Gather, torch.Tensor, None]
"""One bucket on its way: yields codes, is sent what became of them, and ends."""

StateKind = Literal["none", "own", "common"]
"""What a compressor keeps between steps: nothing, something of each worker's own, something
equal on all workers."""

State = dict[str, Any]
"""What is kept of one tensor: tensors on that tensor's device, numbers, texts, and dicts of
those; empty where nothing is."""


@runtime_checkable
class Compressor(Protocol):
    """What is sent of a mean's tensors: a frozen dataclass of hyperparameters.

    It holds no state of its own: all that changes between steps is in the `State` of each
    tensor. Subclasses inherit `init` and `inherit`, which fit a compressor without state.

    Laws (`paceline.testing.check_compressor` holds them): zeros stay zeros. A worker whose
    tensors are zero changes nobody's result. All workers end with the same bits. A number
    that is not finite on any worker is not finite in the result. Shapes and types stay.
    """

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
        """How many collectives follow each other in one bucket."""
        ...

    @property
    def state(self) -> StateKind: ...

    def passes(self, workers: int) -> tuple[float, float]:
        """What coding and decoding cost, among so many *workers*: the time until the first
        code is there, and the time of all that follows, over the time in which the tensors'
        bytes are read or written once. Virtual time charges it."""
        ...

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        """The state of one tensor, before its first mean. *name* is unique and the same on
        all workers; *rank* is this worker's, for what is to differ between workers."""
        return {}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        workers: int,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        """Form the mean of one bucket's tensors.

        *parts*, all of one type and on one device, hold this worker's share of the mean
        (its gradient times its weight); once the generator has ended they hold the sum of
        all *workers'* shares. *states* belong to *parts*, and change in place. *sent*:
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
