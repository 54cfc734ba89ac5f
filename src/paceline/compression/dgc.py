"""Deep gradient compression (DGC): sends the top-k of a velocity, which includes momentum.

Lin et al., "Deep gradient compression" (ICLR 2018), algorithm 1, with corrections of sections
3.2 and 3.3. Per tensor, with g this worker's share of the mean:

    u = m u + g;  v = v + u;  send top-k of v;  v = u = 0 where it was sent

A small tensor, or one of one dimension, is summed uncompressed. Its momentum follows: u = m u + the
sum, equal on all workers. So the optimizer must have no momentum. Its weight decay is added to the
averaged gradients, and is not compressed.

Differences from the paper and its published code:

- The sent value is subtracted from v, so that the rounding error of a 16-bit value is kept.
- Exactly the k largest elements are sent. The published code uses a sampled threshold, and removes
  an excess by index.
- Gradients are not clipped.
- A tensor whose gradient is zero in every element sends nothing and keeps u and v: it was unused in
  this step, or its worker is out of data. If a result is not finite, all workers keep u and v, too,
  since a GradScaler skips that step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    extremes,
    flat_zeros,
    is_lossy,
    is_small,
    real_type,
    require_at_least,
    sum_uncompressed,
)
from paceline.compression.sparse import (
    IndicesAndValues,
    TensorRow,
    TopKShape,
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
from paceline.errors import UsageError

STAGES = 5
"""Stages of the warm-up: the paper's epochs."""


@dataclass(frozen=True, kw_only=True)
class DGC(SkipsSmallTensors):
    """Sends the largest elements of each tensor's velocity, the accumulated momentum.

    Small tensors, those of one dimension, and integers are summed uncompressed. A single worker
    sends all elements. Use an optimizer without momentum: `momentum` replaces it. A worker keeps two
    numbers per element.

    Attributes:
        density: Share of a tensor's elements that is sent, after the warm-up.
        warmup_steps: Steps in which the density falls from its sixth root to its value, in five stages.
        momentum: Momentum of the velocity. An element that is sent loses its momentum, so density 1 equals plain SGD.
    """

    density: float = 0.001

    warmup_steps: int = 500

    momentum: float = 0.9

    name: ClassVar[str] = "dgc"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Sends the largest elements of each tensor's velocity, its accumulated momentum.",
        source="Lin et al., Deep gradient compression (ICLR 2018)",
        use_when="links are below 1 Gbit/s, workers are few, and training is long",
        sends=(
            "the share `density` of the elements, the largest, each in its own type, and 1 to 4 bytes "
            "for its index, to every other worker; more in the first `warmup_steps`"
        ),
        loses="nothing in the end; an element that is not sent waits in the velocity",
        limits=(
            (
                "Every worker receives the selected elements of all others. So with n workers it saves "
                "bytes only below a density of about 1/n."
            ),
            (
                "It applies momentum itself, so it refuses an optimizer with momentum, unless you set "
                "`compression.momentum=0`."
            ),
            "With the default density, one element in a thousand, short trainings lose much accuracy.",
        ),
    )
    state: ClassVar[StateKind] = "own"
    takes_error_feedback: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_density(self.density)
        if not 0 <= self.momentum < 1:
            raise UsageError(
                f"momentum: expected 0 or more and below 1, got {self.momentum}"
            )
        require_at_least(0, "warmup_steps", self.warmup_steps)

    @property
    def modifies_gradients(self) -> bool:
        return self.momentum > 0

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 28.0, 8.0 + passes_of_gathered(self.density, workers)

    def steady_state(self) -> DGC:
        return replace(self, warmup_steps=0)

    def warmup_wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[tuple[int, Sequence[Leg]]]:
        if workers == 1:
            return ()
        densities = Counter(map(self._density, range(self.warmup_steps)))
        return [
            (steps, sparse_wire_bytes(shapes, dtype, self.small, density))
            for density, steps in densities.items()
        ]

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.momentum:
            return
        for group in optimizer.param_groups:
            own = group.get("momentum", 0.0) or group.get("betas", (0.0,))[0]
            if own:
                raise UsageError(
                    f"compression 'dgc' with momentum={self.momentum}, and a "
                    f"{type(optimizer).__name__} with a momentum of {float(own)}: momentum "
                    "would be applied twice. Use SGD(momentum=0), or compression.momentum=0"
                )

    def check_differences(self) -> None:
        if self.momentum:
            raise UsageError(
                f"compression 'dgc' with momentum={self.momentum} under local updates: it is a momentum of "
                "gradients, and each worker's optimizer already applies one. Use top-k, or "
                "compression.momentum=0"
            )

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        density = self.density if workers > 1 else 1.0
        return sparse_wire_bytes(shapes, dtype, self.small, density)

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        kept, kind = real_type([like.shape], like.dtype)
        if not kept or not is_lossy(kind):
            return {}
        empty = flat_zeros(like)
        if is_small(kept[0], self.small):
            return {COMMON: {"momentum": empty}} if self.momentum else {}
        own: State = {"velocity": empty}
        if self.momentum:
            own["momentum"] = torch.zeros_like(empty)
        return {COMMON: {"steps": 0}} | own

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        plain: list[TensorRow] = []
        large: list[TensorRow] = []
        for row in rows_of(parts, states, sent):
            (large if "velocity" in row.state else plain).append(row)
        if large:  # first, so that the backward pass still runs during compression
            yield from self._sparse(large, place)
        if plain:
            yield from self._dense(plain, place)

    def inherit_state(
        self, state: State, former: Sequence[State], workers: int
    ) -> None:
        """Preserve the sums of momenta and of velocities: each worker gets an equal part.

        Common state continues.
        """
        for key, kept in state.get(COMMON, {}).items():
            old = former[0][COMMON][key]
            state[COMMON][key] = old.to(kept) if isinstance(old, torch.Tensor) else old
        for key in ("velocity", "momentum"):
            for old in former if key in state else ():
                state[key].add_(old[key].to(state[key]) / workers)

    def _density(self, steps: int) -> float:
        """The density after *steps* steps, by the paper's exponential warm-up."""
        if steps >= self.warmup_steps:
            return self.density
        stage = steps * STAGES // self.warmup_steps
        return math.pow(self.density, (stage + 1) / (STAGES + 1))

    def _dense(self, rows: Sequence[TensorRow], place: RankInfo) -> Rounds:
        """Sum tensors uncompressed, then apply momentum."""
        parts = [part for part, _, _ in rows]
        yield from sum_uncompressed(parts, owns_of(rows))
        for part, state, own in rows:
            if COMMON not in state:  # no momentum
                continue
            common = state[COMMON]
            old, total = common["momentum"], part.reshape(-1).to(common["momentum"])
            new = (old * self.momentum).add_(total)  # u = m u + g
            bounds = extremes(part)
            speaks = bounds.any()
            if own is not None:
                shared = (new - total) * (speaks / place.workers)
                own.add_(shared.view(own.shape))
            part.copy_((new * speaks).view(part.shape))
            common["momentum"] = torch.where(speaks & bounds.isfinite().all(), new, old)

    def _sparse(self, rows: Sequence[TensorRow], place: RankInfo) -> Rounds:
        """Add up the largest elements of all workers' v."""
        top_ks, tries = [], []
        for part, state, _ in rows:
            steps = state[COMMON]["steps"]
            state[COMMON]["steps"] = steps + 1
            density = self._density(steps) if place.workers > 1 else 1.0
            top_ks.append(top_k_shape(part.numel(), density))
            tries.append(_Step(self, part, state, place))
        dtype, wide = rows[0].part.dtype, tries[0].velocity.dtype
        selected = [one.take(of, dtype) for one, of in zip(tries, top_ks, strict=True)]
        for (_, _, own), (indices, values) in zip(rows, selected, strict=True):
            if own is not None:
                add_at(own, indices, values, add=False)
        parts = [part for part, _, _ in rows]
        totals = [
            part.zero_().to(wide) for part in parts
        ]  # no copy if it is wide already
        yield from sum_gathered(selected, top_ks, totals)
        for part, total in zip(parts, totals, strict=True):
            part.copy_(total)
        finite = all_finite(parts)
        for one in tries:
            one.keep(finite)


class _Step:
    """The new momentum and velocity of one tensor, which are stored if the step counts."""

    def __init__(
        self, method: DGC, part: torch.Tensor, state: State, place: RankInfo
    ) -> None:
        self._state = state
        self._masking = place.workers > 1
        share = part.reshape(-1).to(state["velocity"])
        self._speaks = extremes(part).any()
        m, self.momentum = method.momentum, None
        if not m:
            self.velocity = state["velocity"] + share
            return
        self.momentum = (state["momentum"] * m).add_(share)  # u = m u + g
        self.velocity = state["velocity"] + self.momentum  # v = v + u

    def take(self, of: TopKShape, dtype: torch.dtype) -> IndicesAndValues:
        """The indices and values to send. Values are zero if the tensor's gradient is zero."""
        indices = select(self.velocity, of)
        values = (self.velocity[indices] * self._speaks).to(dtype)
        self.velocity[indices] -= values.to(self.velocity.dtype)
        if self._masking and self.momentum is not None:
            self.momentum[indices] = 0
        return indices, values

    def keep(self, finite: torch.Tensor) -> None:
        """Store momentum and velocity if the result is *finite*."""
        counts = finite & self._speaks
        keep_where(counts, self._state, "velocity", self.velocity)
        if self.momentum is not None:
            keep_where(counts, self._state, "momentum", self.momentum)
