"""A method: when, and with whom, workers agree; its rounds, its consistency, its workers' state.

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
"""Who applies the optimizer: the user's ``step()``, the method piece by piece, a server."""

GradientSeen = Literal["mean", "local", "sent"]
"""What ``.grad`` holds between ``backward()`` and ``step()``: the mean over workers; the
worker's own, still to be used; what was sent already, of no use to the script: changing it
is an error."""


Clips = Literal["mean", "own"]
"""What ``distribute(clip_norm=)`` limits: the norm of the mean gradient, where all of it is
known before any of it is applied; else that of each worker's own, before it is sent."""


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
    """The hooks that a method's worker may define, in the order in which they come.

    A method's worker is what `Method.start` returns: the method's own object for one worker of
    one training, which has all that it keeps from step to step. It defines those hooks that it
    needs; nobody derives from this class, whose methods are their signatures. A worker's public
    functions are its hooks: `distribute` refuses one with another name, or with other arguments,
    since it would never be called. Helpers begin with an underscore.

    Where a submodule is called, or a method of the model other than ``forward``, `step_begins`
    comes with the first gradient.

    An exception from a hook reaches the user's script out of ``forward``, ``backward()`` or
    ``step()``; the training cannot go on after it.
    """

    def step_begins(self) -> None:
        """Called at the first forward with gradients after a backward that ended."""

    def before_use(self, bucket: Bucket) -> None:
        """Called before parameters of *bucket* are used for the first time since the update.

        The use is a call of a module, or anything in Python that hands the parameters to torch;
        at the latest it is the beginning of the next backward pass. With ``waits_in_forward`` also
        before something looks at gradients that are under way, between ``backward()`` and
        ``step()``.

        Args:
            bucket: The bucket of these parameters.
        """

    def bucket_ready(self, bucket: Bucket) -> None:
        """Called when the gradients of *bucket* are in its buffer; backward still runs.

        Buckets come in plan order, on every rank.

        Args:
            bucket: Its buffer holds gradients; times `Run.weight` where workers form the mean, so
                that the sum over workers is the mean.
        """

    def backward_ended(self) -> None:
        """Called when all buckets were delivered.

        A tensor that took no part on this rank is zero in its buffer and False in
        ``bucket.used``.
        """

    def after_update(self) -> None:
        """Called when the user's optimizer has stepped.

        Also where it would have, on a worker that is out of data, or has left its loop before
        ``step()``.
        """

    def buckets_rebuilt(self) -> None:
        """Called between two steps when the tuner has made the buckets anew."""

    def finish(self) -> None:
        """Called when this worker is out of data.

        Return when the documented result is in the model.
        """

    def consolidate(self) -> Callable[[], None]:
        """Put the documented result into the model, for an evaluation.

        Collective only in a method that declares ``consolidates_together = True``: then
        `paceline.save` and whoever evaluates enters it on all workers. Law: training with and
        without consolidations in between is bit-equal.

        Returns:
            A function that undoes it.
        """

    def parameters_replaced(self) -> None:
        """Called when all parameters were replaced between two steps.

        The script has loaded others into the model, or the servers have others. The number of the
        next step stays. What is under way belongs to the parameters before: wait for it, and drop
        it. Comes before the next hook, and not where `load_state` gives back what belongs to the
        new ones.
        """

    def save_state(self) -> dict[str, Any]:
        """Return what a restart of this worker needs, between two steps. Not collective.

        Returns:
            A dict of tensors, numbers, strings, lists and dicts.
        """

    def load_state(self, saved: dict[str, Any]) -> None:
        """Take back what the worker of the same rank saved, bit for bit. Not collective.

        Args:
            saved: What `save_state` or `redistribute_state` returned.
        """

    def redistribute_state(self, parts: Iterable[Any]) -> dict[str, Any]:
        """Return what this worker loads where a job of another size goes on. Not collective.

        Without this hook such a load is refused.

        Args:
            parts: What each worker saved, in order of ranks.
        """

    def metrics(self) -> dict[str, float]:
        """Return numbers by name about the step that has just ended, such as what it has deferred.

        Asked where somebody looks. Not collective.
        """


HOOKS = tuple(name for name in vars(WorkerHooks) if not name.startswith("_"))
"""The names of `WorkerHooks`."""


@runtime_checkable
class Method(Protocol):
    """When, and with whom, workers agree: a frozen dataclass of hyperparameters.

    ``start`` makes the worker, on each rank: an object with those of `WorkerHooks` that the
    method needs. All that changes is there; the method itself never does.

    A method may declare, as class attributes:

    - ``waits_in_forward = True``: its worker need not wait in `backward_ended` for means that
      `Run.messages` plans beyond it, but in ``before_use``.
    - ``sends_halves = True``: it forms means in two halves (`Run.scatter_mean`); what cannot be
      halved is refused beforehand.
    - ``compressible_pushes = True``, where servers update: it pushes whole buckets and waits for
      them by `Remote.wait`, so that they may travel compressed.
    - ``symmetric = True``: all workers of equal hosts send equally much at equal times, by
      collectives alone. A simulation may then run a few of them for all (`WorkerClasses`).
    - ``averages_buffers = True``: it averages BatchNorm's statistics itself (`Run.own_buffers`),
      and training sends none.
    - ``default_compression = "SPEC"``: its compression where the user says nothing.
    - ``summary``, a `MethodSummary`: its row in the table of methods; a method that is no row
      needs none.
    - ``consistency``: its `Consistency` with uncompressed gradients. A method that says nothing is
      taken for asynchronous.
    - ``in_the_long_run``: keys with which a short run shows what a long one comes to: without a
      warm-up, say. For `paceline plan`.
    - ``learns_for``: how many steps it takes, beyond the tuning of buckets, to its steady state.

    A method that sends no gradients may define ``compressed_by(self, compressor)``, given a name. It
    returns the method whose messages are compressed: its means with a name are of differences. Or it
    raises a `UsageError` that says why they cannot be, and what to use instead.

    Where workers do different numbers of steps, its worker may have a number `steps_of_all`: what
    `DistributedOptimizer.steps_of_all` is.

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
        """In which steps it communicates."""
        ...

    @property
    def updates_on(self) -> UpdatesOn:
        """Who applies the optimizer."""
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
        """Make the method's worker, with those of `WorkerHooks` that it needs. Collective.

        Args:
            run: The `Run` of the method's kind: an `UpdatingRun` where it updates, a `ServerRun`
                where servers do.

        Returns:
            The worker.
        """
        ...


class UpdatesOnServer(Method, Protocol):
    """A method whose servers hold the parameters and update them."""

    @property
    def coordinates(self) -> bool:
        """Whether server 0 decides for all, and workers tell the others: see `Discipline.on_decision`."""
        ...

    def piece_bytes(self, total: int) -> int | None:
        """Return the most bytes that a unit has. For methods that push parts of buckets.

        Args:
            total: Bytes of the model.

        Returns:
            None: units are as large as the parts of parameters that a server holds.
        """
        ...

    def groups(self, workers: int) -> Groups | None:
        """Return the first groups, where each group of workers has a server with the whole model.

        Args:
            workers: Number of workers.

        Returns:
            None where servers share out the model among themselves, each for all workers.

        Raises:
            UsageError: As `server` does.
        """
        ...

    def server(self, workers: int) -> Discipline:
        """Make what one server does: a `GroupServerDiscipline` where there are `groups`.

        Args:
            workers: Number of workers.

        Returns:
            A fresh discipline, for one server.

        Raises:
            UsageError: The hyperparameters do not fit that number of workers.
        """
        ...


@dataclass(frozen=True)
class Rounds:
    """In which steps workers communicate: a round is such a step.

    What training itself sends (buffers, the tuner's trials, who still trains) goes with rounds:
    steps between two rounds send nothing.

    Attributes:
        every: Steps from one round to the next; 0: workers never meet by themselves, but at
            servers.
        groups: Whether a round is of groups of workers.
        each_until: Before that step each step is a round, and *every* counts from there.
        after_update: Whether rounds are held once the optimizer has stepped. Workers' optimizers
            differ then, and so may models between two rounds. It follows from each of the others,
            and may be set where each step is a round.
        agree_every: After how many rounds all workers say who still trains. They use what was
            said at the next such round, so that nobody waits. By default groups do so every
            `AGREE_EVERY` rounds; all others ask in each round, which waits for all.

    Example:
        ::

            Rounds()  # bsp's
            Rounds(every=8)  # averages parameters after every eighth step
            Rounds(groups=True)  # averages within other groups in each step
            Rounds(every=8, agree_every=1)  # as the second, and waits for the result later
    """

    every: int = 1
    groups: bool = False
    each_until: int = 0
    after_update: bool = False
    agree_every: int | None = None

    def __post_init__(self) -> None:
        """Check the values, and fill in those that follow from others.

        Raises:
            UsageError: A value cannot be.
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
        """Whether all workers meet in every step, before the update."""
        return self.every == 1 and not self.after_update

    @property
    def models_may_differ(self) -> bool:
        """Whether workers' models, or their optimizers, may differ between two steps."""
        return self.after_update

    @property
    def is_nonblocking(self) -> bool:
        """Whether a round begins without knowing who takes part in it."""
        return self.agree_every is not None


AGREE_EVERY = 16
"""Rounds of groups from one agreement of all workers to the next: an agreement takes a
small message and waits for nobody, since its answer is used at the next one."""

EVERY_STEP = Rounds()
ON_SERVERS = Rounds(every=0)


Consistency = Literal["exact", "delayed", "lossy", "local", "asynchronous"]
"""What becomes of a gradient, from the strongest promise to the weakest. *exact*: DDP's result,
to rounding. *delayed*: every gradient is applied once, at most a step late. *lossy*: what codes
leave out is sent later, or is small. *local*: workers' parameters differ between rounds.
*asynchronous*: nobody bounds what is late, or what is left out, for all."""

CONSISTENCIES: tuple[Consistency, ...] = get_args(Consistency)
"""From the strongest promise to the weakest."""


def weaker(first: Consistency, second: Consistency) -> Consistency:
    """Return the consistency where two things are done to a gradient: the weaker of both."""
    return max(first, second, key=CONSISTENCIES.index)


class WorkerState(Protocol):
    """One state that differs between workers: a method's, a compressor's error feedback.

    What is saved is data: tensors, numpy arrays, numbers, texts, lists, tuples and dicts of them.
    """

    @property
    def name(self) -> str:
        """Name of the state, for example ``"method.bsp"``; loads go by it.

        Equal on all workers, without a slash, and once in a training.
        """
        ...

    def save(self) -> dict[str, Any]:
        """Return this worker's state, between two steps. Not collective.

        Returns:
            Data. The tensors may be the live ones: they are written before training goes on.
        """
        ...

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what `save` or `redistribute` gave, bit for bit. Not collective.

        Args:
            saved: Its tensors are on the processor, and nobody else holds them.
        """
        ...

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        """Return what this worker loads where it cannot have its own. Changes nothing.

        The job that saved had another number of workers than this one, or lost some of them.

        Args:
            parts: What `save` gave, in order of ranks, on every worker alike; each is read when it
                is asked for.
            workers: Number of workers of this job.

        Raises:
            UsageError: No answer would be right.
        """
        ...


def redistribute_nothing(
    name: str, parts: Iterable[dict[str, Any]], workers: int
) -> dict[str, Any]:
    """Return an empty state, for states that mean nothing to another number of workers.

    Args:
        name: Of the state.
        parts: What each worker saved.
        workers: Number of workers of this job.

    Raises:
        UsageError: A part holds something.
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
