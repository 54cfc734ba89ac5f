"""One worker's training: joins what it is made of, and is what the wrapped optimizer calls.

Theory of operation
-------------------
Each gradient goes from its hook (`passes`) into a bucket, and complete buckets to the
method, in plan order (`arrival`). A backward pass ends in a callback of the autograd engine.
There, buckets that are still incomplete get zeros for tensors that took no part, and are
delivered too; then the method has its *backward ended*, in which bsp waits (`steps`). So
``.grad`` holds the mean when ``backward()`` returns, and users clip and scale it as they
always did.

Which gradients share a bucket is the planner's to say; after a backward pass it may have
changed its mind, and buckets are made anew.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from paceline.clipping import clip
from paceline.collectives.alone import AloneComm
from paceline.collectives.comm import TorchComm
from paceline.compression import Identity
from paceline.errors import UsageError
from paceline.exchange import SharedBuffers, broadcast_tensors
from paceline.hooks import Uncopied
from paceline.interfaces import Method, World
from paceline.loading import Loading
from paceline.planning import Planner
from paceline.same_data import SameData
from paceline.sampler import Sampler
from paceline.sent import SentGradients
from paceline.server.remote import RemoteParameters
from paceline.settings import Settings
from paceline.tensors import Bucket, kind_of, wire_bytes
from paceline.training.agreement import Agreement
from paceline.training.arrival import Arrivals
from paceline.training.coding import Codes
from paceline.training.faults import Faults
from paceline.training.means import Means
from paceline.training.method_hooks import MethodHooks
from paceline.training.observers import Observers
from paceline.training.own import own_states
from paceline.training.passes import Passes
from paceline.training.presence import Presence
from paceline.training.roll_call import RollCall
from paceline.training.run import UpdatingWorkerRun, WorkerRun, run_for
from paceline.training.steps import Steps
from paceline.training.uses import Uses
from paceline.weights import Weights

MakeRemote = Callable[[list[Bucket], Callable[[], float]], RemoteParameters]
"""From buckets, and this worker's weight as of now."""


class Training:
    """Joins what one training is made of, and is what the wrapped optimizer calls.

    *parameters* are the trainable ones, in registration order; *remote* finds them on
    their servers, where these update.
    """

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        method: Method,
        settings: Settings,
        comm: TorchComm | AloneComm,
        sampler: Sampler | None = None,
        remote: MakeRemote | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.comm = comm
        self.sampler = sampler
        self.finished = False
        self.leads = False
        """Whether this worker was the lowest rank of those who met last."""
        self.looking = False  # inside `consolidated`
        self._world, self._model, self._method = world, model, method
        self._parameters, self._settings = list(parameters), settings
        self._presence = Presence(comm.size, weight=1.0 / comm.size)
        self._faults = Faults()
        self._number = len(world.job.trainings)
        planned = {id(parameter) for _, parameter in parameters}
        self._outside = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if id(parameter) not in planned and parameter.numel()
        ]
        own_buffers = () if remote is not None else tuple(model.buffers())
        self._shared = SharedBuffers(comm, own_buffers, settings.buffers)
        self._sent = SentGradients(self.say)
        self._steps, means = self._make_steps()
        self._arrivals = self._steps.arrivals
        self._remote: RemoteParameters | None = None
        if remote is not None:
            self._remote = remote(self.buckets, lambda: self._presence.weight)
        self.run = self._steps.run = self._make_run(means, optimizer)
        self._hooks = MethodHooks(method, self.run, self._faults.failed)
        self._steps.hooks = self._hooks
        self._loading = self._steps.loading = self._make_loading()
        self._hooks.begin()
        self.own_states = own_states(
            method, self._hooks, self._codes, comm.rank, self._parameters, optimizer
        )
        """What a checkpoint keeps of this worker alone."""
        self._steps.observers = self._make_observers()
        self._hook_into_model()

    def _make_steps(self) -> tuple[Steps, Means]:
        """What buckets go through, and what means are formed with."""
        comm, presence, method = self.comm, self._presence, self._method
        rhythm, settings = method.rhythm, self._settings
        device = self._parameters[0][1].device
        self.stopwatch = self._world.stopwatch(device)
        compressed = settings.compression != Identity()
        beside = compressed or device.type != "cpu" or rhythm.groups
        control = None
        if beside and comm.size > 1 and rhythm.every:
            control = comm.channel("control")
        roll_call = RollCall(
            presence,
            comm,
            control,
            lambda: self.buckets if rhythm.is_every_step else (),
        )
        agreement = Agreement(presence, control or comm) if rhythm.groups else None
        self._codes = None
        if compressed:
            self._codes = Codes(settings.compression, presence, comm.rank, self._charge)
        means = Means(comm, presence, rhythm, roll_call, self._codes)
        planner = self._planner = Planner(
            comm,
            settings.fusion,
            [wire_bytes(parameter) for _, parameter in self._parameters],
            [kind_of(parameter) for _, parameter in self._parameters],
            device,
            self.stopwatch,
            self._world.blank,
            self._world.journal.planned,
            self.say,
            means.try_out,
            lock_step=rhythm.is_every_step,
        )
        clips_own = method.clips == "own" and settings.clip_norm < math.inf
        steps = Steps(
            *(rhythm, settings, clips_own, presence, planner, roll_call),
            *(agreement, self._shared, self._faults),
        )
        # A bucket holds this rank's share of the mean, where workers form the mean:
        # the division costs nothing beside the copy that has to be made anyway.
        averages = (
            method.gradient_seen_by_user == "mean" or method.updates_on == "method"
        )
        steps.arrivals = Arrivals(
            self._parameters,
            presence.weight,
            averages,
            steps.deliver,
            clips_own,
            self._faults.refused,
        )
        steps.arrivals.make_buckets(planner.groups)
        return steps, means

    def _charge(self, size: float) -> None:
        """A compressor has read or written so many bytes."""
        self._steps.observers.coded(size)

    def _make_run(
        self, means: Means, optimizer: torch.optim.Optimizer | None
    ) -> WorkerRun:
        return run_for(
            self._method,
            optimizer,
            self._clip_mean,
            self._remote,
            self.comm,
            self._presence,
            means,
            [parameter for _, parameter in self._parameters],
            list(self._model.buffers()),
            self.stopwatch,
            self.say,
            lambda: self.buckets,
            self._world.journal.metrics.get,
            self._steps.keep_company,
            self._take_model,
        )

    def _make_loading(self) -> Loading | None:
        if self._remote is None:
            return None
        return Loading(
            self.comm.rank,
            self._method.name,
            self._model,
            self._remote,
            lambda: self._hooks.call("loaded"),
            lambda: self.looking,
        )

    def _make_observers(self) -> Observers:
        """Those who only watch."""
        sees_means = self._method.gradient_seen_by_user == "mean"
        one_of_many = self.comm.rank == 0 and self.comm.size > 1
        same_data = SameData(
            sees_means and self.sampler is None and one_of_many,
            self.comm.size,
            self.say,
            lambda: self.buckets,
            lambda: self._arrivals.share,
        )
        samples = None if self.sampler is None else self.sampler.mean_samples
        compute = self._world.compute(self._model, self._parameters, samples)
        return Observers([compute, self._planner, same_data])

    def _hook_into_model(self) -> None:
        method, steps = self._method, self._steps
        self._passes = Passes(
            self._model,
            self._parameters,
            method.name,
            method.gradient_seen_by_user,
            None if self.sampler is None else Weights(self.sampler),
            self._presence,
            steps,
            self._faults,
            self._note_life,
            self._end_backward,
        )
        self._handle = self._model.register_load_state_dict_pre_hook(
            Uncopied(self.settle_buffers)
        )
        if self._hooks.has("before_use"):
            steps.uses = Uses(
                self._model,
                self._arrivals.bucket_of,
                lambda bucket: self._hooks.call("before_use", bucket),
            )

    # ---- what it is like now ----

    @property
    def buckets(self) -> list[Bucket]:
        """The gradient's pieces, in plan order."""
        return self._arrivals.buckets

    @property
    def state(self) -> Any:
        """The method's state."""
        return self._hooks.state

    @property
    def step_is_due(self) -> bool:
        """Whether gradients were delivered, and ``step()`` has not followed."""
        return self._presence.step_is_due

    @property
    def remote(self) -> RemoteParameters:
        """The parameters on their servers."""
        assert self._remote is not None, "this method's worker updates"
        return self._remote

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined it."""
        return 0 if self._remote is None else self._remote.first_step

    @property
    def loading(self) -> Loading:
        """What the script loads, where servers update."""
        assert self._loading is not None, "this method's worker updates"
        return self._loading

    @property
    def broken_by(self) -> str:
        """The error that has left the ranks out of step, so that it cannot go on; or nothing."""
        return self._faults.broken

    @property
    def updates_on_server(self) -> bool:
        """Whether the optimizer's state is on servers."""
        return self._remote is not None

    @property
    def optimizer_steps(self) -> bool:
        """Whether the user's optimizer steps, and not the method or a server."""
        return self._method.updates_on == "worker"

    @property
    def consolidates_together(self) -> bool:
        """Whether `consolidated` is collective."""
        return self._hooks.consolidates_together

    @property
    def progress(self) -> dict[str, int]:
        """Where in its rhythm this training is, equal on all workers between steps."""
        return self._steps.progress

    @progress.setter
    def progress(self, saved: dict[str, int]) -> None:
        self._steps.progress = saved

    def say(self, sentence: str) -> None:
        """Tell people something, once for all workers: now, and beside the run's figures."""
        self._world.journal.note(sentence)
        if self.comm.rank == 0:
            print(f"paceline: {sentence}", file=sys.stderr)

    # ---- what the wrapped optimizer calls ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate into ``.grad``."""
        return self._passes.no_sync()

    def before_update(self) -> None:
        """``step()`` was called: see to it that this step's gradients were delivered.

        They were not if the loss reached no parameter, or all passes were under
        ``no_sync``; the other ranks wait for them all the same.
        """
        for name, parameter in self._outside:
            if parameter.grad is not None:
                raise UsageError(
                    f"parameter {name!r} was frozen when distribute was called, and has a "
                    "gradient now: it would be trained on each rank alone. Unfreeze "
                    "before distribute, or finish() and call distribute again"
                )
        if not self._steps.delivered:
            self._end_backward()
        if self._method.gradient_seen_by_user == "local-sent":
            self._require_unchanged()
        if self._loading is not None:
            try:
                self._loading.before_update()
            except UsageError as error:
                self._faults.failed(error)  # the gradients were sent
                raise
        if self.optimizer_steps:
            every = (parameter.grad for _, parameter in self._parameters)
            self._clip_mean([gradient for gradient in every if gradient is not None])
        if self._remote is None:
            self._steps.observers.update_begins()

    def evaluates_again(self) -> None:
        """The optimizer calls its closure once more within a step: what this gives is
        delivered too, on every rank, also where it reaches no parameter."""
        self._steps.delivered = False

    def after_update(self) -> None:
        """The user's optimizer has stepped."""
        self._steps.end()

    def finish(self) -> None:
        """This worker is out of data. Collective over the ranks, each in its own time; but
        not where the training is broken: then the others are told."""
        self.finished = True
        if self._arrivals.in_backward and self._arrivals.some_have_left:
            self._faults.broken = self._faults.broken or (
                "its last backward pass ended with an exception after a part of its "
                "gradients had been sent"
            )
        try:
            if not self.broken_by:
                self._end_well()
        finally:
            self._presence.active = False
            if self.broken_by:
                self._world.job.broke(self._number, self.broken_by)
            self.detach()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Within it the method's documented result is in the model."""
        if self.looking:
            yield  # it is there
            return
        undo = self._consolidate()
        before, self.looking = self.looking, True
        try:
            yield
        finally:
            self.looking = before
            undo()

    def detach(self) -> None:
        """Take the hooks out of the model."""
        self._passes.detach()
        self._handle.remove()
        if self._steps.uses is not None:
            self._steps.uses.detach()
        if self._loading is not None:
            self._loading.detach()

    def settle_buffers(self, *_: object) -> None:
        """Those that are under way are put into the model before others are loaded, or
        these are saved: a step that was skipped has not done it."""
        self._shared.put()

    # ---- all workers together ----

    def load_is_complete(self) -> bool:
        """The script has loaded all that it wanted: what the model and the optimizer hold on
        the lowest rank that trains becomes everybody's. Returns when this worker has it;
        False where nothing of it was used, since this worker was started again and the job
        goes on: then the model holds what the servers have. Where workers update, each
        goes on with what it loaded. Collective over the workers that train."""
        return self._loading is None or self._loading.complete(whole=True)

    def meet(self) -> bool:
        """Wait for all workers that train; then each has the answers to what it sent, and
        sends nothing until this has returned. Returns False, at once, where there is nobody
        to be met: this worker is out of data, or was started again and has not trained since.
        Collective."""
        if self._loading is None:
            self.comm.all_reduce(torch.zeros(1), "sum").wait()
            self.leads = self.comm.rank == 0
            return True
        if not self._presence.active or self._loading.is_guest:
            return False
        self.leads = self.remote.meet()
        return True

    def _take_model(self, source: int) -> None:
        self._shared.put()
        tensors = [*self._model.parameters(), *self._model.buffers()]
        broadcast_tensors(self.comm, tensors, source)

    def _consolidate(self) -> Callable[[], None]:
        """Put the result into the model; returns what undoes it."""
        if not self._presence.active or not self._hooks.has("consolidate"):
            return lambda: None  # the result is in the model
        loading = self._loading
        if loading is not None and loading.is_due:
            if not loading.is_guest:
                return lambda: None  # what is in the model was just loaded
            loading.complete()
        undo: Callable[[], None] = self._hooks.call("consolidate")
        return undo

    # ---- the end ----

    def _end_well(self) -> None:
        if self._presence.step_is_due and not self.optimizer_steps:
            self._take_due_step()
        self._presence.active = False
        self._shared.put()
        if self._loading is not None and self._loading.is_due:
            self._loading.complete()
        self._hooks.call("finish")
        if self._remote is not None:
            self._remote.keep_state()
        if isinstance(self.run, UpdatingWorkerRun) and self.run.updater is not None:
            self.run.updater.close()
        self.comm.leave()

    def _take_due_step(self) -> None:
        """The script left its loop between ``backward()`` and ``step()``. The gradients have
        left, too, and count, and the others wait for what this step sends after them. What
        the script has loaded since is the result all the same."""
        loads = self._loading is not None and self._loading.is_due
        loaded = [p.detach().clone() for _, p in self._parameters] if loads else []
        self.after_update()
        with torch.no_grad():
            for (_, parameter), value in zip(self._parameters, loaded, strict=False):
                parameter.copy_(value)

    # ---- what its parts call ----

    def _note_life(self) -> None:
        """A forward pass begins. An evaluation takes long, and sends nothing else."""
        if self._remote is not None and self._world.alone:
            self._remote.note(self._world.now())

    def _end_backward(self) -> None:
        self._steps.end_backward()
        if self._method.gradient_seen_by_user == "local-sent":
            self._sent.remember(self.buckets)

    def _clip_mean(self, gradients: Sequence[torch.Tensor]) -> None:
        if self._method.clips == "mean":
            clip(gradients, self._settings.clip_norm)

    def _require_unchanged(self) -> None:
        """Raise `GradientError` if the script has changed gradients that were sent."""
        name = self._sent.changed(self.buckets)
        if name is not None:
            raise self._faults.refused(
                f"the gradient of {name!r} (or of a tensor sent with it) was changed "
                f"between backward() and step(): under {self._method.name} it is on its "
                "way to the others by then, and a change reaches nobody. Clip with "
                "distribute(clip_norm=...); without GradScaler; or use bsp, whose .grad "
                "holds the mean"
            )
