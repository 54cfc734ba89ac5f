"""How workers communicate: a group of workers, how it forms averages, the ends of servers.

`paceline.collectives` implements `Comm`, for methods and the bucket tuner. A runtime brings the
`WorkerGroup` that a `Comm` issues its operations on, an `Endpoint` for each server, which a training's
`Remote` and averages over servers use, and a `Runner` for the work that follows an operation.

An `AllReduceAlgorithm` says by which `Schedule` an average is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.interfaces.schedules import Placement, Schedule
from paceline.interfaces.server_messages import ReplyMessage, Request

__all__ = [
    "AllReduceAlgorithm",
    "Awaited",
    "CollectiveSummary",
    "Comm",
    "Endpoint",
    "Needs",
    "Pending",
    "PendingReply",
    "ReduceOperation",
    "ReduceScatter",
    "Runner",
    "Signal",
    "WorkerGroup",
]

ReduceOperation = Literal["mean", "sum", "max"]

Needs = Literal["nothing", "servers", "aggregators"]
"""What an all-reduce needs beside the workers."""


class Pending(Protocol):
    """Handle of an operation under way.

    There is no ``done()``: its answer would differ between ranks, and methods that branch on
    it would diverge.

    Example:
        Communicate while this worker computes::

            pending = comm.all_reduce(buffer)
            compute()
            pending.wait()  # buffer holds the mean
    """

    def wait(self) -> None:
        """Return when the result is in the buffers that were handed over.

        A second call returns at once. Inside the work of a `then` only a result that is known
        to be in can be waited for.

        Raises:
            PeerLostError: Another rank is gone. The buffers are undefined then. A process group
                may raise its own error instead.
            UsageError: A `then` waits for a result that may not be in.
        """
        ...

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        """Call *work* once the result is in.

        Works run beside the caller, one after the other, in the order of the calls of ``then``,
        whichever result is in first. So all ranks that issue the same operations run the same
        works in the same order. What a work issues on any `Comm` goes to a channel of its own
        there, and never meets what the caller issues meanwhile.

        On CUDA under NCCL *work* is called at once: kernels follow the result in the order of
        the current stream.

        Args:
            work: May read and write the buffers that were handed over. It builds no autograd
                graph, waits for nothing, makes no groups or channels, and draws nothing from
                global random generators. It may return the handle of what it has issued.

        Returns:
            A handle that is done when the handle that *work* returns is done, or, where it
            returns None, when *work* is done. An error of the operation or of *work* comes out
            of its ``wait()``, and out of those of all later works of this `Comm`, which are
            not run.

        Raises:
            UsageError: Another thread, or another work, has issued the operation.

        Example:
            A second round that depends on the first::

                pending = comm.all_reduce(a).then(lambda: comm.all_reduce(b(a)))
        """
        ...


class ReduceScatter(Protocol):
    """Handle of a reduce-scatter under way.

    Each part of the result will be at one rank, until `gather` brings all parts to all.
    """

    def gather(self) -> Pending:
        """Begin the all-gather.

        It may be called before the reduce-scatter is in, and starts then. All-gathers of one
        communicator start in the order in which they were asked for, which must be the same on
        all ranks. Reduce-scatters that are issued meanwhile queue behind them under NCCL only.

        Returns:
            A handle; after its ``wait()`` the buffer that was handed over to the
            reduce-scatter holds the result, on every rank.
        """
        ...


class Comm(Protocol):
    """One worker's end of a group of workers.

    A buffer handed over belongs to the Comm until its `Pending` was waited for: do not read or
    write it before. Collectives must be issued in the same order on every rank. Different
    channels and groups are not ordered with respect to each other. One communicator is not an
    ordered queue either (gloo runs two collectives at a time): wait for a result before issuing
    what reads it.

    Example:
        ::

            buffer = torch.full((4,), float(comm.rank))
            comm.all_reduce(buffer, "sum").wait()  # the same on every rank
    """

    @property
    def rank(self) -> int:
        """This worker's position in the group, 0 to `size` - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of workers in the group."""
        ...

    def all_reduce(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        """Replace *buffer* on every rank by its mean, sum or maximum over ranks.

        Args:
            buffer: Contiguous, of one type and size on all ranks.
            operation: ``"mean"``, ``"sum"`` or ``"max"``.

        Returns:
            A handle; the result is in *buffer* after its ``wait()``.
        """
        ...

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> Pending:
        """Replace *buffer* on every rank by that of rank *source*.

        Args:
            buffer: Contiguous, of one type and size on all ranks.
            source: The rank whose buffer the others get.

        Returns:
            A handle; the result is in *buffer* after its ``wait()``.
        """
        ...

    def reduce_scatter(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        operation: ReduceOperation = "mean",
    ) -> Pending:
        """Give each rank one part of the mean, sum or maximum of *buffer*.

        Args:
            output: Becomes this rank's part, of k elements.
            buffer: n times k elements for n ranks; part r is for rank r.
            operation: ``"mean"``, ``"sum"`` or ``"max"``.

        Returns:
            A handle; the result is in *output* after its ``wait()``.
        """
        ...

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        """Give each rank the buffers of all ranks.

        Args:
            output: Becomes all ranks' *buffer*, in rank order: n times k elements.
            buffer: This rank's k elements.

        Returns:
            A handle; the result is in *output* after its ``wait()``.
        """
        ...

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        """Send each rank its part of *buffer*.

        Args:
            output: Part r becomes what rank r has sent to this rank; n times k elements.
            buffer: n equal parts of k elements; part r goes to rank r.

        Returns:
            A handle; the result is in *output* after its ``wait()``.
        """
        ...

    def send(self, buffer: torch.Tensor, to: int) -> Pending:
        """Send *buffer* to rank *to*, which receives it.

        Messages between two ranks arrive in the order of issue. They are not ordered with
        respect to collectives.

        Args:
            buffer: Contiguous.
            to: A rank of this group.

        Returns:
            A handle; *buffer* may be written again after its ``wait()``.
        """
        ...

    def receive(self, buffer: torch.Tensor, source: int) -> Pending:
        """Replace *buffer* by what rank *source* has sent.

        Args:
            buffer: Contiguous, of the type and size of what was sent.
            source: A rank of this group.

        Returns:
            A handle; the message is in *buffer* after its ``wait()``.
        """
        ...

    def perform(
        self,
        schedule: Schedule,
        buffer: torch.Tensor,
        operation: ReduceOperation = "sum",
        timed: Schedule | None = None,
    ) -> Pending:
        """Move and add up parts of *buffer* as *schedule* says. Collective.

        Args:
            schedule: The same on all ranks. Its sizes and offsets are in elements of *buffer*;
                a complex element counts as two.
            buffer: Contiguous, of one type and size on all ranks.
            operation: How parts are added. A mean is a sum that every rank divides by n at
                the end.
            timed: Where *buffer* stands for a larger one, the same schedule over the bytes of
                that: the simulated runtime charges these.

        Returns:
            A handle; the result is in *buffer* after its ``wait()``.

        Raises:
            UsageError: On CUDA under NCCL, which performs no schedules.
        """
        ...

    @property
    def placement(self) -> Placement:
        """Where the ranks are, as far as it is known; the same on all ranks."""
        ...

    def channel(self, name: str) -> Comm:
        """Make, or find, another ordered queue over the same workers. Collective.

        What is issued there never queues behind what is issued here, though both share the
        network. Every rank asks for the same channels in the same order.

        Args:
            name: Equal names give the same channel.

        Returns:
            The same group of workers, on a channel of its own.
        """
        ...

    def group(self, ranks: Sequence[int]) -> Comm:
        """Make, or find, the group of some of these workers.

        Only its members call this, in the same order of groups as the others that share them.
        A group is cached, so asking again is cheap. It has connections and threads of its own;
        where one of its members has many groups already, all of them send over the connections
        that they have. Averages are formed as on this `Comm`.

        Args:
            ranks: Ranks of this `Comm`, with this worker's among them. Position i becomes
                rank i of the group.

        Returns:
            The communicator of these workers.
        """
        ...

    def max_in_flight(self, device: torch.device) -> int:
        """Return how many collectives on tensors of *device* are under way at a time.

        Args:
            device: Where the tensors are.

        Returns:
            2 under gloo, 1 under NCCL.
        """
        ...


class WorkerGroup(Protocol):
    """One worker's end of a group of workers, as a runtime has it: what a `Comm` is made of.

    Operations return a handle with ``wait()``, in the simulated runtime also with ``when_in(action)``.
    Buffers are contiguous tensors of real numbers; a group has at least two workers when they are
    called. Collectives are issued in the same order on every rank.
    """

    @property
    def rank(self) -> int:
        """This worker's position in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of workers in the group."""
        ...

    @property
    def follows_streams(self) -> bool:
        """Whether results on CUDA are in the order of the device's streams."""
        ...

    @property
    def moves_host_tensors(self) -> bool:
        """Whether it moves tensors that are in the hosts' memory."""
        ...

    def max_in_flight(self, device: torch.device) -> int:
        """Return how many collectives on tensors of *device* are under way at a time."""
        ...

    def all_reduce(self, buffer: torch.Tensor, operation: ReduceOperation) -> Any:
        """See `Comm.all_reduce`."""
        ...

    def broadcast(self, buffer: torch.Tensor, source: int) -> Any:
        """See `Comm.broadcast`."""
        ...

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Any:
        """See `Comm.reduce_scatter`."""
        ...

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Any:
        """See `Comm.all_gather`."""
        ...

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> Any:
        """See `Comm.all_to_all`."""
        ...

    def send(self, buffer: torch.Tensor, to: int, stream: str) -> Any:
        """Send a flat *buffer*; messages of one *stream* arrive in the order of issue."""
        ...

    def receive(self, buffer: torch.Tensor, source: int, stream: str) -> Any:
        """Receive a flat *buffer* of the same *stream*."""
        ...

    def perform(
        self,
        schedule: Schedule,
        flat: torch.Tensor,
        operation: ReduceOperation,
        timed: Schedule,
        unit: float,
        stream: str,
    ) -> Any:
        """Move and add up as *schedule* says.

        Args:
            schedule: In elements of *flat*.
            flat: One-dimensional.
            operation: How parts are added.
            timed: The same schedule, where time is charged.
            unit: Bytes of one unit of *timed*.
            stream: Schedules of one stream are performed in the order of issue.

        Returns:
            A handle.

        Raises:
            UsageError: The schedule has nodes that are no ranks, and processes are real.
        """
        ...

    def split(self, name: str, ranks: Sequence[int]) -> WorkerGroup:
        """Make the group *name* of some ranks, with queues and connections of its own.

        Only its members call this.
        """
        ...

    def subset(self, name: str, ranks: Sequence[int]) -> WorkerGroup:
        """Return the group *name* of some ranks, over the connections that there are."""
        ...

    def has_room(self, kept: int, ranks: Sequence[int]) -> bool:
        """Return whether each of *ranks* can keep one more group of its own. Collective among them.

        Args:
            kept: Groups that this worker keeps.
            ranks: This worker's among them.
        """
        ...

    def close(self) -> None:
        """Let go of threads and connections."""
        ...


class CollectiveSummary(NamedTuple):
    """The description of a collective, for ``paceline list collectives``, docs and reports.

    Attributes:
        formed_by: Completes "Sums are formed by ...".
        sends: Completes "A rank sends ...".
        good_for: Completes "It is good for ...".
        purpose: One sentence of at most 80 letters.
        source: The papers: authors, short title, venue and year.
        limits: Sentences: costs, refusals, differences from the paper.
    """

    formed_by: str
    sends: str
    good_for: str
    purpose: str = ""
    source: str = ""
    limits: tuple[str, ...] = ()


class AllReduceAlgorithm(Protocol):
    """How an average is formed: a row of the registry in `paceline.collectives`.

    ``needs`` says what it needs beside the workers. See docs/tutorials/write-a-method.md for how to write one.
    """

    name: ClassVar[str]
    summary: ClassVar[CollectiveSummary]
    needs: ClassVar[Needs]

    def schedule(self, size: int, at: Placement) -> Schedule:
        """Say who sends what to whom.

        Args:
            size: What is to be added up, in units: elements, or bytes.
            at: Where the ranks are.

        Returns:
            A schedule, the same on all ranks.
        """
        ...

    def all_reduce(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        """Replace *buffer* on every rank of *comm* by its mean, sum or maximum.

        Args:
            comm: The group of workers.
            buffer: Contiguous, of one type and size on all ranks.
            operation: ``"mean"``, ``"sum"`` or ``"max"``.

        Returns:
            A handle; the result is in *buffer* after its ``wait()``.
        """
        ...


class PendingReply(Protocol):
    """Handle of a request to a server under way: a `Pending` whose `wait` has a result."""

    def wait(self) -> ReplyMessage:
        """Wait for the answer; a second call returns the same at once.

        Returns:
            The answer's header. Its payload is in the tensor that was handed over.

        Raises:
            UsageError: The server refused; the message has its reason.
            PeerLostError: The server is gone.
        """
        ...

    def when_in(self, action: Callable[[], None]) -> None:
        """Call *action* at the instant at which the answer is in. Simulated runtimes only."""
        ...


class Endpoint(Protocol):
    """One worker's end of one server."""

    @property
    def name(self) -> str:
        """Name for errors: ``"server 0 at 10.0.0.1:4711"``."""
        ...

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> PendingReply:
        """Send a request, and return at once.

        Requests of one channel arrive in order. A channel never queues behind another.

        Args:
            message: The request's header.
            payload: A flat contiguous tensor; the endpoint's until the pending_reply was waited
                for.
            into: A flat contiguous tensor that takes the answer's payload, the endpoint's for
                as long. It may be *payload*, and larger than the answer.
            channel: Name of an ordered queue.

        Returns:
            A handle; its ``wait()`` returns the answer's header.
        """
        ...

    def close(self) -> None:
        """Say goodbye: the server does not wait for this worker from now on."""
        ...


class Signal(Protocol):
    """An event that happens once: one thread sets it, others wait for it."""

    def set(self) -> None:
        """Let it happen."""
        ...

    def wait(self) -> None:
        """Return when it has happened."""
        ...

    def when_in(self, action: Callable[[], None]) -> None:
        """Call *action* at the instant at which it happens. Simulated runtimes only."""
        ...


@runtime_checkable
class Awaited(Protocol):
    """An operation that a `Runner` waits for before it runs a work."""

    def settle(self) -> None:
        """Return when the result is in; raises what the operation ended with."""
        ...

    def when_in(self, action: Callable[[], None]) -> None:
        """Call *action* at the instant at which the result is in. Simulated runtimes only."""
        ...


class Runner(Protocol):
    """Runs works in the order in which they were put, each when its operation's result is in."""

    def put(
        self, awaited: Awaited | None, run: Callable[[BaseException | None], None]
    ) -> None:
        """Run *run* after the works that were put before, once *awaited* is in.

        Args:
            awaited: The operation that *run* follows; None where its result is in already.
            run: Called with the error that the operation ended with, or None. Raises nothing.
        """
        ...

    def signal(self, what: str) -> Signal:
        """Make a signal that works of this runner set.

        Args:
            what: What happens, for errors.
        """
        ...

    def close(self) -> None:
        """Drop the works that were not run. Threads end."""
        ...
