"""EF21: what is sent is how a worker's gradient has changed.

Richtarik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically better, and practically
faster error feedback" (NeurIPS 2021), algorithm 2, with top-k. Per tensor, with g this worker's
share of the mean, h its estimate of that, and H the sum of all workers' h, which all have:

    send c = top-k of (g - h);  h = h + c;  H = H + the sum of all c;  the result is H

In the first step h = g is sent as it is. No gradient is sent late, as with residuals: H is all
workers' last known gradients, so it lags behind noisy ones. The paper's learning rates are
smaller than SGD's.

Differs from the paper in that where a result is not finite h and H stay as they were, on all
workers, since a GradScaler skips that step. A worker that is out of data has a gradient of zero,
and its h goes there, a code a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from paceline.compression.no_compression import summed
from paceline.compression.packing import is_lossy, is_small
from paceline.compression.selection import cut, pick, require_density
from paceline.compression.sparse import (
    Row,
    add_at,
    add_everybodys,
    all_finite,
    keep_where,
    passes_to_add_up,
    rows_of,
    traffic_of,
)
from paceline.interfaces import (
    COMMON,
    Coding,
    Compressor,
    CompressorSummary,
    Leg,
    Place,
    Shape,
    State,
    StateKind,
)


@dataclass(frozen=True, kw_only=True)
class EF21(Compressor):
    """The largest elements of what has changed in each tensor's gradient since they were last
    sent. Small tensors, those of one dimension, and whole numbers are summed as they are.

    It keeps two numbers an element on each worker.
    """

    density: float = 0.01
    """The part of a tensor's elements that is sent."""

    start: Literal["dense", "code"] = "dense"
    """Whether the first step sends all, or begins with estimates of zero."""

    small: int = 1024
    """Tensors with fewer elements, and those of one dimension, are summed as they are; 0 for
    none."""

    name: ClassVar[str] = "ef21"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        sends=(
            "the part `density` of the elements in their own type, and 1 to 4 bytes "
            "for the place of each, to every other worker; all in the first step"
        ),
        loses="nothing for good; where gradients change quickly the result is behind them",
    )
    linear: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    state: ClassVar[StateKind] = "own"
    takes_error_feedback: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_density(self.density)

    @property
    def rounds(self) -> int:
        """One for codes, and one for what is sent as it is."""
        return 2 if self.small else 1

    @property
    def contributes_without_data(self) -> bool:
        """Its h is in every result until it has gone to zero."""
        return True

    def passes(self, workers: int) -> tuple[float, float]:
        return 26.0, 8.0 + passes_to_add_up(self.density, workers)

    def settled(self) -> EF21:
        return replace(self, start="code")

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        return traffic_of(shapes, dtype, self.small, self.density)

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        real = torch.view_as_real(like) if like.is_complex() else like
        if (
            not is_lossy(real.dtype)
            or not real.numel()
            or is_small(real.shape, self.small)
        ):
            return {}
        wide = torch.promote_types(real.dtype, torch.float32)
        empty = torch.zeros(real.numel(), dtype=wide, device=real.device)
        return {
            COMMON: {"begun": int(self.start == "code"), "sum": empty},  # H
            "estimate": torch.zeros_like(empty),  # h
        }

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        whole: list[Row] = []
        begun: list[Row] = []
        for row in rows_of(parts, states, sent):
            has_begun = row.state and row.state[COMMON]["begun"]
            (begun if has_begun else whole).append(row)
        if begun:  # first: it is coded beside the backward pass then
            yield from self._go_on(begun)
        if whole:
            yield from _begin(whole)

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """H goes on, and each worker's h is an equal part of it."""
        if state:
            common, old = state[COMMON], former[0][COMMON]
            common["begun"] = old["begun"]
            common["sum"].copy_(old["sum"])
            state["estimate"].copy_(common["sum"]).div_(workers)

    def _go_on(self, rows: Sequence[Row]) -> Coding:
        """Codes of what has changed."""
        cuts = [cut(part.numel(), self.density) for part, _, _ in rows]
        picked = []
        for (part, state, own), of in zip(rows, cuts, strict=True):
            changed = part.reshape(-1) - state["estimate"]
            places = pick(changed, of)
            picked.append((places, changed[places].to(part.dtype)))  # c
            if own is not None:
                own.copy_(state["estimate"].view(own.shape))
                add_at(own, *picked[-1])
        totals = [state[COMMON]["sum"].clone() for _, state, _ in rows]
        yield from add_everybodys(picked, cuts, totals)
        for (part, _, _), total in zip(rows, totals, strict=True):
            part.copy_(total.view(part.shape))
        finite = all_finite([part for part, _, _ in rows])
        for (_, state, _), total, (places, values) in zip(
            rows, totals, picked, strict=True
        ):
            add_at(state["estimate"], places, torch.where(finite, values, 0))
            keep_where(finite, state[COMMON], "sum", total)


def _begin(rows: Sequence[Row]) -> Coding:
    """A sum of what is sent as it is. Where that is the first of a tensor with a state, in that
    state's type: h and H begin with it, or at the next sum, if this one is not finite."""
    states = [state for _, state, _ in rows if state]
    kind = states[0]["estimate"].dtype if states else rows[0][0].dtype
    shares = [part.reshape(-1).clone() for part, state, _ in rows if state]
    totals = [part.to(kind) for part, _, _ in rows]
    for part, _, own in rows:
        if own is not None:
            own.copy_(part)
    yield from summed(totals, None)
    for (part, _, _), total in zip(rows, totals, strict=True):
        part.copy_(total)
    starting = [t for t, (_, state, _) in zip(totals, rows, strict=True) if state]
    if not starting or not bool(all_finite(starting)):
        return
    for state, share, total in zip(states, shares, starting, strict=True):
        state["estimate"].copy_(share)
        state[COMMON]["sum"].copy_(total.reshape(-1))
        state[COMMON]["begun"] = 1
