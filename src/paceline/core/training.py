"""One worker's training: joins what it is made of, and is what the wrapped optimizer calls.

Theory of operation
-------------------
Each gradient goes from its hook (`backward_passes`) into a bucket, and complete buckets to the
method, in plan order (`reducer`). A backward pass ends in a callback of the autograd engine.
There, buckets that are still incomplete get zeros for tensors that took no part, and are
delivered too; then the method has its *backward ended*, in which bsp waits (`step`). So
``.grad`` holds the mean when ``backward()`` returns, and users clip and scale it as they
always did.

Which gradients share a bucket is the planner's to say; after a backward pass it may have
changed its mind, and buckets are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from paceline.bucketing.bucket_plan import Side
from paceline.bucketing.tuner import Planner
from paceline.buckets import Bucket
from paceline.collectives.communicator import TorchComm
from paceline.collectives.no_collectives import AloneComm
from paceline.core.run import UpdatingWorkerRun
from paceline.core.sampler import Sampler
from paceline.core.settings import Settings
from paceline.core.step_metrics import Figures
from paceline.core.training_parts import MakeRemote, Parts
from paceline.errors import UsageError
from paceline.interfaces import Method, Runtime
from paceline.parameter_server.client.load_hooks import Loading
from paceline.parameter_server.client.remote_model import RemoteParameters


class Training:
    """Joins what one training is made of, and is what the wrapped optimizer calls.

    *parameters* are the trainable ones, in registration order; *remote* finds them on
    their servers, where these update. *number*: of this training among the script's.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        method: Method,
        settings: Settings,
        comm: TorchComm | AloneComm,
        sampler: Sampler | None = None,
        remote: MakeRemote | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        number: int = 0,
    ) -> None:
        self.finished = False
        self.leads = False
        """Whether this worker was the lowest rank of those who met last."""
        self.looking = False  # inside `consolidated`
        self._runtime, self._model, self._method = runtime, model, method
        self._number = number
        planned = {id(parameter) for _, parameter in parameters}
        self._outside = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if id(parameter) not in planned and parameter.numel()
        ]
        self._parts = parts = Parts(
            *(runtime, model, parameters, method, settings, comm, sampler, remote),
            optimizer,
            lambda: self.looking,
        )
        self.comm, self.sampler, self.run = comm, sampler, parts.run
        self.own_states = parts.own_states
        """What a checkpoint keeps of this worker alone."""
        self._presence, self._faults = parts.presence, parts.faults
        self._steps, self._arrivals = parts.steps, parts.arrivals
        self._hooks, self._shared = parts.hooks, parts.shared
        self._remote, self._loading = parts.remote, parts.loading
        self._figures = Figures(parts)
        self._place_number = runtime.job.places.add()
        if self.consolidates_together and comm.size > 1:
            self._steps.goes_on = self._goes_on

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
    def was_left(self) -> bool:
        """Whether this worker was started again after it had done all of its steps."""
        return self._remote is not None and self._remote.is_over

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
    def takes_scaled_gradients(self) -> bool:
        """Whether a GradScaler is to call ``step()`` in any case, and to leave it to that to
        unscale gradients, or to leave an update out. Where gradients are workers' own, one
        of them alone has an infinity, and the others meet it after the update: it may leave
        that out, but not the step."""
        if self._method.visible_gradient == "sent":
            return True  # and the step refuses it
        return self.optimizer_steps and self._method.rounds.models_may_differ

    def check_scaler(self) -> None:
        """A GradScaler steps the optimizer, where `takes_scaled_gradients`. Raises
        `GradientError` where gradients were sent with their scale, `UsageError` where they
        were clipped with it."""
        if self._method.visible_gradient == "sent":
            # Its kernel writes into gradients without a trace that `core.sent_gradient_check` could see.
            raise self._faults.refused(
                f"a GradScaler under {self._method.name}: gradients are on their way to the "
                "others, times its scale, when it unscales them. Train in bfloat16 without a "
                "scaler; or use bsp, whose .grad holds the mean"
            )
        if self._parts.clips_own:
            raise UsageError(
                f"clip_norm with a GradScaler: under {self._method.name} each worker's own "
                "gradient is clipped when backward ends, and is scaled then. Clip .grad, "
                "which is its own, after scaler.unscale_(optimizer); or train in bfloat16 "
                "without a scaler"
            )

    @property
    def consolidates_together(self) -> bool:
        """Whether `consolidated` is collective."""
        return self._hooks.consolidates_together

    @property
    def progress(self) -> dict[str, int]:
        """Where in its rounds this training is, equal on all workers between steps."""
        return self._steps.progress

    @progress.setter
    def progress(self, saved: dict[str, int]) -> None:
        self._steps.progress = saved
        self._runtime.job.places.begins_anew(self._place_number)

    # ---- what the wrapped optimizer calls ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate into ``.grad``."""
        return self._parts.passes.no_sync()

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
            self._parts.end_backward()
        self._steps.observers.step_is_called()
        if self._method.visible_gradient == "sent":
            self._require_unchanged()
        if self._loading is not None:
            try:
                self._loading.before_update()
            except UsageError as error:
                self._faults.failed(error)  # the gradients were sent
                raise
        if self.optimizer_steps:
            every = (parameter.grad for _, parameter in self._parts.parameters)
            self._parts.clip_mean(
                [gradient for gradient in every if gradient is not None]
            )
        if self._remote is None:
            self._steps.observers.update_begins()

    def evaluates_again(self) -> None:
        """The optimizer calls its closure once more within a step: what this gives is
        delivered too, on every rank, also where it reaches no parameter."""
        self._steps.delivered = False

    def after_update(self) -> None:
        """The user's optimizer has stepped."""
        self._steps.end()

    def finish(self, *, together: bool = False) -> None:
        """This worker is out of data. Collective over the ranks, each in its own time; but
        not where the training is broken: then the others are told. *together*: all ranks
        know that all call this now, so nobody needs company."""
        self.finished = True
        self._runtime.job.places.leaves(self._place_number)
        if together:
            self._presence.somebody_trains = False
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
                self._runtime.job.broke(self._number, self.broken_by)
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
        self._parts.detach()

    def abandon(self) -> None:
        """It is not to be trained by this, after all: nobody has done a step."""
        self.finished, self._presence.active = True, False
        self._runtime.job.places.take_back(self._place_number)
        self.detach()

    def figures(self) -> dict[str, float]:
        """What the step that has just ended tells of itself; takes time."""
        return self._figures()

    def go_on_from(self, before: Training, step: int) -> None:
        """The script goes on where *before* has ended, after so many steps and in the middle of an
        epoch, say."""
        self._parts.passes.go_on_from(before._parts.passes)
        self.progress = {"step": step, "unsent": 0, "rounds": 0}

    @property
    def planner(self) -> Planner:
        """Who says which gradients share a bucket."""
        return self._parts.planner

    @property
    def plan(self) -> Side | None:
        """The buckets that were measured and settled on, if any: for `reuse`."""
        return self._parts.planner.kept

    def reuse(self, plan: Side | None) -> None:
        """Begin with the buckets of another training of the same model, by the same spec. Before
        the first step, on all workers."""
        self._parts.planner.reuse(plan)

    def observe(self, watcher: Any) -> None:
        """Tell *watcher* what `Observers` are told."""
        self._steps.observers.add(watcher)

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

    def _goes_on(self, place: int) -> None:
        with self._fails_together():
            self._runtime.job.places.goes_on(self._place_number, place)

    @contextmanager
    def _fails_together(self) -> Iterator[None]:
        """An error within it leaves the ranks out of step."""
        try:
            yield
        except UsageError as error:
            self._faults.failed(error)
            raise

    def _consolidate(self) -> Callable[[], None]:
        """Put the result into the model; returns what undoes it."""
        if not self._presence.active or not self._hooks.has("consolidate"):
            return lambda: None  # the result is in the model
        loading = self._loading
        if loading is not None and loading.is_due:
            if not loading.is_guest:
                return lambda: None  # what is in the model was just loaded
            loading.complete()
        if self.consolidates_together and self.comm.size > 1:
            enter = partial(
                self._runtime.job.places.enter,
                *(self._place_number, self._steps.place),
                without_left=self._method.rounds.is_nonblocking,
            )
            with self._fails_together():
                self._runtime.journal.block("consolidated", enter)
        undo: Callable[[], None] = self._hooks.call("consolidate")
        return undo

    # ---- the end ----

    def _end_well(self) -> None:
        if self._presence.step_is_due:
            if self.optimizer_steps:
                self._steps.leave_before_update()
            else:
                self._take_due_step()
        self._presence.active = False
        self._shared.put()
        if self._loading is not None and self._loading.is_due:
            self._loading.complete()
        self._hooks.call("finish")
        self._shared.put()  # a last round may have sent some
        codes = self._parts.codes
        if codes is not None and not codes.was_used and self.comm.size > 1:
            self._parts.say(
                f"compression={codes.compressor.name} was never used: method "
                f"{self._method.name!r} sends no gradients, and no averages with a name"
            )
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
        loaded = (
            [p.detach().clone() for _, p in self._parts.parameters] if loads else []
        )
        self.after_update()
        with torch.no_grad():
            for (_, parameter), value in zip(
                self._parts.parameters, loaded, strict=False
            ):
                parameter.copy_(value)

    def _require_unchanged(self) -> None:
        """Raise `GradientError` if the script has changed gradients that were sent."""
        name = self._parts.sent.changed(self.buckets)
        if name is not None:
            raise self._faults.refused(
                f"the gradient of {name!r} (or of a tensor sent with it) was changed "
                f"between backward() and step(): under {self._method.name} it is on its "
                "way to the others by then, and a change reaches nobody. Clip with "
                "distribute(clip_norm=...); without GradScaler; or use bsp, whose .grad "
                "holds the mean"
            )
