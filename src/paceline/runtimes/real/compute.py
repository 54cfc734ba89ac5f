"""Gives real processes the compute times of a workload."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from paceline.cluster.workload import Workload
from paceline.compression import GradientCompression
from paceline.interfaces import CompressionStage

PASSES_KEPT = 200
"""Passes whose delays are kept, for a median."""
WARM_UP_PASSES = 2
"""Passes that are not counted, since they include start-up costs."""


class PacedCompute:
    """A `Compute` that sleeps for the rest of a workload's times.

    Deadlines count from the start of each forward pass. So the host's own work (the model's
    operations, paceline's copies) takes part of these times, as it would run beside a GPU. On a
    worker of speed 0.5 everything takes twice as long.
    """

    def __init__(self, workload: Workload, samples: float | None, speed: float) -> None:
        self.workload = workload
        self._reference = workload.batch if workload.batch is not None else samples
        self._speed = speed
        self._scale = 1.0
        self._deadline = 0.0
        self._begun = 0.0
        """Seconds of the forward pass of the tensors in use."""
        self._left = 0.0
        """Seconds of the forward pass after `_deadline`, if it is paced tensor by tensor."""
        self._given_up = False
        self._late = 0.0
        """Seconds from the deadline of the last gradient to the gradient itself."""
        self._pending = False
        """Whether `_late` belongs to a pass that is not in `_passes` yet."""
        self._passes: deque[tuple[float, float]] = deque(maxlen=PASSES_KEPT)
        self._pass_count = 0
        self._ended_at: float | None = None
        """End of the last step; None within a step."""

    @property
    def asked_and_taken(self) -> tuple[float, float]:
        """Medians of the seconds that a pass should take, and took; zeros if no pass was counted."""
        if not self._passes:
            return 0.0, 0.0
        asked = median(asked for asked, _ in self._passes)
        return asked, median(asked + late for asked, late in self._passes)

    def step_begins(self) -> None:
        # The time in which the script loads its batch counts as input time.
        ended_at, self._ended_at = self._ended_at, None
        if ended_at is not None and not self._given_up:
            until = ended_at + self.workload.input / self._speed
            time.sleep(max(0.0, until - time.perf_counter()))

    def forward(self, samples: int | None, training: bool) -> None:
        self._note_pass()
        self._pass(self._left)
        self._sleep()
        if self._reference is None and training:
            self._reference = samples
        ratio = samples / self._reference if samples and self._reference else 1.0
        self._scale = ratio / self._speed
        self._left = self.workload.forward_seconds * self._scale
        self._begun = 0.0
        self._deadline = time.perf_counter()

    def used(self, index: int) -> None:
        self._pass(self._begun)
        self._sleep()
        self._begun = self.workload.forward[index] * self._scale

    def usable(self) -> None:
        # Waiting is not compute time, and delays all later work.
        self._deadline = max(self._deadline, time.perf_counter())

    def gradient(self, index: int) -> None:
        self._pass(self._left)
        work = self.workload
        hooks = work.overhead / (len(work.names) * (work.passes or 1) * self._speed)
        self._deadline += work.backward[index] * self._scale + hooks
        self._sleep()
        self._late = max(0.0, time.perf_counter() - self._deadline)
        self._pending = True

    def gradient_taken(self) -> None:
        pass

    def uses_compressor(self, compression: GradientCompression) -> None:
        """Do nothing: the compressor takes its own time."""

    def compressed(
        self,
        compression: GradientCompression,
        workers: int,
        size: float,
        stage: CompressionStage,
    ) -> None:
        """Do nothing: the compressor takes its own time."""

    def update_begins(self) -> None:
        self._note_pass()
        self._left = 0.0
        seconds = self.workload.update / self._speed
        self._deadline = time.perf_counter() + seconds

    def step_ended(self) -> None:
        self._sleep()
        self._ended_at = time.perf_counter()

    def give_up(self) -> None:
        """Stop pacing, because the script paces itself from now on."""
        self._given_up = True

    def _note_pass(self) -> None:
        """Count a pass that has ended."""
        if not self._pending:
            return
        self._pending = False
        self._pass_count += 1
        work = self.workload
        if self._pass_count > WARM_UP_PASSES:
            asked = (work.forward_seconds + work.backward_seconds) * self._scale
            self._passes.append((asked, self._late))

    def _pass(self, seconds: float) -> None:
        part = min(seconds, self._left)
        self._left -= part
        self._deadline += part

    def _sleep(self) -> None:
        left = self._deadline - time.perf_counter()
        if left > 0 and not self._given_up:
            time.sleep(left)
