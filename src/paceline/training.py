"""One worker's training: hooks into PyTorch that become a method's moments.

Theory of operation
-------------------
A hook on every trainable parameter fires when its gradient is complete. The gradient is
copied into its place in a flat bucket, and ``.grad`` becomes that place (the next backward
pass then adds into it, with no copy at all). Buckets are delivered to the method in plan
order, on every rank, whatever order autograd chose: collectives must match.

A backward pass ends in a callback of the autograd engine. There, buckets that are still
incomplete get zeros for tensors that took no part, and are delivered too; then the method
has its *backward ended*, in which BSP waits. So ``.grad`` holds the mean when
``backward()`` returns, and users clip and scale it as they always did.

Which gradients share a bucket is the planner's to say; after a backward pass it may have
changed its mind, and buckets are made anew.
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
from paceline.loading import Loading
from paceline.planning import Planner
from paceline.same_data import SameData
from paceline.sampler import Sampler
from paceline.sent import SentGradients
from paceline.server.remote import RemoteParameters
from paceline.settings import Settings
from paceline.tensors import Bucket, kind_of, make_buckets, wire_bytes
from paceline.torch_private import (
    accumulator_of,
    inside_backward,
    inside_function_transform,
    inside_reentrant_checkpoint,
    queue_callback,
    uncompiled,
)
from paceline.updater import TorchUpdater, split_pieces
from paceline.weights import Weights

MakeRemote = Callable[[list[Bucket], Callable[[], float]], RemoteParameters]
"""From buckets, and this worker's weight as of now."""

DDP_SYNCHRONIZES = "require_backward_grad_sync"
"""DDP's attribute for what `no_sync` does; scripts set it by hand to save the block."""


class Training:
    """The `Run` that a method sees, and the hooks that drive it.

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
        self._optimizer = optimizer
        self._updater: TorchUpdater | None = None
        self.active = True
        self.finished = False
        self.leads = False
        """Whether this worker was the lowest rank of those who met last."""
        self.looking = False  # inside `consolidated`
        self.participants = list(range(comm.size))
        self.behind: list[int] = []
        self.step_is_due = False
        self.buckets: list[Bucket] = []
        self._world = world
        self._model = model
        self._method: Any = method
        self._parameters = list(parameters)
        self._settings = settings
        own_buffers = () if remote is not None else tuple(model.buffers())
        self._shared = SharedBuffers(comm, own_buffers, settings.buffers)
        planned = {id(parameter) for _, parameter in parameters}
        self._outside = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if id(parameter) not in planned and parameter.numel()
        ]

        self._place: list[tuple[Bucket, int]] = []
        # A bucket holds this rank's share of the mean, where workers form the mean:
        # the division costs nothing beside the copy that has to be made anyway.
        averages = (
            method.gradient_seen_by_user == "mean" or method.updates_on == "method"
        )
        self.weight = 1.0 / comm.size
        self._averages = averages
        self.share = self.weight if averages else 1.0
        self._clips_own = method.clips == "own" and settings.clip_norm < math.inf
        self._weights = None if sampler is None else Weights(sampler)
        self._synchronize = True
        # Scripts for DDP set `require_backward_grad_sync` on the model.
        self._attributes = vars(uncompiled(model))
        self._in_backward = False
        self._seen = [False] * len(self._parameters)
        self._next_bucket = 0
        self._step_may_begin = True
        self._accumulated = False  # under `no_sync`, and not delivered yet
        self._guarded = False
        self._delivered = False
        self._broken = ""
        """Why this training cannot go on, where it cannot: `finish` only says so."""
        self._number = len(world.trained)
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
            lock_step=method.updates_on != "server",
        )
        self._make_buckets()
        self._remote: RemoteParameters | None = None
        self._sent = SentGradients(self.say)
        sees_means = method.gradient_seen_by_user == "mean" and sampler is None
        one_of_many = comm.rank == 0 and comm.size > 1
        self._same_data = SameData(sees_means and one_of_many, comm.size, self.say)
        self._loading: Loading | None = None
        if remote is not None:
            self._remote = remote(self.buckets, lambda: self.weight)
            self._loading = Loading(
                comm.rank,
                method.name,
                model,
                self._remote,
                lambda: self._moment("loaded"),
                lambda: self.looking,
            )
        self._state = method.init(self)
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
        samples = None if sampler is None else sampler.mean_samples
        self._compute = world.compute(model, self._parameters, samples)

    @property
    def remote(self) -> RemoteParameters:
        assert self._remote is not None, "this method's worker updates"
        return self._remote

    def take_over(self, most_bytes: int) -> TorchUpdater:
        assert self._method.updates_on == "method", "the user's step() updates"
        assert self._optimizer is not None
        pieces = split_pieces(self._optimizer, most_bytes)
        self._updater = TorchUpdater(self._optimizer, pieces)
        return self._updater

    @property
    def loss(self) -> float | None:
        return self._world.journal.metrics.get("loss")

    def say(self, sentence: str) -> None:
        self._world.journal.note(sentence)
        if self.comm.rank == 0:
            print(f"paceline: {sentence}", file=sys.stderr)

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
        return bool(self._method.updates_on == "worker")

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

    def clip(self, gradients: Sequence[torch.Tensor]) -> None:
        if self._method.clips == "mean":
            clip(gradients, self._settings.clip_norm)

    def _clip_own(self) -> None:
        """This worker's gradient is whole, and nothing of it was sent. Buckets hold its
        share of the mean, and it is the gradient itself that is to be clipped."""
        limit = self._settings.clip_norm * self.share
        clip([bucket.buffer for bucket in self.buckets], limit)

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
                self._broken = _described(error)  # the gradients were sent
                raise
        if self.optimizer_steps:
            every = (parameter.grad for _, parameter in self._parameters)
            self.clip([gradient for gradient in every if gradient is not None])
        if self._compute is not None and self._remote is None:
            self._compute.update_begins()

    def evaluates_again(self) -> None:
        """The optimizer calls its closure once more within a step: what this gives is
        delivered too, on every rank, also where it reaches no parameter."""
        self._delivered = False

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

    def after_update(self) -> None:
        """The user's optimizer has stepped."""
        self._delivered = self.step_is_due = False
        self._steps += 1
        self._moment("after_update")
        if self._compute is not None:
            self._compute.step_ended()
        self._shared.put()

    def finish(self) -> None:
        """This worker is out of data. Collective over the ranks, each in its own time; but
        not where the training is broken: then the others are told."""
        self.finished = True
        if self._in_backward and self._next_bucket:
            self._broken = self._broken or (
                "its last backward pass ended with an exception after a part of its "
                "gradients had been sent"
            )
        try:
            if not self._broken:
                self._end_well()
        finally:
            self.active = False
            if self._broken:
                self._world.training_broke(self._number, self._broken)
            self.detach()

    def _end_well(self) -> None:
        if self.step_is_due and not self.optimizer_steps:
            self._take_due_step()
        self.active = False
        self._shared.put()
        if self._loading is not None and self._loading.is_due:
            self._loading.complete()
        self._moment("finish")
        if self._remote is not None:
            self._remote.keep_state()
        if self._updater is not None:
            self._updater.close()
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

    def detach(self) -> None:
        """Take the hooks out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._loading is not None:
            self._loading.detach()
        self._accumulators.clear()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Within it the method's documented result is in the model."""
        undo = self._consolidate()
        before, self.looking = self.looking, True
        try:
            yield
        finally:
            self.looking = before
            undo()

    def _consolidate(self) -> Callable[[], None]:
        """Put the result into the model; returns what undoes it."""
        if not self.active or not hasattr(self._method, "consolidate"):
            return lambda: None  # the result is in the model
        loading = self._loading
        if loading is not None and loading.is_due:
            if not loading.is_guest:
                return lambda: None  # what is in the model was just loaded
            loading.complete()
        undo: Callable[[], None] = self._method.consolidate(self._state, self)
        return undo

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
        if not self.active or self._loading.is_guest:
            return False
        self.leads = self.remote.meet()
        return True

    def keep_company(self) -> None:
        self._shared.put()
        self._begin_step()
        for bucket in self.buckets:
            bucket.buffer.zero_()
            bucket.used[:] = [False] * len(bucket.used)
        for bucket in self.buckets:
            self._moment("bucket_ready", bucket)
        self._moment("backward_ended")
        self._share_buffers()
        self._step_may_begin = True
        self._plan_anew()

    def settle_buffers(self, *_: object) -> None:
        """Those that are under way are put into the model before others are loaded, or
        these are saved: a step that was skipped has not done it."""
        self._shared.put()

    def take_model(self, source: int) -> None:
        self._shared.put()
        tensors = [*self._model.parameters(), *self._model.buffers()]
        broadcast_tensors(self.comm, tensors, source)

    # ---- hooks ----

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
        if training and self._in_backward:
            self._forget_failed_pass()
        self._shared.put()
        if training:
            self._planner.step_begins()
            if self._weights is not None:
                self._weigh_next_pass()
            self._begin_step()
        if self._compute is not None:  # only now: the forward pass waits for the rest
            self._compute.forward(_samples(args, kwargs), training)

    def _require_to_be_alone(self) -> None:
        """Raise `UsageError` if another tool averages these gradients: many wrap the model
        only after `distribute`, so this is asked when training begins."""
        check_not_inside_ddp(self._model)
        if not self._guarded:
            check_trained_by_nobody_else(self._model)
            self._guarded = True

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            if self._compute is not None:
                self._compute.gradient(index)
            if self._weights is not None and self._weights.pass_runs():
                self._weigh_unannounced_pass()
            if self._synchronize and self._attributes.get(DDP_SYNCHRONIZES, True):
                self._take_gradient(index, parameter)
            else:
                self._delivered = False
                self._accumulated = True
            if self._compute is not None:
                self._compute.gradient_taken()

        return gradient_is_ready

    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if not self._in_backward:
            if inside_reentrant_checkpoint():
                raise self._refused(
                    f"the first gradient of this backward pass, that of "
                    f"{self._parameters[index][0]!r}, comes from a reentrant checkpoint, "
                    "whose end cannot be told from the end of the pass; use "
                    "checkpoint(..., use_reentrant=False)"
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
            self._in_backward = True
            self._seen = [False] * len(self._parameters)
            self._reset_buckets()
            queue_callback(self._end_backward)
        if self._seen[index]:
            raise self._refused(
                f"the gradient of {self._parameters[index][0]!r} came twice in one "
                "backward pass, after it may have been sent; under activation "
                "checkpointing use checkpoint(..., use_reentrant=False)"
            )
        self._seen[index] = True
        if self._planner.listening:
            self._planner.gradient_ready(index)
        self._fill(index)
        bucket = self._place[index][0]
        bucket.missing -= 1
        if not bucket.missing and not self._clips_own:
            self._deliver_complete()

    def _forget_failed_pass(self) -> None:
        """A forward pass while backward seems to run: it raised, and the script goes on.
        That is well as long as nothing had been sent."""
        if self._next_bucket and self.comm.size > 1:
            raise self._refused(
                "the last backward pass ended with an exception after a part of its "
                "gradients had been sent, so this rank is out of step with the others; "
                "end the script, or let such exceptions end it"
            )
        self._in_backward = False
        if self._weights is not None:
            self._weights.pass_failed()

    def _weigh_next_pass(self) -> None:
        """This rank's share of the next mean is its share of the samples. What earlier
        passes under `no_sync` left was to be weighted by theirs."""
        assert self._weights is not None
        self.weight = self._weights.next_share()
        share = self.weight if self._averages else 1.0
        if share != self.share:
            for _, parameter in self._parameters:
                if parameter.grad is not None and not self._delivered:
                    parameter.grad.mul_(self.share / share)
            self.share = share

    def _weigh_unannounced_pass(self) -> None:
        """No forward pass of the model has told that this pass would come: a submodule
        was called, or another method."""
        assert self._weights is not None
        self.weight = self._weights.next_share()
        share = self.weight if self._averages else 1.0
        if share != self.share and self._accumulated:
            raise UsageError(
                f"this batch's share of the samples is {share:.4g} and that of what was "
                f"accumulated under no_sync is {self.share:.4g}; only a call of the model "
                "that was given to distribute tells in time that a batch begins, and its "
                "submodule, or another of its methods, was called instead. Call the model "
                "itself, or step after every batch"
            )
        self.share = share

    def _end_backward(self) -> None:
        """The backward pass is over: deliver what is left, and let the method wait."""
        if not self._in_backward:
            self._begin_step()
            self._seen = [False] * len(self._parameters)
            self._reset_buckets()
        all_used = all(self._seen)
        if not all_used:
            for index, seen in enumerate(self._seen):
                if not seen:
                    self._fill(index)
                    self._place[index][0].missing -= 1
        if self._clips_own:
            self._clip_own()
        self._deliver_complete()
        self._in_backward = False
        self._moment("backward_ended")
        if self._same_data.watching:
            self._same_data.averaged(self.buckets)
        self._share_buffers()
        if not all_used:
            self._show_gradients()
        if self._settings.check_finite:
            self._require_finite()
        self._delivered = self.step_is_due = True
        self._accumulated = False
        self._step_may_begin = True
        self._plan_anew()
        if self._method.gradient_seen_by_user == "local-sent":
            self._sent.remember(self.buckets)

    # ---- buckets ----

    def _fill(self, index: int) -> None:
        """Put a gradient into its bucket, if it is not there already."""
        parameter = self._parameters[index][1]
        bucket, slot = self._place[index]
        view, gradient = bucket.views[slot], parameter.grad
        bucket.used[slot] = gradient is not None
        if gradient is None:
            view.zero_()
        elif gradient is view:
            if self.share != 1.0:
                view.mul_(self.share)
        else:
            if gradient.layout != torch.strided:
                raise self._refused(
                    f"the gradient of {self._parameters[index][0]!r} is sparse, and only "
                    "dense gradients can be averaged; build the embedding with "
                    "sparse=False"
                )
            if gradient.requires_grad:  # backward(create_graph=True)
                gradient = gradient.detach()
            if self.share == 1.0:
                view.copy_(gradient)
            else:
                torch.mul(gradient, self.share, out=view)
            parameter.grad = view

    def _deliver_complete(self) -> None:
        while self._next_bucket < len(self.buckets):
            bucket = self.buckets[self._next_bucket]
            if bucket.missing:
                return
            self._next_bucket += 1
            if self._same_data.watching:
                self._same_data.sends(self.buckets, bucket, self.share)
            self._moment("bucket_ready", bucket)

    def _reset_buckets(self) -> None:
        self._next_bucket = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _show_gradients(self) -> None:
        """A tensor that only other ranks used has a gradient too; one that nobody used
        has none, else momentum and weight decay would move it."""
        for bucket in self.buckets:
            for parameter, view, used in zip(
                bucket.parameters, bucket.views, bucket.used, strict=True
            ):
                if not used:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = view

    def _require_finite(self) -> None:
        for bucket in self.buckets:
            if torch.isfinite(bucket.buffer).all():
                continue
            for name, view in zip(bucket.names, bucket.views, strict=True):
                if not torch.isfinite(view).all():
                    raise self._refused(
                        f"the gradient of {name!r} is not finite in step "
                        f"{self._steps + 1}; lower the learning rate, "
                        "clip gradients, or use a GradScaler without check_finite"
                    )

    def _make_buckets(self) -> None:
        self.buckets = make_buckets(self._parameters, self._planner.groups)
        places = {
            id(parameter): (bucket, slot)
            for bucket in self.buckets
            for slot, parameter in enumerate(bucket.parameters)
        }
        self._place = [places[id(parameter)] for _, parameter in self._parameters]

    def _plan_anew(self) -> None:
        """A backward pass is over, on all ranks: the planner may have changed its mind."""
        if not self._planner.backward_ended():
            return
        self._make_buckets()
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                    parameter.grad = view

    def _refused(self, message: str) -> GradientError:
        """An error after which the ranks may be out of step."""
        error = GradientError(message)
        self._broken = _described(error)
        return error

    # ---- moments ----

    def _moment(self, name: str, *arguments: Any) -> None:
        moment = getattr(self._method, name, None)
        if moment is None:
            return
        try:
            moment(self._state, self, *arguments)
        except BaseException as error:
            self._broken = self._broken or _described(error)
            raise

    def _begin_step(self) -> None:
        """The first forward after a backward that ended; or, where the model itself is not
        called, the first gradient; or a step without either."""
        if not self._step_may_begin:
            return
        self._step_may_begin = False
        if self._loading is not None:
            self._loading.before_step()
        self._moment("step_begins")

    def _share_buffers(self) -> None:
        """DDP's semantics: every step starts from rank 0's buffers; where rank 0 is out of
        data, from the first rank that still has some."""
        if self.participants:
            self._shared.send(source=self.participants[0])


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    return None
