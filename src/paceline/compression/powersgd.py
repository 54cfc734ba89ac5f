"""PowerSGD: a gradient's matrices as products of two thin factors.

Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for
distributed optimization" (NeurIPS 2019), algorithm 1; and its one-sided form, Zhang et al.,
"Evaluation and optimization of gradient compression for distributed deep learning" (ACP-SGD,
ICDCS 2023). A tensor is a matrix M of its first dimension by all others; r is the rank, i a
worker, and orth(X) has orthonormal columns that span X's.

    sides=both   P = orth(sum M_i orth(Q));  Q_i = M_i' P;  Q = sum Q_i;  result = P Q'
    sides=one    in odd steps   P_i = M_i orth(Q);  P = sum P_i;  result = P orth(Q)'
                 in even steps  Q_i = M_i' orth(P);  Q = sum Q_i;  result = orth(P) Q'

Both are linear: factors are summed, and what a worker's own code stands for is its own factor
times the common one, M_i P P' or M_i Q Q': that is what residuals subtract. Factors are kept
from step to step, so that they turn towards the gradients' large directions (warm start).
One-sided is half of the sums and of the bytes, and its sum needs to wait for no other. It is
the default: at equal bytes (twice the rank) trainings end as well with either.

Differs from the papers in that residuals are each worker's own (with the mean subtracted,
as in algorithm 2 and in torch's hook, they take up the differences between workers and never
lose them; the updates are the same). Each matrix is normalised by itself, also where those of
one shape are worked on together. A column that is zero, or depends on the others, becomes
some other orthonormal one, and what is kept of a column that has become zero is its former
self: nothing is divided by zero, and no direction is lost for good. Factors are computed in
float32 where gradients have 16 bits. Tensors of which too little would be saved are sent as
they are, in the same sum. Gradients are sent as they are in the first 10 steps, which made
trainings of 192 steps end a little better, and not in the 1,000 of torch's hook, which are
more than many trainings have; `warmup_steps` says how many.

Bits are equal on all workers where their processors and libraries are of one kind; where they
are not models differ by roundings, as the same training does on another machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from paceline.compression.no_compression import summed
from paceline.compression.packing import (
    dense,
    elements,
    is_lossy,
    is_small,
    real_type,
    reals,
)
from paceline.errors import UsageError
from paceline.interfaces import (
    COMMON,
    Asked,
    Coding,
    Compressor,
    CompressorSummary,
    Leg,
    Place,
    Shape,
    State,
    StateKind,
    Sum,
)


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """Matrices become products of two factors with *rank* columns. Tensors of which too
    little would be saved, those of 8 bits or fewer, and whole numbers are summed as they are.
    """

    rank: int = 4
    """Columns of a factor. Matrices with fewer rows or columns are sent as they are."""

    sides: Literal["one", "both"] = "one"
    """Both factors in each step, one after the other, or one, by turns."""

    small: int = 1024
    """Tensors of fewer elements, or of one dimension, are sent as they are; 0: all are coded of
    which a code saves enough."""

    name: ClassVar[str] = "powersgd"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        sends=(
            "*rank* times half of rows + columns of each matrix (all of them where "
            "*sides* is both), in 4 bytes each (2 where it is bfloat16, 8 where it is "
            "float64)"
        ),
        loses=(
            "what is outside of the *rank* directions of a step, until a later one "
            "(residuals)"
        ),
    )
    linear: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    state: ClassVar[StateKind] = "common"
    error_feedback_by_default: ClassVar[bool] = True
    warmup_steps_by_default: ClassVar[int] = 10
    min_rate: ClassVar[float] = 2.0
    """Matrices whose bytes are not as many times their code's are sent as they are."""

    def __post_init__(self) -> None:
        for key, least in (("rank", 1), ("small", 0)):
            if not getattr(self, key) >= least:
                raise UsageError(
                    f"{key}: expected {least} or more, got {getattr(self, key)}"
                )

    @property
    def rounds(self) -> int:
        return 1 if self.sides == "one" else 2

    def passes(self, workers: int) -> tuple[float, float]:
        # Measured on one core of a CPU, at rank 4, beside a copy of a tensor (2 passes).
        return (2.7, 3.7) if self.sides == "one" else (2.7, 6.5)

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        sizes = [self._size(shape) for shape in kept]
        if not is_lossy(kind) or not any(sizes):
            return dense(kept, kind)
        rows, columns = (self.rank * sum(s[n] for s in sizes if s) for n in (0, 1))
        plain = elements([s for s, size in zip(kept, sizes, strict=True) if not size])
        if self.sides == "one":
            legs = [plain + (rows + columns) / 2]
        else:
            legs = [plain + rows, columns]
        return tuple(Leg("sum", leg * _on_the_wire(kind).itemsize) for leg in legs)

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        kept, kind = real_type([like.shape], like.dtype)
        size = self._size(kept[0]) if kept and is_lossy(kind) else None
        if size is None:
            return {}
        common: State = {"steps": 0}
        for side in (LEFT, RIGHT) if self.sides == "one" else (RIGHT,):
            start = _random(name, side, (self.rank, size[side]))
            common[_NAMES[side]] = start.to(like.device, _precise(kind))
        return {COMMON: common}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        kept = [s for part, s in zip(parts, states, strict=True) if part.numel()]
        parts, sent = reals(parts), None if sent is None else reals(sent)
        if not any(kept):
            yield from summed(parts, sent)
            return
        commons: list[State] = [state[COMMON] for state in kept if state]
        bucket = _Bucket(self.rank, parts, sent, [bool(state) for state in kept])
        if self.sides == "one":
            sides = [common["steps"] % 2 for common in commons]
            bases = _bases(commons, [1 - side for side in sides])
        else:
            starts = _bases(commons, [RIGHT] * len(commons))
            lefts = yield from bucket.sum([LEFT] * len(commons), starts, last=False)
            sides, bases = [RIGHT] * len(commons), orthonormal(lefts)
        factors = yield from bucket.sum(sides, bases, last=True)
        for common, side, factor in zip(commons, sides, factors, strict=True):
            common["steps"] += 1
            _keep(factor, common[_NAMES[side]])

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """Factors go on as they were."""
        if former and COMMON in state:
            for key, value in former[0][COMMON].items():
                is_tensor = isinstance(value, torch.Tensor)
                state[COMMON][key] = value.clone() if is_tensor else value

    def _size(self, shape: Shape) -> tuple[int, int] | None:
        """The rows and columns of a tensor that is coded; None of any other."""
        if not len(shape) or is_small(shape, self.small):
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        code = self.rank * (rows + columns) * (0.5 if self.sides == "one" else 1.0)
        saves = rows * columns >= self.min_rate * code
        return (rows, columns) if saves and self.rank <= min(rows, columns) else None


LEFT, RIGHT = 0, 1
_NAMES = "left", "right"


def _bases(commons: Sequence[State], sides: Sequence[int]) -> list[torch.Tensor]:
    """What each matrix is multiplied with on these *sides*: as the step before left it."""
    pairs = zip(commons, sides, strict=True)
    return orthonormal([common[_NAMES[side]] for common, side in pairs])


class _Bucket:
    """One bucket's matrices in one step, and the plain tensors beside them, which travel with
    the first sum.

    A matrix is left' right. Factors are kept by rows, each of which is a column of the
    papers': it lies in one piece, and products with large matrices are two to five times as
    fast on a CPU.
    """

    def __init__(
        self,
        rank: int,
        parts: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor] | None,
        is_coded: Sequence[bool],
    ) -> None:
        self._rank, kind = rank, parts[0].dtype
        self._precise, self._wire = _precise(kind), _on_the_wire(kind)
        self._matrices, self._plain = _divided(parts, is_coded)
        self._sent: list[torch.Tensor] | None = None
        self._plain_sent: list[torch.Tensor] = []
        if sent is not None:
            self._sent, self._plain_sent = _divided(sent, is_coded)

    def shapes(self, sides: Sequence[int]) -> list[tuple[int, int]]:
        """Of the factors on these *sides*."""
        pairs = zip(self._matrices, sides, strict=True)
        return [(self._rank, _matrix(part).shape[side]) for part, side in pairs]

    def sum(
        self, sides: Sequence[int], bases: Sequence[torch.Tensor], *, last: bool
    ) -> Generator[Asked, torch.Tensor, list[torch.Tensor]]:
        """The sums of all workers' factors on these *sides*: of what their matrices make of
        the other sides' *bases*. The *last* ones, with those, are the result."""
        code = self._code(sides, bases)
        own: list[torch.Tensor] = []
        if self._sent is not None:
            own = self._opened(code, sides, self._plain_sent)
            own = [factor.clone() for factor in own]  # the sum takes their memory
        total = yield Sum(code)  # as soon as can be: large products wait
        if last and self._sent is not None:
            _multiply(own, bases, sides, self._sent)
        factors = self._opened(total, sides, self._plain)
        if last:
            _multiply(factors, bases, sides, self._matrices)
        self._plain, self._plain_sent = [], []
        return factors

    def _code(
        self, sides: Sequence[int], bases: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        plain = elements([part.shape for part in self._plain])
        size = elements(self.shapes(sides)) + plain
        code = torch.empty(size, dtype=self._wire, device=self._matrices[0].device)
        pieces = iter(self._pieces(code, sides))
        for part, side, basis in zip(self._matrices, sides, bases, strict=True):
            matrix = _matrix(part).to(self._precise)
            facing = matrix.mT if side == LEFT else matrix
            piece = next(pieces).view(self._rank, -1)
            if self._wire == self._precise:
                torch.mm(basis, facing, out=piece)
            else:
                piece.copy_(basis @ facing)
        for part, piece in zip(self._plain, pieces, strict=True):
            piece.view(part.shape).copy_(part)
        return code

    def _opened(
        self, code: torch.Tensor, sides: Sequence[int], plain: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The factors in *code*; what it has of plain tensors goes into *plain*."""
        pieces = self._pieces(code, sides)
        factors = [
            p.view(self._rank, -1).to(self._precise) for p in pieces[: len(sides)]
        ]
        for part, piece in zip(plain, pieces[len(sides) :], strict=True):
            part.copy_(piece.view(part.shape))
        return factors

    def _pieces(self, code: torch.Tensor, sides: Sequence[int]) -> list[torch.Tensor]:
        sizes = [math.prod(shape) for shape in self.shapes(sides)]
        sizes += [part.numel() for part in self._plain]
        return list(code.split(sizes))


def orthonormal(factors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rows of length 1, orthogonal to each other, that span at least what each factor's rows
    span, of which there are no more than columns. Those of one shape are worked on together,
    each by itself.

    By Householder's reflections, which divide by nothing that can be zero: a row that is
    zero or depends on those before it becomes another one.
    """
    alike: dict[torch.Size, list[int]] = {}
    for number, factor in enumerate(factors):
        alike.setdefault(factor.shape, []).append(number)
    results = list(factors)
    for numbers in alike.values():
        columns = torch.stack([factors[number] for number in numbers]).mT
        for number, rows in zip(numbers, torch.linalg.qr(columns)[0].mT, strict=True):
            results[number] = rows
    return results


def _multiply(
    factors: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    sides: Sequence[int],
    targets: Sequence[torch.Tensor],
) -> None:
    """left' right, into *targets*."""
    for factor, basis, side, target in zip(factors, bases, sides, targets, strict=True):
        left, right = (factor, basis) if side == LEFT else (basis, factor)
        if target.is_contiguous() and target.dtype == left.dtype:
            torch.mm(left.mT, right, out=_matrix(target))
        else:
            target.copy_((left.mT @ right).view(target.shape))


def _keep(factor: torch.Tensor, known: torch.Tensor) -> None:
    """*known* becomes *factor*, but for rows that say nothing."""
    largest = factor.abs().amax(1, keepdim=True)
    torch.where((largest > 0) & (largest < torch.inf), factor, known, out=known)


def _random(name: str, side: int, shape: tuple[int, int]) -> torch.Tensor:
    """Numbers of a normal distribution, equal on all workers."""
    seed = _number(f"{_number(f'0 {name}')} 0 {side}")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _number(text: str) -> int:
    """A number that *text* stands for."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _divided(
    parts: Sequence[torch.Tensor], is_coded: Sequence[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those that are coded, and the others."""
    pairs = list(zip(parts, is_coded, strict=True))
    return [p for p, coded in pairs if coded], [p for p, coded in pairs if not coded]


def _matrix(part: torch.Tensor) -> torch.Tensor:
    """The first dimension by all others."""
    return part.reshape(len(part), -1)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """In which factors are computed."""
    return torch.promote_types(dtype, torch.float32)


def _on_the_wire(dtype: torch.dtype) -> torch.dtype:
    """In which they travel, where tensors are of type *dtype*. float16 has not the range: a
    factor's elements are as large as a whole row of the matrix."""
    return torch.float32 if dtype == torch.float16 else dtype
