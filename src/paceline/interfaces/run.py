"""What a method sees of one worker's training, and nothing else.

`paceline.core` implements `Run`, `UpdatingRun` and `ServerRun`. `paceline.parameter_server` implements
`Remote` (`client.remote_model`) and `Updater` (`optim.partitioned`, over a torch optimizer).
`paceline.bucketing.tuner` plans `Message`s.

A bucket lies on its servers in *units*: parts of its buffer, each of one parameter, which can be
pushed, updated and answered by themselves. Simple methods push whole buckets (`Remote.push`, and
`Remote.wait` puts the answers into the model). Others push some units of a bucket now and the
rest late, and take the answers themselves (`Remote.arrived`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from paceline.cluster import Cluster
from paceline.interfaces.buckets import Bucket
from paceline.interfaces.communication import Comm, Pending, Scattered
from paceline.interfaces.runtime import Stopwatch
from paceline.interfaces.server import Hyperparameters, SpeedClass

__all__ = [
    "Arrived",
    "Half",
    "Message",
    "Piece",
    "Remote",
    "Run",
    "ServerRun",
    "Told",
    "UnitPlace",
    "Updater",
    "UpdatingRun",
]


class Run(Protocol):
    """One worker's training as its method sees it."""

    @property
    def comm(self) -> Comm:
        """The group of all workers."""
        ...

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The trainable parameters, in the model's order."""
        ...

    @property
    def own_buffers(self) -> Sequence[torch.Tensor]:
        """The model's buffers (BatchNorm's statistics) that a method with
        ``averages_buffers`` is to average itself; none where the user wants each worker to
        keep its own."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer, where workers update: its learning rates, and its state,
        which a method may average. A method never steps it."""
        ...

    @property
    def cluster(self) -> Cluster | None:
        """The network, where it is known: equal on all ranks, and of as many workers."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The gradient's pieces, in the order in which every rank delivers them."""
        ...

    @property
    def sending(self) -> Sequence[Message] | None:
        """In which messages the gradients of this step travel, in the order of issue, where
        they are waited for past backward; None where they are waited for when it ends.
        Equal on all ranks. Only for methods that declare ``waits_in_forward``."""
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
    def participants(self) -> Sequence[int]:
        """Ranks that took part in the last round, equal on all ranks."""
        ...

    @property
    def step_is_due(self) -> bool:
        """Whether gradients were delivered and ``step()`` has not followed: in `finish`,
        that the script left its loop between the two."""
        ...

    @property
    def step(self) -> int:
        """The number of this step, from 0; those that only keep company count on."""
        ...

    @property
    def meets(self) -> bool:
        """Whether workers exchange something in this step, as the method's `Rounds` say."""
        ...

    @property
    def stopwatch(self) -> Stopwatch:
        """What times this training's work."""
        ...

    @property
    def loss(self) -> float | None:
        """What the script last reported as its loss, if it did."""
        ...

    def say(self, sentence: str) -> None:
        """Tell people something, once for all workers: now, and beside the run's figures."""
        ...

    def set_period(self, steps: int) -> None:
        """Tell that what steps take and send repeats after so many (by default after those
        from one round to the next): what people are shown are means over so many."""
        ...

    def mean(
        self,
        gradients: Bucket | torch.Tensor,
        *,
        of: Bucket | None = None,
        among: Comm | None = None,
        channel: str = "",
        parts: Mapping[str, torch.Tensor] | None = None,
    ) -> Pending:
        """Form the mean of *gradients*, in place, over the workers that train.

        The buffer holds this worker's share of the mean already (gradient times
        `weight`), as a bucket's does. *of*: the bucket that a tensor is a part of.
        *among*: a group instead of all workers. *channel*: a
        queue of its own, for what may be late. *parts*: what a tensor that is no bucket consists of, by
        the names under which a compressor keeps its state: a parameter's, or ``weight[0:4096]`` for
        these elements of one.

        In a step's means workers learn who trains and what was used. So a mean is not
        waited for before the step's last bucket was delivered: `UsageError`. Where rounds
        are rarer than steps, and of all workers, they are held in `after_update`: a mean
        among all before that is a `UsageError`, too. What a worker that is out of data has
        in the buffer counts as zeros.
        """
        ...

    def scatter_mean(
        self, gradients: Bucket | torch.Tensor, *, of: Bucket | None = None
    ) -> Scattered:
        """Form the mean of *gradients* as `mean` does, in two halves: a reduce-scatter now, an
        all-gather when `Scattered.gather` asks for it. Together they give the bits of the
        all-reduce by the same collective (native: of `ring`), and send as much.

        The step's last bucket is gathered before any mean of the step is waited for: who
        takes part, and what was used, travels in that half. Each is gathered once. Refused
        under compression, and under collectives without halves: a method that calls this
        declares ``sends_halves = True``, so that `distribute` refuses them.
        """
        ...

    def average(
        self,
        tensor: torch.Tensor,
        *,
        among: Comm | None = None,
        channel: str = "",
        name: str = "",
        parts: Mapping[str, torch.Tensor] | None = None,
    ) -> Pending:
        """Form the mean of anything else, parameters for example, in place: every worker
        that takes part counts once. *name*: what the state of a compressor is kept under,
        for what may be compressed, differences of parameters for example; without a name
        it is sent as it is. *parts*, instead: of a contiguous *tensor*, the views that each
        are coded by themselves, in order, by such names; a parameter's name lets its state
        go on in other buckets, and among other workers. A worker that is out of data takes part in one more
        round if it has trained since the last one; between groups it always does.
        *tensor* is of floating point."""
        ...

    def participate_until_all_finish(self) -> int | None:
        """This worker is out of data: contribute nothing, in step with the others, until
        all are out of data. Each step's hooks come as always, with `active` False.

        Returns whose model all are to take then, if models differ: somebody stopped
        earlier than others, or a step short of them, and this rank trained to the end.
        """
        ...

    def broadcast_model(self, source: int) -> None:
        """Give every rank the parameters and buffers of rank *source*. Collective."""
        ...


class UpdatingRun(Run, Protocol):
    """The run of a method with ``updates_on="method"``: it applies the optimizer."""

    def partition_optimizer(self, most_bytes: int) -> Updater:
        """The optimizer, in pieces of at most so many bytes each; once."""
        ...

    def clip(self, gradients: Sequence[torch.Tensor]) -> None:
        """Scale a step's mean gradients in place, if they are to be clipped: with
        ``clips="mean"``, before they are applied."""
        ...


class ServerRun(Run, Protocol):
    """The run of a method with ``updates_on="server"``."""

    @property
    def remote(self) -> Remote:
        """The parameters on their servers."""
        ...


Half = Literal["all", "scatter", "gather"]
"""What a message does: a whole mean, or the first or second half of forming it."""


@dataclass(frozen=True)
class Message:
    """The part from *start* to *stop* of the buffer of bucket number *bucket*, as fractions of
    it: 0 and 1 are the whole."""

    bucket: int
    start: float = 0.0
    stop: float = 1.0
    half: Half = "all"


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


class UnitPlace(NamedTuple):
    """A part of the model that travels by itself: elements [*start*, *stop*) of its
    bucket's buffer."""

    piece: Piece
    start: int
    stop: int


class Told(NamedTuple):
    """The last *words* of one server about its part of a bucket, whose units these are: see
    `Informed.tells`. Empty before its first answer."""

    units: range
    words: bytes


class Arrived(NamedTuple):
    """An answer's parameters of one unit, flat. They stand until the next push of that kind
    (main or late)."""

    bucket: int
    unit: int
    values: torch.Tensor


class Remote(Protocol):
    """A model's parameters on their servers, as one worker's method sees them."""

    def join(self) -> int:
        """Take part; the model then holds the servers' parameters. Returns the number of
        this worker's first step: 0, unless it was restarted. Collective at the start."""
        ...

    def push(
        self,
        bucket: Bucket,
        step: int,
        units: Collection[int] | None = None,
        late: bool = False,
        report: bytes = b"",
    ) -> None:
        """Send a bucket's gradient, or that of these *units* of it, and ask for its parameters.

        Every bucket has one main push a step, though maybe of no units. What it leaves out
        comes *late*: exactly these units, in one push, before the late push of the next step
        and the main push of the one after that. Only for disciplines that take parts
        (`InParts`). *report*: what the method's servers are to know (`Informed`).
        """
        ...

    def wait(self) -> int:
        """Wait for the answers to all main pushes, and put their parameters into the model.
        Returns the number of this worker's next step."""
        ...

    def leave(self) -> None:
        """This worker is out of data. Returns when all are; the model then holds the
        final parameters."""
        ...

    def consolidate(self) -> Callable[[], None]:
        """Put the servers' present parameters into the model; returns what undoes it."""
        ...

    # ---- groups ----

    @property
    def group(self) -> int:
        """The number of the server that this worker pushes to, where there are `Groups`."""
        ...

    def move(self, group: int, step: int) -> None:
        """Between two steps: from *step* on this worker pushes to that group's server, whose
        parameters the model now holds."""
        ...

    def has_speed(self, speed: SpeedClass) -> None:
        """This worker's group is of that class: for codes that depend on it."""
        ...

    # ---- units ----

    @property
    def units(self) -> Sequence[Sequence[UnitPlace]]:
        """Per bucket, in the order of its buffer."""
        ...

    def unit_bytes(self, bucket: int) -> list[int]:
        """What each unit of a bucket is on the network."""
        ...

    def arrived(self, late: bool = False) -> list[Arrived]:
        """Wait for the answers to all main pushes, and for the model's buffers, which are put
        in; or wait for the answers to all *late* pushes. The method puts parameters into the
        model itself, and then says that it has `written`."""
        ...

    def told(self, bucket: int) -> list[Told]:
        """What the servers last told of a bucket: with an answer to a main push, or to this
        worker's join."""
        ...

    def written(self) -> None:
        """The method has written into the model: it was not the script."""
        ...

    # ---- the optimizer ----

    def own_updater(self) -> Updater:
        """The optimizer on this worker: its pieces are the units, and its state is its own.
        What it does stays here."""
        ...

    def ask_states(self, units: Sequence[tuple[int, int]], step: int) -> None:
        """Ask for the optimizer's state of some units (bucket and number), with all updates
        before *step* in it. Only for disciplines that take parts (`InParts`)."""
        ...

    def states(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Wait for all states that were asked for: bucket, number, and the entries by name;
        tensors are flat."""
        ...
