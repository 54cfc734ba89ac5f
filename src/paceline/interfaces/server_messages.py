"""Requests and replies: of workers to servers, and of group servers to each other.

A message is a typed header and at most one flat tensor, its *payload*. Each request has exactly one reply,
at once or when the server's discipline allows it. Messages are never unpickled. A group server sends
requests to its peers, which identify it by its connection.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import torch

PROTOCOL = 10
"""Both ends must speak the same version."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.uint8),
    )
}
"""What a payload may consist of."""


class Unit(msgspec.Struct, frozen=True, array_like=True):
    """A part of one parameter that a server updates: elements [*start*, *stop*) of the
    flattened parameter number *parameter*, which is in optimizer group *group*. *shape*:
    the parameter's, where the unit is all of it; else the unit is flat."""

    parameter: int
    start: int
    stop: int
    group: int
    shape: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        return self.stop - self.start


Hyperparameters = list[dict[str, Any]]
"""One mapping per optimizer group, of numbers, booleans and lists only."""


# ---- requests of workers ----


Replies = Literal["full", "deltas"]
"""The reply to a push. "full": the current parameters. "deltas": with a compressor, the compressed
difference from the worker's parameters."""


class Join(msgspec.Struct, tag="join", kw_only=True):
    """A worker joins, and describes the training.

    All fields but *shard* are equal on all workers. Reply: `Joined`, at once. If other workers are at a
    barrier that does not wait for this one, the reply comes after that barrier.

    Args:
        options: The options of the training, as text.
        method: The spec of the method whose discipline the server follows; empty where the server
            only reduces.
        shard: The server's number.
        units: By bucket, the parts of parameters that this server holds.
        dtypes: By bucket, the dtype of its parameters.
        optimizer: A class of torch.optim, by name.
        hyperparameters: The optimizer's, at the start.
        clip_norm: The largest norm of a step's mean gradient.
        servers: How many servers hold parts of the model.
        tensors: A line for each tensor of the model, trained or not.
        compression: The spec of the compressor of gradients; empty without one.
        replies: What pushes are answered with.
    """

    options: str
    method: str = ""
    shard: int = 0
    units: list[list[Unit]] = []
    dtypes: list[str] = []
    optimizer: str = ""
    hyperparameters: Hyperparameters = []
    clip_norm: float = math.inf
    servers: int = 1
    tensors: list[str] = []
    compression: str = ""
    replies: Replies = "full"


BarrierKind = Literal["load", "pulled", "meet"]
"""Why workers wait for each other: see `EnterBarrier`."""


class EnterBarrier(msgspec.Struct, tag="enter-barrier", kw_only=True):
    """A worker waits for all others that train.

    Reply: `BarrierPassed`, when all others are there and the load is complete. The worker that
    Reply: `BarrierPassed`, when all others have arrived and the load is complete. The worker that leads
    the load gets its reply before the load.

    Args:
        kind: "meet" is only a barrier. At a "load" one worker loads the state from which all continue.
            "pulled" follows a load, when this worker has pulled it.
        brings: This worker has something to load.
        step: Its next step; 0 before it has sent a gradient.
    """

    kind: BarrierKind
    brings: bool = False
    step: int = 0


class Load(msgspec.Struct, tag="load", kw_only=True):
    """The payload becomes the parameters of *bucket*, once all buckets are in.

    Optimizer states and untrained tensors that were sent before take effect with it. At the start any
    worker may load, later only the one that leads a load. Reply: `Done`.
    """

    bucket: int


class LoadUntrained(msgspec.Struct, tag="load-untrained", kw_only=True):
    """The payload is a part of the untrained tensors, as bytes: frozen parameters and
    buffers.

    It begins at byte *start*, where the previous part ended. It takes effect with the `Load` of all
    buckets. Reply: `Done`.
    """

    start: int


class Push(msgspec.Struct, tag="push", kw_only=True):
    """The payload is this worker's gradient of *bucket* in *step*.

    Each bucket of a step has one main push, which may have no units: these pushes are the step's barrier.
    The remaining units come in one *late* push per bucket, on another channel. Example: bucket 0 has units
    0, 1 and 2; a push of [0, 2] is followed by a late one of [1]. With a compressor the payload is the
    compressed gradient times the weight, as bytes. Reply: `Parameters`, when the discipline allows it.

    Args:
        step: The worker's step.
        bucket: The bucket.
        late: The main push left these units out.
        units: The units in the payload, one after the other; None: all.
        weight: The gradient's weight in the mean: 1/n, or this worker's part of the samples.
        used: Per unit, whether the backward pass used it.
        hyperparameters: The optimizer's, of this step.
        report: The worker's report to the discipline, as bytes that the method defines.
    """

    step: int
    bucket: int
    late: bool = False
    units: list[int] | None = None
    weight: float = 1.0
    used: list[bool] = []
    hyperparameters: Hyperparameters = []
    report: bytes = b""


class Decide(msgspec.Struct, tag="decide", kw_only=True):
    """A worker forwards a decision of server 0: which *workers* count for *step*.

    Reply: `Done`.
    """

    step: int
    workers: list[int]


class MixBuffers(msgspec.Struct, tag="mix-buffers", kw_only=True):
    """The payload is this worker's buffers of the model, in double precision.

    Reply: `Buffers`.

    Args:
        weight: The weight of this worker's values in the server's.
        floats: How many of the first values are averaged. Counters follow: the larger one stays.
    """

    weight: float
    floats: int


class Pull(msgspec.Struct, tag="pull", kw_only=True):
    """A worker asks for *bucket*, to begin with *step*.

    Reply: `Parameters`, once all buckets were loaded and the discipline allows it.

    Args:
        bucket: The bucket.
        step: The step that the worker begins with.
        peek: The worker only reads: the next delta that it receives still refers to what it had
            before.
    """

    bucket: int
    step: int = 0
    peek: bool = False


class PullUntrained(msgspec.Struct, tag="pull-untrained", kw_only=True):
    """A worker asks for untrained tensors: at most *most* bytes, from byte *start* on.

    Reply: `Untrained`, once parameters were loaded.
    """

    start: int
    most: int


class PullBuffers(msgspec.Struct, tag="pull-buffers", kw_only=True):
    """A worker asks for the buffers as they were averaged since the last load.

    Reply: `Buffers`; without a payload if none were averaged.
    """


class PullState(msgspec.Struct, tag="pull-state", kw_only=True):
    """A worker asks for the optimizer state of *bucket*.

    Reply: `OptimizerState`. If *units* are given, it comes once they include all updates before the step.

    Args:
        bucket: The bucket.
        units: The units whose state is requested, as of *step*; None: the current state of the whole
            bucket.
        step: The step.
    """

    bucket: int
    units: list[int] | None = None
    step: int = 0


class LoadState(msgspec.Struct, tag="load-state", kw_only=True):
    """The payload becomes the optimizer state of *bucket*, with the `Load` of all buckets.

    *entries* describe it as in `OptimizerState`. Reply: `Done`.
    """

    bucket: int
    entries: list[list[tuple[str, int | float]]]


class Leave(msgspec.Struct, tag="leave", kw_only=True):
    """This worker is out of data. Reply: `Done`, once no worker trains any more."""


class Reduce(msgspec.Struct, tag="reduce", kw_only=True):
    """The payload is this worker's part of all-reduce number *number* of *channel*.

    Reply: `Reduced`, when the parts of all workers are in.
    """

    channel: str
    number: int
    operation: Literal["mean", "sum", "max"]


class KeepAlive(msgspec.Struct, tag="keep-alive", kw_only=True):
    """This worker is alive, for example during an evaluation. Reply: `Done`, at once.

    Args:
        step: If the worker has just joined: its first step, from the other servers' replies. 0: nothing
            to report.
        late_joiner: As in `Joined`, from another server's reply.
        moved_away: The worker now pushes to another server, and needs no deltas of this one any more.
    """

    step: int = 0
    late_joiner: bool = False
    moved_away: bool = False


class ServiceRequest(msgspec.Struct, tag="say", kw_only=True):
    """A request to a service that is not a parameter server. Reply: `ServiceReply`.

    Example: an aggregator's round and its racks' numbers.

    Attributes:
        content: The request, in an encoding that the service defines.
    """

    content: bytes = b""


class PeerAddress(msgspec.Struct, kw_only=True):
    """Where a service listens, and the token that it requires."""

    host: str
    port: int
    token: str


class Describe(msgspec.Struct, tag="describe", kw_only=True):
    """Tells a server its role: service *number* of these *services*.

    All workers send the same description before anything else, and the first one counts. A supervisor may
    send it in their place. Reply: `Done`.

    Args:
        kind: A key of `parameter_server.process.services.SERVICES`.
        services: The names of all services of the job.
        number: Index of this service in *services*.
        peers: By name, the addresses of the services that this one sends requests to.
    """

    kind: str
    services: list[str]
    number: int = 0
    peers: dict[str, PeerAddress] = {}

    @property
    def name(self) -> str:
        """The service's own name."""
        return self.services[self.number]


# ---- replies to workers ----


class Joined(msgspec.Struct, tag="joined", kw_only=True):
    """The worker takes part from *step* on.

    Args:
        step: The first step that the server allows the worker.
        loaded: The server has parameters.
        own: This worker's gradients of all steps before *own* are in the parameters. With several
            servers, some may have more than others: the worker continues with the smallest *own*,
            unless a *step* is later.
        load: How many loads there were after the first.
        late_joiner: Training has begun without this worker, or without this incarnation of it. It
            takes the server's parameters; its own are not used.
        over: An earlier incarnation of this worker has left, so it has no more steps to do.
    """

    step: int
    loaded: bool
    own: int = 0
    load: int = 0
    late_joiner: bool = False
    over: bool = False


class BarrierPassed(msgspec.Struct, tag="barrier-passed", kw_only=True):
    """All workers are at the barrier.

    Args:
        leads: This worker has the lowest rank; at a load, the lowest of those that bring something.
            It loads now.
        load: How many loads there were after the first.
    """

    leads: bool = False
    load: int = 0


class Parameters(msgspec.Struct, tag="parameters", kw_only=True):
    """The payload is *bucket*, or the units of it that were pushed.

    With replies "deltas", a reply to a push carries a compressed difference, as bytes.

    Args:
        bucket: The bucket.
        version: How many updates are in it.
        step: The worker's next step.
        counted: The workers that counted for the pushed step, if server 0 decides.
        notice: The discipline's notice to its workers, as bytes that the method defines; empty in
            replies to late pushes.
        load: As in `BarrierPassed`.
        sequence: Numbers the replies about the bucket to this incarnation of the worker. A delta
            refers to the reply with the previous number.
    """

    bucket: int
    version: int
    step: int = 0
    counted: list[int] = []
    notice: bytes = b""
    load: int = 0
    sequence: int = 0


class Untrained(msgspec.Struct, tag="untrained", kw_only=True):
    """The payload is the requested part; all parts together have *whole* bytes."""

    whole: int


class Buffers(msgspec.Struct, tag="buffers", kw_only=True):
    """The payload is the model's buffers, as in `MixBuffers`."""


class OptimizerState(msgspec.Struct, tag="state", kw_only=True):
    """The payload is the optimizer state of a bucket, or of units of it.

    *entries*: per unit, name and value of each entry. An int is the offset in the payload of a
    tensor as large as the unit; a float is the value itself.
    """

    entries: list[list[tuple[str, int | float]]]


class Reduced(msgspec.Struct, tag="reduced", kw_only=True):
    """The payload is the result."""


class ServiceReply(msgspec.Struct, tag="said", kw_only=True):
    """A service's reply to `ServiceRequest`.

    Attributes:
        content: The reply, in an encoding that the service defines.
    """

    content: bytes = b""


class Done(msgspec.Struct, tag="done", kw_only=True):
    """The request was carried out."""


class Rejected(msgspec.Struct, tag="rejected", kw_only=True):
    """The request is refused; the worker raises `UsageError` with *reason*."""

    reason: str


# ---- requests between group servers ----


class GradientUpdate(msgspec.Struct, tag="gradient-update", kw_only=True):
    """The payload is what the origin has applied to *bucket*: see `interfaces.GroupUpdate`."""

    bucket: int
    gradients: int
    weight: float
    used: list[bool]
    hyperparameters: Hyperparameters
    steps: dict[int, int] = {}


class BufferUpdate(msgspec.Struct, tag="buffer-update", kw_only=True):
    """The payload is the origin's buffers of the model, as in `MixBuffers`.

    *weight* is the part of them that is new; the first *floats* of them are averaged.
    """

    weight: float
    floats: int


class Away(msgspec.Struct, tag="away", kw_only=True):
    """The origin has no workers: it receives no updates until it re-enters."""


class Update(msgspec.Struct, tag="update", kw_only=True):
    """One entry of a group server's update log.

    A server sends its own entries, and those of a lost server. Reply: `Done`, once the entry is applied.

    Args:
        source: The server that made the update, its origin.
        incarnation: The origin's.
        number: Numbers the entries of that incarnation, from 0. They are applied in this order.
        floor: All servers have the entries below this number.
        load: How many loads the origin had seen.
        cut: How many consistent cuts the origin had completed.
        entry: The receiver's last entry number, as far as the sender knows.
        what: The update.
    """

    source: int
    incarnation: int
    number: int
    floor: int
    load: int
    cut: int
    entry: int
    what: GradientUpdate | BufferUpdate | Away


class Notice(msgspec.Struct, tag="notice", kw_only=True):
    """The discipline's notice to the disciplines of the other servers. Reply: `Done`.

    Args:
        incarnation: The sender's.
        number: Numbers the notices of that incarnation, from 0.
        content: The notice, as bytes that the method defines.
    """

    incarnation: int
    number: int
    content: bytes


class GetStatus(msgspec.Struct, tag="get-status", kw_only=True):
    """A server, in this *incarnation*, asks another one for its `Status`."""

    incarnation: int


class Enter(msgspec.Struct, tag="enter", kw_only=True):
    """The sender enters the group of active servers: it takes the state of server *via*.

    From now on it receives all new updates, and those that *via* has not acknowledged. Reply: `Status`, with
    the number of the next log entry. *via* itself replies with `Manifest`.

    Args:
        incarnation: The sender's.
        entry: A new number for this entry.
        via: The server whose state it takes.
    """

    incarnation: int
    entry: int
    via: int


class GetState(msgspec.Struct, tag="get-state", kw_only=True):
    """The sender asks for *part* of the state that the `Manifest` of *key* lists.

    Parts are numbered from 0. Reply: `StateChunk`.
    """

    key: int
    part: int


class Quiesce(msgspec.Struct, tag="quiesce", kw_only=True):
    """Server 0, in this *incarnation*, asks for consistent cut number *cut*.

    The receiver serves no workers from now on, and sends all its outstanding updates. Reply: `Quiesced`,
    once all other servers have acknowledged them.
    """

    incarnation: int
    cut: int


class AdoptState(msgspec.Struct, tag="adopt-state", kw_only=True):
    """All servers have quiesced: server 0 ends consistent cut number *cut*.

    The receiver adopts the state that *manifest* lists, whose key is the cut's number. Without a
    manifest it continues with its own. Reply: `Done`, at once.
    """

    cut: int
    manifest: Manifest | None = None


PeerRequest = Update | Notice | GetStatus | Enter | GetState | Quiesce | AdoptState


# ---- replies between group servers ----


class Status(msgspec.Struct, tag="status", kw_only=True):
    """Progress of a group server.

    Args:
        incarnation: The server's.
        number: The number of its next log entry.
        entry: Number of its last entry or departure.
        active: It has all updates, and receives the next ones.
        progress: Counts changes of its model; -1 without parameters.
        cut: How many consistent cuts it has completed.
    """

    incarnation: int
    number: int
    entry: int
    active: bool
    progress: int
    cut: int


class Manifest(msgspec.Struct, tag="manifest", kw_only=True):
    """Contents of a group server's state at one moment.

    Args:
        active: As in `Status`.
        join: The first worker's `Join`, in msgpack; empty if nothing was loaded yet.
        step: The first step of workers that begin now.
        loads: How many loads there were after the first.
        gradients: How many gradients were in updates, of this server and of others.
        cut: How many consistent cuts were completed.
        versions: By bucket, how many updates are in it.
        taken: By origin and incarnation, the number of the next log entry to apply.
        parts: Dtype and elements of each payload. For each bucket: parameters, and optimizer state.
            Then untrained tensors, and buffers.
        floats: How many of the first buffers are averaged.
        applied: By worker and bucket, the step before which its gradients are in the parameters.
    """

    active: bool
    join: bytes = b""
    step: int = 0
    loads: int = 0
    gradients: int = 0
    cut: int = 0
    versions: list[int] = []
    taken: list[tuple[int, int, int]] = []
    parts: list[tuple[str, int]] = []
    floats: int = 0
    applied: dict[int, dict[int, int]] = {}


class StateChunk(msgspec.Struct, tag="state-chunk", kw_only=True):
    """The payload is a part of a state.

    *entries* describe optimizer state, as in `OptimizerState`.
    """

    entries: list[list[tuple[str, int | float]]] = []


class Quiesced(msgspec.Struct, tag="quiesced", kw_only=True):
    """All others have the sender's updates. *changed*: its model has changed since the last
    consistent cut.
    """

    changed: bool


PeerReply = Status | Manifest | StateChunk | Quiesced


# ---- all ----


Request = (
    Join
    | EnterBarrier
    | Load
    | LoadUntrained
    | Push
    | Pull
    | Decide
    | MixBuffers
    | PullUntrained
    | PullBuffers
    | PullState
    | LoadState
    | Leave
    | Reduce
    | KeepAlive
    | ServiceRequest
    | Describe
    | PeerRequest
)

ReplyMessage = (
    Joined
    | BarrierPassed
    | Parameters
    | Untrained
    | Buffers
    | OptimizerState
    | Reduced
    | ServiceReply
    | PeerReply
    | Done
    | Rejected
)
