"""Hooks into the user's model: which forward and backward passes belong to a step, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.core.context import TrainingContext
from paceline.core.misuse import (
    check_not_inside_ddp,
    check_not_parallel,
)
from paceline.core.reducer import Slot
from paceline.core.sampler import Sampler
from paceline.core.step import StepDriver
from paceline.errors import UsageError
from paceline.parameter_server.client.remote_model import RemoteModel
from paceline.torch_internals import (
    Uncopied,
    accumulator_of,
    current_backward,
    gradient_hooks,
    inside_backward,
    inside_function_transform,
    inside_reentrant_checkpoint,
    queue_callback,
    uncompiled,
    will_run,
)

DDP_SYNCHRONIZES = "require_backward_grad_sync"
"""DDP's attribute for what `no_sync` does; scripts set it by hand to save the block."""


class BackwardPasses:
    """Hooks the model's forward and backward passes, and drives the training's steps by them.

    A gradient's hook runs once per tensor in each backward pass. `_enter_pass` runs at the first
    tensor, for all of them. *servers* hold the parameters, if servers update.
    """

    def __init__(
        self,
        context: TrainingContext,
        driver: StepDriver,
        servers: RemoteModel | None,
    ) -> None:
        self._context, self._driver, self._reducer = context, driver, driver.reducer
        self._servers, self._listeners = servers, context.listeners
        self._parameters, self._model = context.parameters, context.model
        self._trained = [parameter for _, parameter in context.parameters]
        self._method = context.method.name
        self.weights: BatchWeights | None = None
        if context.sampler is not None:
            self.weights = BatchWeights(context.sampler)
        self._synchronize = True
        self._guarded = False
        self._pass: int | None = None
        """The backward pass whose gradients are sent, and whose hooks need no more checks."""
        self._graph_shows_unused = False
        """Whether some tensors were unused in a pass, and its autograd graph shows which ones."""
        # Scripts for DDP set `require_backward_grad_sync` on the model.
        self._attributes = vars(uncompiled(self._model))
        self._handles = [
            self._model.register_forward_pre_hook(
                Uncopied(self._before_forward), with_kwargs=True
            )
        ]
        # Keep these nodes alive. Otherwise torch makes new ones in each forward pass, on the
        # current stream. Then streams that do not wait for each other could fill one bucket.
        self._accumulators = [accumulator_of(parameter) for parameter in self._trained]
        self._leads = bool(self._listeners.gradient.functions)
        if self._leads:
            # This hook is the first one: a gradient takes compute time before any other hook
            # sees it.
            for index, parameter in enumerate(self._trained):
                hook = partial(self._report_computed, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._gradient_hooks = [self._hook(slot) for slot in self._reducer.slots]
        self._gradient_handles = [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter, hook in zip(self._trained, self._gradient_hooks, strict=True)
        ]
        self._hooks_of = [gradient_hooks(parameter) for parameter in self._trained]
        self._hook_counts = list(map(len, self._hooks_of))
        """Gradient hooks of each parameter, of which ours is the last one."""

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in (*self._handles, *self._gradient_handles):
            handle.remove()
        self._handles.clear()
        self._gradient_handles.clear()
        self._accumulators.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate into ``.grad``.

        Passes of a model whose ``require_backward_grad_sync`` is False do so, too.
        """
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    # ---- forward ----

    def _before_forward(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        runtime = self._context.runtime
        if self._servers is not None and runtime.server_only:
            # An evaluation takes long and sends nothing else, so servers need a keep-alive.
            self._servers.keep_alive(runtime.clock.now())
        training = torch.is_grad_enabled()
        if training and inside_function_transform():
            raise UsageError(
                "the model was called inside a torch.func transform, whose gradients "
                "never reach .grad and cannot be averaged; use loss.backward(), or call "
                "the transform on a copy of the model that was not given to distribute"
            )
        if training and inside_backward():
            return  # a checkpoint's recomputation begins no new step
        if training:
            self._check_only_synchronizer()
        if training and self._reducer.in_backward:
            self._discard_failed_pass()
        self._driver.apply_buffers()
        if training:
            self._listeners.step_begins()
            if self.weights is not None:
                weight = self.weights.next_share()
                self._reducer.set_weight(weight, rescale=not self._driver.delivered)
            self._run_last()
            self._driver.begin()
        # Called last: the forward pass begins only after all of the above.
        self._listeners.forward(_samples(args, kwargs), training)

    def _check_only_synchronizer(self) -> None:
        """Raise `UsageError` if another tool averages these gradients.

        Many tools wrap the model after `distribute`, so this is checked when training begins.
        """
        check_not_inside_ddp(self._model)
        if not self._guarded:
            check_not_parallel(self._model)
            self._guarded = True

    def _discard_failed_pass(self) -> None:
        """Discard a backward pass that raised an exception: the script continues with a forward pass.

        That is possible only if no gradient was sent.
        """
        if self._reducer.has_sent_some and self._context.comm.size > 1:
            raise self._context.fail(
                "the last backward pass ended with an exception after a part of its "
                "gradients had been sent, so this rank is no longer at the step of the others. "
                "Let such exceptions end the script"
            )
        self._reducer.in_backward = False
        self._pass = None
        if self.weights is not None:
            self.weights.pass_failed()

    # ---- backward ----

    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        index, fill = slot.index, self._reducer.fill
        deliver_complete = self._driver.deliver_complete

        def gradient_is_ready(_: torch.Tensor) -> None:
            if self._pass != current_backward():
                self._first_gradient(slot)
                return
            pending = slot.pending
            try:
                pending.remove(index)
            except KeyError:
                self._reducer.take_unexpected(slot)
                return
            if not pending and fill(slot.group):
                deliver_complete()

        return gradient_is_ready

    def _report_computed(self, index: int, _: torch.Tensor) -> None:
        """Report that autograd has computed a gradient; other hooks of the parameter follow."""
        if self._listeners.times_gradients:
            self._listeners.gradient(index)

    def _first_gradient(self, slot: Slot) -> None:
        """Take a gradient that may be the first of its pass.

        All gradients come here while a listener times them, or while they only accumulate.
        """
        listeners, reducer = self._listeners, self._reducer
        if not self._leads:
            listeners.gradient(slot.index)
        if self._enter_pass(slot.index):
            listeners.gradient_ready(slot.index)
            if slot.index not in slot.pending:
                reducer.take_unexpected(slot)
            else:
                slot.pending.remove(slot.index)
                if not slot.pending and reducer.fill(slot.group):
                    self._driver.deliver_complete()
        listeners.gradient_taken()

    def _enter_pass(self, index: int) -> bool:
        """Begin the pass if its first gradient arrives. Returns whether gradients are sent.

        Otherwise they only accumulate.
        """
        driver, reducer = self._driver, self._reducer
        if self.weights is not None and self.weights.pass_runs():
            self._set_unannounced_weight()
        if not (self._synchronize and self._attributes.get(DDP_SYNCHRONIZES, True)):
            if driver.delivered and self._context.method.visible_gradient == "sent":
                raise self._context.fail(
                    f"a backward pass under no_sync() after one outside it: under "
                    f"{self._method} the gradients of the first pass were already sent. Run "
                    "all passes but the last under optimizer.no_sync()"
                )
            self._require_nothing_under_way()
            driver.delivered, driver.accumulated = False, True
            return False
        if not reducer.in_backward:
            self._begin_backward(index)
        if driver.lazy is not None and driver.lazy.some_unseen:
            if driver.lazy.was_unseen(index):
                raise self._unnoticed_use(index)
        elif not self._listeners.times_gradients:
            self._pass = current_backward()
        return True

    def _set_unannounced_weight(self) -> None:
        """Set the weight of a pass that no forward pass of the model has announced.

        The script has called a submodule, or another method of the model.
        """
        assert self.weights is not None
        weight = self.weights.next_share()
        share = weight if self._context.forms_means else 1.0
        if share != self._reducer.share and self._driver.accumulated:
            raise UsageError(
                f"this batch's share of the samples is {share:.4g} and that of the "
                f"gradients accumulated under no_sync is {self._reducer.share:.4g}. Only a "
                "call of the model that was given to distribute announces a batch in time: a "
                "submodule, or another of its methods, was called instead. Call the model "
                "itself, or step after every batch"
            )
        self._reducer.set_weight(weight, rescale=False)

    def _begin_backward(self, index: int) -> None:
        """Begin a pass whose gradients are sent, at its first gradient."""
        context, driver, reducer = self._context, self._driver, self._reducer
        visible = context.method.visible_gradient
        if inside_reentrant_checkpoint():
            raise context.fail(
                f"the first gradient of this backward pass, that of "
                f"{self._parameters[index][0]!r}, comes from "
                "a reentrant checkpoint, whose end looks like the end of the pass. Use "
                "checkpoint(..., use_reentrant=False)"
            )
        if driver.delivered and visible == "sent":
            raise context.fail(
                f"a second backward pass before step(): under {self._method} the "
                "gradients of the first pass were already sent. Run all passes but the last "
                "under optimizer.no_sync()"
            )
        self._require_nothing_under_way()
        if driver.waits_for_update and visible == "local":
            raise context.fail(
                f"a second backward pass before step(): under {self._method} the other workers "
                "wait for this step's update, and gradients are each worker's own. Run all "
                "passes but the last under optimizer.no_sync(). A GradScaler may skip the step "
                "of one worker alone: train in bfloat16 without it"
            )
        if not self._guarded:
            self._check_only_synchronizer()
        driver.begin_backward()
        self._run_last()  # needed if the model itself was not called
        reducer.check_memory()
        reducer.in_backward = True
        queue_callback(self._end_backward)
        if self._graph_shows_unused:
            # Otherwise buckets with unused tensors would be sent only when backward ends.
            reducer.leave_out(self._outside_graph(range(len(self._parameters))))
            driver.deliver_complete()

    def _run_last(self) -> None:
        """Move our gradient hooks behind those that the script has registered since.

        These may change a gradient, and must do so before it is sent, as under DDP.
        """
        counts = list(map(len, self._hooks_of))
        if counts == self._hook_counts:
            return
        for index, parameter in enumerate(self._trained):
            if counts[index] != self._hook_counts[index]:
                self._gradient_handles[index].remove()
                self._gradient_handles[index] = (
                    parameter.register_post_accumulate_grad_hook(
                        self._gradient_hooks[index]
                    )
                )
        self._hook_counts = counts

    def _end_backward(self) -> None:
        """End the backward pass.

        If some tensors were unused, note whether the graph shows exactly these: gradients of a
        reentrant checkpoint are in another graph.
        """
        self._pass = None
        if not self._reducer.all_ready:
            self._graph_shows_unused = not self._outside_graph(self._reducer.ready())
        self._driver.end_backward()

    def _outside_graph(self, indices: Iterable[int]) -> list[int]:
        """The parameters of *indices* that the graph of the running pass does not reach."""
        return [index for index in indices if not will_run(self._accumulators[index])]

    def _require_nothing_under_way(self) -> None:
        if not self._reducer.in_backward and self._driver.adds_to_what_is_under_way:
            raise self._context.fail(
                f"a backward pass without a forward pass since the last one: under "
                f"{self._method} means of gradients are still in flight then, and this pass "
                "has added to them. Call the model before each backward pass, add losses up "
                "before it, or use bsp"
            )

    def _unnoticed_use(self, index: int) -> Exception:
        return self._context.fail(
            f"parameter {self._parameters[index][0]!r} has a gradient, but its use was not "
            f"noticed: no module that owns it was called, and no Python function of torch got "
            f"it (C++ code may have). Under {self._method} its last update may have been "
            "missing then. Use bsp"
        )


class BatchWeights:
    """Finds the batch of the epoch that a backward pass belongs to, and its weight."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._epoch = -1
        self._batch = 0
        self._running = False
        self._weighed = False

    def next_share(self) -> float:
        """The weight of the pass that is about to begin."""
        self._weighed = True
        if self._sampler.passes != self._epoch:
            self._epoch, self._batch = self._sampler.passes, 0
        # A forward pass after the epoch's end may be an evaluation without no_grad.
        return self._sampler.weight(min(self._batch, len(self._sampler) - 1))

    def pass_runs(self) -> bool:
        """Note a gradient: at the end of its backward pass its batch is over.

        Returns whether nothing has asked for the pass's weight yet.
        """
        if not self._running:
            if self._batch >= len(self._sampler):
                raise UsageError(
                    f"backward pass {self._batch + 1} of an epoch of "
                    f"{len(self._sampler)} batches: gradients are weighted batch by "
                    "batch, so each batch of the sampler given to distribute may have "
                    "one backward pass"
                )
            self._running = True
            queue_callback(self._pass_ended)
        return not self._weighed

    def pass_failed(self) -> None:
        """Note that the pass raised an exception: its batch is over nevertheless."""
        if self._running:
            self._pass_ended()

    def _pass_ended(self) -> None:
        self._running = self._weighed = False
        self._batch += 1


def _samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    return None
