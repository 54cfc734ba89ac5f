"""Assigns parts of a model to servers, as one worker sees them.

Either servers share a model, each with a *shard* for all workers. Or they are replicas: one shard,
the whole model, which each server holds for its group of workers. Replicas exchange their updates.
All workers wait for each other at the first replica, and a load there reaches the other replicas
before any worker gets a reply (see `groups.server`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Endpoint, Piece, UnitPlace
from paceline.interfaces.buckets import Bucket, stand_alike, wire_bytes
from paceline.interfaces.server_messages import Hyperparameters, Parameters, Unit
from paceline.optim.partitioned import IMPLEMENTATION, cut_every, parameters_of
from paceline.torch_internals import version_of
from paceline.transport.protocol import SMALL_BYTES

NOT_SENT = {"params", "param_names", *IMPLEMENTATION}
"""Entries of ``param_groups`` that a server has already, or decides itself."""


@dataclass(frozen=True, eq=False)
class BucketPart:
    """One shard's part of one bucket: elements [*start*, *stop*) of its buffer.

    Attributes:
        units: The parts of parameters in it, in order. They are the bucket's from number *first*
            on.
        slots: By unit, the index of its parameter in the bucket.
    """

    bucket: int
    shard: int
    start: int
    stop: int
    first: int
    units: tuple[Unit, ...]
    slots: tuple[int, ...]

    def local_units(self, numbers: Collection[int] | None) -> list[int]:
        """Return the local numbers, from 0, of the bucket's units in this part.

        *numbers* selects units of the bucket; None: all of them.
        """
        every = range(len(self.units))
        if numbers is None:
            return list(every)
        return [unit for unit in every if self.first + unit in numbers]


class Partition:
    """Buckets, partitioned over the servers behind *endpoints*, as one worker sees them.

    Args:
        buckets: The model's buckets.
        optimizer: The user's optimizer.
        endpoints: This worker's connections to the servers.
        most_bytes: The most bytes of a unit, if the optimizer can be applied to smaller units.
        on_host: Whether replies arrive in memory of the processor. In any case they have their own
            memory, and are then copied into the model.
        group: The number of this worker's server, if servers are replicas; None: they share the
            model.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizer: torch.optim.Optimizer,
        endpoints: Sequence[Endpoint],
        most_bytes: int | None,
        on_host: bool = False,
        group: int | None = None,
    ) -> None:
        self.buckets = list(buckets)
        self.optimizer = optimizer
        self.endpoints = endpoints
        self.replicated = group is not None
        shards = 1 if self.replicated else len(endpoints)
        self.parts = split_buckets(buckets, optimizer, shards, most_bytes)
        used = sorted({part.shard for parts in self.parts for part in parts})
        self.untrained_shard = used[0]
        """The shard whose servers also hold the untrained tensors."""
        self.home = list(range(shards)) if group is None else [group]
        """By shard: the server that this worker pushes to and pulls from."""
        self.servers: Sequence[int] = range(len(endpoints)) if self.replicated else used
        """Servers that hold a part of the model, in order."""
        self.barriers: Sequence[int] = (0,) if self.replicated else used
        """Servers at which all workers wait for each other, in order."""
        numbers = {id(p): n for n, (p, _) in enumerate(parameters_of(optimizer))}
        self.owners: dict[int, torch.nn.Parameter] = {
            numbers[id(parameter)]: parameter
            for bucket in buckets
            for parameter in bucket.parameters
        }
        """The parameters, by their numbers in units."""
        self.units = [
            [
                UnitPlace(Piece(unit.parameter, unit.start, unit.stop), start, stop)
                for part in parts
                for unit, start, stop in _bounds(part)
            ]
            for parts in self.parts
        ]
        device = torch.device("cpu") if on_host else None
        self.received = [
            stand_alike(torch.empty_like(b.buffer, device=device), b.buffer)
            for b in buckets
        ]
        """By bucket: buffers for replies."""
        self._replies: dict[BucketPart, Parameters] = {}
        """Each part's last reply."""
        self._sequences: dict[BucketPart, int] = {}
        """Number of the last reply for each part: see `Parameters.sequence`."""
        self._versions: list[list[int]] = []
        """By bucket: versions of the parameters when replies were last copied into the model."""

    # ---- assignment to servers ----

    @property
    def homes(self) -> Sequence[int]:
        """The servers that this worker pushes to and pulls from, in order."""
        return self.home if self.replicated else self.servers

    def endpoint(self, part: BucketPart) -> Endpoint:
        """Return this worker's endpoint of the server that it pushes a part to."""
        return self.endpoints[self.home[part.shard]]

    def holders(self, shard: int) -> Sequence[int]:
        """Return the servers of a shard: until training begins, each is loaded separately."""
        return self.servers if self.replicated else (shard,)

    def loaded_through(self, server: int) -> Collection[int]:
        """Return the servers whose parameters are new after a load at the barrier of *server*."""
        return self.servers if self.replicated else (server,)

    def pulled(self, servers: Collection[int] | None = None) -> list[BucketPart]:
        """Return the parts that this worker pulls from *servers*, or from all, bucket by bucket."""
        return [
            part
            for parts in self.parts
            for part in parts
            if servers is None or self.home[part.shard] in servers
        ]

    def held(self, servers: Collection[int]) -> list[tuple[int, BucketPart]]:
        """Return the parts on these servers, each with its server's number, bucket by bucket."""
        return [
            (server, part)
            for part in self.pulled()
            for server in self.holders(part.shard)
            if server in servers
        ]

    def units_on(self, server: int) -> list[list[Unit]]:
        """Return one server's units of each bucket."""
        return [
            [
                unit
                for part in parts
                if server in self.holders(part.shard)
                for unit in part.units
            ]
            for parts in self.parts
        ]

    def places(self, part: BucketPart, units: Sequence[int]) -> list[UnitPlace]:
        """Return the places of some units of a part in its bucket's buffer."""
        return [self.units[part.bucket][part.first + unit] for unit in units]

    def part_of(self, bucket: int, unit: int) -> BucketPart:
        """Return the part that contains a bucket's unit."""
        return max(
            (part for part in self.parts[bucket] if part.first <= unit),
            key=lambda part: part.first,
        )

    def move(self, group: int) -> None:
        """Move this worker to another group; it must then pull from that group's server.

        Replies of the former server are dropped, since they mean nothing there. Raises `UsageError`
        without groups, or for a group that does not exist.
        """
        if not self.replicated:
            raise UsageError(
                "move: expected a method with one server for each group, and this method has none"
            )
        if group not in self.servers:
            raise UsageError(
                f"group {group}: expected the number of a server, 0 to "
                f"{len(self.servers) - 1}"
            )
        self.home = [group]
        self._replies.clear()
        self._sequences.clear()

    # ---- replies ----

    def received_part(self, part: BucketPart) -> torch.Tensor:
        """Return the memory in which a part's parameters arrive."""
        return cut(self.received[part.bucket], part.start, part.stop)

    def note_reply(self, part: BucketPart, reply: Parameters) -> None:
        """Store a server's reply to a main push, or a pull, with a part's parameters."""
        self._replies[part] = reply

    def note_sequence(self, part: BucketPart, sequence: int) -> None:
        """Note the *sequence* number of this worker's parameters of a part."""
        self._sequences[part] = sequence

    def sequence(self, part: BucketPart) -> int:
        """Return the sequence number of a part, see `Parameters.sequence`."""
        return self._sequences.get(part, 0)

    def notice(self, part: BucketPart) -> bytes:
        """Return the notice of the server's discipline in a part's last reply."""
        reply = self._replies.get(part)
        return b"" if reply is None else reply.notice

    def updates_by_others(self, part: BucketPart, reply: Parameters) -> int:
        """Return the number of other workers' updates since this worker's last reply.

        *reply* answers a push, which was an update, too. Call this before `note_reply`.
        """
        before = self._replies.get(part)
        return 0 if before is None else max(0, reply.version - before.version - 1)

    # ---- the optimizer ----

    def hyperparameters(self) -> Hyperparameters:
        """Return the present hyperparameters of every parameter group."""
        return [
            {
                name: _plain(name, value)
                for name, value in group.items()
                if name not in NOT_SENT
            }
            for group in self.optimizer.param_groups
        ]

    # ---- the model ----

    def write_bucket(self, number: int) -> None:
        """Copy the received parameters of a bucket into the model."""
        bucket = self.buckets[number]
        sizes = [parameter.numel() for parameter in bucket.parameters]
        with torch.no_grad():
            for parameter, part in zip(
                bucket.parameters, self.received[number].split(sizes), strict=True
            ):
                parameter.copy_(part.view(parameter.shape))

    def write_model(self) -> None:
        """Copy all received parameters into the model."""
        for number in range(len(self.buckets)):
            self.write_bucket(number)
        self.remember_versions()

    def read_model(self) -> None:
        """Copy the parameters that the script has written into the memory for replies.

        Parameters that it has not written may be older than the received ones.
        """
        now = self._present_versions()
        for number, bucket in enumerate(self.buckets):
            views = self.received[number].split([p.numel() for p in bucket.parameters])
            for slot, (view, parameter) in enumerate(
                zip(views, bucket.parameters, strict=True)
            ):
                before = self._versions[number] if self._versions else None
                if before is None or before[slot] != now[number][slot]:
                    view.copy_(parameter.detach().reshape(-1))

    @property
    def was_written(self) -> bool:
        """Whether the model has ever had the servers' parameters."""
        return bool(self._versions)

    def remember_versions(self) -> None:
        """Remember that the script has not written the model's present parameters."""
        self._versions = self._present_versions()

    def check_unwritten(self, method: str) -> None:
        """Raise `UsageError` if the script has written into a parameter since the last step.

        The next reply would overwrite it, and no other worker would see it.
        """
        if not self._versions:
            return
        for bucket, before in zip(self.buckets, self._versions, strict=True):
            for name, parameter, version in zip(
                bucket.names, bucket.parameters, before, strict=True
            ):
                if version_of(parameter) != version:
                    raise UsageError(
                        f"parameter {name!r} was written to since step(): under {method} "
                        "servers hold the parameters, and what is written here reaches "
                        "nobody. Evaluate other weights in a copy of the model, or inside "
                        "`with optimizer.consolidated():`, which takes back what is "
                        "written; to change them for all, call load_state_dict on every "
                        "worker, or write before distribute, or after finish()"
                    )

    def _present_versions(self) -> list[list[int]]:
        return [[version_of(p) for p in bucket.parameters] for bucket in self.buckets]


def cut(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return a part of a bucket's buffer.

    If *flat* represents a larger buffer, the part represents its share.
    """
    return stand_alike(flat[start:stop], flat)


def _bounds(part: BucketPart) -> Iterator[tuple[Unit, int, int]]:
    """Yield each unit of a part, and its place in its bucket's buffer."""
    start = part.start
    for unit in part.units:
        yield unit, start, start + unit.elements
        start += unit.elements


def _plain(name: str, value: Any) -> Any:
    """Return a hyperparameter in a form that messages support."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"hyperparameter {name!r}: expected a number, a truth value or a list of them for an "
        f"optimizer on a server, got {type(value).__name__}"
    )


# ---- partition of buckets ----


def split_buckets(
    buckets: Sequence[Bucket],
    optimizer: torch.optim.Optimizer,
    shards: int,
    most_bytes: int | None = None,
) -> list[list[BucketPart]]:
    """Split buckets into parts, so that all shards have about as many bytes.

    Returns the parts of each bucket. No unit has more than *most_bytes*, if the optimizer can be
    applied to smaller ones. A cut is at a place where *optimizer* may be applied to both sides
    separately (see `optim.pieces`). A small bucket belongs as a whole to the shard with the fewest
    bytes. The result is equal on all ranks.
    """
    numbers = {id(p): n for n, (p, _) in enumerate(parameters_of(optimizer))}
    groups = {id(p): group for p, group in parameters_of(optimizer)}
    held = [0] * shards
    plan = []
    for bucket in buckets:
        cuts = _cuts(bucket, optimizer, groups, held)
        slots = {numbers[id(p)]: slot for slot, p in enumerate(bucket.parameters)}
        parts, first = [], 0
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
            parts.append(
                BucketPart(
                    bucket=bucket.index,
                    shard=shard,
                    start=start,
                    stop=stop,
                    first=first,
                    units=tuple(units),
                    slots=tuple(slots[unit.parameter] for unit in units),
                )
            )
            first += len(units)
        plan.append(parts)
    return plan


def _cuts(
    bucket: Bucket,
    optimizer: torch.optim.Optimizer,
    groups: dict[int, int],
    held: Sequence[int],
) -> list[int]:
    """Return the cuts of a bucket: 0, the places between servers, its end.

    Servers that have *held* fewer bytes get more.
    """
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
    """Split a unit into parts of at most so many bytes, as far as the optimizer allows."""
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
