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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from paceline.instruments import Journal
from paceline.options import RunOptions
from paceline.tensors import Bucket

UpdatesOn = Literal["worker", "method", "server"]
"""Who applies the optimizer: the user's ``step()``, the method piece by piece, a server."""

GradientSeen = Literal["mean", "local-kept", "local-sent"]
"""What ``.grad`` holds between ``backward()`` and ``step()``: the mean over workers; the
worker's own, still to be used; the worker's own, already sent (changing it is useless)."""

ReduceOperation = Literal["mean", "sum", "max"]


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
    def share(self) -> float:
        """This worker's weight in the mean: what its gradients were multiplied by."""
        ...

    participants: list[int]
    """Ranks that still train, equal on all ranks; a roll call brings it up to date."""

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
       (times `Run.share` where the user is to see the mean, so that their sum is the mean);
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


@dataclass(frozen=True, order=True)
class Piece:
    """Elements [*start*, *stop*) of the flattened parameter number *parameter*, counted
    in the order in which the optimizer's ``param_groups`` list them."""

    parameter: int
    start: int
    stop: int


Hyperparameters = Sequence[Mapping[str, Any]]
"""What ``param_groups`` held at one moment, group by group, without the parameters."""


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

    def hyperparameters(self) -> list[dict[str, Any]]:
        """A snapshot of every group's hyperparameters as of now, to keep or to send."""
        ...

    def state(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The optimizer's own state of each piece, by name: what is written into it, or
        into its tensors, is what the next step uses. Empty before a piece's first step,
        for most optimizers. Ask again after a checkpoint was loaded."""
        ...


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
