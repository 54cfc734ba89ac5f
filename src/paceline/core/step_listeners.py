"""Tells listeners of a training's events: compute times, the bucket tuner, profilers, checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EVENTS = (
    *("step_begins", "forward", "used", "usable"),
    *("gradient", "gradient_ready", "gradient_taken"),
    *("uses_compressor", "compressed"),
    *("bucket_leaves", "means_are_there", "step_is_called"),
    *("update_begins", "step_ended"),
)
_OF_EACH_GRADIENT = ("gradient", "gradient_ready", "gradient_taken")


class StepListeners:
    """Tells each event to the listeners that define a method of its name, in their order.

    - ``step_begins()``: a forward pass with gradients, before anything is done for it.
    - ``forward(samples, training)``: any forward pass begins; samples may be None.
    - ``used(index)``: a tensor is about to be used, for the first time since it was
      updated; ``usable()``: what that waited for is in. Only under methods that wait so.
    - ``gradient(index)``: autograd has made a gradient; our own work begins.
    - ``gradient_ready(index)``: the same, where it is to be sent.
    - ``gradient_taken()``: our own work is done; backward goes on.
    - ``uses_compressor(compressor)``: from now on it may compress what has the model's tensors.
    - ``compressed(compressor, workers, size, stage)``: it has compressed or decompressed so many
      bytes of these.
    - ``bucket_leaves(bucket)``: it is about to be given to the method.
    - ``means_are_there()``: backward is over, and the means are waited for.
    - ``step_is_called()``: by the script; gradients are as it has left them.
    - ``update_begins()`` and ``step_ended()``: around the optimizer's step.

    The three events of each gradient cost a call a tensor. A listener that needs them only in
    some steps has an attribute ``listening``; hooks skip these events in steps in which nobody
    listens (`times_gradients`).
    """

    def __init__(self) -> None:
        self._timing: list[Any] = []
        self.times_gradients = False
        """Whether a listener wants the events of each gradient in the next pass."""
        for event in EVENTS:
            setattr(self, event, _Event())

    def add(self, listener: Any) -> None:
        """Add *listener* behind the others; None adds none."""
        for event in EVENTS:
            function = getattr(listener, event, None)
            if function is not None:
                getattr(self, event).functions.append(function)
        if any(hasattr(listener, event) for event in _OF_EACH_GRADIENT):
            self._timing.append(listener)
        self.pass_ended()

    def pass_ended(self) -> None:
        """A backward pass is over: learn who listens to the gradients of the next one."""
        self.times_gradients = any(
            getattr(listener, "listening", True) for listener in self._timing
        )

    step_begins: _Event
    forward: _Event
    used: _Event
    usable: _Event
    gradient: _Event
    gradient_ready: _Event
    gradient_taken: _Event
    uses_compressor: _Event
    compressed: _Event
    bucket_leaves: _Event
    means_are_there: _Event
    step_is_called: _Event
    update_begins: _Event
    step_ended: _Event


class _Event:
    def __init__(self) -> None:
        self.functions: list[Callable[..., None]] = []

    def __call__(self, *arguments: Any) -> None:
        for function in self.functions:
            function(*arguments)
