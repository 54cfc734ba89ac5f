"""What one training step of a model costs to compute, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Compute time of one forward and one backward pass.

    *names* are parameter tensors in registration order; *sizes* their gradients' bytes;
    *forward* and *backward* the seconds that each adds to its pass.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def __post_init__(self) -> None:
        for key in ("sizes", "forward", "backward"):
            values = getattr(self, key)
            if len(values) != len(self.names):
                raise UsageError(
                    f"{key}: expected {len(self.names)} values, one per tensor, "
                    f"got {len(values)}"
                )
            for name, value in zip(self.names, values, strict=True):
                if not (value >= 0 and math.isfinite(value)):
                    raise UsageError(
                        f"{key} of tensor {name!r}: expected zero or more, got {value}"
                    )

    @property
    def forward_seconds(self) -> float:
        """Seconds of the whole forward pass."""
        return math.fsum(self.forward)

    @classmethod
    def spread(
        cls,
        names: Sequence[str],
        sizes: Sequence[int],
        forward_seconds: float,
        backward_seconds: float,
    ) -> Workload:
        """Spread two given totals over the tensors in proportion to their bytes.

        Stands in where nothing was measured: real layers cost by operations, not bytes.
        """
        total = sum(sizes)
        return cls(
            names=tuple(names),
            sizes=tuple(sizes),
            forward=tuple(forward_seconds * s / total for s in sizes),
            backward=tuple(backward_seconds * s / total for s in sizes),
        )
