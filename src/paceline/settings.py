"""What a user chooses beside the method: the arguments of `distribute` that specs share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from paceline.errors import UsageError, unknown
from paceline.fusion import check_rule

ModuleBuffers = Literal["rank0", "mean", "local"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """*fusion*: the rule that groups gradients into buckets. *buffers*: what becomes of the
    model's buffers (BatchNorm's statistics) once a step: every rank takes rank 0's, or
    their mean, or keeps its own. *check_finite*: raise an error that names the parameter
    when a gradient is not finite (not together with a GradScaler, which expects such
    gradients and skips the step)."""

    fusion: str = "optimal"
    buffers: ModuleBuffers = "rank0"
    check_finite: bool = False

    def __post_init__(self) -> None:
        check_rule(self.fusion)
        if self.buffers not in get_args(ModuleBuffers):
            raise UsageError(
                unknown("value for buffers", str(self.buffers), get_args(ModuleBuffers))
            )

    def as_keys(self) -> dict[str, str]:
        """The keys of a full spec: the fusion rule, and what differs from the default."""
        keys = {"fusion": self.fusion}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                keys[field.name] = str(value).lower()
        return keys
