"""One server's part of the parameters, its optimizer, and untrained tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Hyperparameters, Piece, Work
from paceline.interfaces.buckets import wire_bytes
from paceline.interfaces.server_messages import DTYPES, Join, MixBuffers
from paceline.optim.partitioned import (
    ELEMENTWISE,
    IMPLEMENTATION,
    WHOLE_TENSOR,
    PartitionedOptimizer,
    whole_pieces,
)

OPTIMIZERS = {kind.__name__: kind for kind in (*ELEMENTWISE, *WHOLE_TENSOR)}
"""The optimizers that a server can run, by name."""
State = dict[str, torch.Tensor]
"""An optimizer's state of one unit, by name."""
MOST_UNTRAINED_BYTES = 16 << 20
"""Largest part of frozen parameters and buffers in one message."""
MOMENTUM = ("momentum_buffer", "exp_avg")
"""Names of running means of gradients in torch's optimizers."""


class Store:
    """Buckets of parameters, each flat, updated by torch's own optimizer.

    Raises `UsageError` for an invalid description, with nothing stored.
    """

    def __init__(self, join: Join) -> None:
        if join.optimizer not in OPTIMIZERS:
            raise UsageError(
                f"optimizer {join.optimizer!r} cannot run on a server, only one of "
                f"{', '.join(sorted(OPTIMIZERS))}: use a method whose worker updates, "
                "such as bsp"
            )
        _check(join)
        self.flats = [
            torch.zeros(sum(u.elements for u in units), dtype=DTYPES[dtype])
            for units, dtype in zip(join.units, join.dtypes, strict=True)
        ]
        self.buckets = [bucket for bucket, units in enumerate(join.units) if units]
        """Buckets of which this server holds a part."""
        self.loaded = [not units for units in join.units]
        self.versions = [0] * len(self.flats)
        self.bytes = [wire_bytes(flat) for flat in self.flats]
        """Bytes of each bucket on the network."""
        self.applied: dict[int, dict[int, int]] = {}
        """By worker and bucket: the step before which all of its gradients are applied, or will
        never arrive."""
        self._news: dict[int, dict[int, int]] = {}
        """The same by bucket and worker, for gradients that workers have sent here since
        `take_news`."""
        self._snapshots: list[dict[tuple[int, ...] | None, torch.Tensor]] = [
            {} for _ in self.flats
        ]
        self._work = Work()
        self._units = join.units
        self._sizes = [[unit.elements for unit in units] for units in join.units]
        self._bounds = [_bounds(sizes) for sizes in self._sizes]
        self._optimizer, self._pieces = self._build(join)
        self._updater = PartitionedOptimizer(
            self._optimizer, whole_pieces(self._optimizer)
        )

    def _build(self, join: Join) -> tuple[torch.optim.Optimizer, list[list[Piece]]]:
        groups: list[dict[str, Any]] = [
            {"params": [], **h} for h in join.hyperparameters
        ]
        places: dict[tuple[int, int], tuple[int, int]] = {}
        for bucket, units in enumerate(join.units):
            for number, unit in enumerate(units):
                part = self._part(bucket, number)
                params = groups[unit.group]["params"]
                places[bucket, number] = unit.group, len(params)
                params.append(torch.nn.Parameter(part))
        try:
            optimizer = OPTIMIZERS[join.optimizer](groups)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{join.optimizer} cannot be made: {error}") from None
        # Pieces are numbered in the order of the parameters in groups.
        firsts = [0]
        for group in groups:
            firsts.append(firsts[-1] + len(group["params"]))
        pieces = [
            [
                Piece(firsts[group] + position, 0, unit.elements)
                for number, unit in enumerate(units)
                for group, position in [places[bucket, number]]
            ]
            for bucket, units in enumerate(join.units)
        ]
        return optimizer, pieces

    def _part(self, bucket: int, number: int) -> torch.Tensor:
        unit, (start, stop) = self._units[bucket][number], self._bounds[bucket][number]
        part = self.flats[bucket][start:stop]
        return part if unit.shape is None else part.view(unit.shape)

    def load(self, bucket: int, parameters: torch.Tensor) -> None:
        """Copy a bucket's loaded parameters."""
        self.flats[bucket].copy_(parameters)
        self.bytes[bucket] = wire_bytes(parameters)
        self.loaded[bucket] = True
        self._snapshots[bucket].clear()

    def apply(
        self,
        bucket: int,
        gradient: torch.Tensor,
        used: Sequence[bool],
        hyperparameters: Hyperparameters,
        factor: float = 1.0,
        units: Sequence[int] | None = None,
    ) -> None:
        """Do one step of the optimizer, on all units or on *units*.

        The gradients of *units* follow each other in *gradient*. *factor* multiplies the learning
        rate.
        """
        self.add_work(stepped=self.size(bucket, units))
        if factor != 1.0:
            hyperparameters = [{**h, "lr": h["lr"] * factor} for h in hyperparameters]
        pieces, gradients = [], []
        start = 0
        for position, number in enumerate(self.numbers(bucket, units)):
            stop = start + self._sizes[bucket][number]
            if used[position]:
                pieces.append(self._pieces[bucket][number])
                gradients.append(gradient[start:stop])
            start = stop
        self._updater.apply(pieces, gradients, hyperparameters)
        self.updated(bucket)

    def updated(self, bucket: int) -> None:
        """Increment the version of *bucket*."""
        self.versions[bucket] += 1
        self._snapshots[bucket].clear()

    def zero_momentum(self, bucket: int) -> None:
        """Zero the momentum of a bucket, see `Shard.zero_momentum`."""
        for state in self._updater.state(self._pieces[bucket]):
            for name in MOMENTUM:
                # SGD without momentum has None here.
                if isinstance(state.get(name), torch.Tensor):
                    state[name].zero_()

    def parameters(
        self, bucket: int, units: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the present parameters of a bucket, or of some units of it.

        The tensor stays unchanged: all requests before the next update share one copy.
        """
        key = None if units is None else tuple(units)
        kept = self._snapshots[bucket].get(key)
        if kept is not None:
            return kept
        self.add_work(added=self.size(bucket, units))
        parts = self.values(bucket, key) if key else []
        if key is None:
            kept = self.flats[bucket].clone()
        else:
            kept = torch.cat(parts) if parts else self.flats[bucket].new_empty(0)
        self._snapshots[bucket][key] = kept
        return kept

    def values(self, bucket: int, units: Sequence[int]) -> list[torch.Tensor]:
        """Return some units' parameters, each flat."""
        bounds = self._bounds[bucket]
        return [self.flats[bucket][slice(*bounds[unit])] for unit in units]

    def elements(self, bucket: int, units: Sequence[int] | None) -> int:
        """Return the number of elements of a bucket, or of some units of it.

        Raises `UsageError` for units that do not exist.
        """
        if units is None:
            return self.flats[bucket].numel()
        count = len(self._units[bucket])
        if list(units) != sorted(set(units)) or not all(0 <= u < count for u in units):
            raise UsageError(
                f"bucket {bucket}: expected units of its {count}, in order, got {units}"
            )
        return sum(self._sizes[bucket][unit] for unit in units)

    def size(self, bucket: int, units: Sequence[int] | None) -> int:
        """Return the bytes on the network of a bucket, or of some units of it."""
        if units is None:
            return self.bytes[bucket]
        elements = self.elements(bucket, units)
        return self.bytes[bucket] * elements // max(1, self.flats[bucket].numel())

    def unit_bytes(self, bucket: int) -> list[int]:
        """Return the bytes on the network of each unit of a bucket."""
        return [self.size(bucket, [unit]) for unit in self.numbers(bucket, None)]

    def units_of(
        self, bucket: int, flat: torch.Tensor
    ) -> list[tuple[int, torch.Tensor]]:
        """Return the units of a flat tensor, see `interfaces.Shard.units_of`."""
        bounds = zip(self._units[bucket], self._bounds[bucket], strict=True)
        return [(unit.group, flat[start:stop]) for unit, (start, stop) in bounds]

    def numbers(self, bucket: int, units: Sequence[int] | None) -> Sequence[int]:
        """Return the numbers of all units of a bucket, or *units*."""
        return range(len(self._pieces[bucket])) if units is None else units

    # ---- applied gradients ----

    def has_applied(self, worker: int, step: int, bucket: int) -> bool:
        """Return whether a worker's gradient is in the parameters."""
        return step < self.applied.get(worker, {}).get(bucket, 0)

    def next_step(self, worker: int) -> int:
        """Return the step before which a worker's gradients of all buckets are applied."""
        mine = self.applied.get(worker, {})
        return min((mine.get(bucket, 0) for bucket in self.buckets), default=0)

    def note_applied(self, worker: int, step: int, bucket: int) -> None:
        """Note that a worker's gradient, which it sent here, is applied."""
        mine = self.applied.setdefault(worker, dict.fromkeys(self.buckets, 0))
        for other in self.buckets:
            # Missing gradients of earlier steps will not arrive any more.
            mine[other] = max(mine[other], step)
        mine[bucket] = max(mine[bucket], step + 1)
        self._news.setdefault(bucket, {})[worker] = mine[bucket]

    def note_applied_elsewhere(self, bucket: int, steps: Mapping[int, int]) -> None:
        """Note gradients in another server's update.

        *steps* has for each worker the step before which its gradients are in that update.
        """
        for worker, step in steps.items():
            mine = self.applied.setdefault(worker, dict.fromkeys(self.buckets, 0))
            mine[bucket] = max(mine[bucket], step)

    def set_applied(self, applied: Mapping[int, Mapping[int, int]]) -> None:
        """Set the applied gradients, after parameters were restored.

        The parameters come from a snapshot or another server.
        """
        self.applied = {
            worker: {bucket: mine[bucket] for bucket in self.buckets}
            for worker, mine in applied.items()
        }
        self._news = {}

    def take_news(self, bucket: int) -> dict[int, int]:
        """Return the applied gradients of a bucket that workers have sent here since the last call.

        The form is that of `note_applied_elsewhere`.
        """
        return self._news.pop(bucket, {})

    # ---- validation ----

    def check_bucket(self, bucket: int) -> None:
        """Raise `UsageError` unless this server holds a part of *bucket*."""
        if bucket not in self.buckets:
            raise UsageError(f"expected a bucket of {self.buckets}, got {bucket}")

    def fitting(
        self,
        what: str,
        bucket: int,
        payload: torch.Tensor | None,
        units: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the payload.

        Raises `UsageError` unless it fits the bucket, or these units of it.
        """
        self.check_bucket(bucket)
        flat, elements = self.flats[bucket], self.elements(bucket, units)
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

    # ---- cost ----

    def add_work(self, added: int = 0, stepped: int = 0, coded: float = 0) -> None:
        """Count bytes that were summed or copied, stepped, and read or written for compression."""
        work = self._work
        self._work = Work(
            work.added + added, work.stepped + stepped, work.coded + coded
        )

    def take_work(self) -> Work:
        """Return the work since the last call."""
        work, self._work = self._work, Work()
        return work

    # ---- snapshots ----

    def saved(self) -> dict[str, Any]:
        """Return copies of parameters, versions and optimizer state, and the applied gradients."""
        return {
            "applied": {worker: dict(mine) for worker, mine in self.applied.items()},
            "flats": [flat.clone() for flat in self.flats],
            "versions": list(self.versions),
            "states": [
                [
                    {name: _copied(value) for name, value in state.items()}
                    for state in self._updater.state(pieces)
                ]
                for pieces in self._pieces
            ],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the result of `saved`, of a store of the same description."""
        self.set_applied(saved["applied"])
        for bucket, flat in enumerate(self.flats):
            if flat.numel():
                self.load(bucket, saved["flats"][bucket])
            self.versions[bucket] = saved["versions"][bucket]
            lives = self._updater.state(self._pieces[bucket])
            for live, state in zip(lives, saved["states"][bucket], strict=True):
                live.clear()
                live.update({name: _copied(value) for name, value in state.items()})

    def check_hyperparameters(self, given: Hyperparameters) -> None:
        """Raise `UsageError` unless the optimizer can step with these."""
        if len(given) != len(self._optimizer.param_groups):
            raise UsageError(
                f"expected the hyperparameters of {len(self._optimizer.param_groups)} "
                f"parameter groups, got {len(given)}"
            )
        for theirs, group in zip(given, self._optimizer.param_groups, strict=True):
            missing = group.keys() - theirs.keys() - {"params"} - IMPLEMENTATION
            if missing:
                raise UsageError(
                    f"hyperparameters without {', '.join(sorted(missing))}"
                )

    # ---- the optimizer's state ----

    def state(
        self, bucket: int, units: Sequence[int] | None = None
    ) -> tuple[list[list[tuple[str, int | float]]], torch.Tensor]:
        """Return each unit's entries of `messages.OptimizerState`, and the payload.

        *units*: of these units only. Raises `UsageError` for state that the message cannot contain.
        """
        flat = self.flats[bucket]
        entries: list[list[tuple[str, int | float]]] = []
        parts: list[torch.Tensor] = []
        offset = 0
        numbers = self.numbers(bucket, units)
        pieces = [self._pieces[bucket][number] for number in numbers]
        for number, state in zip(numbers, self._updater.state(pieces), strict=True):
            like = self._part(bucket, number)
            mine: list[tuple[str, int | float]] = []
            for name, value in state.items():
                if is_per_element(value, like):
                    mine.append((name, offset))
                    parts.append(value.detach().reshape(-1))
                    offset += value.numel()
                elif isinstance(value, torch.Tensor) and value.numel() != 1:
                    raise UsageError(
                        f"{type(self._optimizer).__name__}'s state {name!r} cannot leave "
                        f"the server: it has shape {tuple(value.shape)} for a part of "
                        f"shape {tuple(like.shape)}"
                    )
                elif value is not None:
                    mine.append((name, float(value)))
            entries.append(mine)
        payload = torch.cat(parts) if parts else flat.new_empty(0)
        self.add_work(added=wire_bytes(payload))
        return entries, payload

    def fitting_state(
        self,
        bucket: int,
        entries: list[list[tuple[str, int | float]]],
        payload: torch.Tensor | None,
    ) -> list[State]:
        """Return the result of `state`, per unit, for `put_state`.

        Raises `UsageError` if it does not fit.
        """
        self.check_bucket(bucket)
        payload = self.flats[bucket].new_empty(0) if payload is None else payload
        if payload.dtype != self.flats[bucket].dtype:
            raise UsageError(
                f"bucket {bucket}: expected a state of {self.flats[bucket].dtype}, got "
                f"{payload.dtype}"
            )
        if len(entries) != len(self._pieces[bucket]):
            raise UsageError(f"bucket {bucket}: the state of {len(entries)} units")
        loaded: list[State] = []
        for number, mine in enumerate(entries):
            part, state = self._part(bucket, number), State()
            loaded.append(state)
            for name, value in mine:
                if isinstance(value, int):
                    if not 0 <= value <= payload.numel() - part.numel():
                        raise UsageError(
                            f"bucket {bucket}: {name} is not in the payload"
                        )
                    flat = payload[value : value + part.numel()]
                    state[name] = flat.clone().view(part.shape)
                else:
                    state[name] = torch.tensor(value, dtype=torch.float32)
        return loaded

    def put_state(self, bucket: int, states: Sequence[State]) -> None:
        """Restore the result of `fitting_state`."""
        lives = self._updater.state(self._pieces[bucket])
        for live, state in zip(lives, states, strict=True):
            live.clear()
            live.update(state)

    def catch_up(self, step: int) -> None:
        """Count as if at least *step* steps had been done, because other parameters were loaded.

        They contain no present gradient, so a worker may send one again whose step it has not
        ended.
        """
        self.set_applied(
            {
                worker: dict.fromkeys(self.buckets, self.next_step(worker))
                for worker in self.applied
            }
        )
        self.versions = [max(version, step) for version in self.versions]


class UntrainedTensors:
    """The untrained tensors of a model: frozen parameters and buffers.

    A server does not know their meaning: it stores the bytes of the first worker, or of the leader
    of a load, and sends them to workers that join. Buffers change in training (BatchNorm's
    statistics). The server mixes them as they arrive, and sends them to workers that join as well.
    """

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.buffers: torch.Tensor | None = None
        """In double precision; None before the first worker has sent its buffers."""

    def load(self, parts: Sequence[torch.Tensor]) -> None:
        """Replace the tensors by a worker's parts; training continues with that worker's buffers."""
        self.bytes = torch.cat(list(parts))
        self.buffers = None

    def part(self, start: int, most: int) -> torch.Tensor:
        """Return at most *most* bytes from *start* on.

        Raises `UsageError` for a start out of range.
        """
        if not 0 <= start <= self.bytes.numel() or most < 0:
            raise UsageError(
                f"pull-untrained: expected a start of at most {self.bytes.numel()}, got "
                f"{start} and {most} bytes"
            )
        return self.bytes[start : start + min(most, MOST_UNTRAINED_BYTES)]

    def mix(self, mix: MixBuffers, payload: torch.Tensor | None) -> torch.Tensor:
        """Mix a worker's buffers in; return the result."""
        self.buffers = _mixed(self.buffers, mix, payload)
        return self.buffers

    # ---- for a snapshot ----

    def saved(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors, which are never written again, and need no copy."""
        return {"bytes": self.bytes, "buffers": self.buffers}

    def restore(self, saved: dict[str, torch.Tensor | None]) -> None:
        """Restore the result of `saved`."""
        kept = saved["bytes"]
        assert kept is not None
        self.bytes, self.buffers = kept, saved["buffers"]


def is_per_element(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether an entry of the optimizer's state has a value for each element."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.dtype == parameter.dtype
    )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    stops = [0]
    for size in sizes:
        stops.append(stops[-1] + size)
    return list(pairwise(stops))


def _check(join: Join) -> None:
    if len(join.units) != len(join.dtypes):
        raise UsageError(f"{len(join.units)} buckets with {len(join.dtypes)} dtypes")
    for dtype in join.dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"expected a dtype of {', '.join(DTYPES)}, got {dtype!r}")
        if not (DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex):
            raise UsageError(f"expected parameters that have gradients, got {dtype}")
    for unit in (unit for units in join.units for unit in units):
        numel = torch.Size(unit.shape or ()).numel()
        if (
            not 0 <= unit.start < unit.stop
            or not 0 <= unit.group < len(join.hyperparameters)
            or (unit.shape is not None and numel != unit.elements)
        ):
            raise UsageError(f"{unit}: not a part of a parameter")


def _mixed(
    kept: torch.Tensor | None, mix: MixBuffers, payload: torch.Tensor | None
) -> torch.Tensor:
    """Return a worker's buffers mixed into the *kept* ones; the worker's, if none were kept.

    Numbers that are equal in both stay so to the bit, infinities too. Raises `UsageError` for a
    payload that does not fit.
    """
    if payload is None or payload.dtype != torch.float64:
        raise UsageError("mix-buffers: expected a payload in double precision")
    if not 0 <= mix.floats <= payload.numel() or not 0 <= mix.weight <= 1:
        raise UsageError(f"mix-buffers: {mix.floats} floats, weight {mix.weight}")
    if kept is None:
        return payload
    if kept.numel() != payload.numel():
        raise UsageError(
            f"mix-buffers: expected {kept.numel()} values, got {payload.numel()}"
        )
    cut = mix.floats
    mine, theirs = kept[:cut], payload[:cut]
    # A reply in flight may share the kept tensor, so it must not be written to.
    mixed = torch.where(mine == theirs, mine, mine.lerp(theirs, mix.weight))
    return torch.cat([mixed, torch.maximum(kept[cut:], payload[cut:])])
