"""One worker's training: hooks into PyTorch that become a method's hooks.

Theory of operation
-------------------
Each gradient goes from its hook into a bucket, and complete buckets to the method, in plan
order (`arrival`). A backward pass ends in a callback of the autograd engine. There, buckets
that are still incomplete get zeros for tensors that took no part, and are delivered too;
then the method has its *backward ended*, in which bsp waits. So ``.grad`` holds the mean
when ``backward()`` returns, and users clip and scale it as they always did.

Which gradients share a bucket is the planner's to say; after a backward pass it may have
changed its mind, and buckets are made anew.

What training itself sends (buffers, who still trains) goes with the rounds of the method's
rhythm: at the end of backward where all meet in every step, else after the update.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.clipping import clip
from paceline.collectives.alone import AloneComm
from paceline.collectives.comm import TorchComm
from paceline.errors import GradientError, UsageError
from paceline.exchange import SharedBuffers, broadcast_tensors
from paceline.guards import check_not_inside_ddp, check_trained_by_nobody_else
from paceline.hooks import Uncopied
from paceline.interfaces import Method, World
from paceline.interfaces.compression import Compressor
from paceline.loading import Loading
from paceline.planning import Planner
from paceline.same_data import SameData
from paceline.sampler import Sampler
from paceline.sent import SentGradients
from paceline.server.remote import RemoteParameters
from paceline.settings import Settings
from paceline.tensors import Bucket, kind_of, wire_bytes
from paceline.torch_private import (
    accumulator_of,
    inside_backward,
    inside_function_transform,
    inside_reentrant_checkpoint,
    queue_callback,
    uncompiled,
)
from paceline.training.agreement import Agreement
from paceline.training.arrival import Arrivals
from paceline.training.coding import Codes
from paceline.training.means import Means
from paceline.training.method_hooks import MethodHooks
from paceline.training.observers import Observers
from paceline.training.own import own_states
from paceline.training.presence import Presence
from paceline.training.roll_call import RollCall
from paceline.training.run import UpdatingWorkerRun, run_for
from paceline.training.uses import Uses
from paceline.weights import Weights

MakeRemote = Callable[[list[Bucket], Callable[[], float]], RemoteParameters]
"""From buckets, and this worker's weight as of now."""

DDP_SYNCHRONIZES = "require_backward_grad_sync"
"""DDP's attribute for what `no_sync` does; scripts set it by hand to save the block."""


class Training:
    """Joins what one training is made of, and is what the wrapped optimizer calls.

    *parameters* are the trainable ones, in registration order; *remote* finds them on
    their servers, where these update; *compressor* is what gradients travel as, if not as
    they are.
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
        compressor: Compressor | None = None,
    ) -> None:
        self.comm = comm
        self.sampler = sampler
        self.finished = False
        self.leads = False
        """Whether this worker was the lowest rank of those who met last."""
        self.looking = False  # inside `consolidated`
        self._world, self._model, self._method = world, model, method
        self._parameters, self._settings = list(parameters), settings
        self._rhythm = method.rhythm
        self._presence = Presence(comm.size, weight=1.0 / comm.size)
        planned = {id(parameter) for _, parameter in parameters}
        self._outside = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if id(parameter) not in planned and parameter.numel()
        ]
        self._weights = None if sampler is None else Weights(sampler)
        self._synchronize = True
        # Scripts for DDP set `require_backward_grad_sync` on the model.
        self._attributes = vars(uncompiled(model))
        self._step_may_begin = True
        self._accumulated = False  # under `no_sync`, and not delivered yet
        self._guarded = False
        self._delivered = False
        self._broken = ""
        """Why this training cannot go on, where it cannot: `finish` only says so."""
        self._number = len(world.job.trainings)
        self._steps = 0

        device = parameters[0][1].device
        self.stopwatch = world.stopwatch(device)
        self._planner = Planner(
            comm,
            settings.fusion,
            [wire_bytes(parameter) for _, parameter in parameters],
            [kind_of(parameter) for _, parameter in parameters],
            device,
            self.stopwatch,
            world.blank,
            world.journal.planned,
            self.say,
            lock_step=self._rhythm.is_every_step,
        )
        # A bucket holds this rank's share of the mean, where workers form the mean:
        # the division costs nothing beside the copy that has to be made anyway.
        averages = (
            method.gradient_seen_by_user == "mean" or method.updates_on == "method"
        )
        self._clips_own = method.clips == "own" and settings.clip_norm < math.inf
        self._arrivals = Arrivals(
            self._parameters,
            self._presence.weight,
            averages,
            self._deliver,
            self._clips_own,
            self._refused,
        )
        self._arrivals.make_buckets(self._planner.groups)
        own_buffers = () if remote is not None else tuple(model.buffers())
        self._shared = SharedBuffers(comm, own_buffers, settings.buffers)
        self._begin_method(device, remote, optimizer, compressor)
        self._watch()
        self._hook_into_model()

    def _begin_method(
        self,
        device: torch.device,
        remote: MakeRemote | None,
        optimizer: torch.optim.Optimizer | None,
        compressor: Compressor | None,
    ) -> None:
        """The method, and what it sees."""
        comm, presence, rhythm = self.comm, self._presence, self._rhythm
        beside = compressor is not None or device.type != "cpu" or rhythm.groups
        control = None
        if beside and comm.size > 1 and rhythm.every:
            control = comm.channel("control")
        self._roll_call = RollCall(
            presence,
            comm,
            control,
            lambda: self.buckets if rhythm.is_every_step else (),
        )
        self._agreement = None
        if rhythm.groups:
            self._agreement = Agreement(presence, control or comm)
        self._codes = (
            None if compressor is None else Codes(compressor, presence, comm.rank)
        )
        means = Means(comm, presence, rhythm, self._roll_call, self._codes)
        self._remote: RemoteParameters | None = None
        if remote is not None:
            self._remote = remote(self.buckets, lambda: presence.weight)
        self.run = run_for(
            self._method,
            optimizer,
            self._clip_mean,
            self._remote,
            comm,
            presence,
            means,
            [parameter for _, parameter in self._parameters],
            list(self._model.buffers()),
            self.stopwatch,
            self.say,
            lambda: self.buckets,
            self._world.journal.metrics.get,
            self._keep_company,
            self._take_model,
        )
        self._hooks = MethodHooks(self._method, self.run, self._failed)
        self._loading: Loading | None = None
        if self._remote is not None:
            self._loading = Loading(
                comm.rank,
                self._method.name,
                self._model,
                self._remote,
                lambda: self._hooks.call("loaded"),
                lambda: self.looking,
            )
        self._hooks.begin()
        self.own_states = own_states(
            self._method,
            self._hooks,
            self._codes,
            comm.rank,
            self._parameters,
            optimizer,
        )
        """What a checkpoint keeps of this worker alone."""

    def _watch(self) -> None:
        """Those who only watch."""
        comm, method = self.comm, self._method
        self._sent = SentGradients(self.say)
        sees_means = method.gradient_seen_by_user == "mean" and self.sampler is None
        arrivals = self._arrivals
        same_data = SameData(
            sees_means and comm.rank == 0 and comm.size > 1,
            comm.size,
            self.say,
            lambda: arrivals.buckets,
            lambda: arrivals.share,
        )
        samples = None if self.sampler is None else self.sampler.mean_samples
        compute = self._world.compute(self._model, self._parameters, samples)
        self._observers = Observers([compute, self._planner, same_data])

    def _hook_into_model(self) -> None:
        model = self._model
        self._handles = [
            model.register_forward_pre_hook(
                Uncopied(self._before_forward), with_kwargs=True
            ),
            model.register_load_state_dict_pre_hook(Uncopied(self.settle_buffers)),
        ]
        # Kept alive: torch would make these nodes anew in each forward, on whatever stream
        # runs then, and one bucket could be filled from streams that do not wait for each
        # other.
        self._accumulators = [accumulator_of(p) for _, p in self._parameters]
        for index, (_, parameter) in enumerate(self._parameters):
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(self._hook(index))
            )
        self._uses = None
        if self._hooks.has("before_use"):
            self._uses = Uses(
                model,
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
        return self._broken

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
        rounds = 0 if self._agreement is None else self._agreement.rounds
        unsent = self._presence.unsent
        return {"step": self.run.step, "unsent": unsent, "rounds": rounds}

    @progress.setter
    def progress(self, saved: dict[str, int]) -> None:
        self.run.step = saved["step"]
        if self._rhythm.lets_models_differ:
            self._presence.unsent = saved["unsent"]
        if self._agreement is not None:
            self._agreement.rounds = saved["rounds"]

    def say(self, sentence: str) -> None:
        """Tell people something, once for all workers: now, and beside the run's figures."""
        self._world.journal.note(sentence)
        if self.comm.rank == 0:
            print(f"paceline: {sentence}", file=sys.stderr)

    # ---- what the wrapped optimizer calls ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate into ``.grad``; so do those of a model
        whose ``require_backward_grad_sync`` is false."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

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
        if not self._delivered:
            self._end_backward()
        if self._method.gradient_seen_by_user == "local-sent":
            self._require_unchanged()
        if self._loading is not None:
            try:
                self._loading.before_update()
            except UsageError as error:
                self._failed(error)  # the gradients were sent
                raise
        if self.optimizer_steps:
            every = (parameter.grad for _, parameter in self._parameters)
            self._clip_mean([gradient for gradient in every if gradient is not None])
        if self._remote is None:
            self._observers.update_begins()

    def evaluates_again(self) -> None:
        """The optimizer calls its closure once more within a step: what this gives is
        delivered too, on every rank, also where it reaches no parameter."""
        self._delivered = False

    def after_update(self) -> None:
        """The user's optimizer has stepped."""
        self._delivered = self._presence.step_is_due = False
        self._steps += 1
        if self._rhythm.lets_models_differ:
            self._presence.unsent += 1
        self._end_step()
        self._observers.step_ended()
        self._put_buffers()

    def finish(self) -> None:
        """This worker is out of data. Collective over the ranks, each in its own time; but
        not where the training is broken: then the others are told."""
        self.finished = True
        if self._arrivals.in_backward and self._arrivals.some_have_left:
            self._broken = self._broken or (
                "its last backward pass ended with an exception after a part of its "
                "gradients had been sent"
            )
        try:
            if not self._broken:
                self._end_well()
        finally:
            self._presence.active = False
            if self._broken:
                self._world.job.broke(self._number, self._broken)
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
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._uses is not None:
            self._uses.detach()
        if self._loading is not None:
            self._loading.detach()
        self._accumulators.clear()

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

    def _keep_company(self) -> None:
        """One step without data, or, where rounds are rarer, the next round."""
        self._shared.put()
        run, rhythm = self.run, self._rhythm
        if rhythm.is_every_step:
            self._begin_step()
            self._arrivals.deliver_nothing()
            self._hooks.call("backward_ended")
            self._roll_call.answer()
            self._share_buffers()
            self._step_may_begin = True
            self._plan_anew()
        else:
            run.step += rhythm.every - 1 - run.step % rhythm.every
        self._end_step()

    # ---- hooks in the model ----

    def _before_forward(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        if self._remote is not None and self._world.alone:
            # An evaluation takes long, and sends nothing else.
            self._remote.note(self._world.now())
        training = torch.is_grad_enabled()
        if training and inside_function_transform():
            raise UsageError(
                "the model was called inside a torch.func transform, whose gradients "
                "never reach .grad and cannot be averaged; use loss.backward(), or call "
                "the transform on a copy of the model that was not given to distribute"
            )
        if training and inside_backward():
            return  # a checkpoint computes the model once more: no new step begins
        if training:
            self._require_to_be_alone()
        if training and self._arrivals.in_backward:
            self._forget_failed_pass()
        self._put_buffers()
        if training:
            self._observers.step_begins()
            if self._weights is not None:
                self._presence.weight = self._arrivals.weigh_next(
                    self._weights, self._delivered
                )
            self._begin_step()
        # Only now: the forward pass waits for the rest.
        self._observers.forward(_samples(args, kwargs), training)

    def _require_to_be_alone(self) -> None:
        """Raise `UsageError` if another tool averages these gradients: many wrap the model
        only after `distribute`, so this is asked when training begins."""
        check_not_inside_ddp(self._model)
        if not self._guarded:
            check_trained_by_nobody_else(self._model)
            self._guarded = True

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        observers = self._observers

        def gradient_is_ready(parameter: torch.Tensor) -> None:
            observers.gradient(index)
            if self._weights is not None and self._weights.pass_runs():
                self._presence.weight = self._arrivals.weigh_unannounced(
                    self._weights, self._accumulated
                )
            if self._synchronize and self._attributes.get(DDP_SYNCHRONIZES, True):
                if not self._arrivals.in_backward:
                    self._begin_backward(index)
                observers.gradient_ready(index)
                self._arrivals.take(index)
            else:
                self._delivered = False
                self._accumulated = True
            observers.gradient_taken()

        return gradient_is_ready

    def _begin_backward(self, index: int) -> None:
        """The first gradient of a pass that is to be sent."""
        name = self._parameters[index][0]
        if inside_reentrant_checkpoint():
            raise self._refused(
                f"the first gradient of this backward pass, that of {name!r}, comes from "
                "a reentrant checkpoint, whose end cannot be told from the end of the "
                "pass; use checkpoint(..., use_reentrant=False)"
            )
        if self._delivered and self._method.gradient_seen_by_user == "local-sent":
            raise self._refused(
                f"a second backward pass before step(): under {self._method.name} the "
                "gradients of the first are on their way to the others. Run all passes "
                "but the last under optimizer.no_sync()"
            )
        if not self._guarded:
            self._require_to_be_alone()
        self._begin_step()  # where the model itself was not called
        self._arrivals.in_backward = True
        self._arrivals.begin()
        queue_callback(self._end_backward)

    def _forget_failed_pass(self) -> None:
        """A forward pass while backward seems to run: it raised, and the script goes on.
        That is well as long as nothing had been sent."""
        if self._arrivals.some_have_left and self.comm.size > 1:
            raise self._refused(
                "the last backward pass ended with an exception after a part of its "
                "gradients had been sent, so this rank is out of step with the others; "
                "end the script, or let such exceptions end it"
            )
        self._arrivals.in_backward = False
        if self._weights is not None:
            self._weights.pass_failed()

    # ---- a step ----

    def _begin_step(self) -> None:
        """The first forward after a backward that ended; or, where the model itself is not
        called, the first gradient; or a step without either."""
        if not self._step_may_begin:
            return
        self._step_may_begin = False
        if self._loading is not None:
            self._loading.before_step()
        if self._rhythm.is_every_step:
            self._roll_call.begin()
        self._hooks.call("step_begins")

    def _deliver(self, bucket: Bucket) -> None:
        if bucket.last and self._rhythm.is_every_step:
            self._roll_call.all_is_known()
        self._observers.bucket_leaves(bucket)
        self._hooks.call("bucket_ready", bucket)

    def _end_backward(self) -> None:
        """The backward pass is over: deliver what is left, and let the method wait."""
        arrivals = self._arrivals
        if not arrivals.in_backward:
            self._begin_step()
            arrivals.begin()
        all_used = arrivals.fill_rest()
        if self._clips_own:
            self._clip_own()
        arrivals.deliver_complete()
        arrivals.in_backward = False
        self._hooks.call("backward_ended")
        if self._rhythm.is_every_step:
            self._roll_call.answer()
            self._share_buffers()
        self._observers.means_are_there()
        if not all_used:
            arrivals.show()
        if self._settings.check_finite:
            arrivals.require_finite(self._steps + 1)
        self._delivered = self._presence.step_is_due = True
        self._accumulated = False
        self._step_may_begin = True
        self._plan_anew()
        if self._method.gradient_seen_by_user == "local-sent":
            self._sent.remember(self.buckets)

    def _end_step(self) -> None:
        """The update is done, or would be: the method's hook, and a round's own messages
        where that is when workers meet."""
        run, rhythm = self.run, self._rhythm
        run.meets = rhythm.every == 0 or (run.step + 1) % rhythm.every == 0
        if self._uses is not None:
            self._uses.begin_anew()
        if rhythm.lets_models_differ and run.meets:
            self._hold_round()
        else:
            self._hooks.call("after_update")
        run.step += 1

    def _hold_round(self) -> None:
        """A round of a method whose models differ between rounds."""
        if self._agreement is not None:
            if self._agreement.round_begins():
                self._shared.put()
                self._share_buffers()
            if self._presence.somebody_trains:
                self._hooks.call("after_update")
        else:
            self._roll_call.begin()
            self._roll_call.all_is_known()
            self._hooks.call("after_update")
            self._roll_call.answer()
            self._share_buffers()
        self._presence.unsent = 0

    def _share_buffers(self) -> None:
        """DDP's semantics: every step starts from rank 0's buffers; where rank 0 is out of
        data, from the first rank that still has some."""
        if self._presence.participants:
            self._shared.send(source=self._presence.participants[0])

    def _put_buffers(self) -> None:
        """Groups do not wait for all others: what was sent at one agreement of all is put
        into the model at the next one."""
        if self._agreement is None:
            self._shared.put()

    def _plan_anew(self) -> None:
        """A backward pass is over, on all ranks: the planner may have changed its mind."""
        if self._planner.backward_ended():
            self._arrivals.make_buckets(self._planner.groups)
            self._hooks.call("buckets_changed")

    # ---- clipping, checks, errors ----

    def _clip_mean(self, gradients: Sequence[torch.Tensor]) -> None:
        if self._method.clips == "mean":
            clip(gradients, self._settings.clip_norm)

    def _clip_own(self) -> None:
        """This worker's gradient is whole, and nothing of it was sent. Buckets hold its
        share of the mean, and it is the gradient itself that is to be clipped."""
        limit = self._settings.clip_norm * self._arrivals.share
        clip([bucket.buffer for bucket in self.buckets], limit)

    def _require_unchanged(self) -> None:
        """Raise `GradientError` if the script has changed gradients that were sent."""
        name = self._sent.changed(self.buckets)
        if name is not None:
            raise self._refused(
                f"the gradient of {name!r} (or of a tensor sent with it) was changed "
                f"between backward() and step(): under {self._method.name} it is on its "
                "way to the others by then, and a change reaches nobody. Clip with "
                "distribute(clip_norm=...); without GradScaler; or use bsp, whose .grad "
                "holds the mean"
            )

    def _refused(self, message: str) -> GradientError:
        """An error after which the ranks may be out of step."""
        error = GradientError(message)
        self._broken = _described(error)
        return error

    def _failed(self, error: BaseException) -> None:
        """An error after which this training cannot go on."""
        self._broken = self._broken or _described(error)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    return None
