"""State that the parts of one worker's training share: model, settings, and position in the training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.collectives.communicator import Communicator
from paceline.collectives.server_communicator import NoCollectives
from paceline.core.sampler import Sampler
from paceline.core.settings import Settings
from paceline.core.step_listeners import StepListeners
from paceline.errors import GradientError
from paceline.interfaces import Bucket, Method, Rounds, Runtime


@dataclass
class ActiveWorkers:
    """The active workers, as one worker knows them.

    The classes of `paceline.core.participation` keep *participants*, *left_before_step* and
    *anyone_active* equal on all ranks.
    """

    size: int
    weight: float
    """This worker's weight in a mean of gradients."""
    active: bool = True
    """Whether this worker has data."""
    participants: Sequence[int] = ()
    """Ranks that took part in the last round."""
    left_before_step: list[int] = field(default_factory=list)
    """Other ranks that have left between ``backward()`` and ``step()``."""
    anyone_active: bool = True
    """Whether any rank had data in the last round."""
    step_pending: bool = False
    """Whether gradients were delivered, and ``step()`` has not followed."""
    unsent_steps: int = 0
    """Steps done since the last round."""

    def __post_init__(self) -> None:
        self.participants = range(self.size)

    @property
    def counts(self) -> bool:
        """Whether this worker's contribution counts in the next round."""
        return self.active or self.unsent_steps > 0


@dataclass(eq=False)
class TrainingContext:
    """Everything that the parts of one worker's training share.

    *parameters* are the trainable ones with their names, in registration order. *optimizer* is
    the user's. *number* counts the script's trainings.
    """

    runtime: Runtime
    model: torch.nn.Module
    parameters: Sequence[tuple[str, torch.nn.Parameter]]
    method: Method
    settings: Settings
    comm: Communicator | NoCollectives
    sampler: Sampler | None = None
    optimizer: torch.optim.Optimizer | None = None
    number: int = 0
    listeners: StepListeners = field(default_factory=StepListeners)
    buckets: list[Bucket] = field(default_factory=list)
    """The gradient in flat buffers, in the order of delivery. Rebuilding makes a new list."""
    step: int = 0
    """The number of the current step."""
    evaluating: bool = False
    """Whether the script is inside `consolidated`: changes made there are undone."""
    failure: str = ""
    """The first error after which ranks may be at different steps; empty if there is none.

    `finish` then only reports it.
    """
    workers: ActiveWorkers = field(init=False)

    def __post_init__(self) -> None:
        size = self.comm.size
        self.workers = ActiveWorkers(size, weight=1.0 / size)
        self.stopwatch = self.runtime.clock.stopwatch(self.device)
        self.rounds: Rounds = self.method.rounds

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.parameters[0][1].device

    @property
    def forms_means(self) -> bool:
        """Whether workers form the mean gradient. Then buckets hold this worker's share of it."""
        method = self.method
        return method.visible_gradient == "mean" or method.updates_on == "method"

    @property
    def compressed(self) -> bool:
        """Whether gradients, or averages with a name, are compressed."""
        return self.settings.compression.compresses

    @property
    def clips_own(self) -> bool:
        """Whether this worker's own gradient is clipped before any of it is sent."""
        return self.method.clips == "own" and self.settings.clip_norm < float("inf")

    @property
    def waits_in_forward(self) -> bool:
        """Whether the method waits for means at their first use, not at the end of backward."""
        return getattr(self.method, "waits_in_forward", False)

    def fail(self, message: str) -> GradientError:
        """Record an error after which ranks may be at different steps, and return it to be raised."""
        error = GradientError(message)
        self.failure = _describe(error)
        return error

    def record_failure(self, error: BaseException) -> None:
        """Record that *error* is about to reach the script."""
        self.failure = self.failure or _describe(error)

    def report(self, sentence: str) -> None:
        """Print *sentence* once for all workers, now, and keep it beside the run's records."""
        recorder = self.runtime.recorder
        known = sentence in recorder.notes
        recorder.add_note(sentence)
        if self.comm.rank == 0 and not known:
            print(f"paceline: {sentence}", file=sys.stderr)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
