"""What workers and servers, and group servers among themselves, say to each other.

Messages are typed headers; tensors travel beside them. A *request* is answered exactly once, at
once or when the server's discipline allows it. A request's payload is one flat tensor, described
by its header; so is an answer's. Nothing here is ever unpickled. Between group servers each is a
request of one server to another, its peer; who sends it is known by its connection.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import torch

PROTOCOL = 9
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
"""One mapping per group of the optimizer: numbers, truth values, lists and nothing else."""


# ---- requests of workers ----


Replies = Literal["full", "deltas"]
"""What pushes are answered with: the parameters as they are; or, where gradients are compressed,
a code of their difference from what the worker holds."""


class Join(msgspec.Struct, tag="join", kw_only=True):
    """A worker asks to take part, and says what is trained.

    *options* and all else but *shard* are equal on all workers. *method*: the spec of the method
    whose discipline the server follows; empty where it only reduces. *shard*: the server's number. *units* and *dtypes*: what this
    server holds of each bucket. *optimizer*: a class of torch.optim, by name. *clip_norm*: the
    largest norm of a step's mean gradient, which so many *servers* hold parts of. *tensors*: a
    line for each tensor of the model, trained or not. *compression*: the spec of what gradients
    are pushed as; empty where they are pushed as they are. *answers*: what a push is answered
    with. Answer: `Joined`, at once; to a worker
    that nobody waits for, once no meeting is under way.
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


Purpose = Literal["load", "pulled", "meet"]
"""What workers wait for each other for."""


class Arrive(msgspec.Struct, tag="arrive", kw_only=True):
    """This worker waits for all others that train. *purpose*: "meet" is just that; at a "load"
    one of them loads what all go on from; "pulled" comes after a load, when this worker has
    taken it. *brings*: this worker has something to load. *step*: its next one; 0 before it has
    sent a gradient. Answer: `Met`, when all are there, and the load, too; the worker that is to
    load is answered before it."""

    purpose: Purpose
    brings: bool = False
    step: int = 0


class Load(msgspec.Struct, tag="load", kw_only=True):
    """The payload becomes the parameters of *bucket*, once all buckets are in; so do the states
    and the rest that came before. Any worker may load first; later only the one that leads a
    load. Answer: `Done`."""

    bucket: int


class LoadRest(msgspec.Struct, tag="load-rest", kw_only=True):
    """The payload is a part of what the model holds and nobody trains, as bytes: frozen
    parameters and buffers. It begins at byte *start*, where the part before ended. It takes
    effect with the `Load` of all buckets. Answer: `Done`."""

    start: int


class Push(msgspec.Struct, tag="push", kw_only=True):
    """The payload is this worker's gradient of *bucket* in *step*: of all its units, or of
    these *units*, one after the other. Every bucket of a step is pushed once, though maybe
    none of its units: that is the step's barrier. Units that such a push leaves out come
    *late*, in one push per bucket, on another channel. Example: bucket 0 has units 0, 1 and 2;
    a push of [0, 2] is followed by a late one of [1]. *weight*: the gradient's part in the mean
    (1/n, or its part of the samples); *used*: per unit, whether it took part in the backward
    pass; *hyperparameters*: of this step; *report*: what the worker tells the discipline, in
    the method's own bytes. Under compression the payload is the code, in bytes, of this worker's share of
    the mean: of the gradient times the weight. Answer: `Parameters`, when the discipline allows
    it."""

    step: int
    bucket: int
    late: bool = False
    units: list[int] | None = None
    weight: float = 1.0
    used: list[bool] = []
    hyperparameters: Hyperparameters = []
    report: bytes = b""


class Decide(msgspec.Struct, tag="decide", kw_only=True):
    """A worker tells what it has heard: server 0 has decided which *workers* count for *step*.
    Answer: `Done`."""

    step: int
    workers: list[int]


class PullNorm(msgspec.Struct, tag="pull-norm", kw_only=True):
    """A worker asks for this server's part of the norm of *step*. Answer: `NormPart`, once all
    of the step's mean that the server holds is known."""

    step: int


class Norm(msgspec.Struct, tag="norm", kw_only=True):
    """The *squares* of the mean gradient's elements in *step* add up to this, over all
    servers. Answer: `Done`."""

    step: int
    squares: float


class Blend(msgspec.Struct, tag="blend", kw_only=True):
    """The payload is this worker's buffers of the model, in double precision. So many *floats*
    come first: they are mixed into the server's with *weight*. Counters follow: the larger one
    stays. Answer: `Blended`."""

    weight: float
    floats: int


class Pull(msgspec.Struct, tag="pull", kw_only=True):
    """A worker asks for *bucket*, to begin with *step*. Answer: `Parameters`, once all buckets
    were loaded, and once the discipline allows it. *looks*: what comes does not become what this
    worker holds, so that its next difference is still from what it had before."""

    bucket: int
    step: int = 0
    looks: bool = False


class PullRest(msgspec.Struct, tag="pull-rest", kw_only=True):
    """A worker asks for what nobody trains: from byte *start* on, *most* bytes at most. Answer:
    `Rest`, once parameters were loaded."""

    start: int
    most: int


class PullBuffers(msgspec.Struct, tag="pull-buffers", kw_only=True):
    """A worker asks for the buffers as they were mixed since the last load. Answer: `Blended`;
    without a payload if none were."""


class PullState(msgspec.Struct, tag="pull-state", kw_only=True):
    """A worker asks for the optimizer's state of *bucket*, as it is; or of some *units* of it,
    as of *step*. Answer: `OptimizerState`; of units, once all updates before the step are in
    them."""

    bucket: int
    units: list[int] | None = None
    step: int = 0


class LoadState(msgspec.Struct, tag="load-state", kw_only=True):
    """The payload, described as in `OptimizerState`, becomes the optimizer's state of
    *bucket*, with the `Load` of all buckets. Answer: `Done`."""

    bucket: int
    entries: list[list[tuple[str, int | float]]]


class Leave(msgspec.Struct, tag="leave", kw_only=True):
    """This worker is out of data. Answer: `Done`, once nobody trains any more."""


class Reduce(msgspec.Struct, tag="reduce", kw_only=True):
    """The payload is this worker's part in all-reduce number *number* of *channel*.
    Answer: `Reduced`, when every worker's part is in."""

    channel: str
    number: int
    operation: Literal["mean", "sum", "max"]


class Note(msgspec.Struct, tag="note", kw_only=True):
    """This worker is alive: it evaluates, say. Where it has just joined, it tells each server
    what the others have answered: that it begins with *step*, or that it is a *guest* (see
    `Joined`). *elsewhere*: it pushes to another server from now on, and what it holds of this
    one is of no use. Answer: `Done`, at once."""

    step: int = 0
    guest: bool = False
    elsewhere: bool = False


class Say(msgspec.Struct, tag="say", kw_only=True):
    """What a kind of service that is no parameter server is asked, in *words* of its own that
    both ends decode. Example: an aggregator's round and its racks' numbers. Answer: `Said`."""

    words: bytes = b""


class Introduce(msgspec.Struct, tag="introduce", kw_only=True):
    """A worker tells a server that was there before its job what it is: number *number* of these
    *services*, of that *kind* (a row of `parameter_server.process.service_registry`). With *peers*, once all have been told,
    also where each of the others listens: host and port. Comes before all else. Answer:
    `Done`."""

    kind: str
    services: list[str]
    number: int
    peers: dict[str, tuple[str, int]] = {}


# ---- answers to workers ----


class Joined(msgspec.Struct, tag="joined", kw_only=True):
    """This worker takes part from *step* on. *loaded*: the server has parameters, which have
    come through *load* loads since the first. *guest*: training has begun without this worker,
    or without this life of it. A guest takes what is there; what it brings is not used. *own*:
    this server's parameters have in them the worker's gradients of all steps before. Of several
    servers some may have more than others: the worker goes on with the least *own*, unless a
    *step* is later. *over*: an earlier life of this worker has left the training well, so it has
    no more steps to do."""

    step: int
    loaded: bool
    own: int = 0
    load: int = 0
    guest: bool = False
    over: bool = False


class Met(msgspec.Struct, tag="met", kw_only=True):
    """All are there. *leads*: this worker is the lowest rank; at a load, the lowest of those
    that bring something, and it loads now. *load*: how many loads the server has come
    through."""

    leads: bool = False
    load: int = 0


class Parameters(msgspec.Struct, tag="parameters", kw_only=True):
    """The payload is *bucket*, or the units of it that were pushed. *version*: how many steps,
    or how many pushes, are in it. *step*: the one that the worker is to do next.
    *counted*: the workers that counted for the step that was pushed, where server 0 decides.
    *told*: what the discipline tells its workers of the bucket, in the method's own bytes;
    empty in answers to late pushes. *load*: as in `Met`. Where answers are differences that to a
    push carries the code of one, in bytes; *turn* then numbers what this life of the worker is
    given of the bucket, and a difference is from what had the turn before."""

    bucket: int
    version: int
    step: int = 0
    counted: list[int] = []
    told: bytes = b""
    load: int = 0
    turn: int = 0


class Rest(msgspec.Struct, tag="rest", kw_only=True):
    """The payload is the part that was asked for; all of it has *whole* bytes."""

    whole: int


class NormPart(msgspec.Struct, tag="norm-part", kw_only=True):
    """This server's part of a step's *squares*; *counted*, as in `Parameters`."""

    squares: float
    counted: list[int] = []


class Blended(msgspec.Struct, tag="blended", kw_only=True):
    """The payload is the model's buffers, as in `Blend`."""


class OptimizerState(msgspec.Struct, tag="state", kw_only=True):
    """Per unit, the entries of its state: name and, for a tensor of the unit's size, its
    offset in the payload, as an int; else the value itself, as a float."""

    entries: list[list[tuple[str, int | float]]]


class Reduced(msgspec.Struct, tag="reduced", kw_only=True):
    """The payload is the result."""


class Said(msgspec.Struct, tag="said", kw_only=True):
    """What a service answers to `Say`, in *words* of its kind's own."""

    words: bytes = b""


class Done(msgspec.Struct, tag="done", kw_only=True):
    """That was done."""


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """It cannot be done; the worker raises `UsageError` with *reason*."""

    reason: str


# ---- requests between group servers ----


class Gradients(msgspec.Struct, tag="gradients", kw_only=True):
    """The payload is what the sender has applied to *bucket*: see `interfaces.Parcel`."""

    bucket: int
    gradients: int
    weight: float
    used: list[bool]
    hyperparameters: Hyperparameters
    steps: dict[int, int] = {}


class Buffers(msgspec.Struct, tag="buffers", kw_only=True):
    """The payload is the sender's buffers of the model, as in `Blend`: *weight* is the part of
    them that is new."""

    weight: float
    floats: int


class Away(msgspec.Struct, tag="away", kw_only=True):
    """The sender has no workers: nothing is to be passed on to it, until it enters again."""


class Pass(msgspec.Struct, tag="pass", kw_only=True):
    """A server passes on what server *source* has to tell to all others: its own, or what it
    has had from one that is lost. Those of a *life* of the source are *number*ed from 0, and
    come in that order; all have what is below *floor*. *load*, *meeting*: how many loads and
    meetings the source had come through. *entry*: how the receiver has last entered, as the
    sender knows. Answer: `Done`, once it is taken."""

    source: int
    life: int
    number: int
    floor: int
    load: int
    meeting: int
    entry: int
    what: Gradients | Buffers | Away


class Tell(msgspec.Struct, tag="tell", kw_only=True):
    """What the sender's discipline tells the others, in the method's own bytes, *number*ed in
    this *life* of it. Answer: `Done`."""

    life: int
    number: int
    words: bytes


class Trains(msgspec.Struct, tag="trains", kw_only=True):
    """What the sender trains, as soon as it knows: by the names of `Join`'s fields, their values
    in words, or digests of long ones. Answer: `Done`; `Refused` where the receiver trains something
    else."""

    what: dict[str, str]


class Stand(msgspec.Struct, tag="stand", kw_only=True):
    """A server, in this *life* of it, asks another one where it stands. Answer: `Standing`."""

    life: int


class Enter(msgspec.Struct, tag="enter", kw_only=True):
    """The sender takes everything from server *via*: pass on to it from now on, and what *via*
    has not answered yet. *entry* is a new number. Answer: `Standing`, with the number that comes
    first; of *via* itself `Manifest`."""

    life: int
    entry: int
    via: int


class Copy(msgspec.Struct, tag="copy", kw_only=True):
    """The sender asks for a *part* of what the `Manifest` of *key* lists, from 0 on. Answer:
    `Copied`."""

    key: int
    part: int


class Drain(msgspec.Struct, tag="drain", kw_only=True):
    """Server 0, in this *life* of it: all workers meet. Do nothing for workers, and pass on what
    is owed. Answer: `Drained`, once all others have it."""

    life: int
    meeting: int


class Agree(msgspec.Struct, tag="agree", kw_only=True):
    """Server 0: all have drained. Take over what *manifest* lists, whose key is the number of
    the meeting, and go on; just go on without one. Answer: `Done`, at once."""

    meeting: int
    manifest: Manifest | None = None


PeerRequest = Pass | Tell | Trains | Stand | Enter | Copy | Drain | Agree


# ---- answers between group servers ----


class Standing(msgspec.Struct, tag="standing", kw_only=True):
    """The server is in this *life*, and passes on *number* next. *entry*: how it has last
    entered. *active*: it has all that was passed on, and more is to be. *progress*: how much
    it has; -1 without parameters."""

    life: int
    number: int
    entry: int
    active: bool
    progress: int
    meeting: int


class Manifest(msgspec.Struct, tag="manifest", kw_only=True):
    """Everything that a server has, as of one moment. *join* is what is trained, in msgpack;
    empty where nothing was loaded yet. *gradients*: how many were passed on to it, or by it.
    *step*: with which workers that begin now go on. *active*: as in `Standing`.
    *taken*: of each source and life, the number that is to come next. *parts*: dtype and
    elements of each payload: parameters and the optimizer's state, for each bucket that is
    held; then what nobody trains, and buffers, the first *floats* of which are mixed. *applied*:
    by worker and bucket, the step before which its gradients are in."""

    active: bool
    join: bytes = b""
    step: int = 0
    loads: int = 0
    gradients: int = 0
    meeting: int = 0
    versions: list[int] = []
    taken: list[tuple[int, int, int]] = []
    parts: list[tuple[str, int]] = []
    floats: int = 0
    applied: dict[int, dict[int, int]] = {}


class Copied(msgspec.Struct, tag="copied", kw_only=True):
    """The payload is the part. *entries*: where that is the optimizer's state, as in
    `OptimizerState`."""

    entries: list[list[tuple[str, int | float]]] = []


class Drained(msgspec.Struct, tag="drained", kw_only=True):
    """All others have what this server had to pass on. *changed*: whether its model has, since
    the last meeting."""

    changed: bool


PeerReply = Standing | Manifest | Copied | Drained


# ---- all ----


Request = (
    Join
    | Arrive
    | Load
    | LoadRest
    | Push
    | Pull
    | Decide
    | PullNorm
    | Norm
    | Blend
    | PullRest
    | PullBuffers
    | PullState
    | LoadState
    | Leave
    | Reduce
    | Note
    | Say
    | Introduce
    | PeerRequest
)

Reply = (
    Joined
    | Met
    | Parameters
    | Rest
    | NormPart
    | Blended
    | OptimizerState
    | Reduced
    | Said
    | PeerReply
    | Done
    | Refused
)
