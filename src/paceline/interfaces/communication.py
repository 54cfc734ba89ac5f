"""How workers communicate: a group of workers, its averages, and a worker's connections to servers.

`paceline.collectives` implements `Comm`, for methods and the bucket tuner. A runtime provides

- the `WorkerGroup` that a `Comm` issues its operations on;
- an `Endpoint` for each server, used by a training's `Remote` and by averages over servers;
- a `ContinuationRunner` for callbacks that follow an operation.

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
    "AwaitedOperation",
    "CollectiveSummary",
    "Comm",
    "CompletionEvent",
    "ContinuationRunner",
    "Endpoint",
    "Needs",
    "Pending",
    "PendingReply",
    "ReduceOperation",
    "ReduceScatter",
    "WorkerGroup",
]

ReduceOperation = Literal["mean", "sum", "max"]

Needs = Literal["nothing", "servers", "aggregators"]
"""What an all-reduce needs besides the workers."""


class Pending(Protocol):
    """Handle of an operation in flight.

    There is no ``done()``: its result would differ between ranks, and methods that branch on
    it would diverge.

    Example:
        Communicate while this worker computes::

            pending = comm.all_reduce(buffer)
            compute()
            pending.wait()  # buffer holds the mean
    """

    def wait(self) -> None:
        """Return when the result is in the buffers that were handed over.

        A second call returns at once. A callback of `then` may only wait for a result that has
        certainly arrived.

        Raises:
            PeerLostError: Another rank is gone. The buffers are undefined then. A process group
                may raise its own error instead.
            UsageError: A callback of `then` waits for a result that may not have arrived.
        """
        ...

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        """Call *work* once the result is in.

        Callbacks run beside the caller, one after the other, in the order of the calls of ``then``,
        whichever result arrives first. So all ranks that issue the same operations run the same
        callbacks in the same order. Operations that a callback issues on a `Comm` use a separate
        channel of that `Comm`, so they cannot be matched with the caller's operations.

        On CUDA under NCCL *work* is called at once: its kernels follow the result in the order of
        the current stream.

        Args:
            work: The callback. It may read and write the buffers that were handed over. It builds no
                autograd graph, waits for nothing, makes no groups or channels, and uses no global
                random generator. It may return the handle of an operation that it has issued.

        Returns:
            A handle that is done when *work* is done, or when the handle that *work* returns is
            done. Its ``wait()`` raises an error of the operation or of *work*. Later callbacks of
            this `Comm` are then not run, and their handles raise the same error.

        Raises:
            UsageError: The operation was issued by another thread, or by another callback.

        Example:
            A second round that depends on the first::

                pending = comm.all_reduce(a).then(lambda: comm.all_reduce(b(a)))
        """
        ...


class ReduceScatter(Protocol):
    """Handle of a reduce-scatter under way.

    Each rank gets one part of the result. `gather` sends all parts to all ranks.
    """

    def gather(self) -> Pending:
        """Begin the all-gather.

        It may be called before the reduce-scatter has finished, and starts after it. All-gathers of
        one communicator start in the order of their calls, which must be the same on all ranks.
        Only under NCCL do reduce-scatters that are issued meanwhile queue behind them.

        Returns:
            A handle; after its ``wait()`` the buffer that was handed over to the
            reduce-scatter holds the result, on every rank.
        """
        ...


class Comm(Protocol):
    """One worker's handle of a group of workers.

    A buffer belongs to the Comm until ``wait()`` of its `Pending` returns: do not read or write it
    before. Collectives must be issued in the same order on every rank. Operations of different
    channels or groups are not ordered. Operations of one communicator may overlap, too: gloo runs
    two collectives at a time. So wait for a result before issuing an operation that reads it.

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
            buffer: Contiguous, of the type and size of the sent tensor.
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
        """Move and add up parts of *buffer* by a *schedule*. Collective.

        Args:
            schedule: The same on all ranks. Its sizes and offsets are in elements of *buffer*;
                a complex element counts as two.
            buffer: Contiguous, of one type and size on all ranks.
            operation: How parts are added. A mean is a sum that every rank divides by n at
                the end.
            timed: Only if *buffer* represents a larger one: the same schedule over the larger one's
                bytes, for which the simulated runtime charges time.

        Returns:
            A handle; the result is in *buffer* after its ``wait()``.

        Raises:
            UsageError: On CUDA under NCCL, which cannot perform schedules.
        """
        ...

    @property
    def placement(self) -> Placement:
        """Position of the ranks in the network, as far as it is known; the same on all ranks."""
        ...

    def channel(self, name: str) -> Comm:
        """Create, or return, another ordered queue over the same workers. Collective.

        Its operations never queue behind operations of this one, though both share the network.
        Every rank asks for the same channels in the same order.

        Args:
            name: Equal names return the same channel.

        Returns:
            The same group of workers, on a channel of its own.
        """
        ...

    def group(self, ranks: Sequence[int]) -> Comm:
        """Create, or return, the group of some of these workers.

        Only its members call this. Members that share several groups ask for them in the same
        order. Groups are cached, so a second call is cheap. A group has its own connections and
        threads. If a member already has many groups, the new group uses existing connections
        instead. Averages are formed as on this `Comm`.

        Args:
            ranks: Ranks of this `Comm`, with this worker's among them. Position i becomes
                rank i of the group.

        Returns:
            The communicator of these workers.
        """
        ...

    def max_in_flight(self, device: torch.device) -> int:
        """Return how many collectives on tensors of *device* run at a time.

        Args:
            device: Where the tensors are.

        Returns:
            2 under gloo, 1 under NCCL.
        """
        ...


class WorkerGroup(Protocol):
    """A runtime's group of workers, which a `Comm` is built on.

    Operations return a handle with ``wait()``, in the simulated runtime also with ``on_completion(action)``.
    Buffers are contiguous tensors of real numbers. Operations are only called on groups of two or
    more workers. Collectives are issued in the same order on every rank.
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
        """Whether results on CUDA are ordered by the device's streams."""
        ...

    @property
    def moves_host_tensors(self) -> bool:
        """Whether it moves tensors in host memory."""
        ...

    def max_in_flight(self, device: torch.device) -> int:
        """Return how many collectives on tensors of *device* run at a time."""
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
        """Move and add up parts of *flat* by a *schedule*.

        Args:
            schedule: In elements of *flat*.
            flat: One-dimensional.
            operation: How parts are added.
            timed: The same schedule, for which time is charged.
            unit: Bytes of one unit of *timed*.
            stream: Schedules of one stream are performed in the order of issue.

        Returns:
            A handle.

        Raises:
            UsageError: The schedule has nodes that are not ranks, and processes are real.
        """
        ...

    def split(self, name: str, ranks: Sequence[int]) -> WorkerGroup:
        """Make the group *name* of some ranks, with queues and connections of its own.

        Only its members call this.
        """
        ...

    def subset(self, name: str, ranks: Sequence[int]) -> WorkerGroup:
        """Return the group *name* of some ranks, over existing connections."""
        ...

    def has_room(self, kept: int, ranks: Sequence[int]) -> bool:
        """Return whether each of *ranks* can have one more group of its own. Collective among them.

        Args:
            kept: Number of groups that this worker has.
            ranks: This worker's among them.
        """
        ...

    def close(self) -> None:
        """End threads and close connections."""
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
    """How an average is formed: an entry of the registry in `paceline.collectives`.

    ``needs`` says what it needs besides the workers. docs/tutorials/write-a-method.md shows how to write one.
    """

    name: ClassVar[str]
    summary: ClassVar[CollectiveSummary]
    needs: ClassVar[Needs]

    def schedule(self, size: int, at: Placement) -> Schedule:
        """Return the transfers between ranks that form the sum.

        Args:
            size: Size of the buffer, in elements or bytes.
            at: Positions of the ranks in the network.

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
    """Handle of a request to a server: a `Pending` whose `wait` returns the reply."""

    def wait(self) -> ReplyMessage:
        """Wait for the reply; a second call returns it at once.

        Returns:
            The reply's header. Its payload is in the tensor that was handed over.

        Raises:
            UsageError: The server refused; the message has its reason.
            PeerLostError: The server is gone.
        """
        ...

    def on_completion(self, action: Callable[[], None]) -> None:
        """Call *action* at the instant at which the reply arrives. Simulated runtimes only."""
        ...


class Endpoint(Protocol):
    """One worker's connection to one server."""

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
            payload: A flat contiguous tensor. It belongs to the endpoint until ``wait()`` returns.
            into: A flat contiguous tensor that receives the reply's payload, and belongs to the
                endpoint as long. It may be *payload*, and larger than the reply.
            channel: Name of an ordered queue.

        Returns:
            A handle; its ``wait()`` returns the reply's header.
        """
        ...

    def close(self) -> None:
        """Tell the server that this worker leaves, and that it need not wait for it any more."""
        ...


class CompletionEvent(Protocol):
    """An event that happens once: one thread sets it, others wait for it."""

    def set(self) -> None:
        """Set the event."""
        ...

    def wait(self) -> None:
        """Return once the event is set."""
        ...

    def on_completion(self, action: Callable[[], None]) -> None:
        """Call *action* at the instant at which the event is set. Simulated runtimes only."""
        ...


@runtime_checkable
class AwaitedOperation(Protocol):
    """An operation that a `ContinuationRunner` waits for before it runs a callback."""

    def wait_for_result(self) -> None:
        """Return when the result has arrived; raises the operation's error."""
        ...

    def on_completion(self, action: Callable[[], None]) -> None:
        """Call *action* at the instant at which the result arrives. Simulated runtimes only."""
        ...


class ContinuationRunner(Protocol):
    """Runs callbacks in the order of their submission, each once its operation's result has arrived."""

    def put(
        self,
        awaited: AwaitedOperation | None,
        run: Callable[[BaseException | None], None],
    ) -> None:
        """Run *run* after all earlier callbacks, once *awaited* has finished.

        Args:
            awaited: The operation that *run* follows; None if its result has already arrived.
            run: Called with the operation's error, or None. Raises nothing.
        """
        ...

    def completion_event(self, what: str) -> CompletionEvent:
        """Make an event that callbacks of this runner set.

        Args:
            what: The event's name, for errors.
        """
        ...

    def close(self) -> None:
        """Drop callbacks that have not run, and end threads."""
        ...
