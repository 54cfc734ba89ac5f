"""Those who only watch a training: compute time, the planner's times, and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

EVENTS = (
    *("step_begins", "forward", "used", "usable"),
    *("gradient", "gradient_ready", "gradient_taken"),
    *(
        "codes_with",
        "coded",
        "bucket_leaves",
        "means_are_there",
        "step_is_called",
        "update_begins",
        "step_ended",
    ),
)


class Observers:
    """Tells each event to those who define a function of its name, in their order.

    - ``step_begins()``: a forward pass with gradients, before anything is done for it.
    - ``forward(samples, training)``: any forward pass begins; samples may be None.
    - ``used(index)``: a tensor is about to be used, for the first time since it was
      updated; ``usable()``: what that waited for is in. Only under methods that wait so.
    - ``gradient(index)``: autograd has made a gradient; our own work begins.
    - ``gradient_ready(index)``: the same, where it is to be sent.
    - ``gradient_taken()``: our own work is done; backward goes on.
    - ``codes_with(compressor)``: from now on it may code what has the model's tensors.
    - ``coded(compressor, workers, size, stage)``: it has coded or decoded so many bytes of
      these.
    - ``bucket_leaves(bucket)``: it is about to be given to the method.
    - ``means_are_there()``: backward is over, and the means are waited for.
    - ``step_is_called()``: by the script; gradients are as it has left them.
    - ``update_begins()`` and ``step_ended()``: around the optimizer's step.
    """

    def __init__(self, watchers: Sequence[Any]) -> None:
        def of(event: str) -> list[Callable[..., None]]:
            found = (getattr(watcher, event, None) for watcher in watchers)
            return [function for function in found if function is not None]

        for event in EVENTS:
            setattr(self, event, _Event(of(event)))

    def add(self, watcher: Any) -> None:
        """One more, which is told last."""
        for event in EVENTS:
            function = getattr(watcher, event, None)
            if function is not None:
                getattr(self, event).functions.append(function)

    step_begins: _Event
    forward: _Event
    used: _Event
    usable: _Event
    gradient: _Event
    gradient_ready: _Event
    gradient_taken: _Event
    codes_with: _Event
    coded: _Event
    bucket_leaves: _Event
    means_are_there: _Event
    step_is_called: _Event
    update_begins: _Event
    step_ended: _Event


class _Event:
    def __init__(self, functions: list[Callable[..., None]]) -> None:
        self.functions = functions

    def __call__(self, *arguments: Any) -> None:
        for function in self.functions:
            function(*arguments)
