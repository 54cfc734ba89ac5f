"""A model's parameters on their servers, as one worker uses them: the `Remote`.

This module has the messages of a step: pushes, and the wait for their replies. `partition` has the
servers of each part, `synchronization` joins and pulls, and `remote_state` has everything except
trained parameters.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.compression import GradientCompression
from paceline.interfaces import (
    CompressionListener,
    Endpoint,
    PendingReply,
    ServerJob,
    SpeedClass,
    UnitNotice,
    UnitValues,
)
from paceline.interfaces.buckets import (
    Bucket,
    stand_alike,
    stand_in_for,
    stands_in,
    wire_bytes,
)
from paceline.interfaces.server_messages import (
    DTYPES,
    Decide,
    Join,
    KeepAlive,
    Leave,
    OptimizerState,
    Parameters,
    PullState,
    Push,
)
from paceline.optim.partitioned import (
    MOST_STATES,
    PartitionedOptimizer,
    check_servers_can_hold,
)
from paceline.parameter_server.client.compression import ClientCompression
from paceline.parameter_server.client.partition import BucketPart, Partition, cut
from paceline.parameter_server.client.remote_state import (
    RemoteBuffers,
    RemoteOptimizerState,
)
from paceline.parameter_server.client.synchronization import Synchronizer
from paceline.timeouts import timeouts

LATE_CHANNEL = "late"
"""Channel parallel to the steps: late pushes, and optimizer state for tentative steps."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ServedModel:
    """A model for servers, before its buckets are made.

    Attributes:
        rank: This worker's rank.
        optimizer: The user's optimizer.
        endpoints: This worker's connections to the servers.
        job: The job for which the servers were started.
        options: All options of the training, as text: equal on all workers.
        tensors: A line for each of the model's tensors: equal on all workers.
        untrained: Frozen parameters and buffers.
        mixed: The buffers among them that every step mixes.
        loads_untrained: Whether all workers begin with rank 0's `untrained`, because they
            communicate through servers only.
        most_bytes: The most bytes of a unit, if the method needs small ones.
    """

    rank: int
    optimizer: torch.optim.Optimizer
    endpoints: Sequence[Endpoint]
    job: ServerJob
    options: str = ""
    tensors: Sequence[str] = ()
    untrained: Sequence[torch.Tensor] = ()
    mixed: Sequence[torch.Tensor] = ()
    loads_untrained: bool = False
    most_bytes: int | None = None


class _Push(NamedTuple):
    """A push of some of a part's *units* that waits for its reply, which arrives in *into*."""

    pending_reply: PendingReply
    part: BucketPart
    units: Sequence[int]
    into: torch.Tensor

    def reply(self) -> Parameters:
        reply = self.pending_reply.wait()
        assert isinstance(reply, Parameters), reply
        return reply


class _StatePull(NamedTuple):
    """A request for the state of some of a part's *units*, which arrives in *into*."""

    pending_reply: PendingReply
    part: BucketPart
    units: Sequence[int]
    into: torch.Tensor


class RemoteModel:
    """A *model* whose *buckets* are partitioned over servers.

    Pushes are compressed by *compression*, if the job compresses; *listener* is called for each
    compression. Raises `UsageError` for an optimizer that servers cannot run.
    """

    def __init__(
        self,
        model: ServedModel,
        buckets: Sequence[Bucket],
        compression: GradientCompression,
        listener: CompressionListener | None = None,
    ) -> None:
        check_servers_can_hold(model.optimizer)
        job = model.job
        self._model, self._endpoints = model, model.endpoints
        self._coordinates = job.method is not None and job.method.coordinates
        self.partition = partition = Partition(
            buckets,
            model.optimizer,
            model.endpoints,
            model.most_bytes,
            # Deltas are summed on the processor on any device, as on servers.
            on_host=job.replies == "deltas",
            group=None if job.groups is None else job.groups.of[model.rank],
        )
        self.units = partition.units
        self.compression: ClientCompression | None = None
        """Set if gradients are compressed."""
        if job.compression:
            self.compression = ClientCompression(
                compression, model.rank, partition, job.replies, listener
            )
        self.buffers = RemoteBuffers(partition, model.untrained, model.mixed)
        self.optimizer_state = RemoteOptimizerState(partition)
        self.synchronizer = Synchronizer(
            model.rank,
            partition,
            self.optimizer_state,
            self.buffers,
            model.loads_untrained,
        )
        self._main: list[_Push] = []
        self._late: list[_Push] = []
        self._state_pulls: list[_StatePull] = []
        self._pushed_step, self._next_step = 0, 0
        # Memory for pushes of some units, by bucket. Late pushes have their own memory, since
        # backward writes into buckets meanwhile.
        self._some = [torch.empty(0) for _ in buckets]
        self._some_late = [torch.empty(0) for _ in buckets]
        self._kept_alive = -timeouts.progress_note
        self.staleness = 0
        """Other workers' updates while the last step's gradient was computed and sent: the maximum
        over all parts of the model."""

    # ---- a step ----

    def push(
        self,
        bucket: Bucket,
        step: int,
        weight: float,
        units: Collection[int] | None = None,
        late: bool = False,
        report: bytes = b"",
    ) -> None:
        hyperparameters = self.partition.hyperparameters()
        chosen = None if units is None else set(units)
        self._pushed_step, self._next_step = step, step + 1
        if bucket.last and not late:
            self.buffers.mix(weight)
        # Servers know shapes, but not strides.
        gradient = bucket.by_index()
        for part in self.partition.parts[bucket.index]:
            mine = part.local_units(chosen)
            if late and not mine:
                continue
            payload, into = self._memory(bucket, gradient, part, mine, late, weight)
            message = Push(
                step=step,
                bucket=bucket.index,
                late=late,
                units=None if len(mine) == len(part.units) else mine,
                weight=weight,
                used=[bucket.used[part.slots[unit]] for unit in mine],
                hyperparameters=hyperparameters,
                report=report,
            )
            pending_reply = self.partition.endpoint(part).request(
                message,
                payload if mine else None,
                into if mine else None,
                channel=LATE_CHANNEL if late else "",
            )
            under_way = self._late if late else self._main
            under_way.append(_Push(pending_reply, part, mine, into))

    def _memory(
        self,
        bucket: Bucket,
        gradient: torch.Tensor,
        part: BucketPart,
        units: Sequence[int],
        late: bool,
        weight: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the payload of a push for a part, and the memory for its reply."""
        if self.compression is not None:
            code = self.compression.encode(bucket, gradient, part, weight)
            return code, self.compression.room(part)
        received = self.partition.received_part(part)
        if len(units) == len(part.units) and not late:
            return cut(gradient, part.start, part.stop), received
        places = self.partition.places(part, units)
        size = sum(place.stop - place.start for place in places)
        memory = self._some_late if late else self._some
        if memory[bucket.index].numel() < bucket.buffer.numel():
            memory[bucket.index] = torch.empty_like(bucket.buffer)
        payload = memory[bucket.index][part.start : part.start + size]
        start = 0
        for place in places:
            stop = start + place.stop - place.start
            payload[start:stop].copy_(gradient[place.start : place.stop])
            start = stop
        into = payload if late else received[:size]
        return stand_alike(payload, bucket.buffer), stand_alike(into, bucket.buffer)

    def wait(self) -> int:
        replies = self._main_replies()
        for sent, reply in zip(self._main, replies, strict=True):
            self.partition.note_reply(sent.part, reply)
            if self.compression is not None:
                self.compression.decode(sent.part, reply)
        steps = [reply.step for reply in replies]
        step = max(steps)
        if step > self._pushed_step + 1:
            # This step came too late, and servers may have continued with different steps.
            sent_steps = zip(self._main, steps, strict=True)
            self.synchronizer.pull(
                [sent.part for sent, its in sent_steps if its < step], step
            )
        self.buffers.wait()
        for number in dict.fromkeys(sent.part.bucket for sent in self._main):
            self.partition.write_bucket(number)
        self._main.clear()
        self.partition.remember_versions()
        return step

    def wait_for_units(self, late: bool = False) -> list[UnitValues]:
        under_way = self._late if late else self._main
        found = []
        replies = [one.reply() for one in self._late] if late else self._main_replies()
        for sent, reply in zip(under_way, replies, strict=True):
            if not late:
                self.partition.note_reply(sent.part, reply)
                self.partition.note_sequence(sent.part, reply.sequence)
            start = 0
            for unit in sent.units:
                stop = start + sent.part.units[unit].elements
                number = sent.part.first + unit
                found.append(
                    UnitValues(sent.part.bucket, number, sent.into[start:stop])
                )
                start = stop
        under_way.clear()
        if not late:
            self.buffers.wait()
        return found

    def _main_replies(self) -> list[Parameters]:
        """Wait for the replies to all main pushes, which the caller must note."""
        passed_on = self._pass_on_decision()
        replies = [sent.reply() for sent in self._main]
        for pending_reply in passed_on:
            pending_reply.wait()
        pairs = zip(self._main, replies, strict=True)
        updates = (
            self.partition.updates_by_others(s.part, reply) for s, reply in pairs
        )
        self.staleness = max(updates, default=0)
        return replies

    def _pass_on_decision(self) -> list[PendingReply]:
        """Forward server 0's choice of counted workers to the other servers, if it makes one."""
        if len(self._endpoints) == 1 or not self._coordinates:
            return []
        counted: list[int] = []
        for sent in self._main:
            if sent.part.shard == 0:
                counted = counted or sent.reply().counted
        if not counted:
            # The server waited for all workers.
            return []
        decide = Decide(step=self._pushed_step, workers=counted)
        return [endpoint.request(decide) for endpoint in self._endpoints[1:]]

    def keep_alive(self, now: float) -> None:
        """Report to the servers that this worker is alive, at most once a second."""
        if now - self._kept_alive >= timeouts.progress_note:
            self._kept_alive = now
            for endpoint in self._endpoints:
                # The reply is ignored.
                endpoint.request(KeepAlive())

    # ---- the model ----

    def join(self) -> int:
        model, job, partition = self._model, self._model.job, self.partition
        return self.synchronizer.join(
            Join(
                options=model.options,
                method=job.spec,
                dtypes=[_NAMES[bucket.buffer.dtype] for bucket in partition.buckets],
                optimizer=type(model.optimizer).__name__,
                hyperparameters=partition.hyperparameters(),
                clip_norm=job.clip_norm,
                servers=len(partition.homes),
                tensors=list(model.tensors),
                compression=job.compression,
                replies=job.replies,
            )
        )

    def leave(self) -> None:
        self._main.clear()
        for pending_reply in [e.request(Leave()) for e in self._endpoints]:
            pending_reply.wait()
        self.synchronizer.pull_final()
        # With weight 0 all workers end with the same buffers.
        self.buffers.mix(0.0)
        self.buffers.wait()

    def consolidate(self) -> Callable[[], None]:
        buckets = self.partition.buckets
        before = [[p.detach().clone() for p in b.parameters] for b in buckets]
        # A pull would count as the model of the next gradient. But its staleness, and the servers'
        # deltas, must refer to this worker's own parameters.
        self.synchronizer.peek()

        def undo() -> None:
            with torch.no_grad():
                for bucket, mine in zip(buckets, before, strict=True):
                    for parameter, value in zip(bucket.parameters, mine, strict=True):
                        parameter.copy_(value)
            self.partition.remember_versions()

        return undo

    def barrier(self) -> bool:
        """Wait for all workers, see `Synchronizer.barrier`."""
        return self.synchronizer.barrier(self._next_step)

    def note_write(self) -> None:
        self.partition.remember_versions()

    # ---- groups ----

    @property
    def group(self) -> int:
        return self.partition.homes[0]

    def move(self, group: int, step: int) -> None:
        assert not self._main, "between two steps nothing is under way"
        before = self.group
        self.partition.move(group)
        self._endpoints[before].request(KeepAlive(moved_away=True)).wait()
        self._endpoints[group].request(KeepAlive(step=step)).wait()
        self.synchronizer.pull_model(step)
        self.buffers.pull_mixed()

    def set_speed_class(self, speed: SpeedClass) -> None:
        if self.compression is not None:
            self.compression.set_speed_class(speed)

    # ---- units ----

    def unit_bytes(self, bucket: int) -> list[int]:
        whole = self.partition.buckets[bucket].buffer
        size, elements = wire_bytes(whole), max(1, whole.numel())
        return [size * (p.stop - p.start) // elements for p in self.units[bucket]]

    def notices(self, bucket: int) -> list[UnitNotice]:
        return [
            UnitNotice(
                range(part.first, part.first + len(part.units)),
                self.partition.notice(part),
            )
            for part in self.partition.parts[bucket]
        ]

    def own_optimizer(self) -> PartitionedOptimizer:
        twin = copy.copy(self.partition.optimizer)
        twin.state = defaultdict(dict)
        pieces = [place.piece for places in self.units for place in places]
        return PartitionedOptimizer(twin, pieces)

    def request_states(self, units: Sequence[tuple[int, int]], step: int) -> None:
        places: dict[BucketPart, list[int]] = {}
        for bucket, number in units:
            part = self.partition.part_of(bucket, number)
            places.setdefault(part, []).append(number - part.first)
        for part, mine in places.items():
            buffer = self.partition.buckets[part.bucket].buffer
            size = sum(part.units[number].elements for number in mine)
            into = torch.empty(MOST_STATES * size, dtype=buffer.dtype)
            if stands_in(buffer):
                # The optimizer's state is unknown here: assume Adam's.
                stands = wire_bytes(buffer) * size // max(1, buffer.numel())
                stand_in_for(2 * stands, into)
            message = PullState(bucket=part.bucket, units=mine, step=step)
            pending_reply = self.partition.endpoint(part).request(
                message, into=into, channel=LATE_CHANNEL
            )
            self._state_pulls.append(_StatePull(pending_reply, part, mine, into))

    def wait_for_states(self) -> list[tuple[int, int, dict[str, Any]]]:
        waiting, self._state_pulls = self._state_pulls, []
        found = []
        for pull in waiting:
            reply = pull.pending_reply.wait()
            assert isinstance(reply, OptimizerState), reply
            for number, entries in zip(pull.units, reply.entries, strict=True):
                size, state = pull.part.units[number].elements, dict[str, Any]()
                for name, value in entries:
                    if isinstance(value, int):
                        state[name] = pull.into[value : value + size]
                    else:
                        state[name] = torch.tensor(value, dtype=torch.float32)
                found.append((pull.part.bucket, pull.part.first + number, state))
        return found
