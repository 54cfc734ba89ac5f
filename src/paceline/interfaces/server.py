"""Servers: state machines that workers ask, and the disciplines by which methods' servers differ.

- `Server`, `AskingServer`: a server, or another service, as those who run it see it.
  `paceline.parameter_server` implements `Server` (`state_machine.server`; `process` wraps it).
  A thread behind sockets (`transport.listener`), the simulated runtime and tests run it.
  `parameter_server.process.service_registry` lists the services.
- `Discipline`: what a server does with gradients. A method's file implements it, and those of the
  optional protocols that it needs; the server calls it, and gives it a `Shard`: its part of the
  model.
- `Groups`, `Meshed`: group servers. Each holds the whole model for the workers of its group, and
  they pass on to each other what they have applied. A method with such servers declares its
  `Groups` (`UpdatesOnServer.groups`), and its discipline is `Meshed`: it says what is to be passed
  on, and applies what comes. `paceline.parameter_server.groups.server` carries it: each parcel
  arrives once at each server, whatever connections do meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.interfaces.server_messages import Reply, Request

__all__ = [
    "Answer",
    "AnyServer",
    "Ask",
    "AskingServer",
    "Coordinated",
    "Discipline",
    "Groups",
    "HeldPush",
    "Hyperparameters",
    "InParts",
    "Informed",
    "Led",
    "Meshed",
    "Parcel",
    "ReturningServer",
    "Sender",
    "Server",
    "Shard",
    "Sparing",
    "SpeedClass",
    "Timed",
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
    received: int = 0
    """The worker has the answers to the channel's requests below this number."""


class Answer(NamedTuple):
    """An answer to one request. *payload* is flat, shared by all workers that get it, and
    never written again."""

    to: Sender
    message: Reply
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


class Server(Protocol):
    """A server as a pure state machine: no I/O, no clock, no threads. The real runtime runs
    it behind sockets, the simulated runtime as an event handler, a test calls it directly.

    Exceptions are faults of the server itself: what workers do wrong is answered with
    `Refused`, and changes nothing.
    """

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        """A request has come in. *payload* is the server's from now on. A request that came
        before is not done again, and answered again if it had been answered."""
        ...

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        """The connection to a worker is lost: nobody waits for it any more."""
        ...

    def next_deadline(self) -> float | None:
        """When `on_timer` wants to be called, if nothing happens before."""
        ...

    def on_timer(self, now: float) -> list[Answer]:
        """A deadline has passed."""
        ...

    def take_work(self) -> Work:
        """What was done since this was last called."""
        ...


@runtime_checkable
class AskingServer(Protocol):
    """A `Server` that is a client of other services, too: its transitions also return what it
    asks of them. Each `Ask` is followed by one `on_reply`, or by the `on_peer_lost` of its
    peer; none comes after that. Example: an aggregator returns an `Ask` once the parts of
    its rack are in, and answers its workers in `on_reply`.

    As `Server`, it has no I/O, no clock and no threads.
    """

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> Sequence[Answer | Ask]:
        """As `Server.on_message`; the sender may be another service."""
        ...

    def on_lost(
        self, worker: int, incarnation: int, now: float
    ) -> Sequence[Answer | Ask]:
        """As `Server.on_lost`; of another service, too, that asks here."""
        ...

    def next_deadline(self) -> float | None:
        """As `Server.next_deadline`."""
        ...

    def on_timer(self, now: float) -> Sequence[Answer | Ask]:
        """As `Server.on_timer`."""
        ...

    def take_work(self) -> Work:
        """As `Server.take_work`."""
        ...

    def on_reply(
        self,
        peer: str,
        number: int,
        reply: Reply,
        payload: torch.Tensor | None,
        now: float,
    ) -> Sequence[Answer | Ask]:
        """*peer* has answered request *number*, maybe with `Refused`. *payload* is the
        tensor that was handed over for it."""
        ...

    def on_peer_lost(
        self, peer: str, reason: str, now: float
    ) -> Sequence[Answer | Ask]:
        """*peer* is gone, for the *reason* given in words: it answers nothing any more, and
        whoever waits for it is to be told."""
        ...


@runtime_checkable
class ReturningServer(AskingServer, Protocol):
    """An `AskingServer` whose peers may come back: who runs it tries to reach one that is lost
    again and again, as one that asks with a later incarnation."""

    def on_peer_back(self, peer: str, now: float) -> Sequence[Answer | Ask]:
        """*peer* is there again after an `on_peer_lost`: it may be asked."""
        ...


AnyServer = Server | AskingServer


Hyperparameters = Sequence[Mapping[str, Any]]
"""What ``param_groups`` held at one moment, group by group, without the parameters."""


class HeldPush(NamedTuple):
    """A worker's gradient of one bucket on a server, or of some *units* of that bucket.

    *number* counts pushes as they came. *late*: the bucket's main push of this step has left
    these units out. *report*: what `Informed.read_report` made of the worker's report; None
    without one. *applied*: an earlier life of the worker has sent it, and it is in the parameters:
    the push is answered like any other, and its gradient is not used. *of*: the workers and steps
    of the gradients that this one is the mean of; its own alone where empty.
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

    def expected(self, step: int) -> Sequence[int]:
        """The workers, in rank order, whose gradients of *step* have come or will come."""
        ...

    def clock(self, worker: int) -> int:
        """The number of a worker's next step: its main pushes of all steps before are in. Of
        a worker that has yet to join: the number of its first step."""
        ...

    def move_on(self, worker: int, step: int) -> None:
        """Let *worker* leave out its steps before *step*: its answers name the next one. A
        worker whose clock is further stays there."""
        ...

    def fastest(self) -> int:
        """One more than the highest step of which a gradient has come, from whomever."""
        ...

    def meeting(self) -> Collection[int]:
        """The workers that have come to where all meet, and wait there: they send nothing
        until all others that train have come, too."""
        ...

    def slowest(self) -> int:
        """The least clock of those that take part; `fastest` where nobody does."""
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

    def apply(self, push: HeldPush) -> None:
        """Update by one push alone. Its *weight* scales the learning rate: decay follows
        by itself, and Adam, whose step does not depend on a gradient's size, moves as far
        as it should (design section 4). A push that was applied before changes nothing."""
        ...

    def apply_mean(self, bucket: int, pushes: Sequence[HeldPush]) -> None:
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

    def answer(self, push: HeldPush, counted: Sequence[int] = ()) -> None:
        """Send the parameters that were pushed, as they are now, to the worker that pushed
        them. *counted*: the workers that counted for the step, where that was decided."""
        ...

    def count(self, what: str) -> None:
        """Count something that happened, for reports: ``"gradients dropped"``."""
        ...


class Discipline(Protocol):
    """What a server does with gradients, and when it answers: one object per server."""

    def pushed(self, shard: Shard, push: HeldPush) -> None:
        """A gradient has come. The discipline alone keeps it."""
        ...

    def changed(self, shard: Shard) -> None:
        """Who takes part has changed, or all main pushes of a worker's step are in."""
        ...

    def first_step(self, shard: Shard) -> int:
        """The step with which a worker that joins now begins."""
        ...

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        """Whether a worker that begins with *step* may have *bucket* as it is."""
        ...

    def ended(self, shard: Shard) -> int | None:
        """The first step that workers may do after a snapshot of this moment: all steps before
        it have ended. A worker whose later gradients are in the parameters goes on after them.
        Example: under asp, with workers that have done 7 and 9 steps, it is step 7; one goes on
        with step 7, the other one with step 9. None while a step has ended for some buckets
        only: then there is no snapshot."""
        ...

    def resume(self, shard: Shard, step: int) -> None:
        """Go on with *step*, holding no gradient. The shard was restored from a snapshot for
        which `ended` was *step*; or other parameters were loaded, and this object is a fresh
        copy. All buckets have the version of then, and at least *step*. Called before
        anything else."""
        ...


@runtime_checkable
class Timed(Discipline, Protocol):
    """A discipline that acts at a time, and not only when something comes."""

    def next_deadline(self) -> float | None:
        """When `timer` is to be called, on the clock of `Shard.now`; None: not at all. Every
        call of the discipline may change it."""
        ...

    def timer(self, shard: Shard) -> None:
        """`Shard.now` has reached the deadline."""
        ...


@runtime_checkable
class Led(Discipline, Protocol):
    """A discipline whose servers would decide differently: so server 0 decides alone."""

    def follow(self) -> None:
        """This is not server 0: do not decide. Called before anything else."""
        ...


@runtime_checkable
class Coordinated(Led, Protocol):
    """What server 0 decides, the others have to know: its answers say it, and workers tell
    the others."""

    def decided(self, shard: Shard, step: int, workers: Sequence[int]) -> None:
        """Server 0 has decided that *workers* count for *step*. Comes from each worker."""
        ...


@runtime_checkable
class Sparing(Discipline, Protocol):
    """A discipline whose steps may end without some of those that take part."""

    @property
    def spares(self) -> bool:
        """Whether they may here. Where workers wait for all others (see `Shard.expected`),
        steps then end without them, so that the others get there."""
        ...


@runtime_checkable
class InParts(Discipline, Protocol):
    """A discipline that takes a step's buckets in parts: some units with the main push, which
    is the step's barrier, and those that it left out late. The others take whole buckets:
    their servers refuse anything else."""

    def has(self, shard: Shard, step: int, bucket: int, units: Sequence[int]) -> bool:
        """Whether all updates before *step* are in these units. A worker that asks for their
        optimizer state is answered then."""
        ...


@runtime_checkable
class Informed(Discipline, Protocol):
    """A discipline that its workers report to, and that tells them something: both are bytes
    that only the method reads."""

    def read_report(self, shard: Shard, report: bytes) -> Any:
        """What a worker's report says: `pushed` finds it in `HeldPush.report`. Raises
        `UsageError` for a report that makes no sense: then its push is refused, and nothing
        has changed."""
        ...

    def tells(self, bucket: int) -> bytes:
        """What goes out with an answer to a main push of *bucket*, or to a pull of it."""
        ...


SpeedClass = Literal["fastest", "middle", "slowest"]


class Groups(NamedTuple):
    """Who is in which group. A later *version* replaces an earlier one.

    *of*: by rank, the number of the worker's group, which is the number of its server. A server
    may have no workers. *servers*: how many servers there are. *speeds*: by group, its class;
    empty while nobody knows.
    """

    of: tuple[int, ...]
    servers: int
    version: int = 0
    speeds: tuple[SpeedClass, ...] = ()

    def members(self, group: int) -> list[int]:
        """The workers of a group, in rank order."""
        return [rank for rank, its in enumerate(self.of) if its == group]


class Parcel(NamedTuple):
    """What one server has applied to a bucket, and the others have not yet.

    *values*: flat, of all the bucket's units: the mean of *gradients* gradients, by weight, whose
    weights add up to *weight*. *used*: per unit, whether any of them has it. In *hyperparameters* learning rates
    are means, by the gradients' weights. *steps*: by worker whose gradients are in it: those of all steps before this one
    are in it, or in an earlier one. The server fills that in.
    """

    bucket: int
    gradients: int
    weight: float
    used: Sequence[bool]
    hyperparameters: Hyperparameters
    values: torch.Tensor
    steps: Mapping[int, int] = MappingProxyType({})


@runtime_checkable
class Meshed(Discipline, Protocol):
    """A discipline whose server is one of several that hold the whole model each."""

    @property
    def groups(self) -> Groups:
        """As this server knows them."""
        ...

    def is_server(self, number: int) -> None:
        """This is the server of group *number*. Called before anything else."""
        ...

    def outgoing(self, shard: Shard) -> list[Parcel]:
        """What is to be passed on by now. Called after each event; what was returned is not
        owed any more."""
        ...

    def owed(self, shard: Shard) -> list[Parcel]:
        """Everything that was not passed on yet, whether it is time or not: all meet, or this
        group has no workers any more."""
        ...

    def incoming(self, shard: Shard, source: int, parcel: Parcel) -> None:
        """Server *source* has passed this on: it comes once, and in the order of its sending."""
        ...

    def words(self, shard: Shard) -> bytes:
        """What the other servers are to know beside, in the method's own bytes; empty while
        there is nothing new. Called after each event."""
        ...

    def heard(self, shard: Shard, source: int, words: bytes) -> None:
        """Server *source* has said this. Raises `UsageError` for what makes no sense: then
        nothing has changed."""
        ...
