"""What group servers say to each other: typed headers, as in `server_messages`; tensors travel beside
them.

Each is a request of one server to another, its peer; who sends it is known by its connection.
"""

from __future__ import annotations

from typing import Any

import msgspec

Hyperparameters = list[dict[str, Any]]
"""As in `server_messages`."""

# ---- requests ----


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


# ---- answers ----


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
