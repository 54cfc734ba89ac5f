"""PowerSGD: a gradient's matrices as products of two thin factors, of which each step sends one.

Zhang et al., "Evaluation and optimization of gradient compression for distributed deep
learning" (ACP-SGD, ICDCS 2023): the alternating form of Vogels, Karimireddy, Jaggi, "PowerSGD:
practical low-rank gradient compression for distributed optimization" (NeurIPS 2019),
algorithm 1. A tensor is a matrix M of its first dimension by all others; r is the rank, i a
worker, and orth(X) has orthonormal columns that span X's.

    in odd steps   P_i = M_i orth(Q);  P = sum P_i;  result = P orth(Q)'
    in even steps  Q_i = M_i' orth(P);  Q = sum Q_i;  result = orth(P) Q'

It is linear: factors are summed. A worker's own contribution is its factor times the common one,
and error feedback subtracts that. Factors are kept from step to step, so that they turn towards the
gradients' large directions (warm start). The two-sided form of 2019 sends both factors in each step.
At equal bytes (half the rank) trainings end as well, but its second sum waits for the first.

Differences from the papers:

- A residual subtracts the worker's own contribution. Algorithm 2 and torch's hook subtract the mean:
  then residuals take up the differences between workers and never lose them. The updates are the
  same.
- Each matrix is orthonormalized by itself, even if matrices of one shape are processed together. A
  column that is zero, or depends on the others, is replaced by another orthonormal one. A column
  that has become zero keeps its former value. So nothing is divided by zero, and no direction is
  lost for good.
- Factors are computed in float32 for gradients of 16 bits.
- Tensors whose compression would save too little are sent uncompressed, in the same sum.
- In the first `warmup_steps` steps gradients are sent uncompressed. With 10 of them trainings of 192
  steps ended a little better. The 1,000 of torch's hook are more than many trainings have.

Results are bit-equal on all workers if their processors and libraries are of one kind. Otherwise
models differ by rounding, as the same training does on another machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.compression.base import (
    COMMON,
    CompressorSummary,
    Leg,
    RankInfo,
    Rounds,
    Shape,
    SkipsSmallTensors,
    State,
    StateKind,
    Sum,
    at_least_float32,
    dense,
    elements,
    is_lossy,
    is_small,
    real_type,
    reals,
    require_at_least,
    sum_uncompressed,
)


@dataclass(frozen=True, kw_only=True)
class PowerSGD(SkipsSmallTensors):
    """Approximates matrices by products of two factors with *rank* columns.

    Tensors whose compression would save too little, those of 8 bits or fewer, and integers are summed
    uncompressed.

    Attributes:
        rank: Columns of a factor. Matrices with fewer rows or columns are sent uncompressed.
    """

    rank: int = 4

    name: ClassVar[str] = "powersgd"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Sends each matrix as a thin factor, alternately of rows and of columns.",
        source=(
            "Vogels, Karimireddy and Jaggi, PowerSGD (NeurIPS 2019); Zhang et al., ACP-SGD (ICDCS "
            "2023)"
        ),
        use_when="links have 1 Gbit/s or less, and the model consists of matrices",
        sends=(
            "`rank` * (rows + columns) / 2 numbers per matrix, of 4 bytes each (2 for bfloat16, 8 for "
            "float64)"
        ),
        loses="everything outside the `rank` directions of a step, until error feedback brings it back",
        limits=(
            "Trainings with Adam lose accuracy.",
            "Matrices that would hardly shrink are sent as they are.",
            "Workers' results are bit-equal only if their processors and libraries are equal.",
        ),
    )
    linear: ClassVar[bool] = True
    rounds: ClassVar[int] = 1
    state: ClassVar[StateKind] = "common"
    error_feedback_by_default: ClassVar[bool] = True
    warmup_steps_by_default: ClassVar[int] = 10
    min_rate: ClassVar[float] = 2.0
    """Matrices with a lower compression rate are sent uncompressed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, "rank", self.rank)

    def memory_passes(self, workers: int) -> tuple[float, float]:
        # Measured on one core of a CPU, at rank 4, relative to a copy of a tensor (2 passes).
        return 2.7, 3.7

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        sizes = [self._size(shape) for shape in kept]
        if not is_lossy(kind) or not any(sizes):
            return dense(kept, kind)
        rows, columns = (self.rank * sum(s[n] for s in sizes if s) for n in (0, 1))
        plain = elements([s for s, size in zip(kept, sizes, strict=True) if not size])
        size = plain + (rows + columns) / 2
        return (Leg("sum", size * _on_the_wire(kind).itemsize),)

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        kept, kind = real_type([like.shape], like.dtype)
        size = self._size(kept[0]) if kept and is_lossy(kind) else None
        if size is None:
            return {}
        common: State = {"steps": 0}
        for side in (LEFT, RIGHT):
            start = _random(name, side, (self.rank, size[side]))
            common[_NAMES[side]] = start.to(like.device, at_least_float32(kind))
        return {COMMON: common}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        kept = [s for part, s in zip(parts, states, strict=True) if part.numel()]
        parts, sent = reals(parts), None if sent is None else reals(sent)
        if not any(kept):
            yield from sum_uncompressed(parts, sent)
            return
        commons: list[State] = [state[COMMON] for state in kept if state]
        sides = [common["steps"] % 2 for common in commons]
        opposite = zip(commons, sides, strict=True)
        bases = orthonormal([common[_NAMES[1 - side]] for common, side in opposite])
        is_matrix = [bool(state) for state in kept]
        bucket = _Bucket(parts, sent, is_matrix, sides, bases)
        code = bucket.encode()
        own = bucket.own_factors(code)
        total = yield Sum(code)  # as early as possible: large products follow
        factors = bucket.decode(total, own)
        for common, side, factor in zip(commons, sides, factors, strict=True):
            common["steps"] += 1
            _keep(factor, common[_NAMES[side]])

    def inherit_state(
        self, state: State, former: Sequence[State], workers: int
    ) -> None:
        """Continue with the same factors."""
        if former and COMMON in state:
            for key, value in former[0][COMMON].items():
                is_tensor = isinstance(value, torch.Tensor)
                state[COMMON][key] = value.clone() if is_tensor else value

    def _size(self, shape: Shape) -> tuple[int, int] | None:
        """The rows and columns of a tensor that is compressed; None for other tensors."""
        if not len(shape) or is_small(shape, self.small):
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        code = self.rank * (rows + columns) / 2
        saves = rows * columns >= self.min_rate * code
        return (rows, columns) if saves and self.rank <= min(rows, columns) else None


LEFT, RIGHT = 0, 1
_NAMES = "left", "right"


class _Bucket:
    """One bucket's matrices in one step, and its uncompressed tensors, in one message.

    A matrix is left' right. Each has a *side* that is computed in this step, and a *basis* of the
    other side. Factors are stored by rows; a row is a column in the papers. A row is contiguous, so
    products with large matrices are two to five times as fast on a CPU.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor] | None,
        is_matrix: Sequence[bool],
        sides: Sequence[int],
        bases: Sequence[torch.Tensor],
    ) -> None:
        self._sides, self._bases = sides, bases
        self._matrices, self._plain = _divided(parts, is_matrix)
        self._sent, self._plain_sent = _divided(sent or (), is_matrix if sent else ())
        kind = parts[0].dtype
        self._precise, self._wire = at_least_float32(kind), _on_the_wire(kind)
        pairs = zip(self._matrices, sides, bases, strict=True)
        self._sizes = [len(b) * _matrix(part).shape[side] for part, side, b in pairs]
        self._sizes += [part.numel() for part in self._plain]

    def encode(self) -> torch.Tensor:
        """This worker's message: the products of its matrices with their bases, and plain tensors."""
        device = self._matrices[0].device
        code = torch.empty(sum(self._sizes), dtype=self._wire, device=device)
        pieces = iter(code.split(self._sizes))
        rows = zip(self._matrices, self._sides, self._bases, strict=True)
        for part, side, basis in rows:
            matrix = _matrix(part).to(self._precise)
            facing = matrix.mT if side == LEFT else matrix
            piece = next(pieces).view(len(basis), -1)
            if self._wire == self._precise:
                torch.mm(basis, facing, out=piece)
            else:
                piece.copy_(basis @ facing)
        for part, piece in zip(self._plain, pieces, strict=True):
            piece.view(part.shape).copy_(part)
        return code

    def own_factors(self, code: torch.Tensor) -> list[torch.Tensor]:
        """Copies of this worker's factors in *code*, whose memory the sum will overwrite.

        Empty if the caller does not need its contribution.
        """
        if not self._sent:
            return []
        return [factor.clone() for factor in self._opened(code, self._plain_sent)]

    def decode(
        self, total: torch.Tensor, own: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Write the sum over workers, and this worker's contribution; return the summed factors."""
        if self._sent:
            self._multiply(own, self._sent)
        factors = self._opened(total, self._plain)
        self._multiply(factors, self._matrices)
        return factors

    def _opened(
        self, code: torch.Tensor, plain: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The factors in *code*. Its uncompressed tensors are copied into *plain*."""
        pieces = code.split(self._sizes)
        factors = [
            piece.view(len(basis), -1).to(self._precise)
            for piece, basis in zip(pieces, self._bases, strict=False)
        ]
        for part, piece in zip(plain, pieces[len(factors) :], strict=True):
            part.copy_(piece.view(part.shape))
        return factors

    def _multiply(
        self, factors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> None:
        """Write the products left' right into *targets*."""
        rows = zip(factors, self._bases, self._sides, targets, strict=True)
        for factor, basis, side, target in rows:
            left, right = (factor, basis) if side == LEFT else (basis, factor)
            if target.is_contiguous() and target.dtype == left.dtype:
                torch.mm(left.mT, right, out=_matrix(target))
            else:
                target.copy_((left.mT @ right).view(target.shape))


def orthonormal(factors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Orthonormalize the rows of each factor: the new rows span at least the old rows' span.

    A factor has no more rows than columns. Factors of one shape are processed together.

    The QR decomposition by Householder reflections never divides by zero. It replaces a row that is
    zero, or depends on earlier rows, by another one.
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


def _keep(factor: torch.Tensor, known: torch.Tensor) -> None:
    """Copy *factor* into *known*, except for rows that are zero or not finite."""
    largest = factor.abs().amax(1, keepdim=True)
    torch.where((largest > 0) & (largest < torch.inf), factor, known, out=known)


def _random(name: str, side: int, shape: tuple[int, int]) -> torch.Tensor:
    """Draw from a normal distribution, equally on all workers."""
    seed = _number(f"{_number(f'0 {name}')} 0 {side}")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _number(text: str) -> int:
    """A number derived from *text*, equal on all workers."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _divided(
    parts: Sequence[torch.Tensor], is_coded: Sequence[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Divide into compressed and uncompressed tensors."""
    pairs = list(zip(parts, is_coded, strict=True))
    return [p for p, coded in pairs if coded], [p for p, coded in pairs if not coded]


def _matrix(part: torch.Tensor) -> torch.Tensor:
    """A view of *part* as a matrix: the first dimension by all others."""
    return part.reshape(len(part), -1)


def _on_the_wire(dtype: torch.dtype) -> torch.dtype:
    """The type of factors on the network, for tensors of type *dtype*.

    The range of float16 is too small: a factor's elements are as large as a row of the matrix.
    """
    return torch.float32 if dtype == torch.float16 else dtype
