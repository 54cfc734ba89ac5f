"""A method: when, and with whom, workers agree; its rounds, its consistency, its own state.

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
    """A method's row in the table of methods, in words."""

    waits_for: str
    sends: str
    guarantees: str


class WorkerHooks(Protocol):
    """The hooks that a method's worker may define, in the order in which they come.

    A method's worker is what `Method.start` returns: the method's own object for one worker of one
    training, which has all that it keeps from step to step. It
    defines those hooks that it needs; nobody derives from this class, whose methods are their
    signatures. A worker's public functions are its hooks: `distribute` refuses
    one with another name, or with other arguments, since it would never be called. Helpers begin
    with an underscore.

    Where a submodule is called, or a method of the model other than ``forward``,
    `step_begins` comes with the first gradient.

    An exception from a hook reaches the user's script out of ``forward``,
    ``backward()`` or ``step()``; the training cannot go on after it.
    """

    def step_begins(self) -> None:
        """The first forward with gradients after a backward that ended."""

    def before_use(self, bucket: Bucket) -> None:
        """Something is about to use parameters of *bucket* for the first time since the last
        update: a module that is called, or anything in Python that hands them to torch. At the
        latest when the next backward pass begins.

        With ``waits_in_forward`` also before something looks at gradients that are under way,
        between ``backward()`` and ``step()``.
        """

    def bucket_ready(self, bucket: Bucket) -> None:
        """The gradients of *bucket* are in its buffer (times `Run.weight` where workers form the
        mean, so that their sum is the mean); backward still runs. Always in plan order, on
        every rank."""

    def backward_ended(self) -> None:
        """All buckets were delivered. A tensor that took no part on this rank is zero in its
        buffer and False in ``bucket.used``."""

    def after_update(self) -> None:
        """The user's optimizer has stepped, or would have, on a worker that only keeps company
        or has left its loop before ``step()``."""

    def buckets_rebuilt(self) -> None:
        """The planner has made the buckets anew; between two steps."""

    def finish(self) -> None:
        """This worker is out of data. Returns when the documented result is in the model."""

    def consolidate(self) -> Callable[[], None]:
        """Put the documented result into the model, for an evaluation, and return what undoes
        it.

        Collective only in a method that declares ``consolidates_together = True``: then
        `paceline.save` and whoever evaluates enters it on all workers. Law: training with
        and without consolidations in between is bit-equal.
        """

    def parameters_replaced(self) -> None:
        """All parameters were replaced between two steps, by what the script has loaded into the
        model, or by what the servers have. The number of the next step stays.

        What is under way is of before: wait for it, and drop it. Comes before the next hook, and
        not where `load_state` gives back what belongs to them.
        """

    def save_state(self) -> dict[str, Any]:
        """What a restart of this worker needs, between two steps: a dict of tensors, numbers,
        strings, lists and dicts. Not collective."""

    def load_state(self, saved: dict[str, Any]) -> None:
        """Take back what the worker of the same rank saved, bit for bit. Not collective."""

    def redistribute_state(self, parts: Iterable[Any]) -> dict[str, Any]:
        """What this worker loads where a job of another size goes on: *parts* gives what each
        worker saved, in order of ranks. Without it such a load is refused. Not collective."""

    def metrics(self) -> dict[str, float]:
        """Numbers by name that people may want to see of the step that has just ended, such as
        what it has deferred: asked where somebody looks. Not collective."""


HOOKS = tuple(name for name in vars(WorkerHooks) if not name.startswith("_"))
"""The names of `WorkerHooks`."""


@runtime_checkable
class Method(Protocol):
    """When, and with whom, workers agree: a frozen dataclass of hyperparameters.

    ``start`` makes the worker, on each rank: an object with those of `WorkerHooks` that the
    method needs. All that changes is there; the method itself never does.

    A method may declare ``waits_in_forward = True``: then its worker need not wait in
    `backward_ended` for means that `Run.messages` plans beyond it, but in ``before_use``.
    With ``sends_halves = True`` it forms means in two halves (`Run.scatter_mean`), and what
    cannot be halved is refused beforehand. Where servers update, ``pushes_codes =
    True`` says that it pushes whole buckets and waits for them by `Remote.wait`, so that they may
    travel as codes. It may declare ``averages_buffers = True``: then it averages
    BatchNorm's statistics itself (`Run.own_buffers`), and training sends none.

    A method that sends no gradients may define ``compressed_by(self, compressor)``: itself as it is
    where what it sends is compressed, so that its means with a name are of differences, or an
    `UsageError` that says why they cannot be, and what to use instead. With
    ``default_compression = "SPEC"`` it says what that is where the user says nothing.

    ``summary``, a `MethodSummary`, is its row in the table of methods; a method that is no row
    needs none. What `paceline plan` needs: ``consistency`` is its `Consistency` with uncompressed gradients (a method
    that says nothing is taken for asynchronous), ``in_the_long_run`` are keys with which a
    short run shows what a long one comes to: without a warm-up, say; and ``learns_for`` is how many
    steps it takes beyond the planning of buckets until its steps are as they will be.

    Where workers do different numbers of steps, its worker may have a number `steps_of_all`: what
    `DistributedOptimizer.steps_of_all` is.
    """

    name: ClassVar[str]
    """The registry's name: lower case, with hyphens."""

    @property
    def rounds(self) -> Rounds:
        """When it communicates."""
        ...

    @property
    def updates_on(self) -> UpdatesOn: ...

    @property
    def visible_gradient(self) -> GradientSeen: ...

    @property
    def clips(self) -> Clips: ...

    def start(self, run: Any) -> object:
        """Make the method's worker for this run, with those of `WorkerHooks` that it needs.

        *run* is the `Run` of the method's kind: an `UpdatingRun` where it updates, a
        `ServerRun` where servers do. Collective.
        """
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

    def groups(self, workers: int) -> Groups | None:
        """The first groups, where each group of workers has a server that holds the whole
        model; None where servers share it out among themselves, each for all workers.
        Raises `UsageError` as `server` does."""
        ...

    def server(self, workers: int) -> Discipline:
        """What one server does, for a job of so many workers: a `Meshed` discipline where there
        are `groups`. Raises `UsageError` where the hyperparameters do not fit that number."""
        ...


@dataclass(frozen=True)
class Rounds:
    """A round is a step in which workers communicate; there is one every so many steps.
    What training itself sends (buffers, the planner's trials, who still trains) goes with
    rounds: steps between two rounds send nothing.

    *every*: steps from one round to the next; 0 means that workers never meet by
    themselves, but at servers. *each_until*: before that step there is a round in each,
    and *every* counts from there. *groups*: a round is of groups of workers.
    *after_update*: rounds are held once the optimizer has stepped, also where they are in
    each step: workers' optimizers differ, and so may models between two rounds. It follows
    from each of the others.

    *agree_every*: all workers say who still trains every so many rounds, and use what was
    said at the next such round, so that nobody waits. By default groups do so every
    `AGREE_EVERY` rounds, and all others ask in each round, which waits for all.

    Examples: ``Rounds()`` is bsp's; ``Rounds(every=8)`` averages parameters after every
    eighth step; ``Rounds(groups=True)`` averages within other groups in each step;
    ``Rounds(every=8, agree_every=1)`` begins something after every eighth step whose result
    is waited for later.
    """

    every: int = 1
    groups: bool = False
    each_until: int = 0
    after_update: bool = False
    agree_every: int | None = None

    def __post_init__(self) -> None:
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
        """Whether step number *step*, from 0, is one of a round."""
        return self.every == 0 or self.next_round(step) == step

    def next_round(self, step: int) -> int:
        """The first step of a round, at or after *step*."""
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
to rounding. *delayed*: every gradient is applied once, at most a step late. *lossy*: what codes leave
out is sent later, or is small. *local*: workers' parameters differ between rounds.
*asynchronous*: nobody bounds what is late, or what is left out, for all."""

CONSISTENCIES: tuple[Consistency, ...] = get_args(Consistency)
"""From the strongest promise to the weakest."""


def weaker(first: Consistency, second: Consistency) -> Consistency:
    """What is promised where two things are done to a gradient: the weaker of both."""
    return max(first, second, key=CONSISTENCIES.index)


class WorkerState(Protocol):
    """One state that differs between workers: a method's, a compressor's residuals.

    What is saved is data: tensors, numpy arrays, numbers, texts, lists, tuples and dicts
    of them.
    """

    @property
    def name(self) -> str:
        """Whose state it is, for example ``"method.bsp"``. Equal on all workers, without a
        slash, and once in a training. A state is loaded by who has the same name."""
        ...

    def save(self) -> dict[str, Any]:
        """This worker's state, between two steps. Not collective. The tensors may be the
        live ones: they are written before training goes on."""
        ...

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what `save` or `redistribute` gave, bit for bit. Tensors are on the
        processor, and nobody else holds them. Not collective."""
        ...

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        """What this worker loads where it cannot have its own: the job that saved had
        another number of workers than this one's *workers*, or lost some of them.

        *parts* gives what `save` gave, in order of ranks, on every worker alike; each is
        read when it is asked for. Changes nothing. Raises `UsageError` where no answer
        would be right.
        """
        ...


def redistribute_nothing(
    name: str, parts: Iterable[dict[str, Any]], workers: int
) -> dict[str, Any]:
    """For states that mean nothing to another number of workers: raises `UsageError` where
    any part holds something. Returns an empty state where none does."""
    held = [bool(part) for part in parts]
    if not any(held):
        return {}
    raise UsageError(
        f"the checkpoint holds {name} of {len(held)} worker{'s' * (len(held) > 1)}, which a "
        f"job of {workers} cannot take over: load it with as many workers as the job that "
        "saved it had, if all of them lived then; or save after finish(), when nothing of "
        "it is left"
    )
