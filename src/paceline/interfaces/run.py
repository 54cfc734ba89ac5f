"""What a method sees of one worker's training, and nothing else.

`paceline.core` implements `Run`, `UpdatingRun` and `ServerRun`. `paceline.parameter_server`
implements `Remote` (`client.remote_model`), and `paceline.optim` the `PartialOptimizer`
(`partitioned`, over a torch optimizer). `paceline.bucketing.tuner` plans `Message`s.

A bucket lies on its servers in *units*: parts of its buffer, each of one parameter, which can be
pushed, updated and answered by themselves. Simple methods push whole buckets (`Remote.push`, and
`Remote.wait` puts the answers into the model). Others push some units of a bucket now and the
rest late, and take the answers themselves (`Remote.wait_for_units`).
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

    `distribute` makes it for the method's hooks (`Method`). Averages, and what is called collective
    here, must be called on all workers, in the same order.

    Example:
        What DDP does: average each bucket when it is full, and wait at the end of backward::

            pending.append(run.mean(bucket))  # in bucket_ready
            ...
            for mean in pending:  # in backward_ended
                mean.wait()
    """

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
        """The model's buffers (BatchNorm's statistics) that the method averages itself.

        Only for methods that declare ``averages_buffers``. Empty where the user wants each worker
        to keep its own (``distribute(buffers="local")``).
        """
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer where workers update, else None.

        A method may read its learning rates, and average its state. It never steps it.
        """
        ...

    @property
    def cluster(self) -> Cluster | None:
        """The network where it is known, else None.

        Equal on all ranks, with as many workers as the job.
        """
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The gradient's buckets, in the order in which every rank delivers them."""
        ...

    @property
    def messages(self) -> Sequence[Message] | None:
        """The messages in which the gradients of this step travel, in the order of issue.

        None where gradients are waited for when backward ends. Equal on all ranks. Only for
        methods that declare ``waits_in_forward``.
        """
        ...

    @property
    def active(self) -> bool:
        """Whether this worker still has data; else it only joins the others' collectives."""
        ...

    @property
    def weight(self) -> float:
        """This worker's part in the mean: 1/n, or its part of the samples."""
        ...

    @property
    def participants(self) -> Sequence[int]:
        """Ranks that took part in the last round; equal on all ranks."""
        ...

    @property
    def step_pending(self) -> bool:
        """Whether gradients were delivered and ``step()`` has not followed.

        In `finish`: the script left its loop between the two.
        """
        ...

    @property
    def step(self) -> int:
        """The number of this step, from 0.

        Steps of a worker that is out of data count on.
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
        """The loss that the script last gave to `paceline.log`, if it did."""
        ...

    def report(self, sentence: str) -> None:
        """Report something to the user, once for all workers.

        It is printed now, and stands beside the run's figures.

        Args:
            sentence: What to report.
        """
        ...

    def set_period(self, steps: int) -> None:
        """Set after how many steps times and bytes repeat.

        Figures are means over so many steps. By default the period is that of the method's
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
        """Average gradients in place over the workers that train.

        Workers learn in a step's means who trains and which tensors were used. So no mean can be
        waited for before the step's last bucket was delivered. Where rounds are rarer than steps
        and of all workers, they are held in `after_update`. The buffer of a worker that is out of
        data counts as zeros.

        Args:
            gradients: A bucket, or a flat tensor. It holds this worker's share of the mean
                already, gradient times `weight`, as a bucket's buffer does.
            of: The bucket that a tensor is a part of.
            among: A group instead of all workers.
            channel: An ordered queue of its own, for what may be late.
            parts: The views that a tensor which is no bucket consists of, by the names under
                which a compressor keeps its state: a parameter's, or ``weight[0:4096]`` for
                these elements of one.

        Returns:
            A handle; the mean is in *gradients* after its ``wait()``.

        Raises:
            UsageError: It is waited for too early, or among all workers before `after_update`
                where rounds are held there.
        """
        ...

    def scatter_mean(
        self, gradients: Bucket | torch.Tensor, *, of: Bucket | None = None
    ) -> ReduceScatter:
        """Average gradients as `mean` does, in two halves.

        The reduce-scatter begins now, the all-gather when `ReduceScatter.gather` is called. Together
        they give the bits of the all-reduce by the same collective (native: of `ring`), and send as
        much. The step's last bucket is gathered before any mean of the step is waited for, since
        that half says who takes part and what was used. Each bucket is gathered once.

        A method that calls this declares ``sends_halves = True``: then `distribute` refuses
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
        """Average something other than gradients in place, parameters for example.

        Every worker that takes part counts once. A worker that is out of data takes part in one
        more round if it has trained since the last one; between groups it always does.

        Args:
            tensor: Of floating point.
            among: A group instead of all workers.
            channel: An ordered queue of its own, for what may be late.
            name: The name under which a compressor keeps its state, for what may be compressed:
                differences of parameters, say. Without a name *tensor* is sent uncompressed.
            parts: Instead of *name*, for a contiguous *tensor*: the views that are compressed
                one by one, in order, by such names. Under a parameter's name its state goes on
                in other buckets, and among other workers.

        Returns:
            A handle; the average is in *tensor* after its ``wait()``.
        """
        ...

    def participate_until_all_finish(self) -> int | None:
        """Contribute zeros, in step with the others, until all are out of data.

        For a worker that is out of data. The hooks of each step are called as always, with
        `active` False.

        Returns:
            The rank whose model all are to take, where models differ: some worker stopped
            earlier than others, or a step short of them, and this rank trained to the end.
            None where models are equal.
        """
        ...

    def broadcast_model(self, source: int) -> None:
        """Give every rank the parameters and buffers of rank *source*. Collective.

        Args:
            source: The rank whose model the others get.
        """
        ...


class UpdatingRun(Run, Protocol):
    """The run of a method with ``updates_on="method"``: the method applies the optimizer."""

    def partition_optimizer(self, most_bytes: int) -> PartialOptimizer:
        """Cut the optimizer into pieces; at most once in a training.

        Args:
            most_bytes: The most that a piece may have.

        Returns:
            The optimizer, to be applied piece by piece.
        """
        ...

    def clip(self, gradients: Sequence[torch.Tensor]) -> None:
        """Scale a step's mean gradients in place where the user asked for ``clip_norm``.

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
"""What a message does: a whole mean, or the first or second half of forming it."""


@dataclass(frozen=True)
class Message:
    """A part of a bucket that travels by itself.

    It goes from *start* to *stop* of the buffer of bucket number *bucket*, as fractions of it: 0
    and 1 are the whole.
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

    Law: applying a step's pieces in several calls, in any order, or later with the gradients and
    hyperparameters of then, gives the bits of one plain optimizer step.

    A call that is refused (`UsageError`) has changed nothing. After an error of the optimizer
    itself some of the call's pieces may have been updated, unless it ran with ``commit=False``;
    the training cannot go on after it.

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
            Nothing with *commit*; else the values that the pieces would have got, one new
            tensor of the piece's shape for each piece.
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
        """Return a number for each piece that changes with every write into its parameter.

        Writes through ``.data`` are not seen.
        """
        ...

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return a snapshot of every group's hyperparameters as of now."""
        ...

    def state(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the optimizer's own state of each piece, by name.

        What is written into it, or into its tensors, is what the next step uses. Empty before a
        piece's first step, for most optimizers. Ask again after a checkpoint was loaded.
        """
        ...


class UnitPlace(NamedTuple):
    """A part of the model that travels by itself: [*start*, *stop*) of its bucket's buffer."""

    piece: Piece
    start: int
    stop: int


class UnitNotice(NamedTuple):
    """The last *notice* of one server about its part of a bucket, which has these *units*.

    See `Discipline.notice`. Empty before the server's first answer.
    """

    units: range
    notice: bytes


class UnitValues(NamedTuple):
    """An answer's parameters of one unit, flat.

    They stand until the next push of that kind (main or late).
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
        """Take part; the model then holds the servers' parameters. Collective at the start.

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

        Every bucket has one main push a step, though maybe of no units. The units that it leaves
        out come *late*: exactly these, in one push, before the late push of the next step and the
        main push of the one after that.

        Args:
            bucket: Its buffer has this worker's gradient.
            step: The number of this step.
            weight: The gradient's part in the mean: `Run.weight`.
            units: Numbers of the units to send; None: all. Only for disciplines that take parts
                (`Discipline.accepts_partial_pushes`).
            late: Whether these are the units that the main push has left out.
            report: What the method's servers are to know (`Discipline.decode_report`).
        """
        ...

    def wait(self) -> int:
        """Wait for the answers to all main pushes, and put their parameters into the model.

        Returns:
            The number of this worker's next step.
        """
        ...

    def leave(self) -> None:
        """Say that this worker is out of data, and wait until all are.

        The model then holds the final parameters.
        """
        ...

    def consolidate(self) -> Callable[[], None]:
        """Put the servers' present parameters into the model.

        Returns:
            A function that undoes it.
        """
        ...

    # ---- groups ----

    @property
    def group(self) -> int:
        """The number of the server that this worker pushes to, where there are `Groups`."""
        ...

    def move(self, group: int, step: int) -> None:
        """Push to another group's server from *step* on. Between two steps.

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
        """Wait for the answers to all main pushes, and for the model's buffers, which are put in.

        The method puts parameters into the model itself, and then calls `note_write`.

        Args:
            late: Wait for the answers to all late pushes instead.

        Returns:
            The parameters of the units.
        """
        ...

    def notices(self, bucket: int) -> list[UnitNotice]:
        """Return the servers' last reports about a bucket.

        They come with an answer to a main push, or to this worker's join.
        """
        ...

    def note_write(self) -> None:
        """Say that the method, and not the script, has written into the model."""
        ...

    # ---- the optimizer ----

    def own_optimizer(self) -> PartialOptimizer:
        """Return the optimizer on this worker: its pieces are the units, and its state is its own.

        Its updates stay on this worker.
        """
        ...

    def request_states(self, units: Sequence[tuple[int, int]], step: int) -> None:
        """Ask for the optimizer's state of some units, with all updates before *step* in it.

        Only for disciplines that take parts (`Discipline.accepts_partial_pushes`).

        Args:
            units: Pairs of a bucket's number and a unit's number.
            step: The number of a step.
        """
        ...

    def wait_for_states(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Wait for all states that were asked for.

        Returns:
            Bucket, number of the unit, and the entries by name; tensors are flat.
        """
        ...
