"""A method: when, and with whom, workers agree.

`paceline.methods` implements `Method`; `paceline.core` calls its hooks.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from paceline.interfaces.discipline import Discipline
from paceline.interfaces.groups import Groups
from paceline.interfaces.rounds import Rounds

UpdatesOn = Literal["worker", "method", "server"]
"""Who applies the optimizer: the user's ``step()``, the method piece by piece, a server."""

GradientSeen = Literal["mean", "local", "sent"]
"""What ``.grad`` holds between ``backward()`` and ``step()``: the mean over workers; the
worker's own, still to be used; what was sent already, of no use to the script: changing it
is an error."""


Clips = Literal["mean", "own"]
"""What ``distribute(clip_norm=)`` limits: the norm of the mean gradient, where all of it is
known before any of it is applied; else that of each worker's own, before it is sent."""


HOOKS = (
    *("init", "step_begins", "before_use", "bucket_ready", "backward_ended"),
    *("after_update", "buckets_rebuilt", "finish", "consolidate", "loaded"),
    *("save_state", "load_state", "redistribute_state", "figures"),
)
"""What a method may define, beside its hyperparameters; see `Method`."""


class MethodSummary(NamedTuple):
    """A method's row in the table of methods, in words."""

    waits_for: str
    sends: str
    guarantees: str


@runtime_checkable
class Method(Protocol):
    """When, and with whom, workers agree: a frozen dataclass of hyperparameters.

    ``init`` makes the state: one explicit object, picklable between steps. Then come the
    hooks of a step, in this order; a method defines those that it needs, each with the
    arguments ``(state, run, ...)``. A public function with these arguments and another
    name is refused by `distribute`: it would never be called.

    1. ``step_begins(state, run)``: the first forward with gradients after a backward
       that ended.
    2. ``before_use(state, run, bucket)``: something is about to use parameters of
       *bucket* for the first time since the last update: a module that is called, or anything in
       Python that hands them to torch. At the latest when the next backward pass begins.
       With ``waits_in_forward`` also before something looks at gradients that are under way,
       between ``backward()`` and ``step()``.
    3. ``bucket_ready(state, run, bucket)``: the gradients of *bucket* are in its buffer
       (times `Run.weight` where workers form the mean, so that their sum is the mean);
       backward still runs. Always in plan order, on every rank.
    4. ``backward_ended(state, run)``: all buckets were delivered. A tensor that took no
       part on this rank is zero in its buffer and False in ``bucket.used``.
    5. ``after_update(state, run)``: the user's optimizer has stepped, or would have, on
       a worker that only keeps company or has left its loop before ``step()``.
    6. ``buckets_rebuilt(state, run)``: the planner has made the buckets anew; between
       two steps.
    7. ``finish(state, run)``: this worker is out of data. Returns when the documented
       result is in the model.
    8. ``consolidate(state, run)``: put the documented result into the model, for an
       evaluation, and return what undoes it. Collective only in a method that declares
       ``consolidates_together = True``: then `paceline.save` and whoever evaluates
       enters it on all workers. Law: training with and without consolidations in
       between is bit-equal.
    9. ``loaded(state, run)``: all parameters were replaced between two steps, by what the
       script has loaded into the model, or by what the servers have. The number of the
       next step stays. What is under way is of before: wait for it, and drop it. Comes
       before the next hook, and not where `load_state` gives back what belongs to them.
    10. ``save_state(state, run)``: what a restart of this worker needs, between two steps;
       a dict of tensors, numbers, strings, lists and dicts. ``load_state(state, run,
       saved)`` gives it back, bit for bit, to the worker of the same rank.
       ``redistribute_state(state, run, parts)`` says what this worker loads where a job of
       another size goes on: *parts* gives what each worker saved, in order of ranks.
       Without it such a load is refused. None of the three is collective.
    11. ``figures(state, run)``: numbers by name that people may want to see of the step that has just
       ended, such as what it has deferred: asked where somebody looks. Not collective.

    Where a submodule is called, or a method of the model other than ``forward``, hook 1
    comes with the first gradient.

    Beside its hooks a method may declare ``waits_in_forward = True``: then it need not wait in
    `backward_ended` for means that `Run.sending` plans beyond it, but in ``before_use``.
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

    Where workers do different numbers of steps, its state may have a number `steps_of_all`: what
    `DistributedOptimizer.steps_of_all` is.

    An exception from a hook reaches the user's script out of ``forward``,
    ``backward()`` or ``step()``; the training cannot go on after it.
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

    def init(self, run: Any) -> Any:
        """Make the method's state for this run, which is the `Run` of the method's kind:
        an `UpdatingRun` where it updates, a `ServerRun` where servers do. Collective."""
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
