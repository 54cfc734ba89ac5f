"""What a training's first steps show: a step's times, tensor by tensor.

It costs some microseconds a tensor, until enough was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.cluster import Workload
from paceline.cluster.profiling import StepProfiler
from paceline.interfaces import Stopwatch
from paceline.torch_internals import Uncopied

ENOUGH = 12
"""Steps whose times are taken."""


class Watch:
    """One worker's: an observer of its first training."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        stopwatch: Stopwatch,
    ) -> None:
        self._profiler = profiler = StepProfiler(model, parameters, stopwatch)
        # In front of the training's own hook, which may charge the whole pass at once.
        before = Uncopied(self._forward_begins)
        self._handle = model.register_forward_pre_hook(
            before, with_kwargs=True, prepend=True
        )
        self.step_begins = profiler.step_begins
        self.gradient = profiler.gradient
        self.gradient_ready = profiler.gradient_ready
        self.step_is_called = profiler.step_is_called
        self.gradient_taken = profiler.gradient_taken
        self.update_begins = profiler.update_begins
        self.step_ended = profiler.step_ended

    def workload(self, source: str) -> Workload | None:
        """Medians over the steps that were seen; None where the model itself was never called."""
        return (
            self._profiler.workload(source) if self._profiler.profiled_steps else None
        )

    def end(self) -> None:
        """Take the hooks away: nothing is measured any more."""
        self._handle.remove()
        self._profiler.detach()

    def means_are_there(self) -> None:
        if not self._is_enough:
            self._profiler.means_are_there()

    @property
    def _is_enough(self) -> bool:
        return self._profiler.profiled_steps >= ENOUGH

    def _forward_begins(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        if torch.is_grad_enabled() and not self._is_enough:
            given = (*args, *kwargs.values())
            sizes = [
                value.shape[0]
                for value in given
                if isinstance(value, torch.Tensor) and value.dim()
            ]
            self._profiler.forward(sizes[0] if sizes else None, True)


def with_all(workload: Workload, compute: float, scale: float) -> Workload:
    """*workload* with all of a step's *compute* seconds, and *scale* times as long: what passes and
    updates do not take (batches that are loaded) comes before each pass."""
    more = max(0.0, compute - workload.compute_seconds)
    more /= len(workload.names) * (workload.passes or 1)
    return replace(
        workload,
        forward=tuple(scale * (one + more) for one in workload.forward),
        backward=tuple(scale * one for one in workload.backward),
        update=scale * workload.update,
    )


def as_one_pass(workload: Workload) -> Workload:
    """*workload* with its forward pass spread as its backward pass is: virtual time charges a forward
    pass as a whole."""
    total = workload.backward_seconds
    if not total:
        return workload
    forward = workload.forward_seconds
    return replace(
        workload, forward=tuple(forward * one / total for one in workload.backward)
    )
