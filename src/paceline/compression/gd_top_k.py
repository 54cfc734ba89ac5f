"""GDTopK, group-differentiated top-k: how much is sent depends on how fast a worker's group is.

Sun et al., "GSSP: eliminating stragglers through grouping synchronous for distributed deep
learning in heterogeneous cluster" (IEEE TCC 2022), from its published code, since the paper's
text says less. Per tensor, with e this worker's residual and r the ratio of its speed class in
this epoch:

    e = e + g;  send top-r of e, and e = 0 there;  at the end of an epoch send all of e

The ratios fall from 0.35 in the first epoch to what the class keeps from the fifth on. The
fastest workers send least: they push more often, and what they send in a second is then about
what the slowest do. `direction` turns that round.

Differs from the code in that:

- momentum stays with the optimizer, as there, and so does clipping: there the residual is clipped;
- exactly the largest are sent, of those above a sampled threshold; the code repairs a threshold up
  to ten times, and cuts what is too much of it by place, or sends less;
- epochs are counted in steps, each tensor's own: as many as the sampler's have that `distribute`
  was given, else `EPOCH_STEPS`, unless `epoch_steps` says how many;
- a place is a whole number of 1 to 4 bytes, and not a float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from paceline.compression.no_compression import summed
from paceline.compression.packing import (
    Reader,
    dense,
    elements,
    is_lossy,
    is_small,
    real_type,
)
from paceline.compression.per_worker import Alone
from paceline.compression.selection import Cut, cut, pick
from paceline.compression.sparse import (
    Row,
    add_at,
    coded,
    opened,
    passes_to_add_up,
    rows_of,
    size_of,
    traffic_of,
)
from paceline.compression.top_k import TopK
from paceline.errors import UsageError
from paceline.interfaces import (
    COMMON,
    Coding,
    Compressor,
    CompressorSummary,
    Leg,
    Place,
    Shape,
    SpeedClass,
    State,
    StateKind,
)

RATIOS: dict[SpeedClass, Sequence[float]] = {
    "fastest": (0.35, 0.25, 0.0625, 0.015625, 0.004),
    "middle": (0.35, 0.30, 0.09, 0.027, 0.0081),
    "slowest": (0.35, 0.35, 0.1225, 0.042875, 0.015),
}
"""By speed class: in the first epochs, and from the last of these on."""

EPOCH_STEPS = 100
"""Of an epoch, where nobody says how many it has: as in a stage of DGC's warm-up here."""

_ALL = 1.0
_EVERY_RATIO = sorted({_ALL}.union(*RATIOS.values()))
"""A tensor's code begins with its ratio's number in here: whoever decodes it, as a server that has
groups of all classes, need not know which worker it is from."""

_OTHER_WAY: dict[SpeedClass, SpeedClass] = {
    "fastest": "slowest",
    "middle": "middle",
    "slowest": "fastest",
}


@dataclass(frozen=True, kw_only=True)
class GDTopK(Alone):
    """The largest elements of each tensor, fewer in each of the first five epochs; all of them in
    the step that ends an epoch. Small tensors, those of one dimension, and whole numbers are
    summed as they are.

    Where a method finds groups of workers with a server each, `speed` follows the class of a
    worker's group: nothing of it is in the states. Answers that are differences have no epochs:
    they are `top-k` of the ratio that `speed` keeps from the fifth epoch on, for all classes.
    """

    speed: SpeedClass = "middle"
    """The class of this worker's group, until a method with groups has found it. Workers whose
    mean is formed have the same."""

    direction: Literal["slowest-most", "fastest-most"] = "slowest-most"
    """Which class sends most: the slowest, as published, or the fastest, so that the slowest need
    not wait for the network as well."""

    epoch_steps: int = 0
    """Steps in an epoch; 0: those of the sampler that `distribute` is given, else 100."""

    warm_up: bool = True
    """Whether the first epochs send more."""

    small: int = 1024
    """Tensors with fewer elements, and those of one dimension, are summed as they are; 0 for
    none."""

    name: ClassVar[str] = "gd-top-k"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        sends=(
            "from the fifth epoch on 0.4 % (`speed=fastest`), 0.81 % (`middle`) or 1.5"
            " % (`slowest`) of the elements in their own type, and 1 to 4 bytes for "
            "the place of each, to every other worker; 35, 30, 9 and 2.7 % (`middle`) "
            "in the first four; all of them in the last step of an epoch"
        ),
        loses="all other elements, until residuals have made them large, or the epoch ends",
    )
    unbiased: ClassVar[bool] = False
    state: ClassVar[StateKind] = "common"
    error_feedback_by_default: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.epoch_steps < 0:
            raise UsageError(f"epoch_steps: expected 0 or more, got {self.epoch_steps}")

    def passes(self, workers: int) -> tuple[float, float]:
        return 14.0, passes_to_add_up(self._ratios[-1], workers)

    def settled(self) -> GDTopK:
        return replace(self, warm_up=False)

    def in_epochs(self, steps: int | None) -> GDTopK:
        if steps is None:
            return replace(self, epoch_steps=0)
        return self if self.epoch_steps else replace(self, epoch_steps=steps)

    def for_speed(self, speed: SpeedClass) -> GDTopK:
        return replace(self, speed=speed)

    def for_replies(self) -> Compressor:
        return TopK(density=self._ratios[-1], small=self.small)

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        """Over an epoch, the mean of a step."""
        within = super().traffic(shapes, dtype, workers)
        return self._over_epoch(shapes, dtype, within)

    def warm_up_traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[tuple[int, Sequence[Leg]]]:
        if not self.warm_up:
            return ()
        epochs = [
            traffic_of(shapes, dtype, self.small, ratio) for ratio in self._ratios[:-1]
        ]
        return [
            (self._epoch, self._over_epoch(shapes, dtype, within)) for within in epochs
        ]

    def _over_epoch(
        self, shapes: Sequence[Shape], dtype: torch.dtype, within: Sequence[Leg]
    ) -> Sequence[Leg]:
        """Of an epoch's steps the mean: *within* it, and at its end."""
        kept, kind = real_type(shapes, dtype)
        if not is_lossy(kind):
            return dense(kept, kind)
        ends = 1 / self._epoch
        plain = ends * elements(kept) * kind.itemsize
        plain += (1 - ends) * sum(leg.size for leg in within if leg.kind == "sum")
        code = (1 - ends) * sum(leg.size for leg in within if leg.kind == "gather")
        legs = Leg("sum", plain), Leg("gather", code)
        return tuple(leg for leg in legs if leg.size)

    def init(self, like: torch.Tensor, name: str, rank: int) -> State:
        kept, kind = real_type([like.shape], like.dtype)
        if not kept or not is_lossy(kind) or is_small(kept[0], self.small):
            return {}
        return {COMMON: {"steps": 0}}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        """What ends its epoch is summed, and not gathered: much less, among many workers."""
        ending: list[Row] = []
        others: list[Row] = []
        for row in rows_of(parts, states, sent):
            ends = row.state and self._ratio(row.state) == _ALL
            (ending if ends else others).append(row)
        for row in ending:
            row.state[COMMON]["steps"] += 1
        yield from summed([row.part for row in ending], _owns(ending))
        yield from super().average(
            [row.part for row in others],
            [row.state for row in others],
            place,
            _owns(others),
        )

    def inherit(self, state: State, former: Sequence[State], workers: int) -> None:
        """Epochs go on."""
        if state:
            state[COMMON]["steps"] = former[0][COMMON]["steps"]

    @property
    def _epoch(self) -> int:
        return self.epoch_steps or EPOCH_STEPS

    @property
    def _ratios(self) -> Sequence[float]:
        """Of this class, epoch by epoch."""
        flips = self.direction == "fastest-most"
        return RATIOS[_OTHER_WAY[self.speed] if flips else self.speed]

    def _ratio(self, state: State) -> float:
        """Of the next step."""
        steps = state[COMMON]["steps"]
        if (steps + 1) % self._epoch == 0:
            return _ALL
        epoch = steps // self._epoch
        settled = not self.warm_up or epoch >= len(self._ratios)
        return self._ratios[-1 if settled else epoch]

    def _cuts(self, shapes: Sequence[Shape], ratios: Sequence[float]) -> list[Cut]:
        sizes = map(math.prod, shapes)
        return [cut(size, ratio) for size, ratio in zip(sizes, ratios, strict=True)]

    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """In the middle of a late epoch."""
        ratios = [self._ratios[-1]] * len(shapes)
        return len(shapes) + size_of(self._cuts(shapes, ratios), dtype)

    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        ratios = [self._ratio(state) for state in states]
        cuts = self._cuts([part.shape for part in parts], ratios)
        picked = []
        for part, state, of in zip(parts, states, cuts, strict=True):
            state[COMMON]["steps"] += 1
            values = part.reshape(-1)
            places = pick(values, of)
            picked.append((places, values.index_select(0, places)))
        numbers = [_EVERY_RATIO.index(ratio) for ratio in ratios]
        head = torch.tensor(numbers, dtype=torch.uint8, device=parts[0].device)
        return torch.cat([head, coded(picked, cuts)])

    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        reader = Reader(code)
        numbers = reader.take(torch.uint8, len(parts)).tolist()
        if max(numbers) >= len(_EVERY_RATIO):
            raise UsageError(
                f"a code of gd-top-k with ratio number {max(numbers)}: expected one below "
                f"{len(_EVERY_RATIO)}; take the same version everywhere"
            )
        ratios = [_EVERY_RATIO[number] for number in numbers]
        cuts = self._cuts([part.shape for part in parts], ratios)
        for part, (places, values) in zip(
            parts, opened(reader.rest(), cuts, dtype), strict=True
        ):
            add_at(part, places, values, add)


def _owns(rows: Sequence[Row]) -> list[torch.Tensor] | None:
    return [row.own for row in rows if row.own is not None] or None
