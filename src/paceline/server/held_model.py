"""The part of the model that a server holds: what fits it, and how pushes update it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from paceline.errors import UsageError
from paceline.interfaces import HeldPush, Work
from paceline.messages import Join, LoadState, Unit
from paceline.server.checks import (
    different_hyperparameters,
    different_units,
    total_weight,
)
from paceline.server.store import State, Store
from paceline.tensors import wire_bytes

NOTHING_HELD = "this server holds no parameters: it only reduces"
Entries = list[list[tuple[str, int | float]]]
"""As in `messages.OptimizerState`."""


class HeldModel:
    """A `Store`, once a worker has said what is trained, and the work that was done on it.

    Where workers disagree about a step it is updated no more: *fault* then says why.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self.buckets: list[int] = []
        """Those of which this server holds a part."""
        self.fault = ""
        self._counts = counts
        self._store: Store | None = None
        self._units: list[list[Unit]] = []
        self._work = Work()

    def hold(self, join: Join) -> None:
        """Make room for what a worker describes. Raises `UsageError` where that makes no
        sense."""
        self._store = Store(join)
        self._units = join.units
        self.buckets = [bucket for bucket, units in enumerate(join.units) if units]

    @property
    def store(self) -> Store:
        """Raises `UsageError` where there is none."""
        if self._store is None:
            raise UsageError(NOTHING_HELD)
        return self._store

    @property
    def is_held(self) -> bool:
        return self._store is not None

    @property
    def is_loaded(self) -> bool:
        return self._store is not None and all(self._store.loaded)

    def take_work(self) -> Work:
        """What was done since this was last called."""
        work, self._work = self._work, Work()
        return work

    def add_work(self, added: int = 0, stepped: int = 0) -> None:
        """Bytes that were added up, or stepped."""
        self._work = Work(self._work.added + added, self._work.stepped + stepped)

    # ---- what fits ----

    def check_held(self) -> None:
        """Raise `UsageError` unless there is a store."""
        if self._store is None:
            raise UsageError(NOTHING_HELD)

    def check_bucket(self, bucket: int) -> None:
        """Raise `UsageError` unless something of *bucket* is here."""
        self.check_held()
        if bucket not in self.buckets:
            raise UsageError(f"expected a bucket of {self.buckets}, got {bucket}")

    def numbers(self, bucket: int, units: Sequence[int] | None) -> Sequence[int]:
        """All units of a bucket, or these."""
        return range(len(self._units[bucket])) if units is None else units

    def fitting(
        self,
        what: str,
        bucket: int,
        payload: torch.Tensor | None,
        units: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The payload, which fits the bucket, or these units of it; else `UsageError`."""
        self.check_bucket(bucket)
        flat, elements = self.store.flats[bucket], self.store.elements(bucket, units)
        if payload is None and not elements:
            payload = flat.new_empty(0)
        if payload is None:
            raise UsageError(f"{what}: expected a payload, got none")
        if payload.numel() != elements or payload.dtype != flat.dtype:
            raise UsageError(
                f"bucket {bucket}: expected {elements} elements of {flat.dtype}, got "
                f"{payload.numel()} of {payload.dtype}"
            )
        return payload

    # ---- what is in it ----

    def unit_bytes(self, bucket: int) -> list[int]:
        units = range(len(self._units[bucket]))
        return [self.store.size(bucket, [unit]) for unit in units]

    def parameters(
        self, bucket: int, units: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A bucket, or some units of it, as they are; nobody writes them again."""
        payload, copied = self.store.snapshot(bucket, units)
        if copied:
            self.add_work(added=self.store.size(bucket, units))
        return payload

    def state(
        self, bucket: int, units: Sequence[int] | None
    ) -> tuple[Entries, torch.Tensor]:
        """The optimizer's, of a bucket or of some units of it: entries and payload."""
        entries, payload = self.store.state(bucket, units)
        self.add_work(added=wire_bytes(payload))
        return entries, payload

    def fitting_state(
        self, load: LoadState, payload: torch.Tensor | None
    ) -> list[State]:
        """What `state` gave, as the store takes it. Raises `UsageError` where it does not
        fit."""
        self.check_bucket(load.bucket)
        flat = self.store.flats[load.bucket]
        given = flat.new_empty(0) if payload is None else payload
        return self.store.fitting_state(load.bucket, load.entries, given)

    # ---- updates ----

    def apply(self, push: HeldPush) -> None:
        """Update by one push alone; see `Shard.apply`."""
        if self.fault:
            return
        self.store.apply(
            push.bucket,
            push.gradient,
            push.used,
            push.hyperparameters,
            push.weight,
            push.units,
        )
        self.add_work(stepped=self.store.size(push.bucket, push.units))
        self._counts["gradients applied"] += 1

    def apply_mean(self, bucket: int, pushes: Sequence[HeldPush]) -> None:
        """Update by the mean of pushes; see `Shard.apply_mean`. Where they do not fit each
        other, that is a fault."""
        if self.fault:
            return
        self.fault = different_hyperparameters(pushes) or different_units(pushes)
        if self.fault:
            return
        self._counts["gradients applied"] += len(pushes)
        whole = total_weight([push.weight for push in pushes])
        if not whole:
            self.store.updated(bucket)  # nobody had a sample
            return
        first = pushes[0]
        mean = _mean(pushes, whole)
        used = [any(flags) for flags in zip(*(p.used for p in pushes), strict=True)]
        self.store.apply(bucket, mean, used, first.hyperparameters, units=first.units)
        size = self.store.size(bucket, first.units)
        self.add_work(added=size * (len(pushes) - 1), stepped=size)


def _mean(pushes: Sequence[HeldPush], whole: float) -> torch.Tensor:
    """Made in the first push's gradient; *whole*: the sum of weights."""
    total = pushes[0].gradient
    for push in pushes:
        # As workers do that weigh before they send, so that the bits are the same.
        if push.weight != 1.0:
            push.gradient.mul_(push.weight)
        if push is not pushes[0]:
            total.add_(push.gradient)
    if whole != 1.0:
        total.mul_(1 / whole)
    return total
