"""Servers: state machines that answer workers, and the disciplines in which methods' servers differ.

- `Service`: a server, or another service, as its host sees it. `parameter_server.state_machine.server` is
  one. It is run by a thread behind sockets, by the simulated runtime and by tests.
  `parameter_server.process.services` lists the services.
- `Discipline`: what a server does with gradients. A method overrides the defaults that differ. The server
  calls its discipline with a `Shard`: the server's part of the model.
- `Groups`, `GroupServerDiscipline`: group servers. Each holds the whole model for the workers of its group,
  and sends the updates that it has applied to the other servers. A method with such servers declares its
  `Groups` (`UpdatesOnServer.groups`). Its discipline is a `GroupServerDiscipline`, which says which updates
  are due, and applies the others' updates. `paceline.parameter_server.groups.server` runs it, and delivers
  each update exactly once to each server, even if connections are lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import torch

from paceline.errors import UsageError
from paceline.interfaces.server_messages import ReplyMessage, Request

__all__ = [
    "Ask",
    "Discipline",
    "GroupServerDiscipline",
    "GroupUpdate",
    "Groups",
    "Hyperparameters",
    "Outputs",
    "PushedGradient",
    "Reply",
    "Sender",
    "Service",
    "Shard",
    "SpeedClass",
    "Work",
]


class Sender(NamedTuple):
    """The sender of a request. A restarted worker has another *incarnation*. A service that sends
    requests has a number after those of the workers: number *i* of its job's services is sender
    *workers* + *i*."""

    worker: int
    incarnation: int
    channel: str
    number: int


class Reply(NamedTuple):
    """A reply to one request. *payload* is flat, shared by all workers that receive it, and never
    written again."""

    to: Sender
    message: ReplyMessage
    payload: torch.Tensor | None = None


class Ask(NamedTuple):
    """A service's request to another one, its *peer*. The asker chooses *number*, and the reply
    carries it. *payload* and *into* are flat, and the asker does not touch them before the reply.
    *channel*: as in `Endpoint.request`."""

    peer: str
    number: int
    message: Request
    payload: torch.Tensor | None = None
    into: torch.Tensor | None = None
    channel: str = ""


class Work(NamedTuple):
    """Work of a transition on the server's processor: bytes that it added up or copied, bytes of
    parameters that an optimizer stepped, and bytes read or written for compressed gradients."""

    added: int = 0
    stepped: int = 0
    coded: float = 0


Outputs = Sequence[Reply | Ask]
"""What a service's transition sends."""


class Service:
    """A server, or another service, as a pure state machine: no I/O, no clock, no threads.

    The real runtime runs it behind sockets, the simulated runtime as an event handler, and a test
    calls it directly. Each transition returns messages to send: replies to requests, and the
    service's own requests to other services. Each `Ask` is followed by one `on_reply`, or by the
    `on_peer_lost` of its peer. After `on_peer_lost` no reply comes.

    Exceptions are faults of the service itself. A worker's invalid request is answered with
    `Rejected`, and changes nothing.

    Example: an aggregator returns an `Ask` once it has the parts of its rack, and replies to its
    workers in `on_reply`.
    """

    reconnects_to_peers = False
    """Whether lost peers may come back. The service's host then keeps trying to reach them, with a
    later incarnation."""
    holds_model: bool | None = None
    """Of a group server: whether it holds the model; None of any other service. It holds the model
    after it has taken its peers' state, until its group has no workers."""

    def on_request(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> Outputs:
        """Handle a request of a worker or of another service. *payload* belongs to the service from
        now on."""
        raise NotImplementedError

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> Outputs:
        """The connection to a worker, or to a service that sends requests here, is lost. The service
        does not wait for it any more."""
        raise NotImplementedError

    def on_worker_finished(self, worker: int, now: float) -> Outputs:
        """The script of *worker* has ended without an error: the worker does not come back."""
        return []

    def is_over(self) -> bool:
        """Whether the training has ended for some worker: then the others will end it soon."""
        return False

    def next_deadline(self) -> float | None:
        """When `on_timer` is to be called, if nothing happens before."""
        return None

    def on_timer(self, now: float) -> Outputs:
        """A deadline has passed."""
        return []

    def take_work(self) -> Work:
        """Return the work since the last call."""
        return Work()

    def on_reply(
        self,
        peer: str,
        number: int,
        reply: ReplyMessage,
        payload: torch.Tensor | None,
        now: float,
    ) -> Outputs:
        """Handle the reply of *peer* to request *number*, which may be `Rejected`. *payload* is the
        tensor that was handed over for it."""
        return []

    def on_peer_lost(self, peer: str, reason: str, now: float) -> Outputs:
        """*peer* is lost, for this *reason*. It sends no more replies, and senders that wait for it
        must be told."""
        return []

    def on_peer_back(self, peer: str, now: float) -> Outputs:
        """*peer* is back after an `on_peer_lost`, and can receive requests."""
        return []


Hyperparameters = Sequence[Mapping[str, Any]]
"""Contents of the optimizer's ``param_groups`` at one moment, by group, without the parameters."""


class PushedGradient(NamedTuple):
    """A worker's gradient of one bucket on a server, or of some *units* of that bucket.

    Args:
        worker: The worker; negative in an update of another group server.
        step: Its step.
        bucket: The bucket.
        weight: Scales the learning rate.
        used: Per unit, whether the backward pass used it.
        hyperparameters: The optimizer's, of this step.
        gradient: Flat, of all the units.
        number: Counts pushes in order of arrival.
        late: The main push of this bucket and step left these units out.
        units: The units; None: all of the bucket.
        report: The result of `Discipline.decode_report` for the worker's report; None without one.
        applied: An earlier incarnation of the worker sent it, and the parameters already include it.
            The server replies as usual, and does not use the gradient.
        of: The workers and steps of the gradients whose mean this one is; empty: its own.
    """

    worker: int
    step: int
    bucket: int
    weight: float
    used: Sequence[bool]
    hyperparameters: Hyperparameters
    gradient: torch.Tensor
    number: int
    late: bool = False
    units: Sequence[int] | None = None
    report: Any = None
    applied: bool = False
    of: Sequence[tuple[int, int]] = ()


class Shard(Protocol):
    """One server's parameters and clocks, as a discipline sees them."""

    @property
    def now(self) -> float:
        """Seconds on the server's clock when the current request arrived."""
        ...

    def active_workers(self, step: int) -> Sequence[int]:
        """The workers, in rank order, whose gradients of *step* have arrived or will arrive."""
        ...

    def clock(self, worker: int) -> int:
        """The number of a worker's next step: all its main pushes of earlier steps have arrived. Of a
        worker that has not joined yet: the number of its first step."""
        ...

    def skip_to(self, worker: int, step: int) -> None:
        """Let *worker* skip its steps before *step*: replies to it name the next one. A worker with a
        later clock stays there."""
        ...

    def next_unstarted_step(self) -> int:
        """One more than the highest step of which any worker's gradient has arrived."""
        ...

    def waiting_at_barrier(self) -> Collection[int]:
        """The workers that wait at the barrier of all workers. They send nothing until all other
        active workers have arrived."""
        ...

    def slowest_step(self) -> int:
        """The smallest clock of the active workers; `next_unstarted_step` if there are none."""
        ...

    @property
    def buckets(self) -> Sequence[int]:
        """The buckets of which this server holds a part."""
        ...

    @property
    def all_buckets(self) -> int:
        """How many buckets the model has, on all servers."""
        ...

    def version(self, bucket: int) -> int:
        """How many times *bucket* was updated."""
        ...

    def unit_bytes(self, bucket: int) -> Sequence[int]:
        """The bytes of each unit of *bucket* on the network."""
        ...

    def values(self, bucket: int, units: Sequence[int]) -> list[torch.Tensor]:
        """The current parameters of some units, each flat, read-only."""
        ...

    def units_of(
        self, bucket: int, flat: torch.Tensor
    ) -> Iterable[tuple[int, torch.Tensor]]:
        """Views of the units in a tensor of all of *bucket*, each with the number of the unit's
        optimizer group."""
        ...

    def apply(self, push: PushedGradient) -> None:
        """Update by one push alone. Its *weight* scales the learning rate. So weight decay scales with
        it, and so does the step of Adam, which does not depend on the gradient's size (design section
        4). A push that was applied before changes nothing."""
        ...

    def apply_mean(self, bucket: int, pushes: Sequence[PushedGradient]) -> None:
        """Update by the weighted mean of pushes, all of the same units: the sum of gradients times
        weights, divided by the sum of weights. Gradients are added in the given order. Their memory is
        reused: the first one becomes the mean. An empty list counts as an update, too."""
        ...

    def zero_momentum(self, bucket: int) -> None:
        """Set the optimizer's running mean of gradients to zero, for this server's part of *bucket*:
        SGD's momentum buffer, Adam's first moment. Second moments and step counters stay. Raises
        `UsageError` if a step's updates are held until its norm is known, since this would precede
        them."""
        ...

    def reply(self, push: PushedGradient, counted: Sequence[int] = ()) -> None:
        """Send the pushed units' current parameters to the worker that pushed them. *counted*: the
        workers whose gradients count for the step, if that was decided."""
        ...

    def count(self, what: str) -> None:
        """Count an event for reports, such as ``"gradients dropped"``."""
        ...


class Discipline:
    """What a server does with gradients, and when it replies: one object per server.

    A method's discipline overrides what differs. By default a server applies each gradient on arrival.
    It has no rounds, so a worker may join at any moment and gets the current parameters.

    Example:
        >>> class ApplyOnArrival(Discipline):
        ...     def on_push(self, shard, push):
        ...         shard.apply(push)
        ...         shard.reply(push)
    """

    accepts_partial_pushes = False
    """Whether it accepts a step's buckets in parts: some units with the main push, which is the step's
    barrier, and the remaining units late. Servers of other disciplines refuse anything but whole
    buckets."""
    finishes_without_stragglers = False
    """Whether steps may end without some workers. If workers wait for all others (see
    `Shard.active_workers`), steps then end without them, so that the others reach the barrier."""
    follows_first_server = False
    """Whether servers could decide differently, so that server 0 decides for all."""

    def follow(self) -> None:
        """This is not server 0: do not decide. Called before anything else, if
        `follows_first_server` is set."""

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        """A gradient has arrived. Only the discipline stores it."""
        raise NotImplementedError

    def on_change(self, shard: Shard) -> None:
        """The active workers have changed, or all main pushes of a worker's step have arrived."""

    def on_decision(self, shard: Shard, step: int, workers: Sequence[int]) -> None:
        """Server 0 has decided that *workers* count for *step*. Each worker forwards the decision to
        the other servers. Raises `UsageError` if the discipline decides nothing."""
        raise UsageError("decide: nothing is decided under this method")

    def next_deadline(self) -> float | None:
        """When `on_timer` is to be called, on the clock of `Shard.now`; None: never. Every call of the
        discipline may change it."""
        return None

    def on_timer(self, shard: Shard) -> None:
        """`Shard.now` has reached the deadline."""

    # ---- reports of workers and notices to them: bytes that only the method reads ----

    def decode_report(self, shard: Shard, report: bytes) -> Any:
        """Decode a worker's report: `on_push` finds the result in `PushedGradient.report`. Raises
        `UsageError` for an invalid report. The server then refuses the push, and nothing has
        changed."""
        raise UsageError("push: this method takes no reports")

    def notice(self, bucket: int) -> bytes:
        """Bytes that are sent with a reply to a main push of *bucket*, or to a pull of it."""
        return b""

    # ---- joining, pulling, snapshots ----

    def first_step(self, shard: Shard) -> int:
        """The first step of a worker that joins now."""
        return shard.slowest_step()

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        """Whether a worker that begins with *step* may have the current parameters of *bucket*."""
        return True

    def has_updates(
        self, shard: Shard, step: int, bucket: int, units: Sequence[int]
    ) -> bool:
        """Whether all updates before *step* are in these units. The server then replies to a worker
        that has requested their optimizer state. Called if `accepts_partial_pushes`."""
        return True

    def completed_step(self, shard: Shard) -> int | None:
        """The first step that workers do after a snapshot of this moment: all earlier steps have ended.
        A worker whose later gradients are in the parameters continues after those. Example: under asp
        with workers that have done 7 and 9 steps, the result is 7; one continues with step 7, the other
        with step 9. None while a step has ended for some buckets only: then no snapshot is taken."""
        return shard.slowest_step()

    def resume(self, shard: Shard, step: int) -> None:
        """Continue with *step*, without any gradient; this object is new. The shard was restored from a
        snapshot for which `completed_step` was *step*, or other parameters were loaded. All buckets have
        the version of that moment, and at least *step*. Called before anything else."""

    def take_over(self, before: Discipline) -> None:
        """Take the state that outlives a load from the previous discipline. Called before `resume`, if
        other parameters were loaded."""


SpeedClass = Literal["fastest", "middle", "slowest"]


class Groups(NamedTuple):
    """Which worker is in which group.

    Args:
        of: By rank, the number of the worker's group, which is the number of its server. A server
            may have no workers.
        servers: How many servers there are.
        version: A later version replaces an earlier one.
        speeds: By group, its speed class; empty before all workers were measured.
    """

    of: tuple[int, ...]
    servers: int
    version: int = 0
    speeds: tuple[SpeedClass, ...] = ()

    def members(self, group: int) -> list[int]:
        """The workers of a group, in rank order."""
        return [rank for rank, its in enumerate(self.of) if its == group]


class GroupUpdate(NamedTuple):
    """What one server has applied to a bucket, and has yet to send to the others.

    Args:
        bucket: The bucket.
        gradients: How many gradients are in it.
        weight: The sum of their weights.
        used: Per unit, whether any of the gradients has it.
        hyperparameters: The optimizer's. Learning rates are averaged with the gradients' weights.
        values: The weighted mean of the gradients: flat, of all units of the bucket.
        steps: By worker: all gradients of the worker before this step are in this update, or in an
            earlier one. The server fills it in.
    """

    bucket: int
    gradients: int
    weight: float
    used: Sequence[bool]
    hyperparameters: Hyperparameters
    values: torch.Tensor
    steps: Mapping[int, int] = MappingProxyType({})


class GroupServerDiscipline(Discipline):
    """A discipline whose server is one of several that hold the whole model each."""

    @property
    def groups(self) -> Groups:
        """The groups, as this server knows them."""
        raise NotImplementedError

    def serve_group(self, number: int) -> None:
        """This is the server of group *number*. Called before anything else."""
        raise NotImplementedError

    def take_due_updates(self, shard: Shard) -> list[GroupUpdate]:
        """Return the updates that are due, and remove them. Called after each event."""
        raise NotImplementedError

    def take_all_updates(self, shard: Shard) -> list[GroupUpdate]:
        """Return all updates that were not sent yet, due or not, and remove them.

        Called at a barrier of all workers, and if this group has no workers any more.
        """
        raise NotImplementedError

    def apply_update(self, shard: Shard, source: int, update: GroupUpdate) -> None:
        """Apply an update of server *source*. Each arrives once, in the order of sending."""
        raise NotImplementedError

    def encode_notice(self, shard: Shard) -> bytes:
        """A notice to the other servers, as bytes that the method defines; empty without one.

        Called after each event.
        """
        raise NotImplementedError

    def on_notice(self, shard: Shard, source: int, notice: bytes) -> None:
        """Handle a notice of server *source*.

        Raises:
            UsageError: The notice is invalid, and nothing has changed.
        """
        raise NotImplementedError
