"""One worker's training: joins its parts. The wrapped optimizer calls it.

Theory of operation
-------------------
Each gradient goes from its hook (`backward_passes`) into a bucket (`reducer`). Complete buckets go to the
method, in plan order (`step`). A backward pass ends in a callback of the autograd engine. There,
incomplete buckets get zeros for tensors that took no part, and are delivered too. Then the method's
`backward_ended` runs, in which bsp waits. So ``.grad`` holds the average when ``backward()`` returns, and
users clip and scale it as always.

The bucket tuner decides which gradients share a bucket. After a backward pass it may have a new plan,
and buckets are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from paceline.bucketing.rules import MEASURED
from paceline.bucketing.tuner import BucketTuner, Gradients, Mode
from paceline.core.averages import Averages
from paceline.core.backward_passes import BackwardPasses
from paceline.core.compressed_average import CompressedAverage
from paceline.core.context import TrainingContext
from paceline.core.lazy_parameters import LazyParameters
from paceline.core.load_hooks import LoadTracker
from paceline.core.method_hooks import MethodHooks
from paceline.core.misuse import SameDataCheck
from paceline.core.module_buffers import BufferSync
from paceline.core.participation import GroupParticipation, Participation
from paceline.core.reducer import Reducer
from paceline.core.run import UpdatingWorkerRun, make_run
from paceline.core.step import StepDriver
from paceline.errors import UsageError
from paceline.interfaces.buckets import kind_of, wire_bytes
from paceline.parameter_server.client.compression import ClientCompression
from paceline.parameter_server.client.remote_model import RemoteModel, ServedModel
from paceline.torch_internals import Uncopied


class Training:
    """One worker's training of a model by one method, from `distribute` to `finish`.

    *served*: the part of the model that servers hold, if servers update.
    """

    def __init__(
        self, context: TrainingContext, served: ServedModel | None = None
    ) -> None:
        self.finished = False
        self.leads = False
        """Whether this worker was the lowest rank at the last barrier (`meet`)."""
        self.context, self._workers = context, context.workers
        self._runtime, self._method = context.runtime, context.method
        self.comm = context.comm
        planned = {id(parameter) for _, parameter in context.parameters}
        self._outside = [
            (name, parameter)
            for name, parameter in context.model.named_parameters()
            if id(parameter) not in planned and parameter.numel()
        ]
        recorder = context.runtime.recorder
        recorder.set_period(context.rounds.every)
        recorder.warmup_steps = _learning_steps(context)

        on_servers = served is not None
        own = on_servers or getattr(context.method, "averages_buffers", False)
        buffers = () if own else tuple(context.model.buffers())
        self._buffers = BufferSync(context.comm, buffers, context.settings.buffers)
        participation = Participation(context)
        groups = GroupParticipation(context)
        self._compression: CompressedAverage | None = None
        if context.compressed and not on_servers:
            self._compression = CompressedAverage(context)
        averages = Averages(context, participation, groups, self._compression)
        self.tuner = _make_tuner(context, averages)
        """Decides which gradients share a bucket."""
        self._reducer = Reducer(context)
        self._driver = driver = StepDriver(
            context, self._reducer, self.tuner, participation, groups, self._buffers
        )
        self._reducer.make_buckets(self.tuner.plan.buckets)
        self.remote: RemoteModel | None = None
        """The parameters on their servers, if servers update."""
        if served is not None:
            self.remote = RemoteModel(
                served,
                context.buckets,
                context.settings.compression,
                context.listeners,
            )
        self.run = make_run(context, averages, driver, self.remote)
        self.hooks = driver.hooks = MethodHooks(context, self.run)
        self.loads: LoadTracker | None = None
        """Handles the script's loads, if servers update."""
        if self.remote is not None:
            self.loads = driver.loads = LoadTracker(context, self.remote, self.hooks)
        try:
            self.hooks.begin()
        except BaseException:
            if self.loads is not None:
                self.loads.detach()
            raise
        self._add_listeners()
        self._passes = BackwardPasses(context, driver, self.remote)
        self._handles = self._watch_model()
        self._training_number = context.runtime.registry.consolidated_entries.add()
        if self.consolidates_together and self.comm.size > 1:
            driver.before_place = self._before_place

    def _add_listeners(self) -> None:
        context, listeners = self.context, self.context.listeners
        samples = None if context.sampler is None else context.sampler.mean_samples
        model, parameters = context.model, context.parameters
        listeners.add(context.runtime.compute(model, parameters, samples))
        listeners.add(self.tuner.timer)
        listeners.add(SameDataCheck(context, self._reducer))
        for watcher in context.runtime.registry.watchers:
            for listener in watcher(model, parameters):
                listeners.add(listener)
        averages = self._compression is not None and context.comm.size > 1
        if averages or isinstance(self.compression, ClientCompression):
            listeners.uses_compressor(context.settings.compression)

    def _watch_model(self) -> list[Any]:
        """Register the hooks that no backward pass needs; returns their handles."""
        context, driver = self.context, self._driver
        model = context.model
        handles: list[Any] = [
            model.register_load_state_dict_pre_hook(Uncopied(self.flush_buffers))
        ]
        if self.remote is None and self.hooks.has("parameters_replaced"):
            handles += [
                module.register_load_state_dict_post_hook(Uncopied(self._note_load))
                for module in model.modules()
            ]
        if self.hooks.has("before_use"):
            driver.lazy = LazyParameters(context, self._reducer, self.hooks)
            driver.lazy.reset()
        return handles

    def _note_load(self, *_: object) -> None:
        """Note that the script has loaded parameters; inside `consolidated` loads are undone."""
        if not self.context.evaluating:
            self.hooks.is_loaded = True

    # ---- present state ----

    @property
    def step_pending(self) -> bool:
        """Whether gradients were delivered, and ``step()`` has not followed."""
        return self._workers.step_pending

    @property
    def compression(self) -> CompressedAverage | ClientCompression | None:
        """Compresses this worker's messages, and holds the compressor's states."""
        remote = self.remote
        return self._compression if remote is None else remote.compression

    @property
    def first_step(self) -> int:
        """Number of steps that the job had done when this worker joined it."""
        return 0 if self.remote is None else self.remote.synchronizer.first_step

    @property
    def broken_by(self) -> str:
        """The error after which the ranks may be at different steps; empty if there is none."""
        return self.context.failure

    @property
    def optimizer_steps(self) -> bool:
        """Whether the user's optimizer applies the update, not the method or a server."""
        return self._method.updates_on == "worker"

    @property
    def takes_scaled_gradients(self) -> bool:
        """Whether a GradScaler always calls ``step()``, which unscales gradients or skips the update.

        True if ``.grad`` is a worker's own gradient. One worker alone may have an infinity, and the
        others communicate with it after the update. So it may skip the update, but not the step.
        """
        if self._method.visible_gradient == "sent":
            return True  # `check_scaler` then raises in the step
        return self.optimizer_steps and self._method.rounds.models_may_differ

    def check_scaler(self) -> None:
        """Refuse a GradScaler that steps the optimizer, if the scale has already had an effect.

        Raises `GradientError` if gradients were sent with their scale, and `UsageError` if they
        were clipped with it.
        """
        if self._method.visible_gradient == "sent":
            # Its kernel writes into gradients without a trace that `SentGradientCheck` could see.
            raise self.context.fail(
                f"a GradScaler under {self._method.name}: scaled gradients were already sent "
                "when it unscales them. Train in bfloat16 without a scaler, or use bsp, whose "
                ".grad holds the mean"
            )
        if self.context.clips_own:
            raise UsageError(
                f"clip_norm with a GradScaler: under {self._method.name} each worker's own "
                "gradient is clipped when backward ends, while it is still scaled. Clip .grad "
                "after scaler.unscale_(optimizer) instead, or train in bfloat16 without a "
                "scaler"
            )

    @property
    def consolidates_together(self) -> bool:
        """Whether `consolidated` is collective."""
        return self.hooks.consolidates_together

    @property
    def progress(self) -> dict[str, int]:
        """The training's position in its rounds, equal on all workers between steps."""
        return self._driver.progress

    @progress.setter
    def progress(self, saved: dict[str, int]) -> None:
        self._driver.progress = saved
        self._runtime.registry.consolidated_entries.begins_anew(self._training_number)

    # ---- calls of the wrapped optimizer ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate into ``.grad``."""
        return self._passes.no_sync()

    def before_update(self) -> None:
        """Prepare the update after a call of ``step()``: deliver this step's gradients if that is due.

        They were not delivered if the loss reached no parameter, or if all passes were under
        ``no_sync``. The other ranks wait for them nevertheless.
        """
        for name, parameter in self._outside:
            if parameter.grad is not None:
                raise UsageError(
                    f"parameter {name!r} was frozen when distribute was called, and has a "
                    "gradient now: each rank would train it alone. Unfreeze it before "
                    "distribute, or call finish() and distribute again"
                )
        if not self._driver.delivered:
            self._driver.end_backward()
        self.context.listeners.step_is_called()
        self._driver.require_unchanged()
        if self.loads is not None:
            try:
                self.loads.before_update()
            except UsageError as error:
                self.context.record_failure(error)  # its gradients were sent already
                raise
        if self.optimizer_steps:
            every = (parameter.grad for _, parameter in self.context.parameters)
            self._driver.clip_mean(
                [gradient for gradient in every if gradient is not None]
            )
        if self.remote is None:
            self.context.listeners.update_begins()

    def evaluates_again(self) -> None:
        """Note that the optimizer calls its closure again within a step.

        Its gradients are delivered too, on every rank, even if the loss reaches no parameter.
        """
        self._driver.delivered = False

    def after_update(self) -> None:
        """End the step after the update."""
        self._driver.end()

    def finish(self, *, together: bool = False) -> None:
        """End this worker's training. Collective, but ranks may call it at different times.

        After an error it is not collective: the other ranks get the reason. *together*: all ranks
        call this now, so no shadow collectives are needed.
        """
        self.finished = True
        self._runtime.registry.consolidated_entries.leaves(self._training_number)
        if together:
            self._workers.anyone_active = False
        if self._reducer.in_backward and self._reducer.has_sent_some:
            self.context.failure = self.context.failure or (
                "its last backward pass ended with an exception after a part of its "
                "gradients had been sent"
            )
        try:
            if not self.broken_by:
                self._end_well()
        finally:
            self._workers.active = False
            if self.broken_by:
                self._runtime.registry.broke(self.context.number, self.broken_by)
            self.detach()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """While the context is open, the method's documented result is in the model."""
        context = self.context
        if context.evaluating:
            yield  # the result is in the model already
            return
        undo = self._consolidate()
        before, context.evaluating = context.evaluating, True
        try:
            yield
        finally:
            context.evaluating = before
            undo()

    def detach(self) -> None:
        """Remove the hooks from the model."""
        self._passes.detach()
        for handle in self._handles:
            handle.remove()
        if self._driver.lazy is not None:
            self._driver.lazy.detach()
        if self.loads is not None:
            self.loads.detach()

    def abandon(self) -> None:
        """Discard a training that has done no step: another one will train the model."""
        self.finished, self._workers.active = True, False
        self._runtime.registry.consolidated_entries.take_back(self._training_number)
        self.detach()

    def figures(self) -> dict[str, float]:
        """Return numbers about the step that has just ended, by name. Computing them takes time.

        - ``round``: number of rounds so far, if models differ between rounds.
        - ``staleness``: if servers update, the number of other workers' updates since the
          parameters that the gradient was computed on. The largest value of all shards.
        - ``residual_norm``: norm of the residuals, with error feedback.
        - The method's own numbers (`WorkerHooks.metrics`).
        """
        found: dict[str, float] = {}
        remote, compression = self.remote, self.compression
        if self.context.rounds.models_may_differ and remote is None:
            found["round"] = self._driver.rounds_done
        if remote is not None:
            found["staleness"] = remote.staleness
        states = {} if compression is None else compression.states
        residuals = [s["residual"] for s in states.values() if "residual" in s]
        if residuals:
            # Imaginary parts of complex residuals count, too.
            reals = [torch.view_as_real(r) if r.is_complex() else r for r in residuals]
            norms = [torch.linalg.vector_norm(real.float()) for real in reals]
            found["residual_norm"] = float(torch.linalg.vector_norm(torch.stack(norms)))
        if self.hooks.has("metrics"):
            found |= self.hooks.ask("metrics")
        return found

    def go_on_from(self, before: Training, step: int) -> None:
        """Continue the training *before* after *step* steps, which may be in the middle of an epoch."""
        self._passes.weights = before._passes.weights
        self.progress = {"step": step, "unsent": 0, "rounds": 0}

    def flush_buffers(self, *_: object) -> None:
        """Copy buffers in flight into the model, before a load or a save of the model.

        The step that does this otherwise may have been skipped.
        """
        self._buffers.apply()

    # ---- all workers together ----

    def load_is_complete(self) -> bool:
        """Give all workers the model and optimizer that the script has loaded on the lowest active rank.

        Returns when this worker has them. Returns False if this worker was restarted while the job
        continues: then its loads are ignored, and the model has the servers' parameters. If workers
        update, each continues with its own loads. Collective over the active workers.
        """
        return self.loads is None or self.loads.complete(whole=True)

    def meet(self) -> bool:
        """Wait for all active workers, each with the replies to its requests: a barrier. Collective.

        No worker may send anything before this returns. Returns False at once if this worker is out
        of data, or was restarted and has not trained since.
        """
        if self.loads is None or self.remote is None:
            self.comm.all_reduce(torch.zeros(1), "sum").wait()
            self.leads = self.comm.rank == 0
            return True
        if not self._workers.active or self.loads.is_late_joiner:
            return False
        self.leads = self.remote.barrier()
        return True

    def _before_place(self, place: int) -> None:
        with self._fails_together():
            self._runtime.registry.consolidated_entries.goes_on(
                self._training_number, place
            )

    @contextmanager
    def _fails_together(self) -> Iterator[None]:
        """Record an error inside as one after which the ranks may be at different steps."""
        try:
            yield
        except UsageError as error:
            self.context.record_failure(error)
            raise

    def _consolidate(self) -> Callable[[], None]:
        """Put the result into the model; returns a function that undoes it."""
        if not self._workers.active or not self.hooks.has("consolidate"):
            return lambda: None  # no undo: the model itself is the result
        loading = self.loads
        if loading is not None and loading.is_due:
            if not loading.is_late_joiner:
                return lambda: None  # no undo: the model was just loaded
            loading.complete()
        if self.consolidates_together and self.comm.size > 1:
            enter = partial(
                self._runtime.registry.consolidated_entries.enter,
                *(self._training_number, self._driver.place),
                without_left=self._method.rounds.is_nonblocking,
            )
            with self._fails_together():
                self._runtime.recorder.block("consolidated", enter)
        undo: Callable[[], None] = self.hooks.call("consolidate")
        return undo

    # ---- the end ----

    def _end_well(self) -> None:
        if self._workers.step_pending:
            if self.optimizer_steps:
                self._driver.abandon_step()
            else:
                self._take_due_step()
        self._workers.active = False
        self._buffers.apply()
        if self.loads is not None and self.loads.is_due:
            self.loads.complete()
        self.hooks.call("finish")
        self._buffers.apply()  # a last round may have sent buffers
        unused = self._compression
        if unused is not None and not unused.was_used and self.comm.size > 1:
            self.context.report(
                f"compression={unused.compression.name} was never used: method "
                f"{self._method.name!r} sends no gradients, and no averages with a name"
            )
        if self.remote is not None:
            # Training is over: the optimizer takes its state back from the servers.
            remote = self.remote
            remote.partition.optimizer.state.update(remote.optimizer_state.pull())
        if isinstance(self.run, UpdatingWorkerRun) and self.run.updater is not None:
            self.run.updater.close()
        self.comm.leave()

    def _take_due_step(self) -> None:
        """Take the step that the script left between ``backward()`` and ``step()``.

        Its gradients were sent and count, and the others wait for the messages that follow them.
        Parameters that the script has loaded since stay the result.
        """
        loads = self.loads is not None and self.loads.is_due
        loaded = (
            [p.detach().clone() for _, p in self.context.parameters] if loads else []
        )
        self.after_update()
        with torch.no_grad():
            for (_, parameter), value in zip(
                self.context.parameters, loaded, strict=False
            ):
                parameter.copy_(value)


def _make_tuner(context: TrainingContext, averages: Averages) -> BucketTuner:
    in_halves = getattr(context.method, "sends_halves", False)
    mode: Mode = "barrier"
    # A script that uses gradients waits for all averages at the end of backward.
    if context.waits_in_forward and not context.settings.use_gradients:
        mode = "halves" if in_halves else "whole"
    parameters = [parameter for _, parameter in context.parameters]
    compression = context.settings.compression
    gradients = Gradients(
        [wire_bytes(parameter) for parameter in parameters],
        [kind_of(parameter) for parameter in parameters],
        context.device,
    )
    return BucketTuner(
        context.comm,
        gradients,
        context.settings.buckets,
        context.runtime,
        partial(averages.benchmark, in_halves=in_halves),
        context.report,
        mode=mode,
        every_step=context.rounds.is_every_step,
        warmup=compression.warmup_steps if context.compressed else 0,
    )


def _learning_steps(context: TrainingContext) -> int:
    """Number of steps from the end of bucket tuning to steady state.

    Tuning by measurement begins after the uncompressed first steps, so it contains these.
    """
    settings = context.settings
    steps: int = getattr(context.method, "learns_for", 0)
    early = settings.compression.warmup_steps
    return steps if settings.buckets in MEASURED else steps + early
