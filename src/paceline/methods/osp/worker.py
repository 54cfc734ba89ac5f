"""What a worker does in both forms; `all_reduce` and `parameter_server` say how gradients travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import torch

from paceline.interfaces import Bucket, Hyperparameters, PartialOptimizer, Run
from paceline.methods.osp.measurement import StepWatch
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.piece_layout import Layout

AnyRun = TypeVar("AnyRun", bound=Run)


class Worker(Generic[AnyRun]):
    """One worker. What a step defers is ``layout.deferred``."""

    def __init__(
        self, run: AnyRun, options: OSPOptions, updater: PartialOptimizer
    ) -> None:
        self.run, self.options, self.updater = run, options, updater
        self.layout = Layout(run.buckets, updater)
        self.watch = StepWatch(options, run)
        self.correction = options.correction_class()
        self.steps = 0  # without those that only kept the others company
        self.has_deferred = False

    def _send(self, bucket: Bucket) -> None:
        """Stage 1 of a bucket: what is not deferred leaves."""
        raise NotImplementedError

    def bucket_ready(self, bucket: Bucket) -> None:
        self.watch.bucket_ready()
        if self.options.overlap:
            self._send(bucket)

    def backward_ended(self) -> None:
        self.watch.mark()
        if not self.options.overlap:
            for bucket in self.run.buckets:
                self._send(bucket)

    def buckets_rebuilt(self) -> None:
        self.layout.follow(self.run.buckets)

    def _step_tentatively(
        self, numbers: Sequence[int], how: Hyperparameters, scale: float = 1.0
    ) -> None:
        """Guess the next values of these pieces, which hold their exact ones. Buckets hold the
        own gradient, or, where it is to be *scaled*, this worker's share of the mean."""
        if self.options.correction == "none" or not numbers:
            return
        own = [self.layout.gradient(number) for number in numbers]
        if scale != 1.0:
            for gradient in own:
                gradient.mul_(scale)
        pieces = self.layout.some(numbers)
        self._write(numbers, self.correction.values(self.updater, pieces, own, how))

    def _values(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """What the model holds of these pieces: views."""
        return self.updater.values(self.layout.some(numbers))

    def _kept(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """A copy of that."""
        return [value.clone() for value in self._values(numbers)]

    def _write(self, numbers: Iterable[int], values: Iterable[torch.Tensor]) -> None:
        """Put *values* of these pieces, flat or of their shapes, into the model."""
        for into, value in zip(self._values(numbers), values, strict=True):
            into.copy_(value.view(into.shape))

    def metrics(self) -> dict[str, float]:
        """*budget*: the part of the model that may be deferred; *deferred*: the part that is."""
        parts = self.layout.parts()
        whole = max(1, sum(parts.sizes))
        return {
            "budget": self.options.most * self.watch.growth.part,
            "deferred": parts.total(self.layout.deferred) / whole,
        }

    def _explain(self) -> None:
        """The training is over: say why nothing was deferred in it, if nothing was."""
        why = self.watch.why_nothing(self.steps)
        if why is not None and not self.has_deferred:
            self.run.report(why)
