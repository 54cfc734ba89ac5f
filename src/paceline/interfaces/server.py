"""Servers: state machines that workers ask, and the disciplines by which methods' servers differ.

- `Service`: a server, or another service, as those who run it see it.
  `parameter_server.state_machine.server` is one. A thread behind sockets, the simulated runtime and
  tests run it.
  `parameter_server.process.services` lists the services.
- `Discipline`: what a server does with gradients. A method's file overrides what differs from its
  defaults; the server calls it, and gives it a `Shard`: its part of the model.
- `Groups`, `GroupServerDiscipline`: group servers. Each holds the whole model for the workers of
  its group, and they send each other the updates that they have applied. A method with such
  servers declares its `Groups` (`UpdatesOnServer.groups`), and its discipline is a
  `GroupServerDiscipline`: it says which updates are due, and applies what comes.
  `paceline.parameter_server.groups.server` runs it: each update arrives once at each server,
  whatever connections do meanwhile.
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
    """The request that an answer belongs to. A worker that was restarted has another
    *incarnation*. A service that asks has a number behind those of the workers: number *i* of
    its job's services is sender *workers* + *i*."""

    worker: int
    incarnation: int
    channel: str
    number: int


class Reply(NamedTuple):
    """An answer to one request. *payload* is flat, shared by all workers that get it, and
    never written again."""

    to: Sender
    message: ReplyMessage
    payload: torch.Tensor | None = None


class Ask(NamedTuple):
    """A service's request to another one, its *peer*. *number* is the asker's own, and comes
    back with the answer. *payload* and *into* are flat, and not touched by the asker until
    then; *channel*: as in `Endpoint.request`."""

    peer: str
    number: int
    message: Request
    payload: torch.Tensor | None = None
    into: torch.Tensor | None = None
    channel: str = ""


class Work(NamedTuple):
    """What a transition cost a server's processor: bytes that it added up (or copied), bytes of
    parameters that an optimizer stepped, and bytes that were read or written for codes."""

    added: int = 0
    stepped: int = 0
    coded: float = 0


Outputs = Sequence[Reply | Ask]
"""What a service's transition sends."""


class Service:
    """A server, or another service, as a pure state machine: no I/O, no clock, no threads.

    The real runtime runs it behind sockets, the simulated runtime as an event handler, a test
    calls it directly. Each transition returns what is to be sent: replies to requests, and what
    the service asks of other services. Each `Ask` is followed by one `on_reply`, or by the
    `on_peer_lost` of its peer; none comes after that.

    Exceptions are faults of the service itself: what a worker does wrong is answered with
    `Rejected`, and changes nothing.

    Example: an aggregator returns an `Ask` once the parts of its rack are in, and answers its
    workers in `on_reply`.
    """

    reconnects_to_peers = False
    """Whether peers that are lost may come back: whoever runs the service then tries to reach them
    again and again, as one that asks with a later incarnation."""
    holds_model: bool | None = None
    """Of a group server: whether it holds the model; None of any other service. It holds the model once it
    has taken over what its peers hold, and no more when its group has no workers."""

    def on_request(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> Outputs:
        """A worker, or another service, asks for something. *payload* is the service's from now
        on."""
        raise NotImplementedError

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> Outputs:
        """The connection to a worker, or to a service that asks here, is lost: nobody waits for
        it any more."""
        raise NotImplementedError

    def on_worker_finished(self, worker: int, now: float) -> Outputs:
        """The script of *worker* has ended well: it does not come back."""
        return []

    def is_over(self) -> bool:
        """Whether the training is over for some worker: the others are about to end it."""
        return False

    def next_deadline(self) -> float | None:
        """When `on_timer` is to be called, if nothing happens before."""
        return None

    def on_timer(self, now: float) -> Outputs:
        """A deadline has passed."""
        return []

    def take_work(self) -> Work:
        """What was done since this was last called."""
        return Work()

    def on_reply(
        self,
        peer: str,
        number: int,
        reply: ReplyMessage,
        payload: torch.Tensor | None,
        now: float,
    ) -> Outputs:
        """*peer* has answered request *number*, maybe with `Rejected`. *payload* is the
        tensor that was handed over for it."""
        return []

    def on_peer_lost(self, peer: str, reason: str, now: float) -> Outputs:
        """*peer* is gone, for the *reason* given: it answers nothing any more, and whoever waits
        for it is to be told."""
        return []

    def on_peer_back(self, peer: str, now: float) -> Outputs:
        """*peer* is there again after an `on_peer_lost`: it may be asked."""
        return []


Hyperparameters = Sequence[Mapping[str, Any]]
"""What ``param_groups`` held at one moment, group by group, without the parameters."""


class PushedGradient(NamedTuple):
    """A worker's gradient of one bucket on a server, or of some *units* of that bucket.

    Args:
        worker: The worker; negative in an update of another group server.
        step: Its step.
        bucket: The bucket.
        weight: Scales the learning rate.
        used: Per unit, whether it took part in the backward pass.
        hyperparameters: The optimizer's, of this step.
        gradient: Flat, of all the units.
        number: Counts pushes as they came.
        late: The main push of this bucket and step has left these units out.
        units: The units; None: all of the bucket.
        report: What `Discipline.decode_report` made of the worker's report; None without one.
        applied: An earlier incarnation of the worker has sent it, and it is in the parameters. The
            push is answered like any other, and its gradient is not used.
        of: The workers and steps of the gradients that this one is the mean of; empty: its own.
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
        """Seconds on the server's clock: when the request at hand came."""
        ...

    def active_workers(self, step: int) -> Sequence[int]:
        """The workers, in rank order, whose gradients of *step* have come or will come."""
        ...

    def clock(self, worker: int) -> int:
        """The number of a worker's next step: its main pushes of all steps before are in. Of
        a worker that has yet to join: the number of its first step."""
        ...

    def skip_to(self, worker: int, step: int) -> None:
        """Let *worker* leave out its steps before *step*: its answers name the next one. A
        worker whose clock is further stays there."""
        ...

    def next_unstarted_step(self) -> int:
        """One more than the highest step of which a gradient has come, from whomever."""
        ...

    def waiting_at_barrier(self) -> Collection[int]:
        """The workers that have come to where all meet, and wait there: they send nothing
        until all others that train have come, too."""
        ...

    def slowest_step(self) -> int:
        """The least clock of those that take part; `next_unstarted_step` where nobody does."""
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
        """What each unit of *bucket* is on the network."""
        ...

    def values(self, bucket: int, units: Sequence[int]) -> list[torch.Tensor]:
        """The parameters of some units as they are, each flat: to read."""
        ...

    def units_of(
        self, bucket: int, flat: torch.Tensor
    ) -> Iterable[tuple[int, torch.Tensor]]:
        """Views of a tensor of all of *bucket*, unit by unit; each with the number of the
        optimizer's group that the unit is in."""
        ...

    def apply(self, push: PushedGradient) -> None:
        """Update by one push alone. Its *weight* scales the learning rate: decay follows
        by itself, and Adam, whose step does not depend on a gradient's size, moves as far
        as it should (design section 4). A push that was applied before changes nothing."""
        ...

    def apply_mean(self, bucket: int, pushes: Sequence[PushedGradient]) -> None:
        """Update by the mean of pushes, all of the same units: weighted by their weights,
        divided by the sum of them, and added up in the order given. The gradients are used
        up: the first one becomes the mean. No pushes at all count as an update, too."""
        ...

    def zero_momentum(self, bucket: int) -> None:
        """Make the optimizer's running mean of gradients nought, of all that this server
        holds of *bucket*: SGD's momentum buffer, Adam's first moment. Second moments and
        counts of steps stay. `UsageError` where a step's updates are held until its norm is
        known: this would come before them."""
        ...

    def reply(self, push: PushedGradient, counted: Sequence[int] = ()) -> None:
        """Send the parameters that were pushed, as they are now, to the worker that pushed
        them. *counted*: the workers that counted for the step, where that was decided."""
        ...

    def count(self, what: str) -> None:
        """Count something that happened, for reports: ``"gradients dropped"``."""
        ...


class Discipline:
    """What a server does with gradients, and when it answers: one object per server.

    A method's discipline overrides what differs. The defaults are those of a server that applies
    each gradient when it comes: it has no rounds, so a worker may join at any moment and have the
    parameters as they are.

    Example:
        >>> class ApplyOnArrival(Discipline):
        ...     def on_push(self, shard, push):
        ...         shard.apply(push)
        ...         shard.reply(push)
    """

    accepts_partial_pushes = False
    """Whether it takes a step's buckets in parts: some units with the main push, which is the
    step's barrier, and those that it left out late. The others take whole buckets: their servers
    refuse anything else."""
    finishes_without_stragglers = False
    """Whether steps may end without some workers. Where workers wait for all others (see
    `Shard.active_workers`), steps then end without them, so that the others get there."""
    follows_first_server = False
    """Whether servers would decide differently, so that server 0 decides alone."""

    def follow(self) -> None:
        """This is not server 0: do not decide. Called before anything else, where
        `follows_first_server`."""

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        """A gradient has come. The discipline alone keeps it."""
        raise NotImplementedError

    def on_change(self, shard: Shard) -> None:
        """The active workers have changed, or all main pushes of a worker's step are in."""

    def on_decision(self, shard: Shard, step: int, workers: Sequence[int]) -> None:
        """Server 0 has decided that *workers* count for *step*. Comes from each worker, by which
        the others learn it. Raises `UsageError` where nothing is decided."""
        raise UsageError("decide: nothing is decided under this method")

    def next_deadline(self) -> float | None:
        """When `on_timer` is to be called, on the clock of `Shard.now`; None: not at all. Every
        call of the discipline may change it."""
        return None

    def on_timer(self, shard: Shard) -> None:
        """`Shard.now` has reached the deadline."""

    # ---- what its workers report, and are told: bytes that only the method reads ----

    def decode_report(self, shard: Shard, report: bytes) -> Any:
        """What a worker's report says: `on_push` finds it in `PushedGradient.report`. Raises
        `UsageError` for a report that makes no sense: then its push is refused, and nothing
        has changed."""
        raise UsageError("push: this method takes no reports")

    def notice(self, bucket: int) -> bytes:
        """What goes out with a reply to a main push of *bucket*, or to a pull of it."""
        return b""

    # ---- joining, pulling, snapshots ----

    def first_step(self, shard: Shard) -> int:
        """The step with which a worker that joins now begins."""
        return shard.slowest_step()

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        """Whether a worker that begins with *step* may have *bucket* as it is."""
        return True

    def has_updates(
        self, shard: Shard, step: int, bucket: int, units: Sequence[int]
    ) -> bool:
        """Whether all updates before *step* are in these units. A worker that asks for their
        optimizer state is answered then. Asked where `accepts_partial_pushes`."""
        return True

    def completed_step(self, shard: Shard) -> int | None:
        """The first step that workers may do after a snapshot of this moment: all steps before
        it have ended. A worker whose later gradients are in the parameters goes on after them.
        Example: under asp, with workers that have done 7 and 9 steps, it is step 7; one goes on
        with step 7, the other one with step 9. None while a step has ended for some buckets
        only: then there is no snapshot."""
        return shard.slowest_step()

    def resume(self, shard: Shard, step: int) -> None:
        """Go on with *step*, holding no gradient: this object is new. The shard was restored from
        a snapshot for which `completed_step` was *step*; or other parameters were loaded. All
        buckets have the version of then, and at least *step*. Called before anything else."""

    def take_over(self, before: Discipline) -> None:
        """Take what outlives a load from the discipline before it. Called before `resume`, where
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
    """What one server has applied to a bucket, and owes to the others.

    Args:
        bucket: The bucket.
        gradients: How many gradients are in it.
        weight: The sum of their weights.
        used: Per unit, whether any of them has it.
        hyperparameters: The optimizer's. Learning rates are means by the gradients' weights.
        values: The mean of the gradients by weight: flat, of all units of the bucket.
        steps: By worker whose gradients are in it: its gradients of all steps before this one are
            in it, or in an earlier update. The server fills that in.
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
        """Take the updates that are due: they are not owed any more. Called after each event."""
        raise NotImplementedError

    def take_all_updates(self, shard: Shard) -> list[GroupUpdate]:
        """Take all updates that are owed, due or not.

        Called where all workers meet, and where this group has no workers any more.
        """
        raise NotImplementedError

    def apply_update(self, shard: Shard, source: int, update: GroupUpdate) -> None:
        """Apply an update of server *source*. It comes once, and in the order of its sending."""
        raise NotImplementedError

    def encode_notice(self, shard: Shard) -> bytes:
        """A notice to the other servers, as bytes that the method defines; empty without one.

        Called after each event.
        """
        raise NotImplementedError

    def on_notice(self, shard: Shard, source: int, notice: bytes) -> None:
        """A notice of server *source* has come.

        Raises:
            UsageError: It makes no sense, and nothing has changed.
        """
        raise NotImplementedError
