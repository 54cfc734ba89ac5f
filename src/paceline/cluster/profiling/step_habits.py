"""What a script does in each step, beside computing: how many passes, and whether it uses gradients."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import torch

from paceline.torch_internals import notify_before_use, stop_notifying

MOST_STEPS = 64
"""What is done in so many steps is a habit: no more are watched, and nothing is charged for it."""


class StepHabits:
    """Is told a training's events (`paceline.core.step_listeners`), and counts.

    A step has as many passes as accumulate into one update: those under ``no_sync`` and the one that is sent.
    A script uses gradients where it reads or changes one between the end of backward and ``step()``, as
    one that clips does; so does ``distribute(check_finite=True)``. What is done in fewer than half of
    the steps, as a norm that is logged now and then, does not count.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._came: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._watched: list[torch.Tensor] = []
        self._ended = self._used = False
        self._steps = 0
        self._passes: list[int] = []
        self._uses: list[bool] = []

    @property
    def passes(self) -> int | None:
        """Of a usual step; None where there was none."""
        return statistics.median_low(self._passes) if self._passes else None

    @property
    def uses_gradients(self) -> bool | None:
        """In most steps; None where no step has shown it."""
        if not self._uses:
            return None
        return 2 * sum(self._uses) > len(self._uses)

    def step_begins(self) -> None:
        """A pass begins: what it does to gradients is not the script's doing."""
        self._release()

    def gradient(self, index: int) -> None:
        if self._steps < MOST_STEPS:
            self._came[index] += 1

    def gradient_ready(self, index: int) -> None:
        if self._steps < MOST_STEPS:
            self._left[index] += 1

    def means_are_there(self) -> None:
        """From here on the script may look."""
        if self._steps >= MOST_STEPS:
            return
        self._ended = True
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and notify_before_use(gradient, self._is_used):
                self._watched.append(gradient)

    def step_is_called(self) -> None:
        self._release()

    def step_ended(self) -> None:
        self._steps += 1
        if self._came:
            passes = (
                count - max(0, self._left[index] - 1)
                for index, count in self._came.items()
            )
            self._passes.append(max(passes))
        if self._ended:
            self._uses.append(self._used)
        self._came.clear()
        self._left.clear()
        self._ended = self._used = False

    def end(self) -> None:
        """Nothing is counted any more."""
        self._release()

    def _is_used(self, gradient: torch.Tensor) -> None:
        self._used = True
        stop_notifying(gradient)

    def _release(self) -> None:
        for gradient in self._watched:
            stop_notifying(gradient)
        self._watched.clear()
