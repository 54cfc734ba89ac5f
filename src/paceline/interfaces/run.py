"""What a method sees of one worker's training. It sees nothing else.

`paceline.core` implements `Run`, `UpdatingRun` and `ServerRun`. `paceline.parameter_server`
implements `Remote` (`client.remote_model`), and `paceline.optim` the `PartialOptimizer`
(`partitioned`, over a torch optimizer). `paceline.bucketing.tuner` plans `Message`s.

A bucket lies on its servers in *units*: parts of its buffer, each of one parameter, that can be pushed,
updated and sent back separately. Simple methods push whole buckets (`Remote.push`), and `Remote.wait`
puts the replies into the model. Others push some units of a bucket now and the rest late, and take the
replies themselves (`Remote.wait_for_units`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from paceline.cluster import Cluster
from paceline.interfaces.buckets import Bucket
from paceline.interfaces.communication import Comm, Pending, ReduceScatter
from paceline.interfaces.runtime import Stopwatch
from paceline.interfaces.server import Hyperparameters, SpeedClass

__all__ = [
    "Half",
    "Message",
    "PartialOptimizer",
    "Piece",
    "Remote",
    "Run",
    "ServerRun",
    "UnitNotice",
    "UnitPlace",
    "UnitValues",
    "UpdatingRun",
]


class Run(Protocol):
    """One worker's training as its method sees it.

    `distribute` makes it for the method's hooks (`Method`). All workers must call averages, and functions
    that are collective, in the same order. `mean` is for gradients, `average` for all other tensors.

    For groups of workers, ``run.comm.group(ranks)`` makes a communicator: keep it. Draw groups from
    `participants` and `step`, which are equal on all workers. Hooks of a worker without data are
    called, too: in `mean` over a group it has weight 0, in `average` over a group its model counts.
    When all workers have agreed that it is gone, it is not in `participants`, is in no group, and
    sends nothing.

    Example:
        What DDP does: average each bucket when it is full, and wait at the end of backward::

            pending.append(run.mean(bucket))  # in bucket_ready
            ...
            for mean in pending:  # in backward_ended
                mean.wait()
    """

    @property
    def comm(self) -> Comm:
        """The group of all workers. Its ``placement`` has each rank's rack."""
        ...

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The trainable parameters, in the model's order."""
        ...

    @property
    def own_buffers(self) -> Sequence[torch.Tensor]:
        """The model's buffers (BatchNorm's statistics) that the method averages itself.

        Only for methods that declare ``averages_buffers``; `paceline.methods.model_averaging.flatten_buckets`
        takes those of floating point as *extra*. Empty if each worker keeps its own (``distribute(buffers="local")``).
        """
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer if workers update, else None.

        A method may read its learning rates, and average its state. It never calls its ``step()``.
        """
        ...

    @property
    def cluster(self) -> Cluster | None:
        """The network if it is known, else None.

        Equal on all ranks, with as many workers as the job. In real jobs it is that of ``paceline run
        --cluster FILE``: a method that plans with it must also plan without it.
        """
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The gradient's buckets, in the order in which every rank delivers them."""
        ...

    @property
    def messages(self) -> Sequence[Message] | None:
        """The messages in which the gradients of this step are sent, in the order of issue.

        None if the worker waits for gradients at the end of the backward pass. Equal on all ranks.
        Only for methods that declare ``waits_in_forward``.
        """
        ...

    @property
    def active(self) -> bool:
        """Whether this worker still has data; else it only shadows the others' collectives."""
        ...

    @property
    def weight(self) -> float:
        """This worker's weight in the mean: 1/n, or its part of the samples."""
        ...

    @property
    def participants(self) -> Sequence[int]:
        """Ranks that were active in the last round; equal on all ranks."""
        ...

    @property
    def step_pending(self) -> bool:
        """Whether gradients were delivered and ``step()`` has not been called since.

        If it is true in `finish`, the script left its loop between the two.
        """
        ...

    @property
    def step(self) -> int:
        """The number of this step, from 0.

        Steps of a worker without data count, too.
        """
        ...

    @property
    def is_round(self) -> bool:
        """Whether workers exchange something in this step, as the method's `Rounds` say."""
        ...

    @property
    def stopwatch(self) -> Stopwatch:
        """Times this training's work, on the host or on its device."""
        ...

    @property
    def loss(self) -> float | None:
        """The last loss that the script gave to `paceline.log`, if any."""
        ...

    def report(self, sentence: str) -> None:
        """Report something to the user, once for all workers.

        It is printed at once, and again beside the run's results.

        Args:
            sentence: What to report.
        """
        ...

    def set_period(self, steps: int) -> None:
        """Set the number of steps after which times and bytes repeat.

        Reported values are means over this many steps. The default is the period of the method's
        `Rounds`.

        Args:
            steps: The period, in steps.
        """
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
        """Average gradients in place over the active workers.

        The averages of a step also tell workers which workers were active and which tensors were
        used. So the worker may only wait for an average after the step's last bucket was delivered.
        If all workers hold rounds less often than every step, averages belong in `after_update`.
        The buffer of a worker without data counts as zeros.

        Args:
            gradients: A bucket, or a flat tensor. It must already hold gradient times `weight`, as a
                bucket's buffer does.
            of: The bucket that a tensor is a part of.
            among: A group instead of all workers.
            channel: Name of a separate ordered queue, for averages that may be delayed.
            parts: For a tensor that is not a bucket: the views that it consists of, by the names
                under which a compressor keeps its state. A name is a parameter's, or
                ``weight[0:4096]`` for these elements of one.

        Returns:
            A handle; the mean is in *gradients* after its ``wait()``.

        Raises:
            UsageError: The worker waits too early, or averages among all workers before
                `after_update` although rounds are held there.
        """
        ...

    def scatter_mean(
        self, gradients: Bucket | torch.Tensor, *, of: Bucket | None = None
    ) -> ReduceScatter:
        """Average gradients as `mean` does, in two halves.

        The reduce-scatter begins now, the all-gather when `ReduceScatter.gather` is called. Together
        they give the same bits as the all-reduce by the same collective (for native: by `ring`), and
        send as many bytes. Gather each bucket once. Gather the step's last bucket before waiting for
        any average of the step, since it tells the active workers and used tensors.

        A method that calls this declares ``sends_halves = True``. Then `distribute` refuses
        compression, and collectives without halves.

        Args:
            gradients: As for `mean`.
            of: As for `mean`.

        Returns:
            A handle for the second half.
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
        """Average a tensor other than gradients in place, for example parameters.

        Every participating worker counts once. A worker without data participates in one more
        round if it has trained since the last one; between groups it always does.

        Args:
            tensor: A floating-point tensor.
            among: A group instead of all workers.
            channel: Name of a separate ordered queue, for averages that may be delayed.
            name: Allows compression, for example of parameter differences; a compressor keeps its
                state under this name. Without a name *tensor* is sent uncompressed.
            parts: Instead of *name*, for a contiguous *tensor*: the views that are compressed one by
                one, in order, by name. State under a parameter's name also serves other buckets and
                other sets of workers.

        Returns:
            A handle; the average is in *tensor* after its ``wait()``.
        """
        ...

    def participate_until_all_finish(self) -> int | None:
        """Take part in the others' collectives with zeros until all workers are out of data.

        For a worker that is out of data. The hooks of each step are called as usual, with
        `active` False.

        Returns:
            The rank whose model all workers are to take, if models differ. They differ if a worker
            stopped earlier than others, or a step short of them. This rank trained to the end.
            None if models are equal.
        """
        ...

    def broadcast_model(self, source: int) -> None:
        """Give every rank the parameters and buffers of rank *source*. Collective.

        Args:
            source: The rank whose model the others take.
        """
        ...


class UpdatingRun(Run, Protocol):
    """The run of a method with ``updates_on="method"``: the method applies the optimizer."""

    def partition_optimizer(self, most_bytes: int) -> PartialOptimizer:
        """Partition the optimizer into pieces; at most once in a training.

        Args:
            most_bytes: The largest size of a piece, in bytes.

        Returns:
            The optimizer, which is applied piece by piece.
        """
        ...

    def clip(self, gradients: Sequence[torch.Tensor]) -> None:
        """Scale a step's mean gradients in place if the user set ``clip_norm``.

        For methods with ``clips="mean"``, before the gradients are applied.

        Args:
            gradients: All gradients of the step.
        """
        ...


class ServerRun(Run, Protocol):
    """The run of a method with ``updates_on="server"``: servers apply the optimizer."""

    @property
    def remote(self) -> Remote:
        """The parameters on their servers."""
        ...


Half = Literal["all", "scatter", "gather"]
"""What a message carries: a whole average, or its first or second half."""


@dataclass(frozen=True)
class Message:
    """A part of a bucket that is sent separately.

    It covers *start* to *stop* of the buffer of bucket number *bucket*, as fractions of the buffer:
    0 and 1 are the whole.
    """

    bucket: int
    start: float = 0.0
    stop: float = 1.0
    half: Half = "all"


@dataclass(frozen=True, order=True)
class Piece:
    """Elements [*start*, *stop*) of a flattened parameter.

    *parameter* is its number, in the order in which the optimizer's ``param_groups`` list
    parameters.
    """

    parameter: int
    start: int
    stop: int


class PartialOptimizer(Protocol):
    """The optimizer, applied piece by piece: on a worker, or on a server.

    Contract: the result is bit-equal to one plain optimizer step. A step's pieces may be applied in
    several calls, in any order, or later with the gradients and hyperparameters of that step.

    A call that raises `UsageError` has changed nothing. After an error of the optimizer itself some of
    the call's pieces may have been updated, unless it ran with ``commit=False``. The training cannot
    continue after it.

    Example:
        ::

            pieces = updater.pieces_of(parameter)
            gradients = [flat[piece.start : piece.stop] for piece in pieces]
            updater.apply(pieces, gradients, updater.hyperparameters())
    """

    def apply(
        self,
        pieces: Sequence[Piece],
        gradients: Sequence[torch.Tensor],
        hyperparameters: Hyperparameters,
        commit: bool = True,
    ) -> list[torch.Tensor]:
        """Do one optimizer step on just these pieces.

        Args:
            pieces: What to update; the parameters change in place.
            gradients: ``gradients[i]`` belongs to ``pieces[i]``: flat, or of the piece's shape.
                Only read.
            hyperparameters: Of every parameter group, as `hyperparameters` gives them.
            commit: False: leave parameters and the optimizer's state as they are.

        Returns:
            With *commit* an empty list. Without it the values that the pieces would have got: one
            new tensor of the piece's shape for each piece.
        """
        ...

    def pieces_of(self, parameter: torch.nn.Parameter) -> Sequence[Piece]:
        """Return the pieces of one parameter, in order; none if the optimizer does not have it."""
        ...

    def group_of(self, piece: Piece) -> int:
        """Return the number of the parameter group that a piece is in."""
        ...

    def values(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return each piece's elements of its parameter: views, to read and to write."""
        ...

    def stamps(self, pieces: Sequence[Piece]) -> list[int]:
        """Return for each piece a number that changes with every write into its parameter.

        It does not change with writes through ``.data``.
        """
        ...

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return a snapshot of every group's hyperparameters as of now."""
        ...

    def state(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the optimizer's own state of each piece, by name.

        The next step uses values that are written into it, or into its tensors. With most optimizers
        it is empty before a piece's first step. Call again after a checkpoint was loaded.
        """
        ...


class UnitPlace(NamedTuple):
    """A unit's place: [*start*, *stop*) of its bucket's buffer."""

    piece: Piece
    start: int
    stop: int


class UnitNotice(NamedTuple):
    """The last *notice* of one server about its part of a bucket, which has these *units*.

    See `Discipline.notice`. Empty before the server's first reply.
    """

    units: range
    notice: bytes


class UnitValues(NamedTuple):
    """Parameters of one unit from a reply, flat.

    They are valid until the next push of that kind (main or late).
    """

    bucket: int
    unit: int
    values: torch.Tensor


class Remote(Protocol):
    """A model's parameters on their servers, as one worker's method sees them.

    Example:
        What asp does in a step::

            step = run.remote.join()  # at the start
            ...
            run.remote.push(bucket, step, run.weight)  # in bucket_ready
            ...
            step = run.remote.wait()  # in backward_ended
    """

    def join(self) -> int:
        """Join the training; the model then holds the servers' parameters. Collective at the start.

        Returns:
            The number of this worker's first step: 0, unless it was restarted.
        """
        ...

    def push(
        self,
        bucket: Bucket,
        step: int,
        weight: float,
        units: Collection[int] | None = None,
        late: bool = False,
        report: bytes = b"",
    ) -> None:
        """Send a bucket's gradient, and ask for its parameters.

        Every bucket has one main push a step, which may have no units. The units that it leaves out
        are pushed *late*: exactly these, in one push. That push comes before the late push of the
        next step, and before the main push of the step after that.

        Args:
            bucket: Its buffer has this worker's gradient.
            step: The number of this step.
            weight: The gradient's weight in the mean: `Run.weight`.
            units: Numbers of the units to send; None: all. Only for disciplines that accept parts
                (`Discipline.accepts_partial_pushes`).
            late: Whether these are the units that the main push left out.
            report: Bytes for the method's servers (`Discipline.decode_report`).
        """
        ...

    def wait(self) -> int:
        """Wait for the replies to all main pushes, and put their parameters into the model.

        Returns:
            The number of this worker's next step.
        """
        ...

    def leave(self) -> None:
        """Tell the servers that this worker is out of data, and wait until all workers are.

        The model then holds the final parameters.
        """
        ...

    def consolidate(self) -> Callable[[], None]:
        """Put the servers' current parameters into the model.

        Returns:
            A function that undoes it.
        """
        ...

    # ---- groups ----

    @property
    def group(self) -> int:
        """The number of the server that this worker pushes to, if there are `Groups`."""
        ...

    def move(self, group: int, step: int) -> None:
        """Push to another group's server from step number *step* on. Called between two steps.

        Args:
            group: The number of the group, whose parameters the model now holds.
            step: The number of the next step.
        """
        ...

    def set_speed_class(self, speed: SpeedClass) -> None:
        """Set the speed class of this worker's group, for compressors that depend on it."""
        ...

    # ---- units ----

    @property
    def units(self) -> Sequence[Sequence[UnitPlace]]:
        """The units of each bucket, in the order of its buffer."""
        ...

    def unit_bytes(self, bucket: int) -> list[int]:
        """Return the bytes of each unit of a bucket on the network."""
        ...

    def wait_for_units(self, late: bool = False) -> list[UnitValues]:
        """Wait for the replies to all main pushes, and load the model's buffers from them.

        The method itself puts the parameters into the model, and then calls `note_write`.

        Args:
            late: Wait for the replies to all late pushes instead.

        Returns:
            The parameters of the units.
        """
        ...

    def notices(self, bucket: int) -> list[UnitNotice]:
        """Return the servers' last reports about a bucket.

        They come with a reply to a main push, or to this worker's join.
        """
        ...

    def note_write(self) -> None:
        """Record that the method, and not the script, has written into the model."""
        ...

    # ---- the optimizer ----

    def own_optimizer(self) -> PartialOptimizer:
        """Return this worker's own optimizer: its pieces are the units, and its state is separate.

        Its updates stay on this worker.
        """
        ...

    def request_states(self, units: Sequence[tuple[int, int]], step: int) -> None:
        """Request the optimizer's state of some units, which includes all updates before *step*.

        Only for disciplines that accept parts (`Discipline.accepts_partial_pushes`).

        Args:
            units: Pairs of a bucket's number and a unit's number.
            step: The number of a step.
        """
        ...

    def wait_for_states(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Wait for all requested states.

        Returns:
            Bucket, number of the unit, and the entries by name; tensors are flat.
        """
        ...
