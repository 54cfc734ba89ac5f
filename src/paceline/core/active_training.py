"""Which training goes on under one `DistributedOptimizer`, and who may put another in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.training import Training
from paceline.interfaces import Endpoint


class Changes(Protocol):
    """Changes the method between two steps."""

    @property
    def spec(self) -> str:
        """What training goes by now, in full."""
        ...

    def change(self, spec: str, *, together: bool = False) -> str:
        """Train by *spec* from now on; or say why that cannot be. Collective, between two steps;
        *together*: over all workers, and they know it. Else some may be out of data."""
        ...

    def after_step(self) -> None:
        """A step has ended. Collective where the method changes now."""
        ...

    def finish(self) -> None:
        """This worker is out of data: keep the others company, whatever they change to."""
        ...


class Present:
    """The `TrainingStatus` of a model's trainings, one after the other, and what is there of the
    present one. All faces of an optimizer share it. *changes*: who changes the method, if anybody."""

    def __init__(self, training: Training, endpoints: Sequence[Endpoint]) -> None:
        self.training, self.endpoints = training, endpoints
        self.changes: Changes | None = None
        self._fault = ""
        self.finished = False
        """Whether this worker has no more steps to do."""
        self.scales = False
        """Whether a GradScaler steps the optimizer."""

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined it."""
        return self.training.first_step

    @property
    def broken_by(self) -> str:
        """The error after which the training cannot go on, if any."""
        return self.training.broken_by or self._fault

    def broke(self, error: BaseException) -> None:
        """One training has ended, and the next one could not begin: there is none to go on."""
        self.finished = True
        self._fault = self.broken_by or f"{type(error).__name__}: {error}"

    def step_ended(self) -> None:
        """A step has ended: the next one may go by another method."""
        if self.changes is not None:
            self.changes.after_step()

    def finish(self) -> None:
        """This worker is out of data. Collective over the ranks, each in its own time."""
        if self.finished:
            return
        self.finished = True
        if self.changes is None:
            self.end()
        else:
            self.changes.finish()

    def end(self, *, together: bool = False) -> None:
        """End the present training; the model may be trained by another one. *together*: see
        `Training.finish`."""
        self.training.finish(together=together)
        for endpoint in self.endpoints:
            endpoint.close()
