"""Which server holds which part of each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from paceline.interfaces.buckets import Bucket, wire_bytes
from paceline.interfaces.server_messages import Unit
from paceline.parameter_server.optim.pieces import cut_every, parameters_of
from paceline.transport.protocol import SMALL_BYTES


@dataclass(frozen=True)
class Part:
    """Elements [*start*, *stop*) of a bucket's buffer, on server number *shard*; *units*:
    the parts of parameters that lie in it, in order."""

    shard: int
    start: int
    stop: int
    units: tuple[Unit, ...]


def split(
    buckets: Sequence[Bucket],
    optimizer: torch.optim.Optimizer,
    shards: int,
    most_bytes: int | None = None,
) -> list[list[Part]]:
    """Per bucket its parts, so that all servers hold about as many bytes; no unit has more
    than *most_bytes*, where the optimizer can be applied to less.

    Cuts go where *optimizer* may be applied to both sides alone (see `paceline.parameter_server.optim.pieces`);
    a small bucket goes whole to the server that has least. The same on every rank.
    """
    numbers = {id(p): n for n, (p, _) in enumerate(parameters_of(optimizer))}
    groups = {id(p): group for p, group in parameters_of(optimizer)}
    held = [0] * shards
    plan = []
    for bucket in buckets:
        cuts = _cuts(bucket, optimizer, groups, held)
        parts = []
        for position, (start, stop) in enumerate(pairwise(cuts)):
            if start == stop:
                continue
            shard = held.index(min(held)) if len(cuts) == 2 else position
            held[shard] += bucket.bytes * (stop - start) // cuts[-1]
            units = _units(bucket, start, stop, numbers, groups)
            if most_bytes is not None:
                owners = {numbers[id(p)]: p for p in bucket.parameters}
                units = [
                    smaller
                    for unit in units
                    for smaller in _smaller(
                        unit, owners[unit.parameter], optimizer, most_bytes
                    )
                ]
            parts.append(Part(shard, start, stop, tuple(units)))
        plan.append(parts)
    return plan


def _cuts(
    bucket: Bucket,
    optimizer: torch.optim.Optimizer,
    groups: dict[int, int],
    held: Sequence[int],
) -> list[int]:
    """Where to cut a bucket: 0, the places between servers, its end. Whoever has *held*
    less until now gets more."""
    size, shards = bucket.buffer.numel(), len(held)
    if shards == 1 or bucket.bytes < SMALL_BYTES * shards:
        return [0, size]
    cuts, position = [0], 0
    share = sum(held) + bucket.bytes
    lacks = list(accumulate(max(0, share - shards * mine) for mine in held))
    wanted = [size * lack // lacks[-1] for lack in lacks[:-1]]
    for parameter in bucket.parameters:
        unit, _ = cut_every(optimizer, parameter, groups[id(parameter)])
        end = position + parameter.numel()
        while wanted and wanted[0] <= end:
            inside = round((wanted.pop(0) - position) / unit) * unit
            cuts.append(max(cuts[-1], min(end, position + inside)))
        position = end
    return [*cuts, size]


def _units(
    bucket: Bucket,
    start: int,
    stop: int,
    numbers: dict[int, int],
    groups: dict[int, int],
) -> list[Unit]:
    units, position = [], 0
    for parameter in bucket.parameters:
        end = position + parameter.numel()
        first, last = max(start, position), min(stop, end)
        if first < last:
            whole = last - first == parameter.numel()
            units.append(
                Unit(
                    parameter=numbers[id(parameter)],
                    start=first - position,
                    stop=last - position,
                    group=groups[id(parameter)],
                    shape=tuple(parameter.shape) if whole else None,
                )
            )
        position = end
    return units


def _smaller(
    unit: Unit,
    parameter: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    most_bytes: int,
) -> list[Unit]:
    """A unit in parts of at most so many bytes, as far as the optimizer allows."""
    step, _ = cut_every(optimizer, parameter, unit.group)
    step_bytes = step * max(1, wire_bytes(parameter) // parameter.numel())
    steps = -(-unit.elements // step)
    count = -(-steps // max(1, most_bytes // step_bytes))
    if count <= 1:
        return [unit]
    cuts = [min(unit.elements, step * (steps * i // count)) for i in range(count + 1)]
    return [
        Unit(
            parameter=unit.parameter,
            start=unit.start + first,
            stop=unit.start + last,
            group=unit.group,
        )
        for first, last in pairwise(cuts)
    ]
