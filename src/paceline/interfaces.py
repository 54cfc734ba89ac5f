"""Every seam of paceline in one file: what a method sees, and what a world brings.

- `Method`: when, and with whom, workers agree. It is given a `Run` and nothing else.
- `Run`: one worker's training, as its method sees it: buckets, `Comm`, who takes part.
- `Comm`: asynchronous collectives; each returns a `Pending`.
- `Updater`: the optimizer, applied piece by piece.
- `World`: where a worker lives: its rank, its clock, its way to spend compute time.

No seam here has a time-out of its own: when a peer is gone, the world's transport raises
(gloo and NCCL by connection loss, the virtual world at once), and every call here lets
that error through. After an error from a collective the contents of its buffer are
undefined and the communicator must not be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.instruments import Journal
from paceline.messages import FIRST, Measured, Reply, Request
from paceline.options import RunOptions
from paceline.tensors import Bucket

UpdatesOn = Literal["worker", "method", "server"]
"""Who applies the optimizer: the user's ``step()``, the method piece by piece, a server."""

GradientSeen = Literal["mean", "local-kept", "local-sent"]
"""What ``.grad`` holds between ``backward()`` and ``step()``: the mean over workers; the
worker's own, still to be used; what was sent already, of no use to the script: changing it
is an error."""

ReduceOperation = Literal["mean", "sum", "max"]


Hyperparameters = Sequence[Mapping[str, Any]]
"""What ``param_groups`` held at one moment, group by group, without the parameters."""


class Pending(Protocol):
    """The handle of an operation under way.

    There is no ``done()``: its answer would differ between ranks, and methods that
    branch on it would part ways.
    """

    def wait(self) -> None:
        """Return when the result is in the buffers that were handed over.

        Raises what the transport raises when a peer is lost; the buffers are then
        undefined. A second call returns at once.
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

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        """*output* (size k) becomes this rank's part of the mean of *buffer*
        (size n times k)."""
        ...

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        """*output* (size n times k) becomes all ranks' *buffer* (size k), in rank order."""
        ...

    def channel(self, name: str) -> Comm:
        """A queue of its own over the same workers: what is issued there never queues
        behind what is issued here, though both share the network. Collective: every rank
        asks for the same channels in the same order."""
        ...

    def group(self, ranks: Sequence[int]) -> Comm:
        """The group of some of these workers. Only its members call this; groups are
        kept, so asking again is cheap."""
        ...

    def now(self) -> float:
        """Seconds on this world's clock, from an arbitrary origin."""
        ...

    def lanes(self, device: torch.device) -> int:
        """Collectives on tensors of *device* that are under way at a time: gloo moves
        two, NCCL one."""
        ...


class Reception(Protocol):
    """The handle of a request under way; as `Pending`, and its `wait` has a result."""

    def wait(self) -> Reply:
        """Return the answer's header; its payload is in the tensor that was handed over.

        Raises `UsageError` with the server's reason if it refused, `PeerLostError` if the
        server is gone. A second call returns the same at once.
        """
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


class Sender(NamedTuple):
    """Which request an answer belongs to: it is sent back unread. A worker that was
    restarted has another *incarnation*."""

    worker: int
    incarnation: int
    channel: str
    number: int
    received: int = 0
    """The worker has the answers to all requests of the channel below this number."""


class Answer(NamedTuple):
    """What a server sends, and to whom. *payload* is flat, shared by all who get it, and
    never written again."""

    to: Sender
    message: Reply
    payload: torch.Tensor | None = None


class Work(NamedTuple):
    """What a transition cost a server's processor: bytes that it added up (or copied), and
    bytes of parameters that an optimizer stepped."""

    added: int = 0
    stepped: int = 0


class HeldPush(NamedTuple):
    """A worker's gradient of one bucket, or of some *units* of it, on a server. *stamp*
    counts pushes as they came."""

    worker: int
    step: int
    bucket: int
    weight: float
    used: Sequence[bool]
    hyperparameters: Hyperparameters
    gradient: torch.Tensor
    stamp: int
    stage: int = FIRST
    units: Sequence[int] | None = None
    measured: Measured | None = None


class Shard(Protocol):
    """One server's parameters and clocks, as a discipline sees them."""

    @property
    def now(self) -> float:
        """Seconds on the server's clock, when what is being handled came."""
        ...

    def expected(self, step: int) -> Sequence[int]:
        """The workers, in rank order, whose gradients of *step* have come or will come."""
        ...

    def clock(self, worker: int) -> int:
        """How many steps of a worker that takes part have come in whole: the number of
        the one that comes next."""
        ...

    def move_on(self, worker: int, step: int) -> None:
        """The next step of *worker* is *step*, or the one after its last if that is
        later: it is told so with its answers."""
        ...

    def fastest(self) -> int:
        """One more than the highest step of which a gradient has come, also of those that
        are gone."""
        ...

    def slowest(self) -> int:
        """The least clock of those that take part; where nobody does, that of the step of
        which no gradient has come yet."""
        ...

    @property
    def buckets(self) -> Sequence[int]:
        """The buckets of which this server holds a part."""
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

    def apply(self, push: HeldPush) -> None:
        """Update by one push alone. Its *weight* scales the learning rate: decay follows
        by itself, and Adam, whose step does not depend on a gradient's size, moves as far
        as it should (design section 4)."""
        ...

    def apply_mean(self, bucket: int, pushes: Sequence[HeldPush]) -> None:
        """Update by the mean of pushes, weighted by their weights and divided by the sum of
        them, added up in the order given. All are of the same units. Their gradients are
        used up: the first one then holds the mean. Counts as an update also where there are
        none."""
        ...

    def answer(self, push: HeldPush, counted: Sequence[int] = ()) -> None:
        """Send the bucket's parameters, as they are, to who pushed it; and who *counted*
        for its step, where that was decided."""
        ...

    def count(self, what: str) -> None:
        """Count something that happened, for reports: ``"gradients dropped"``."""
        ...


class Discipline(Protocol):
    """What a server does with gradients, and when it answers: one object per server."""

    def pushed(self, shard: Shard, push: HeldPush) -> None:
        """A gradient has come. It is kept nowhere but here."""
        ...

    def changed(self, shard: Shard) -> None:
        """Who takes part has changed, or a worker's step is in as a whole."""
        ...

    def first_step(self, shard: Shard) -> int:
        """The step with which a worker that joins now begins."""
        ...

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        """Whether a worker that begins with *step* may have *bucket* as it is."""
        ...

    def ended(self, shard: Shard) -> int | None:
        """All steps before this one have ended, and nothing of a later one that its workers
        will do again: who goes on from a snapshot of this moment begins with it. None
        while a step has ended for some buckets only: no snapshot then."""
        ...

    def resume(self, shard: Shard, step: int) -> None:
        """The shard was restored from a snapshot for which `ended` was *step*. Called
        before anything else."""
        ...


@runtime_checkable
class Timed(Discipline, Protocol):
    """A discipline that acts at a time, and not only when something comes."""

    def next_deadline(self) -> float | None:
        """When, on the clock of `Shard.now`, `timer` is to be called; None: not at all. May
        become another one with every call of this discipline."""
        ...

    def timer(self, shard: Shard) -> None:
        """`Shard.now` has reached the deadline."""
        ...


@runtime_checkable
class Led(Discipline, Protocol):
    """A discipline that decides what other servers would decide otherwise: it does so on
    server 0 alone."""

    def follow(self) -> None:
        """This is not server 0: do not decide. Called before anything else."""
        ...


@runtime_checkable
class Deferring(Discipline, Protocol):
    """A discipline that takes a part of each step in its second stage."""

    def deferred(self, bucket: int) -> Sequence[int]:
        """The bucket's units that workers are to defer in their next step."""
        ...

    def has(self, shard: Shard, step: int, bucket: int, units: Sequence[int]) -> bool:
        """Whether all updates before *step* are in these units."""
        ...


@runtime_checkable
class Coordinated(Led, Protocol):
    """The others have to know: server 0 says it in its answers, and workers tell them."""

    def decided(self, shard: Shard, step: int, workers: Sequence[int]) -> None:
        """Server 0 has decided that *workers* count for *step*. Comes from each worker."""
        ...


class Server(Protocol):
    """A server as a pure state machine: no I/O, no clock, no threads. The real world runs
    it behind sockets, the virtual world as an event handler, a test calls it directly.

    Exceptions are faults of the server itself: what workers do wrong is answered with
    `Refused`, and changes nothing.
    """

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        """A request has come in. *payload* is the server's from now on. Seen before: it is
        not done again, and answered again if it had been answered."""
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


class Remote(Protocol):
    """A model's parameters on their servers, as one worker's method sees them."""

    def join(self) -> int:
        """Take part; the model then holds the servers' parameters. Returns the number of
        this worker's first step: 0, unless it was restarted. Collective at the start."""
        ...

    def push(self, bucket: Bucket, step: int, stage: int = FIRST) -> None:
        """Send a bucket's gradient, and ask for its parameters."""
        ...

    def wait(self) -> int:
        """Wait for the parameters of all that was pushed, and put them into the model.
        Returns the number of this worker's next step."""
        ...

    def leave(self) -> None:
        """This worker is out of data. Returns when all are; the model then holds the
        final parameters."""
        ...

    def consolidate(self) -> Callable[[], None]:
        """Put the servers' present parameters into the model; returns what undoes it."""
        ...


class UnitPlace(NamedTuple):
    """A part of the model that travels by itself: elements [*start*, *stop*) of its
    bucket's buffer."""

    piece: Piece
    start: int
    stop: int


class StagedRemote(Remote, Protocol):
    """A `Remote` whose servers take a step in two stages, bucket by bucket in units."""

    units: list[list[UnitPlace]]
    """Per bucket, in the order of its buffer."""

    deferred: list[list[int]]
    """Per bucket, the numbers of its units that the next step leaves to its second stage, as
    servers have said (GIB)."""

    def unit_bytes(self, bucket: int) -> list[int]:
        """What each unit of a bucket is on the network."""
        ...

    def mirror(self) -> Updater:
        """The optimizer on this worker, for tentative steps: its pieces are the units, and
        its state is its own."""
        ...

    def push_units(
        self,
        bucket: Bucket,
        step: int,
        stage: int,
        numbers: Collection[int],
        measured: Measured | None = None,
    ) -> None:
        """Send some units' gradients, and ask for their parameters."""
        ...

    def arrived(self, stage: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Wait for the answers to all that was pushed in *stage*: bucket, number and
        parameters of each unit."""
        ...

    def ask_states(self, units: Sequence[tuple[int, int]], step: int) -> None:
        """Ask for the optimizer's state of some units (bucket and number), with all updates
        before *step* in it."""
        ...

    def states(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Wait for all states that were asked for: bucket, number, and the entries by
        name; tensors are flat."""
        ...

    def buffers_arrived(self) -> None:
        """Wait for the model's buffers, if any are under way, and put them in."""
        ...

    def written(self, under_way: bool) -> None:
        """The method has written into the model; *under_way*: some of it is tentative."""
        ...


class Run(Protocol):
    """One worker's training as its method sees it."""

    @property
    def comm(self) -> Comm:
        """The group of all workers."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The gradient's pieces, in the order in which every rank delivers them."""
        ...

    @property
    def active(self) -> bool:
        """False once this worker is out of data: it only keeps the others company."""
        ...

    @property
    def weight(self) -> float:
        """This worker's part in the mean: 1/n, or its part of the samples."""
        ...

    @property
    def stopwatch(self) -> Stopwatch:
        """What times this training's work."""
        ...

    @property
    def loss(self) -> float | None:
        """What the script last reported as its loss, if it did."""
        ...

    def take_over(self, most_bytes: int) -> Updater:
        """The optimizer, in pieces of at most so many bytes each: from now on the method
        applies it. Only for methods with ``updates_on="method"``; once."""
        ...

    def say(self, sentence: str) -> None:
        """Tell people something, once for all workers."""
        ...

    participants: list[int]
    """Ranks that still train, equal on all ranks; a roll call brings it up to date."""

    @property
    def remote(self) -> Remote:
        """The parameters on their servers. Only for methods with ``updates_on="server"``."""
        ...

    @property
    def staged(self) -> StagedRemote:
        """The same, for a method that takes its steps in two stages."""
        ...

    def keep_company(self) -> None:
        """Go through one step's moments without data: zeros in every bucket."""
        ...

    def take_model(self, source: int) -> None:
        """Give every rank the parameters and buffers of rank *source*. Collective."""
        ...


@runtime_checkable
class Method(Protocol):
    """When, and with whom, workers agree: a frozen dataclass of hyperparameters.

    ``init`` makes the state: one explicit object, picklable between steps. Then come the
    moments of a step, in this order; a method defines those that it needs, each with
    the arguments ``(state, run, ...)``:

    1. ``step_begins(state, run)``: the first forward with gradients after a backward
       that ended.
    2. ``bucket_ready(state, run, bucket)``: the gradients of *bucket* are in its buffer
       (times `Run.weight` where workers form the mean, so that their sum is the mean);
       backward still runs. Always in plan order, on every rank.
    3. ``backward_ended(state, run)``: all buckets were delivered. A tensor that took no
       part on this rank is zero in its buffer and False in ``bucket.used``.
    4. ``after_update(state, run)``: the user's optimizer has stepped.
    5. ``finish(state, run)``: this worker is out of data. Returns when the documented
       result is in the model.
    6. ``consolidate(state, run)``: put the documented result into the model, for an
       evaluation, and return what undoes it. Not collective unless the method says so.
       Law: training with and without consolidations in between is bit-equal.

    A submodule that is called directly skips moment 1.

    An exception from a moment reaches the user's script out of ``forward``,
    ``backward()`` or ``step()``; the training cannot go on after it.
    """

    name: ClassVar[str]
    """The registry's name: lower case, with hyphens."""

    @property
    def updates_on(self) -> UpdatesOn: ...

    @property
    def gradient_seen_by_user(self) -> GradientSeen: ...

    def init(self, run: Run) -> Any:
        """Make the method's state for this run. Collective."""
        ...


class UpdatesOnServer(Method, Protocol):
    """A method whose servers hold the parameters and update them."""

    def server(self, workers: int) -> Discipline:
        """What one server does, for a job of so many workers. Raises `UsageError` where the
        hyperparameters do not fit that number."""
        ...


@dataclass(frozen=True, order=True)
class Piece:
    """Elements [*start*, *stop*) of the flattened parameter number *parameter*, counted
    in the order in which the optimizer's ``param_groups`` list them."""

    parameter: int
    start: int
    stop: int


class Updater(Protocol):
    """The optimizer, applied piece by piece: on a worker, or on a server.

    Law: applying a step's pieces in several calls, in any order, or later with the
    gradients and hyperparameters of then, gives the bits of one plain optimizer step.

    A call that is refused (`UsageError`) has changed nothing. After an error of the
    optimizer itself some of the call's pieces may have been updated, unless it ran with
    ``commit=False``; the training cannot go on after it.
    """

    def apply(
        self,
        pieces: Sequence[Piece],
        gradients: Sequence[torch.Tensor],
        hyperparameters: Hyperparameters,
        commit: bool = True,
    ) -> list[torch.Tensor]:
        """Do one optimizer step on just these pieces; returns an empty list.

        ``gradients[i]`` belongs to ``pieces[i]``: flat, or of the piece's shape. It is
        only read. The parameters change in place. With ``commit=False`` neither they nor
        the optimizer's state change, and the values that they would have got are
        returned, one new tensor of the piece's shape for each piece.
        """
        ...

    def pieces_of(self, parameter: torch.nn.Parameter) -> Sequence[Piece]:
        """The pieces of one parameter, in order; none if the optimizer does not have it."""
        ...

    def group_of(self, piece: Piece) -> int:
        """The number of the parameter group that a piece is in."""
        ...

    def values(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Each piece's elements of its parameter: views, to read and to write."""
        ...

    def stamps(self, pieces: Sequence[Piece]) -> list[int]:
        """A number for each piece that becomes another one when anybody writes into its
        parameter (through ``.data`` nobody notices)."""
        ...

    def hyperparameters(self) -> list[dict[str, Any]]:
        """A snapshot of every group's hyperparameters as of now, to keep or to send."""
        ...

    def state(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The optimizer's own state of each piece, by name: what is written into it, or
        into its tensors, is what the next step uses. Empty before a piece's first step,
        for most optimizers. Ask again after a checkpoint was loaded."""
        ...


@dataclass(frozen=True)
class ServerJob:
    """What servers are started for: training number *training* of the script, under
    *method* with its full *spec*; None for servers that only reduce. *place*: "embedded" (one beside
    rank 0), "per-node" (one on each host), "dedicated" (on hosts of their own), "auto" (dedicated
    where there are any, else embedded), or
    addresses ``"HOST:PORT"`` joined by "+". *sums*: the order of sums, "rank",
    "arrival" or "ring"."""

    training: int
    method: UpdatesOnServer | None
    spec: str
    place: str
    sums: Literal["rank", "arrival", "ring"]


class World(Protocol):
    """Where one worker lives."""

    name: ClassVar[str]
    """``"real"``, ``"emulated"`` or ``"virtual"``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def speeds(self) -> Sequence[float] | None:
        """Relative compute speed of each worker, where the world knows it."""
        ...

    @property
    def options(self) -> RunOptions:
        """What the command line decided for this run."""
        ...

    @property
    def journal(self) -> Journal:
        """Where this worker's steps, bytes, waits and metrics are counted."""
        ...

    alone: bool
    """Whether workers meet only at their servers, so that the job survives deaths."""

    trained: list[tuple[torch.nn.Module, torch.optim.Optimizer]]
    """What `distribute` was given and gave back here, in order."""

    def compute(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        samples: float | None,
    ) -> Compute | None:
        """Where one model's compute time is charged, or measured; None where it passes by
        itself, unobserved.

        *parameters* are the model's trainable tensors, in registration order; *samples* is
        the batch that a forward and a backward pass are given for (None: the workload's
        own, or the first training batch).
        """
        ...

    def stopwatch(self, device: torch.device) -> Stopwatch:
        """What times work on tensors of *device*."""
        ...

    def blank(self, size: int, device: torch.device) -> torch.Tensor:
        """A flat float32 tensor of zeros that is *size* bytes on this world's network (in
        the virtual world it may have fewer elements)."""
        ...

    def connect(self) -> None:
        """Make sure that torch.distributed is initialized. Collective."""
        ...

    def servers(self, job: ServerJob) -> Sequence[Endpoint]:
        """Start one training's servers, or find them; returns this worker's ends of them.
        Collective. Raises `UsageError` where there are none of the kind asked for."""
        ...

    def now(self) -> float:
        """Seconds on this world's clock, from an arbitrary origin."""
        ...

    def pace(self, seconds: float) -> None:
        """Spend *seconds* of compute time (at a speed of 1)."""
        ...

    def at_exit(self, action: Callable[[], None]) -> None:
        """Call *action* when this worker's script ends without an error."""
        ...


class Compute(Protocol):
    """Charges a model's compute time where no real time passes for it, or measures it."""

    def forward(self, samples: int | None, training: bool) -> None:
        """A forward pass begins, over *samples* samples (None: not known)."""
        ...

    def gradient(self, index: int) -> None:
        """The gradient of one tensor was computed; paceline's own work begins."""
        ...

    def gradient_taken(self) -> None:
        """paceline's own work is done; backward goes on."""
        ...

    def update_begins(self) -> None:
        """The optimizer is about to step."""
        ...

    def step_ended(self) -> None:
        """The optimizer stepped: the next step draws its own jitter."""
        ...


class Stopwatch(Protocol):
    """Marks moments without waiting for them, and says later how far apart they were."""

    def mark(self) -> Any:
        """This moment: on the host's clock, or in the device's stream of work."""
        ...

    def seconds(self, start: Any, marks: Sequence[Any]) -> list[float]:
        """Seconds from *start* to each of *marks*. Waits until the device is past them."""
        ...
