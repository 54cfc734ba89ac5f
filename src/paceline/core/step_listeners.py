"""Sends a training's events to listeners: compute times, the bucket tuner, profilers, checks."""

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
    """Sends each event to the listeners that define a method with its name, in their order.

    - ``step_begins()``: a forward pass with gradients, before any work for it.
    - ``forward(samples, training)``: any forward pass begins. *samples* may be None.
    - ``used(index)``: a tensor is about to be used for the first time since its update.
      ``usable()``: its update has arrived. Only for methods with the hook `before_use`.
    - ``gradient(index)``: autograd has computed a gradient; paceline's own work begins.
    - ``gradient_ready(index)``: the same, if the gradient is sent.
    - ``gradient_taken()``: paceline's own work is done; backward continues.
    - ``uses_compressor(compressor)``: from now on it may compress tensors like the model's.
    - ``compressed(compressor, workers, size, stage)``: it has compressed or decompressed *size*
      bytes.
    - ``bucket_leaves(bucket)``: the method is about to get it.
    - ``means_are_there()``: backward is over, and the means have arrived.
    - ``step_is_called()``: the script has called ``step()``, after its own changes of gradients.
    - ``update_begins()`` and ``step_ended()``: around the optimizer's step.

    The three events of each gradient cost a call per tensor. A listener that needs them only in
    some steps has an attribute ``listening``. Hooks skip these events in steps without such a
    listener (`times_gradients`).
    """

    def __init__(self) -> None:
        self._timing: list[Any] = []
        self.times_gradients = False
        """Whether a listener needs the events of each gradient in the next pass."""
        for event in EVENTS:
            setattr(self, event, _Event())

    def add(self, listener: Any) -> None:
        """Add *listener* after the others; None is ignored."""
        for event in EVENTS:
            function = getattr(listener, event, None)
            if function is not None:
                getattr(self, event).functions.append(function)
        if any(hasattr(listener, event) for event in _OF_EACH_GRADIENT):
            self._timing.append(listener)
        self.pass_ended()

    def pass_ended(self) -> None:
        """Update `times_gradients` for the next backward pass."""
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
