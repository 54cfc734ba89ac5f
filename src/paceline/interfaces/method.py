"""A method, and what it sees on a worker.

`paceline.methods` implements `Method`; `paceline.training` calls its moments, and
implements the `Run` that they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from paceline.interfaces.communication import Comm
from paceline.interfaces.discipline import Discipline
from paceline.interfaces.remote import Remote
from paceline.interfaces.timing import Stopwatch
from paceline.interfaces.updates import Updater
from paceline.tensors import Bucket

UpdatesOn = Literal["worker", "method", "server"]
"""Who applies the optimizer: the user's ``step()``, the method piece by piece, a server."""

GradientSeen = Literal["mean", "local-kept", "local-sent"]
"""What ``.grad`` holds between ``backward()`` and ``step()``: the mean over workers; the
worker's own, still to be used; what was sent already, of no use to the script: changing it
is an error."""


Clips = Literal["mean", "own"]
"""What ``distribute(clip_norm=)`` limits: the norm of the mean gradient, where all of it is
known before any of it is applied; else that of each worker's own, before it is sent."""


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
        """Tell people something, once for all workers: now, and beside the run's figures."""
        ...

    participants: list[int]
    """Ranks that still train, equal on all ranks; a roll call brings it up to date."""

    behind: list[int]
    """Ranks that have left with a step due, equal on all ranks; a roll call likewise."""

    @property
    def step_is_due(self) -> bool:
        """Whether gradients were delivered and ``step()`` has not followed: in `finish`,
        that the script left its loop between the two."""
        ...

    @property
    def remote(self) -> Remote:
        """The parameters on their servers. Only for methods with ``updates_on="server"``."""
        ...

    def clip(self, gradients: Sequence[torch.Tensor]) -> None:
        """Scale a step's mean gradients in place, if they are to be clipped. For methods
        with ``updates_on="method"`` and ``clips="mean"``, before they apply them."""
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

    7. ``loaded(state, run)``, where servers update: all parameters were replaced between two
       steps, by what the script has loaded, or by what the servers have. The number of the
       next step stays. Nothing is under way, but answers that have not been waited for.

    Where a submodule is called, or a method of the model other than ``forward``, moment 1
    comes with the first gradient.

    An exception from a moment reaches the user's script out of ``forward``,
    ``backward()`` or ``step()``; the training cannot go on after it.
    """

    name: ClassVar[str]
    """The registry's name: lower case, with hyphens."""

    @property
    def updates_on(self) -> UpdatesOn: ...

    @property
    def gradient_seen_by_user(self) -> GradientSeen: ...

    @property
    def clips(self) -> Clips: ...

    def init(self, run: Run) -> Any:
        """Make the method's state for this run. Collective."""
        ...


class UpdatesOnServer(Method, Protocol):
    """A method whose servers hold the parameters and update them."""

    @property
    def coordinates(self) -> bool:
        """Whether server 0 decides for all, and workers tell the others: see
        `Coordinated`."""
        ...

    def piece_bytes(self, total: int) -> int | None:
        """The most that a unit has, of a model of *total* bytes; None: units are as large as
        the parts of parameters that a server holds. For methods that push parts of
        buckets."""
        ...

    def server(self, workers: int) -> Discipline:
        """What one server does, for a job of so many workers. Raises `UsageError` where the
        hyperparameters do not fit that number."""
        ...
