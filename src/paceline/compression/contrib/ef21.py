"""EF21: sends the change of a worker's gradient.

Richtarik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically better, and practically
faster error feedback" (NeurIPS 2021), algorithm 2, with top-k. Per tensor, with g this worker's
share of the mean, h its estimate of g, and H the sum of all workers' h, known to all workers:

    send c = top-k of (g - h);  h = h + c;  H = H + the sum of all c;  the result is H

It begins with h = H = 0, so the first step sends the top-k of g (the paper's experiments do the
same). Unlike error feedback it does not send old gradients later. H is the sum of all workers' last
known gradients, so it lags behind noisy ones. The paper's learning rates are smaller than SGD's.

Difference from the paper: if a result is not finite, h and H stay as they were on all workers, since
a GradScaler skips that step. A worker that is out of data has a gradient of zero, and its h
approaches zero from step to step.
"""

from __future__ import annotations

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
    flat_zeros,
    is_encoded,
    real_type,
    sum_uncompressed,
)
from paceline.compression.sparse import (
    TensorRow,
    add_at,
    all_finite,
    keep_where,
    owns_of,
    passes_of_gathered,
    require_density,
    rows_of,
    select,
    sparse_wire_bytes,
    sum_gathered,
    top_k_shape,
)


@dataclass(frozen=True, kw_only=True)
class EF21(SkipsSmallTensors):
    """Sends the largest changes of each tensor's gradient since its elements were last sent.

    Small tensors, those of one dimension, and integers are summed uncompressed. Each worker keeps two
    numbers per element.

    Attributes:
        density: Share of a tensor's elements that is sent.
    """

    density: float = 0.01

    name: ClassVar[str] = "ef21"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Sends the largest elements of a gradient's difference from its estimate.",
        source="Richtarik, Sokolov and Fatkhullin, EF21 (NeurIPS 2021)",
        use_when="you compare compressors; no measurement recommends it for training",
        sends=(
            "the share `density` of the elements, the largest, each in its own type, and 1 to 4 bytes "
            "for its index, to every other worker"
        ),
        loses="nothing in the end; the result lags behind gradients that change quickly",
        limits=(
            (
                "Every worker receives the selected elements of all others. So with n workers it saves "
                "bytes only below a density of about 1/n."
            ),
            "`plan` and `auto` do not try it.",
        ),
    )
    state: ClassVar[StateKind] = "own"
    takes_error_feedback: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_density(self.density)

    @property
    def contributes_without_data(self) -> bool:
        """True: its h is in every result until it has become zero."""
        return True

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 26.0, 8.0 + passes_of_gathered(self.density, workers)

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        return sparse_wire_bytes(shapes, dtype, self.small, self.density)

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        kept, kind = real_type([like.shape], like.dtype)
        if not kept or not is_encoded(kept[0], kind, self.small):
            return {}
        empty = flat_zeros(like)
        return {
            COMMON: {"sum": empty},  # H
            "estimate": torch.zeros_like(empty),  # h
        }

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        rows = rows_of(parts, states, sent)
        changed = [row for row in rows if row.state]
        if changed:  # first, so that the backward pass still runs during compression
            yield from self._sum_changes(changed)
        plain = [row for row in rows if not row.state]
        yield from sum_uncompressed([row.part for row in plain], owns_of(plain))

    def inherit_state(
        self, state: State, former: Sequence[State], workers: int
    ) -> None:
        """Continue with H; each worker's h becomes an equal part of it."""
        if state:
            total = state[COMMON]["sum"].copy_(former[0][COMMON]["sum"])
            state["estimate"].copy_(total).div_(workers)

    def _sum_changes(self, rows: Sequence[TensorRow]) -> Rounds:
        """Average the changes of gradients."""
        top_ks = [top_k_shape(part.numel(), self.density) for part, _, _ in rows]
        selected = []
        for (part, state, own), of in zip(rows, top_ks, strict=True):
            changed = part.reshape(-1) - state["estimate"]
            indices = select(changed, of)
            selected.append((indices, changed[indices].to(part.dtype)))  # c
            if own is not None:
                own.copy_(state["estimate"].view(own.shape))
                add_at(own, *selected[-1])
        totals = [state[COMMON]["sum"].clone() for _, state, _ in rows]
        yield from sum_gathered(selected, top_ks, totals)
        for (part, _, _), total in zip(rows, totals, strict=True):
            part.copy_(total.view(part.shape))
        finite = all_finite([part for part, _, _ in rows])
        for (_, state, _), total, (indices, values) in zip(
            rows, totals, selected, strict=True
        ):
            add_at(state["estimate"], indices, torch.where(finite, values, 0))
            keep_where(finite, state[COMMON], "sum", total)
