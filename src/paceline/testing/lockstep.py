"""A compressor among workers that are only simulated: their generators in lock step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.interfaces import (
    Asked,
    Coding,
    Compressor,
    Exchange,
    Gather,
    Leg,
    Place,
    State,
    Sum,
)
from paceline.testing.problems import require

SHAPES = ((4, 3), (257,), (0,), (40, 30), (5,), (), (24, 5, 12))
"""Small matrices and large ones, vectors, nothing, a number."""

Gradients = Sequence[Sequence[torch.Tensor]]
"""Each worker's tensors."""


@dataclass(frozen=True)
class Mean:
    """One mean that was formed. *results* and *sent*: each worker's; *codes*: one worker's,
    in each round, as it gave them."""

    results: list[list[torch.Tensor]]
    sent: list[list[torch.Tensor]]
    codes: list[Asked]

    @property
    def bytes(self) -> int:
        """What one worker's codes are on the network."""
        return sum(round(leg.size) for leg in self.legs)

    @property
    def legs(self) -> list[Leg]:
        """What one worker's codes are, one after the other."""
        return [
            Leg(_KINDS[type(asked)], asked.code.numel() * asked.code.itemsize)
            for asked in self.codes
        ]

    @property
    def is_coded_twice(self) -> bool:
        """Whether owners have coded sums once more."""
        return any(isinstance(asked, Exchange) for asked in self.codes)

    @property
    def rounding(self) -> float:
        """How far apart two ways to add the same numbers may end, relative to the
        largest."""
        coarsest = torch.finfo(torch.float32).eps
        for asked in self.codes:
            if isinstance(asked, Sum) and asked.code.is_floating_point():
                coarsest = max(coarsest, torch.finfo(asked.code.dtype).eps)
        return 4 * len(self.results) * coarsest


_KINDS: dict[type, Literal["sum", "gather", "exchange"]] = {
    Sum: "sum",
    Gather: "gather",
    Exchange: "exchange",
}


class Workers:
    """Some workers with tensors like *like*, and the states that they keep of them."""

    def __init__(
        self, compressor: Compressor, like: Sequence[torch.Tensor], workers: int
    ) -> None:
        self.compressor = compressor
        self.states: list[list[State]] = [
            [compressor.init(t, f"tensor {i}", rank) for i, t in enumerate(like)]
            for rank in range(workers)
        ]

    def mean(self, gradients: Gradients) -> Mean:
        """Form one mean. Raises `CheckFailedError` where workers yield different things, or
        what cannot be sent."""
        results = [[part.clone() for part in own] for own in gradients]
        sent = [[torch.zeros_like(part) for part in own] for own in gradients]
        rows = zip(results, self.states, sent, strict=True)
        workers = len(results)
        codings = [
            self.compressor.average(parts, states, Place(rank, workers), own)
            for rank, (parts, states, own) in enumerate(rows)
        ]
        codes: list[Asked] = []
        answers: list[torch.Tensor | None] = [None] * workers
        while True:
            asked = [_resume(c, a) for c, a in zip(codings, answers, strict=True)]
            first = asked[0]
            _require_alike(asked)
            if first is None:
                return Mean(results, sent, codes)
            codes.append(type(first)(first.code.clone()))
            answers = list(_answers([one for one in asked if one is not None]))

    def inherit(self, former: Workers) -> None:
        """The job goes on with these workers, after *former* ones."""
        for states in self.states:
            for number, state in enumerate(states):
                theirs = [of_one[number] for of_one in former.states]
                self.compressor.inherit(state, theirs, len(self.states))


def gradients(
    workers: int = 3,
    seed: int = 0,
    scale: float = 1.0,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[list[torch.Tensor]]:
    """Each worker's own, of different sizes in different tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(shape, generator=generator) * scale * 10.0**-number
            for number, shape in enumerate(shapes)
        ]
        for _ in range(workers)
    ]


def _resume(coding: Coding, answer: torch.Tensor | None) -> Asked | None:
    try:
        return next(coding) if answer is None else coding.send(answer)
    except StopIteration:
        return None


def _answers(asked: Sequence[Asked]) -> list[torch.Tensor]:
    """What a collective gives back to each worker."""
    if isinstance(asked[0], Gather):
        together = torch.stack([one.code for one in asked])
        return [together.clone() for _ in asked]
    if isinstance(asked[0], Exchange):
        rows = [one.code.view(len(asked), -1) for one in asked]
        return [torch.stack([row[to] for row in rows]) for to in range(len(asked))]
    total = asked[0].code.clone()
    for one in asked[1:]:
        total += one.code
    return [one.code.copy_(total) for one in asked]


def _require_alike(asked: Sequence[Asked | None]) -> None:
    described = [_described(one) for one in asked]
    require(
        len(set(described)) == 1,
        f"workers are not in step, they yield: {'; '.join(described)}",
    )
    if asked[0] is not None:
        code = asked[0].code
        require(
            code.dim() == 1 and code.is_contiguous() and bool(code.numel()),
            f"a code is to be flat, contiguous and not empty, not {described[0]}",
        )
    if isinstance(asked[0], Exchange):
        require(
            asked[0].code.numel() % len(asked) == 0,
            f"an exchange among {len(asked)} workers is to have as many equal rows, not "
            f"{described[0]}",
        )


def _described(one: Asked | None) -> str:
    if one is None:
        return "nothing more"
    kind = str(one.code.dtype).removeprefix("torch.")
    return f"{type(one).__name__} of {kind} {tuple(one.code.shape)}"
