"""Communication: a worker's ends of the group of workers, and of the servers; collectives as data.

`paceline.collectives` implements `Comm`, for methods and the planner. Runtimes bring an
`Endpoint` for each server, which a training's `Remote`, and averages over servers, use,
and a `Runner` for what is chained.

A `Schedule` is a collective as data: who sends which part of a buffer to whom, and after what.
One list of transfers serves four readers: `collectives.execute` *performs* it on real tensors
over sends and receives; the simulated runtime *plays* it message by message, or *prices* it as
one activity; the planner prices it without a runtime. Ranks here are positions in the group, 0
to n-1. Sizes and offsets are in one unit, whichever whoever makes a schedule takes: elements
of the buffer to perform it, bytes to price it.

A transfer may start when every transfer of an earlier step into its source has arrived:
that is all the order there is. What is sent in a step is what the buffer held before that
step. Messages between the same two ranks never overtake.

Beside n ranks other nodes may take part in a schedule: what adds up at racks' switches, as n,
n + 1, ... (see `switches_of`), and after them servers on hosts of their own (`servers_of`). These
are always present, and hold zeros at first; such schedules are performed in virtual time only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.interfaces.server_messages import Reply, Request

__all__ = [
    "Awaited",
    "Collective",
    "CollectiveSummary",
    "Comm",
    "Endpoint",
    "Pending",
    "Priced",
    "Reception",
    "ReduceOperation",
    "Runner",
    "Scattered",
    "Schedule",
    "Signal",
    "Transfer",
    "servers_of",
    "switches_of",
]

ReduceOperation = Literal["mean", "sum", "max"]


class Pending(Protocol):
    """The handle of an operation under way.

    There is no ``done()``: its answer would differ between ranks, and methods that
    branch on it would part ways.
    """

    def wait(self) -> None:
        """Return when the result is in the buffers that were handed over.

        Raises what the transport raises when a peer is lost; the buffers are then
        undefined. A second call returns at once. Within what `then` runs only a result
        that is known to be in can be waited for; anything else is a `UsageError`.
        """
        ...

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        """Call *work* once the result is in; the Pending that is returned is done when that
        of *work* is (None: with *work*).

        Works run beside the caller, one after the other in the order of the calls of
        ``then``, whichever result is in first: so all ranks that issue the same operations
        run the same works in the same order. What a work issues on any `Comm` goes to a
        queue of its own there, and never meets what the caller issues meanwhile. For
        example a second round::

            pending = comm.all_reduce(a).then(lambda: comm.all_reduce(b(a)))

        A work may read and write the buffers that were handed over, and builds no autograd
        graph. It waits for nothing, makes no groups or channels, and draws nothing from
        global random generators. An error of the operation or of *work* comes out of
        ``wait()`` of the Pending that is returned, and of those of all later works of this
        `Comm`, which are not run. On CUDA under NCCL *work* is called at once: kernels
        follow the result in the order of the current stream.

        Raises `UsageError` where another thread, or another work, has issued the operation.
        """
        ...


class Scattered(Protocol):
    """The handle of a reduce-scatter under way: each part of the result will be at one rank,
    until `gather` brings all parts to all."""

    def gather(self) -> Pending:
        """Begin the all-gather: when the Pending has been waited for the buffer that was handed
        over holds the result, on every rank.

        It may be asked for before the reduce-scatter is in, and starts then. Those of one
        communicator start in the order in which they were asked for: the same one on all
        ranks. Reduce-scatters that are issued meanwhile queue behind them under NCCL only.
        """
        ...


class Comm(Protocol):
    """One worker's end of a group of workers.

    A buffer handed over is Comm's until its Pending has been waited for: do not read or
    write it before. Collectives must be issued in the same order on every rank; different
    channels and groups are not ordered with respect to each other, and one communicator
    is not an ordered queue either (gloo runs two at a time): wait for a result before
    issuing what reads it.
    """

    @property
    def rank(self) -> int:
        """This worker's position in the group, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of workers in the group."""
        ...

    def all_reduce(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        """Replace *buffer* on every rank by its mean, sum or maximum over ranks."""
        ...

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> Pending:
        """Replace *buffer* by the one of rank *source*."""
        ...

    def reduce_scatter(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        operation: ReduceOperation = "mean",
    ) -> Pending:
        """*output* (size k) becomes this rank's part of the mean, sum or maximum of *buffer*
        (size n times k)."""
        ...

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        """*output* (size n times k) becomes all ranks' *buffer* (size k), in rank order."""
        ...

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        """Part j of *buffer*, cut into n equal parts, becomes this rank's part of the
        *output* of rank j (both of size n times k)."""
        ...

    def send(self, buffer: torch.Tensor, to: int) -> Pending:
        """Send *buffer* to rank *to*, which receives it. Messages between two ranks arrive
        in the order of issue; they are not ordered with respect to collectives."""
        ...

    def receive(self, buffer: torch.Tensor, source: int) -> Pending:
        """*buffer* becomes what rank *source* has sent: of the same type and size."""
        ...

    def perform(
        self,
        schedule: Schedule,
        buffer: torch.Tensor,
        operation: ReduceOperation = "sum",
        timed: Schedule | None = None,
    ) -> Pending:
        """Move and add up parts of *buffer* as *schedule* says, whose sizes and offsets are
        in elements (a complex one counts as two). *operation* is how parts are added; a
        mean is a sum that every rank divides by n at the end. *timed*: of a buffer that
        stands for a larger one, the same schedule over its bytes: these take the time.
        Collective. On CUDA under NCCL a `UsageError`."""
        ...

    @property
    def racks(self) -> Sequence[int] | None:
        """In which rack each rank is, where that is known: the same on all ranks."""
        ...

    @property
    def aggregating(self) -> Set[int]:
        """The racks at whose switches something adds up workers' numbers."""
        ...

    def channel(self, name: str) -> Comm:
        """A queue of its own over the same workers: what is issued there never queues
        behind what is issued here, though both share the network. Collective: every rank
        asks for the same channels in the same order."""
        ...

    def group(self, ranks: Sequence[int]) -> Comm:
        """The group of some of these workers. Only its members call this, in the same order
        of groups as the others that share them.

        A group is kept, so asking again is cheap, and has connections and threads of its
        own; where one of its members keeps many already, all of them send over the
        connections that they have. Averages are formed as on this `Comm`.
        """
        ...

    def lanes(self, device: torch.device) -> int:
        """Collectives on tensors of *device* that are under way at a time: gloo moves
        two, NCCL one."""
        ...


class CollectiveSummary(NamedTuple):
    """A collective's row in the table of collectives, in words."""

    formed_by: str
    sends: str
    good_for: str


class Collective(Protocol):
    """How an average is formed: a row of the registry, see `paceline.collectives`."""

    name: ClassVar[str]
    summary: ClassVar[CollectiveSummary]
    needs_servers: ClassVar[bool]

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        """Who sends what to whom to add up *size* units among the ranks of *comm*."""
        ...

    def run(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        """Replace *buffer* on every rank of *comm* by its mean, sum or maximum."""
        ...


class Reception(Protocol):
    """The handle of a request under way; as `Pending`, and its `wait` has a result."""

    def wait(self) -> Reply:
        """Return the answer's header; its payload is in the tensor that was handed over.

        Raises `UsageError` with the server's reason if it refused, `PeerLostError` if the
        server is gone. A second call returns the same at once.
        """
        ...

    def when_in(self, action: Callable[[], None]) -> None:
        """Simulated runtimes: call *action* at the instant at which the answer is in."""
        ...


class Endpoint(Protocol):
    """One worker's end of one server."""

    @property
    def name(self) -> str:
        """For errors: ``"server 0 at 10.0.0.1:4711"``."""
        ...

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> Reception:
        """Send a request, and return at once. *payload*: a flat contiguous tensor, the
        endpoint's until the reception was waited for; *into*: a flat contiguous tensor
        that takes the answer's payload, in the same way (may be *payload*, and larger than
        the answer).

        Requests of one channel arrive in order; a channel never queues behind another.
        """
        ...

    def close(self) -> None:
        """Say goodbye: this worker is not missed from now on."""
        ...


class Signal(Protocol):
    """Something that happens once, told from one place and waited for at another."""

    def set(self) -> None: ...

    def wait(self) -> None: ...

    def when_in(self, action: Callable[[], None]) -> None:
        """Simulated runtimes: call *action* at the instant at which it happens."""
        ...


@runtime_checkable
class Awaited(Protocol):
    """What a `Runner` waits for before it runs a work."""

    def settle(self) -> None:
        """Return when the result is in; raises what the operation ended with."""
        ...

    def when_in(self, action: Callable[[], None]) -> None:
        """Simulated runtimes: call *action* at the instant at which the result is in."""
        ...


class Runner(Protocol):
    """Runs works in the order in which they were put, each when what it follows is in."""

    def put(
        self, awaited: Awaited | None, run: Callable[[BaseException | None], None]
    ) -> None:
        """Call *run* when *awaited* is in (None: it is), with the error that it ended with,
        if any. *run* raises nothing."""
        ...

    def signal(self, what: str) -> Signal:
        """A signal that works of this runner give. *what* it is, for errors."""
        ...

    def close(self) -> None:
        """Drop what has not been run. Threads end."""
        ...


class Transfer(NamedTuple):
    """*source* sends *size* units at *offset* of its buffer to *destination*,
    which adds them to its own there (*adds*), or puts them in their place."""

    source: int
    destination: int
    size: int
    offset: int = 0
    adds: bool = False


class Schedule(Protocol):
    """A collective's transfers, and what they cost when nothing disturbs them."""

    def __hash__(self) -> int: ...

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        ...

    @property
    def steps(self) -> int:
        """Number of steps."""
        ...

    def step(self, number: int) -> Iterator[Transfer]:
        """The transfers of one step."""
        ...

    def bytes_sent(self, rank: int) -> int:
        """What *rank* sends in all, in units: bytes where sizes are bytes."""
        ...

    @property
    def priced(self) -> Sequence[Sequence[Priced]] | None:
        """This schedule as activities: in each phase some side by side, and the next phase
        begins when they all have ended; None: it must be played."""
        ...


def switches_of(schedule: Schedule) -> tuple[int, ...]:
    """The racks whose aggregators are nodes of *schedule*, its attribute ``switches``: most
    schedules have none."""
    found: tuple[int, ...] = getattr(schedule, "switches", ())
    return found


def servers_of(schedule: Schedule) -> tuple[int, ...]:
    """The numbers of a cluster's servers on hosts of their own that are nodes of *schedule*, its
    attribute ``servers``: most schedules have none."""
    found: tuple[int, ...] = getattr(schedule, "servers", ())
    return found


class Priced(Protocol):
    """Messages that keep step with each other, so that they can be taken for one activity:
    after the latency of the longest chain all connections carry the same. Where they do not, it has
    ``streams`` as well, which counts instead: how many connections' bytes go from one node to
    another, by pair."""

    @property
    def pattern(self) -> Hashable:
        """Equal for schedules with the same connections and latency, of whatever size."""
        ...

    @property
    def connections(self) -> Iterable[tuple[int, int]]:
        """Source and destination of each connection in use."""
        ...

    @property
    def members(self) -> Sequence[int]:
        """The ranks that take part."""
        ...

    @property
    def messages_sent(self) -> int:
        """Messages that each of them sends."""
        ...

    @property
    def bytes_per_connection(self) -> int:
        """What the busiest connection carries."""
        ...

    def latency(self, one_way: Callable[[int, int], float]) -> float:
        """Seconds of latency on the longest chain of dependent messages. *one_way* gives
        seconds between two ranks."""
        ...
