"""Hooks into the user's model: which forward and backward passes are a step's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.core.batch_weights import Weights
from paceline.core.model_checks import (
    check_not_inside_ddp,
    check_trained_by_nobody_else,
)
from paceline.core.presence import Presence
from paceline.core.step import Steps
from paceline.core.training_errors import Faults
from paceline.errors import UsageError
from paceline.interfaces import GradientSeen
from paceline.torch_internals import (
    Uncopied,
    accumulator_of,
    inside_backward,
    inside_function_transform,
    inside_reentrant_checkpoint,
    queue_callback,
    uncompiled,
    will_run,
)

DDP_SYNCHRONIZES = "require_backward_grad_sync"
"""DDP's attribute for what `no_sync` does; scripts set it by hand to save the block."""


class Passes:
    """Watches *model*'s passes, and drives *steps* by them. *parameters* are the trainable
    ones; *seen* is what ``.grad`` holds; *weights* say what passes weigh, where a sampler
    deals out uneven shares. *note* is called when any forward pass begins; *ended* when a
    backward pass that was sent is over."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        method: str,
        seen: GradientSeen,
        weights: Weights | None,
        presence: Presence,
        steps: Steps,
        faults: Faults,
        note: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._model, self._parameters = model, parameters
        self._method, self._seen = method, seen
        self._weights, self._presence = weights, presence
        self._steps, self._arrivals, self._faults = steps, steps.arrivals, faults
        self._observers, self._note, self._ended = steps.observers, note, ended
        self._synchronize = True
        self._guarded = False
        self._graph_tells = False
        """Whether some tensors were unused in a pass, and its graph told which."""
        # Scripts for DDP set `require_backward_grad_sync` on the model.
        self._attributes = vars(uncompiled(model))
        self._handles = [
            model.register_forward_pre_hook(
                Uncopied(self._before_forward), with_kwargs=True
            )
        ]
        # Kept alive: torch would make these nodes anew in each forward, on whatever stream
        # runs then, and one bucket could be filled from streams that do not wait for each
        # other.
        self._accumulators = [accumulator_of(p) for _, p in parameters]
        for index, (_, parameter) in enumerate(parameters):
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(self._hook(index))
            )

    def detach(self) -> None:
        """Take the hooks out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulators.clear()

    def go_on_from(self, before: Passes) -> None:
        """The sampler may be in the middle of an epoch."""
        self._weights = before._weights

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate into ``.grad``; so do those of a model
        whose ``require_backward_grad_sync`` is false."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    # ---- forward ----

    def _before_forward(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self._note()
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
        self._steps.put_buffers()
        if training:
            self._observers.step_begins()
            if self._weights is not None:
                self._presence.weight = self._arrivals.weigh_next(
                    self._weights, self._steps.delivered
                )
            self._steps.begin()
        # Only now: the forward pass waits for the rest.
        self._observers.forward(_samples(args, kwargs), training)

    def _require_to_be_alone(self) -> None:
        """Raise `UsageError` if another tool averages these gradients: many wrap the model
        only after `distribute`, so this is asked when training begins."""
        check_not_inside_ddp(self._model)
        if not self._guarded:
            check_trained_by_nobody_else(self._model)
            self._guarded = True

    def _forget_failed_pass(self) -> None:
        """A forward pass while backward seems to run: it raised, and the script goes on.
        That is well as long as nothing had been sent."""
        if self._arrivals.some_have_left and self._presence.size > 1:
            raise self._faults.refused(
                "the last backward pass ended with an exception after a part of its "
                "gradients had been sent, so this rank is out of step with the others; "
                "end the script, or let such exceptions end it"
            )
        self._arrivals.in_backward = False
        if self._weights is not None:
            self._weights.pass_failed()

    # ---- backward ----

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        observers, arrivals, steps = self._observers, self._arrivals, self._steps

        def gradient_is_ready(parameter: torch.Tensor) -> None:
            observers.gradient(index)
            if steps.uses is not None and steps.uses.was_unseen(index):
                raise self._used_unseen(index)
            if self._weights is not None and self._weights.pass_runs():
                self._presence.weight = arrivals.weigh_unannounced(
                    self._weights, steps.accumulated
                )
            if self._synchronize and self._attributes.get(DDP_SYNCHRONIZES, True):
                if not arrivals.in_backward:
                    self._begin_backward(index)
                observers.gradient_ready(index)
                arrivals.take(index)
            else:
                self._require_nothing_under_way()
                steps.delivered = False
                steps.accumulated = True
            observers.gradient_taken()

        return gradient_is_ready

    def _begin_backward(self, index: int) -> None:
        """The first gradient of a pass that is to be sent."""
        name = self._parameters[index][0]
        if inside_reentrant_checkpoint():
            raise self._faults.refused(
                f"the first gradient of this backward pass, that of {name!r}, comes from "
                "a reentrant checkpoint, whose end cannot be told from the end of the "
                "pass; use checkpoint(..., use_reentrant=False)"
            )
        if self._steps.delivered and self._seen == "sent":
            raise self._faults.refused(
                f"a second backward pass before step(): under {self._method} the "
                "gradients of the first are on their way to the others. Run all passes "
                "but the last under optimizer.no_sync()"
            )
        self._require_nothing_under_way()
        if self._steps.waits_for_update and self._seen == "local":
            raise self._faults.refused(
                f"a second backward pass before step(): under {self._method} the others "
                "wait for this step's update, and gradients are each worker's own. Run all "
                "passes but the last under optimizer.no_sync(); a GradScaler skips steps of "
                "one worker alone, so train in bfloat16 without it"
            )
        if not self._guarded:
            self._require_to_be_alone()
        self._steps.begin_backward()
        self._arrivals.check_memory()
        self._arrivals.in_backward = True
        queue_callback(self._end_backward)
        if self._graph_tells:
            # Buckets that wait for unused tensors would leave when backward ends.
            self._arrivals.leave_out(self._outside_graph(range(len(self._parameters))))

    def _end_backward(self) -> None:
        """The backward pass is over. If some tensors took no part in it, see whether its
        graph has told so of them alone: gradients that a reentrant checkpoint computes are
        in another one."""
        if not self._arrivals.all_came:
            self._graph_tells = not self._outside_graph(self._arrivals.came())
        self._ended()

    def _outside_graph(self, indices: Iterable[int]) -> list[int]:
        """Those of the parameters that the graph of the running pass does not reach."""
        return [index for index in indices if not will_run(self._accumulators[index])]

    def _require_nothing_under_way(self) -> None:
        if not self._arrivals.in_backward and self._steps.adds_to_what_is_under_way:
            raise self._faults.refused(
                f"a backward pass without a forward pass since the last one: under "
                f"{self._method} means of gradients are still on their way then, and this "
                "pass has added to them. Call the model before each backward pass, add "
                "losses up before it, or use bsp"
            )

    def _used_unseen(self, index: int) -> Exception:
        return self._faults.refused(
            f"parameter {self._parameters[index][0]!r} has a gradient, and nothing has told "
            f"that it would be used: no module that owns it was called, and none of torch's "
            f"functions got it (code in C++, perhaps). Under {self._method} its update may "
            "have been missing there; use bsp"
        )


def _samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    return None
