"""What each backward pass weighs in the mean, where a sampler deals out uneven shares."""

from __future__ import annotations

from paceline.core.sampler import Sampler
from paceline.errors import UsageError
from paceline.torch_internals import queue_callback


class Weights:
    """Which batch of its epoch a backward pass belongs to, and what it weighs."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._epoch = -1
        self._batch = 0
        self._running = False
        self._weighed = False

    def next_share(self) -> float:
        """The share of the pass that is about to begin."""
        self._weighed = True
        if self._sampler.passes != self._epoch:
            self._epoch, self._batch = self._sampler.passes, 0
        # A forward pass beyond the epoch may be an evaluation that forgot no_grad.
        return self._sampler.weight(min(self._batch, len(self._sampler) - 1))

    def pass_runs(self) -> bool:
        """A gradient has come; when its backward pass ends, its batch is over. Returns
        whether it is the first of a pass whose share nobody has asked for."""
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
        """The pass raised: its batch is over all the same."""
        if self._running:
            self._pass_ended()

    def _pass_ended(self) -> None:
        self._running = self._weighed = False
        self._batch += 1
