"""A method: when workers synchronize, and with whom; its rounds, its consistency, its workers' state.

`paceline.methods` implements `Method`; `paceline.core` calls its worker's hooks.
`paceline.core` has a list of `WorkerState`s; `paceline.core.checkpoint` saves and restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    get_args,
    runtime_checkable,
)

from paceline.errors import UsageError
from paceline.interfaces.buckets import Bucket
from paceline.interfaces.server import Discipline, Groups

__all__ = [
    "AGREE_EVERY",
    "CONSISTENCIES",
    "EVERY_STEP",
    "HOOKS",
    "ON_SERVERS",
    "Clips",
    "Consistency",
    "GradientSeen",
    "Method",
    "MethodSummary",
    "Rounds",
    "UpdatesOn",
    "UpdatesOnServer",
    "WorkerHooks",
    "WorkerState",
    "redistribute_nothing",
    "weaker",
]

UpdatesOn = Literal["worker", "method", "server"]
"""What applies the optimizer: the user's ``step()``, the method piece by piece, or a server."""

GradientSeen = Literal["mean", "local", "sent"]
"""What ``.grad`` holds between ``backward()`` and ``step()``.

- ``"mean"``: the mean over workers.
- ``"local"``: the worker's own gradient, which is not used yet.
- ``"sent"``: a gradient that was sent already. The script cannot use it, and changing it is an error.
"""


Clips = Literal["mean", "own"]
"""What ``distribute(clip_norm=)`` limits.

- ``"mean"``: the norm of the mean gradient; all of it must be known before any of it is applied.
- ``"own"``: the norm of each worker's own gradient, before it is sent.
"""


class MethodSummary(NamedTuple):
    """The description of a method, for ``paceline list methods``, docs and reports.

    A number may stand as its key in backticks: reports put the value there.

    Attributes:
        waits_for: Completes "A step waits for ...".
        sends: Completes "A worker sends ...".
        guarantees: Sentences on the result.
        purpose: One sentence of at most 80 letters, without a subject.
        source: The papers: authors, short title, venue and year.
        use_when: Completes "Use it when ...".
        limits: Sentences: costs, refusals, differences from the paper.
    """

    waits_for: str
    sends: str
    guarantees: str
    purpose: str = ""
    source: str = ""
    use_when: str = ""
    limits: tuple[str, ...] = ()


class WorkerHooks(Protocol):
    """The hooks that a method's worker may define, in the order in which they are called.

    A method's worker is the object that `Method.start` returns. There is one for each worker of a
    training, and it holds all state from step to step: simulated workers share the method. It
    defines only the hooks that it needs. Do not derive from this class: it only documents the
    signatures.

    `distribute` refuses a public function of a worker that is no hook (``bucket_redy``,
    ``after_step``), a hook with other arguments, and a hook of the method itself: they would never be
    called. Begin the names of helpers with an underscore. Attributes and properties may have any
    name.

    If the script calls only a submodule, or a method other than ``forward``, `step_begins` is called
    at the first gradient instead.

    An exception from a hook reaches the user's script out of ``forward``, ``backward()`` or
    ``step()``; the training cannot go on after it.
    """

    def step_begins(self) -> None:
        """Called at the first forward pass with gradients after a completed backward pass."""

    def before_use(self, bucket: Bucket) -> None:
        """Called before parameters of *bucket* are used for the first time since the update.

        Wait here for parameters that are in flight. A use is a call of a module, or Python code that
        hands the parameters to torch. The hook is called at the latest when the next backward pass
        begins. With ``waits_in_forward`` it is also called before the script reads gradients that
        are in flight, between ``backward()`` and ``step()``. It is not called in a step without data:
        wait for the rest in `after_update`.

        Args:
            bucket: The bucket of these parameters.
        """

    def bucket_ready(self, bucket: Bucket) -> None:
        """Called when the gradients of *bucket* are in its buffer; backward still runs.

        Start to send the gradients here. Buckets come in plan order, on every rank. Wait for averages
        in `backward_ended`, not earlier: only the last bucket shows which workers are active.

        Args:
            bucket: Its buffer holds gradients. If workers form the mean, they are already multiplied
                by `Run.weight`, so that the sum over workers is the mean.
        """

    def backward_ended(self) -> None:
        """Called when all buckets were delivered. Wait for averages of gradients here.

        A tensor that this rank did not use has zeros in its buffer and False in ``bucket.used``.
        """

    def after_update(self) -> None:
        """Called when the user's optimizer has stepped. Send parameters here.

        Also called at the end of each step that a worker without data shadows, and if the script
        leaves its loop before ``step()``.
        """

    def buckets_rebuilt(self) -> None:
        """Called between two steps after the tuner has replaced the buckets."""

    def finish(self) -> None:
        """Called when this worker is out of data.

        Call `Run.participate_until_all_finish`. If it returns a rank, call `Run.broadcast_model` with
        it. After rounds of groups, average the parameters once more over all workers. Return when the
        documented result is in the model.
        """

    def consolidate(self) -> Callable[[], None]:
        """Put the documented result into the model, for an evaluation.

        It is collective only in a method that declares ``consolidates_together = True``. Then
        `paceline.save` and evaluations must enter it on all workers. Consolidations must not change
        the training: its result is bit-equal with and without them.

        Returns:
            A function that undoes it.
        """

    def parameters_replaced(self) -> None:
        """Called when all parameters were replaced between two steps.

        The script or the servers have loaded other parameters: copy them anew if the worker has a
        copy. The number of the next step stays. Operations in flight belong to the old parameters:
        wait for them, and drop their results.
        This hook is called before any other. It is not called if `load_state` restores the state
        that belongs to the new parameters.
        """

    def save_state(self) -> dict[str, Any]:
        """Return the state that a restart of this worker needs. Called between two steps. Not collective.

        That is everything that changes in the worker.

        Returns:
            A dict of tensors, numbers, strings, lists and dicts.
        """

    def load_state(self, saved: dict[str, Any]) -> None:
        """Take back what the worker of the same rank saved, bit for bit. Not collective.

        Args:
            saved: What `save_state` or `redistribute_state` returned.
        """

    def redistribute_state(self, parts: Iterable[Any]) -> dict[str, Any]:
        """Return what this worker loads when a job with another number of workers resumes. Not collective.

        Without this hook such a load is refused.

        Args:
            parts: What each worker saved, in order of ranks.
        """

    def metrics(self) -> dict[str, float]:
        """Return numbers by name about the step that has just ended, such as the deferred share.

        Called only if something reads the metrics. Not collective.
        """


HOOKS = tuple(name for name in vars(WorkerHooks) if not name.startswith("_"))
"""The names of `WorkerHooks`."""


@runtime_checkable
class Method(Protocol):
    """When workers synchronize, and with whom: a frozen dataclass of hyperparameters.

    ``start`` makes the method's worker on each rank: an object with the `WorkerHooks` that the method
    needs. All state is in that object; the method itself never changes.

    A method may declare, as class attributes:

    - ``waits_in_forward = True``: its worker may wait for averages in ``before_use`` instead of
      `backward_ended`, for the gradients that `Run.messages` plans beyond the backward pass.
    - ``sends_halves = True``: it forms averages in two halves (`Run.scatter_mean`). `distribute`
      refuses collectives and compression that have no halves.
    - ``compressible_pushes = True``, where servers update: it pushes whole buckets and waits for
      them by `Remote.wait`, so that they may travel compressed.
    - ``symmetric = True``: if hosts are equal, all workers send equally much at equal times, by
      collectives alone. A simulation may then run a few workers as representatives of all
      (`WorkerClasses`).
    - ``averages_buffers = True``: it averages BatchNorm's statistics itself (`Run.own_buffers`),
      and the training sends none.
    - ``default_compression = "SPEC"``: its compression if the user names none.
    - ``summary``, a `MethodSummary`: its row in the table of methods; only listed methods need one.
    - ``consistency``: its `Consistency` with uncompressed gradients. Without a declaration it counts
      as asynchronous.
    - ``steady_state_keys``: keys with which a short run has the steady-state step time of a long one, for
      example no warm-up. For `paceline plan`.
    - ``learns_for``: how many steps beyond bucket tuning it needs to reach its steady state.

    A method that sends no gradients may define ``compressed_by(self, compressor)``, with the name of a
    compressor. It returns a method whose named averages are of differences, and compressed. Otherwise
    it raises a `UsageError` with the reason and an alternative.

    If workers do different numbers of steps, its worker may have a number `steps_of_all`, the value of
    `DistributedOptimizer.steps_of_all`.

    Example:
        What DDP does; docs/tutorials/write-a-method.md says more::

            @dataclass(frozen=True, kw_only=True)
            class Averaging:
                name: ClassVar = "averaging"
                rounds: ClassVar = EVERY_STEP
                updates_on: ClassVar = "worker"
                visible_gradient: ClassVar = "mean"
                clips: ClassVar = "mean"

                def start(self, run):
                    return AveragingWorker(run)


            class AveragingWorker:
                def __init__(self, run):
                    self._run, self._pending = run, []

                def bucket_ready(self, bucket):
                    self._pending.append(self._run.mean(bucket))

                def backward_ended(self):
                    while self._pending:
                        self._pending.pop(0).wait()

                def finish(self):
                    source = self._run.participate_until_all_finish()
                    if source is not None:
                        self._run.broadcast_model(source)
    """

    name: ClassVar[str]
    """The registry's name: lower case, with hyphens."""

    @property
    def rounds(self) -> Rounds:
        """In which steps workers communicate."""
        ...

    @property
    def updates_on(self) -> UpdatesOn:
        """What applies the optimizer."""
        ...

    @property
    def visible_gradient(self) -> GradientSeen:
        """What ``.grad`` holds between ``backward()`` and ``step()``."""
        ...

    @property
    def clips(self) -> Clips:
        """What ``distribute(clip_norm=)`` limits."""
        ...

    def start(self, run: Any) -> object:
        """Make the method's worker, an object with the `WorkerHooks` that it needs. Collective.

        Args:
            run: An `UpdatingRun` if the method updates, a `ServerRun` if servers update, else a `Run`.

        Returns:
            The worker.
        """
        ...


class UpdatesOnServer(Method, Protocol):
    """A method whose servers hold the parameters and update them."""

    @property
    def coordinates(self) -> bool:
        """Whether server 0 decides for all servers, see `Discipline.on_decision`."""
        ...

    def piece_bytes(self, total: int) -> int | None:
        """Return the largest size of a unit, in bytes. For methods that push parts of buckets.

        Args:
            total: Bytes of the model.

        Returns:
            None: a unit is as large as the part of a parameter that a server holds.
        """
        ...

    def groups(self, workers: int) -> Groups | None:
        """Return the first groups, if each group of workers has a server with the whole model.

        Args:
            workers: Number of workers.

        Returns:
            None if the servers divide the model among themselves, and each serves all workers.

        Raises:
            UsageError: For the reasons of `server`.
        """
        ...

    def server(self, workers: int) -> Discipline:
        """Make the discipline of one server: a `GroupServerDiscipline` if there are `groups`.

        Args:
            workers: Number of workers.

        Returns:
            A new discipline, for one server.

        Raises:
            UsageError: The hyperparameters do not fit that number of workers.
        """
        ...


@dataclass(frozen=True)
class Rounds:
    """In which steps workers communicate: such a step is a round.

    The training's own messages (buffers, the tuner's trials, active workers) follow the rounds:
    steps between two rounds send nothing.

    A round waits for all workers, so its list of active workers is exact. With *agree_every* the list
    is exchanged every *agree_every* rounds, and used at the next exchange. Until then a worker
    without data takes part, with `Run.active` False. If that matters, average ``w * change`` and a
    one-element ``w`` in one round, and divide.

    Attributes:
        every: Steps from one round to the next. 0: workers only meet at servers.
        groups: Whether a round is of groups of workers.
        each_until: Every step before this one is a round; *every* counts from here.
        after_update: Whether a round follows the optimizer's step. Workers' optimizers differ then,
            and models may differ between two rounds. Any of the other attributes implies it. It may
            also be set if every step is a round.
        agree_every: Number of rounds between two exchanges of the active workers. Their result is
            used at the next exchange, so no worker waits. By default groups exchange them every
            `AGREE_EVERY` rounds. All others exchange them in each round, and wait for all workers.

    Example:
        ::

            Rounds()  # bsp: gradients, by run.mean in bucket_ready
            Rounds(after_update=True)  # parameters, in after_update of each step
            Rounds(every=8)  # parameters, in after_update of every eighth step (run.is_round)
            Rounds(every=8, each_until=100)  # also in each of the first 100 steps
            Rounds(every=8, agree_every=1)  # an average that is used some steps after its start
            Rounds(groups=True)  # averages within groups in each step, or gossip
    """

    every: int = 1
    groups: bool = False
    each_until: int = 0
    after_update: bool = False
    agree_every: int | None = None

    def __post_init__(self) -> None:
        """Check the values, and fill in those that follow from others.

        Raises:
            UsageError: A value is not possible.
        """
        if self.every < 0:
            raise UsageError(
                f"rounds of every={self.every} steps: expected 1 or more, or 0 for "
                "workers that meet at servers alone"
            )
        if self.each_until < 0 or (self.agree_every or 1) < 1:
            raise UsageError(
                f"rounds with each_until={self.each_until} and agree_every="
                f"{self.agree_every}: expected a step, 0 or more, and rounds, 1 or more"
            )
        if self.groups and self.agree_every is None:
            object.__setattr__(self, "agree_every", AGREE_EVERY)
        together = self.every <= 1 and not self.each_until
        if not together or self.groups or self.agree_every is not None:
            object.__setattr__(self, "after_update", True)

    def is_round(self, step: int) -> bool:
        """Return whether step number *step*, from 0, is a round."""
        return self.every == 0 or self.next_round(step) == step

    def next_round(self, step: int) -> int:
        """Return the first round at or after *step*."""
        if step < self.each_until or not self.every:
            return step
        return step + self.every - 1 - (step - self.each_until) % self.every

    @property
    def is_every_step(self) -> bool:
        """Whether all workers communicate in every step, before the update."""
        return self.every == 1 and not self.after_update

    @property
    def models_may_differ(self) -> bool:
        """Whether workers' models, or their optimizers, may differ between two steps."""
        return self.after_update

    @property
    def is_nonblocking(self) -> bool:
        """Whether a round begins before its active workers are known."""
        return self.agree_every is not None


AGREE_EVERY = 16
"""Rounds of groups between two exchanges of all active workers.

An exchange is one small message. No worker waits for it, since its result is used at the next one.
"""

EVERY_STEP = Rounds()
ON_SERVERS = Rounds(every=0)


Consistency = Literal["exact", "delayed", "lossy", "local", "asynchronous"]
"""What a method guarantees about gradients, from the strongest guarantee to the weakest.

- *exact*: DDP's result, up to rounding.
- *delayed*: every gradient is applied once, at most a step late.
- *lossy*: the compression error is sent later, or is small.
- *local*: workers' parameters differ between rounds.
- *asynchronous*: there is no common bound on staleness or on what is left out.
"""

CONSISTENCIES: tuple[Consistency, ...] = get_args(Consistency)
"""From the strongest guarantee to the weakest."""


def weaker(first: Consistency, second: Consistency) -> Consistency:
    """Return the weaker of two consistencies: that of a gradient to which both apply."""
    return max(first, second, key=CONSISTENCIES.index)


class WorkerState(Protocol):
    """State that differs between workers: a method's, or a compressor's error feedback.

    It consists of tensors, numpy arrays, numbers and strings, in lists, tuples and dicts.
    """

    @property
    def name(self) -> str:
        """Name of the state, by which it is loaded, for example ``"method.bsp"``.

        Equal on all workers, without a slash, and unique in a training.
        """
        ...

    def save(self) -> dict[str, Any]:
        """Return this worker's state, between two steps. Not collective.

        Returns:
            The data. Tensors may be the live ones: they are written before training continues.
        """
        ...

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from the result of `save` or `redistribute`, bit for bit. Not collective.

        Args:
            saved: Its tensors are in host memory, and have no other owner.
        """
        ...

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        """Return what this worker loads if it cannot have its own state. Changes nothing.

        This happens if the saving job had another number of workers, or lost some of them.

        Args:
            parts: The results of `save` by rank, the same on every worker. Each is read on access.
            workers: Number of workers of this job.

        Raises:
            UsageError: The state cannot be redistributed correctly.
        """
        ...


def redistribute_nothing(
    name: str, parts: Iterable[dict[str, Any]], workers: int
) -> dict[str, Any]:
    """Return an empty state, for states that have no meaning with another number of workers.

    Args:
        name: Name of the state.
        parts: What each worker saved.
        workers: Number of workers of this job.

    Raises:
        UsageError: A part is not empty.
    """
    held = [bool(part) for part in parts]
    if not any(held):
        return {}
    raise UsageError(
        f"the checkpoint holds {name} of {len(held)} worker{'s' * (len(held) > 1)}, which a "
        f"job of {workers} cannot take over. Load it with as many workers as the job that "
        "saved it had, if all of them lived then. Or save after finish(), when nothing of "
        "it is left"
    )
