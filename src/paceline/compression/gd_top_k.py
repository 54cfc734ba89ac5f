"""GDTopK, group-differentiated top-k: faster groups of workers send fewer elements.

Sun et al., "GSSP: eliminating stragglers through grouping synchronous for distributed deep
learning in heterogeneous cluster" (IEEE TCC 2022), after its published code, which says more than
the paper. Per tensor, with e this worker's residual and r the ratio of its speed class in this
epoch:

    e = e + g;  send top-r of e, and e = 0 there;  at the end of an epoch send all of e

The ratios fall from 0.35 in the first epoch to the class's own ratio from the fifth epoch on. The
fastest workers send least per push. They push more often, so all send about equally much per
second.

Differences from the published code:

- Clipping stays with the optimizer, as momentum does in both; the published code clips the residual.
- Exactly the largest elements are sent. The published code corrects a sampled threshold up to ten
  times, and then removes an excess by index, or sends less.
- Epochs are counted in steps, for each tensor: `epoch_steps` if it is set, else the sampler's steps
  (`distribute(sampler=...)`), else `EPOCH_STEPS`.
- An index is an integer of 1 to 4 bytes, not a float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from paceline.compression.base import (
    COMMON,
    Compressor,
    CompressorSummary,
    GatheredCompressor,
    Leg,
    RankInfo,
    Reader,
    Rounds,
    Shape,
    SkipsSmallTensors,
    State,
    StateKind,
    dense,
    elements,
    is_encoded,
    is_lossy,
    real_type,
    require_at_least,
    sum_uncompressed,
)
from paceline.compression.sparse import (
    TensorRow,
    TopKShape,
    add_at,
    decode_sparse,
    encode_sparse,
    owns_of,
    passes_of_gathered,
    rows_of,
    select_largest,
    sparse_bytes,
    sparse_wire_bytes,
    top_k_shape,
)
from paceline.compression.top_k import TopK
from paceline.errors import UsageError
from paceline.interfaces import SpeedClass

RATIOS: dict[SpeedClass, Sequence[float]] = {
    "fastest": (0.35, 0.25, 0.0625, 0.015625, 0.004),
    "middle": (0.35, 0.30, 0.09, 0.027, 0.0081),
    "slowest": (0.35, 0.35, 0.1225, 0.042875, 0.015),
}
"""By speed class: the ratios of the first epochs. The last one also holds for all later epochs."""

EPOCH_STEPS = 100
"""Steps of an epoch of unknown length: as many as a stage of DGC's default warm-up."""

_ALL = 1.0
_EVERY_RATIO = sorted({_ALL}.union(*RATIOS.values()))
"""All ratios. Each compressed tensor begins with the index of its ratio in this list.

So a server with groups of all classes can decompress it without knowing the worker.
"""


@dataclass(frozen=True, kw_only=True)
class GDTopK(SkipsSmallTensors, GatheredCompressor):
    """Sends the largest elements of each tensor, fewer in each of the first five epochs.

    The last step of an epoch sends all elements. Small tensors, those of one dimension, and integers
    are summed uncompressed.

    Methods that form groups of workers with a server each set `speed` to the class of a worker's
    group; states do not hold it. Delta replies have no epochs: for all classes they are `top-k` with
    the ratio that `speed` has from the fifth epoch on.

    Attributes:
        speed: Speed class of this worker's group, until a method with groups determines it. It must
            be equal on workers that average together.
        epoch_steps: Steps of an epoch; 0: those of the sampler that `distribute` is given, else 100.
    """

    speed: SpeedClass = "middle"

    epoch_steps: int = 0

    name: ClassVar[str] = "gd-top-k"
    summary: ClassVar[CompressorSummary] = CompressorSummary(
        purpose="Sends fewer elements in later epochs, and fewer from fast groups of workers.",
        source="Sun et al. (IEEE TCC 10(4), 2022), by its published code",
        use_when="each group of workers has its own server, and links between workers and servers are slow",
        sends=(
            "from the fifth epoch on 0.4 % (`speed=fastest`), 0.81 % (`middle`) or 1.5 % (`slowest`) "
            "of the elements, each in its own type, and 1 to 4 bytes for its index, to every other "
            "worker; 35, 30, 9 and 2.7 % (`middle`) in the first four epochs; all elements in the "
            "last step of an epoch"
        ),
        loses="all other elements, until error feedback has made them large, or the epoch ends",
        limits=(
            (
                "Every worker receives the selected elements of all others. So with n workers it saves "
                "bytes only below a density of about 1/n."
            ),
            "Trainings with Adam lose accuracy.",
            (
                "It needs the length of an epoch: `distribute(sampler=...)` or `epoch_steps`. Otherwise "
                "an epoch has 100 steps."
            ),
        ),
    )
    state: ClassVar[StateKind] = "common"
    error_feedback_by_default: ClassVar[bool] = True
    epochs_before: ClassVar[int] = 0
    """Number of epochs before the first average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, "epoch_steps", self.epoch_steps)

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 14.0, passes_of_gathered(self._ratios[-1], workers)

    def steady_state(self) -> GDTopK:
        return _SteadyGDTopK(**vars(self))

    def with_epoch(self, steps: int | None) -> GDTopK:
        if steps is None:
            return replace(self, epoch_steps=0)
        return self if self.epoch_steps else replace(self, epoch_steps=steps)

    def for_speed(self, speed: SpeedClass) -> GDTopK:
        return replace(self, speed=speed)

    def for_replies(self) -> Compressor:
        return TopK(density=self._ratios[-1], small=self.small)

    def wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        """The mean of an epoch's steps."""
        within = super().wire_bytes(shapes, dtype, workers)
        return self._over_epoch(shapes, dtype, within)

    def warmup_wire_bytes(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[tuple[int, Sequence[Leg]]]:
        epochs = [
            sparse_wire_bytes(shapes, dtype, self.small, ratio)
            for ratio in self._ratios[self.epochs_before : -1]
        ]
        return [
            (self._epoch, self._over_epoch(shapes, dtype, within)) for within in epochs
        ]

    def _over_epoch(
        self, shapes: Sequence[Shape], dtype: torch.dtype, within: Sequence[Leg]
    ) -> Sequence[Leg]:
        """The mean of an epoch's steps: those *within* it, and the last one."""
        kept, kind = real_type(shapes, dtype)
        if not is_lossy(kind):
            return dense(kept, kind)
        ends = 1 / self._epoch
        plain = ends * elements(kept) * kind.itemsize
        plain += (1 - ends) * sum(leg.size for leg in within if leg.kind == "sum")
        code = (1 - ends) * sum(leg.size for leg in within if leg.kind == "gather")
        legs = Leg("sum", plain), Leg("gather", code)
        return tuple(leg for leg in legs if leg.size)

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        kept, kind = real_type([like.shape], like.dtype)
        encoded = [s for s in kept if is_encoded(s, kind, self.small)]
        return {COMMON: {"steps": 0}} if encoded else {}

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        """As for gathered compressors, but tensors at the end of an epoch are summed uncompressed.

        Among many workers that sends much less than a gather.
        """
        ending: list[TensorRow] = []
        others: list[TensorRow] = []
        for row in rows_of(parts, states, sent):
            ends = row.state and self._ratio(row.state) == _ALL
            (ending if ends else others).append(row)
        for row in ending:
            row.state[COMMON]["steps"] += 1
        yield from sum_uncompressed([row.part for row in ending], owns_of(ending))
        yield from super().average(
            [row.part for row in others],
            [row.state for row in others],
            place,
            owns_of(others),
        )

    def inherit_state(
        self, state: State, former: Sequence[State], workers: int
    ) -> None:
        """Continue the epochs."""
        if state:
            state[COMMON]["steps"] = former[0][COMMON]["steps"]

    @property
    def _epoch(self) -> int:
        return self.epoch_steps or EPOCH_STEPS

    @property
    def _ratios(self) -> Sequence[float]:
        """The ratios of this class, epoch by epoch."""
        return RATIOS[self.speed]

    def _ratio(self, state: State) -> float:
        """The ratio of the next step."""
        steps = state[COMMON]["steps"]
        if (steps + 1) % self._epoch == 0:
            return _ALL
        epoch: int = self.epochs_before + steps // self._epoch
        return self._ratios[min(epoch, len(self._ratios) - 1)]

    def _cuts(
        self, shapes: Sequence[Shape], ratios: Sequence[float]
    ) -> list[TopKShape]:
        sizes = map(math.prod, shapes)
        return [
            top_k_shape(size, ratio) for size, ratio in zip(sizes, ratios, strict=True)
        ]

    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """Bytes in the middle of a late epoch."""
        ratios = [self._ratios[-1]] * len(shapes)
        return len(shapes) + sparse_bytes(self._cuts(shapes, ratios), dtype)

    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        ratios = [self._ratio(state) for state in states]
        top_ks = self._cuts([part.shape for part in parts], ratios)
        for state in states:
            state[COMMON]["steps"] += 1
        numbers = [_EVERY_RATIO.index(ratio) for ratio in ratios]
        head = torch.tensor(numbers, dtype=torch.uint8, device=parts[0].device)
        return torch.cat([head, encode_sparse(select_largest(parts, top_ks), top_ks)])

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
                f"gd-top-k: received ratio number {max(numbers)}, expected one below "
                f"{len(_EVERY_RATIO)}. Use the same version of paceline on all machines"
            )
        ratios = [_EVERY_RATIO[number] for number in numbers]
        top_ks = self._cuts([part.shape for part in parts], ratios)
        for part, (indices, values) in zip(
            parts, decode_sparse(reader.rest(), top_ks, dtype), strict=True
        ):
            add_at(part, indices, values, add)


@dataclass(frozen=True, kw_only=True)
class _SteadyGDTopK(GDTopK):
    """GDTopK after its warm-up."""

    epochs_before: ClassVar[int] = len(RATIOS["middle"]) - 1
