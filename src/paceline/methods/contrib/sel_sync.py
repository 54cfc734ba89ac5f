"""SelSync: workers step by themselves, and average parameters when gradients change.

Tyagi and Swany, "Accelerating distributed ML training via selective synchronization" (CLUSTER
2023). In each step a worker looks at the norms of its own gradient:

    N(t) = EWMA of sum_layers |g_l|;   d(t) = |N(t) - N(t-1)| / N(t-1);   D(t) = EWMA of d

It raises its flag if D(t) is `delta` or more, or if its window is not full yet. If any worker raises
its flag, all average their parameters in this step; otherwise none does. Means (EWMA) are over the
last `window` steps, with weights (1 - `smoothing`)^age.

It saves bytes, but no latency: each step waits for one small message from all workers.

Defaults are the authors'. With them D is small: a norm that is itself a mean over 25 steps changes by
a few percent from step to step. After the window is full, only a jump in the loss raises a flag. A
run shorter than its window averages in each step. For more frequent averages set `delta` to about D:
at its end the training reports the number of steps with an average.

Differences from the authors' code:

- The authors' code averages parameters before the step's update, so models differ by one own gradient
  after an average. Here they are averaged after the update, so models are equal then, as for an
  evaluation, a checkpoint or the end.
- The authors' code takes N as 0 until the window is full, and divides by it. Here N is the mean over
  the steps so far.
- A norm that is not finite raises the flag, and is dropped from the mean.
- BatchNorm's statistics are averaged with the parameters.
- A worker's weight is its number of samples since the last average.
- A worker that is out of data raises no flag.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from paceline.errors import UsageError
from paceline.interfaces import (
    Clips,
    Consistency,
    GradientSeen,
    MethodSummary,
    Rounds,
    Run,
    UpdatesOn,
)
from paceline.methods.local_updates.options import Options
from paceline.methods.local_updates.rounds import LocalUpdatesWorker

PLAIN = Options(sync_every=1)
ANCHORED = PLAIN.with_differences()
"""The kind of average: of the parameters, or of their changes since the last average."""


@dataclass(frozen=True, kw_only=True)
class SelSync:
    """Average the parameters in steps in which some worker's gradient norm changes.

    With compression workers send the change of parameters since the last average, and keep one more
    copy of the model.

    Attributes:
        delta: Relative change of the gradient norm at which a worker raises its flag; 0: in each step.
        window: Steps in a running mean.
        smoothing: Share that a running mean forgets in each step.
    """

    name: ClassVar[str] = "sel-sync"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages parameters after steps in which some worker's gradient norm changes.",
        source="Tyagi and Swany, SelSync (CLUSTER 2023)",
        use_when="bandwidth is scarce and latency is low",
        waits_for="every worker, in every step: for a flag, and for the parameters if a flag is raised",
        sends="a flag in every step, and the parameters if a flag is raised",
        guarantees="A worker whose norm changes raises a flag. All workers hold equal models after each step with a flag.",
        limits=(
            "`delta=0` equals `local-sgd:sync_every=1`.",
            (
                "With the authors' `delta=0.3` a flag is raised only where the loss jumps. A smaller "
                "`delta` averages more often."
            ),
            "It saves bytes and no latency: every step waits for the flags.",
        ),
    )
    consistency: ClassVar[Consistency] = "local"
    updates_on: ClassVar[UpdatesOn] = "worker"
    visible_gradient: ClassVar[GradientSeen] = "local"
    clips: ClassVar[Clips] = "own"
    averages_buffers: ClassVar[bool] = True
    rounds: ClassVar[Rounds] = Rounds(agree_every=1)
    """Active workers are exchanged without a wait: workers only wait for the flag."""

    delta: float = 0.3
    window: int = 25
    smoothing: float = 0.01

    averages: ClassVar[Options] = PLAIN

    def __post_init__(self) -> None:
        if not self.delta >= 0:
            raise self._wrong("delta", "0 (each step) or more")
        if self.window < 1:
            raise self._wrong("window", "1 or more steps")
        if not 0 <= self.smoothing < 1:
            raise self._wrong(
                "smoothing", "0 (all steps alike) or more, and less than 1"
            )

    def _wrong(self, key: str, expected: str) -> UsageError:
        return UsageError(f"sel-sync:{key}={getattr(self, key)}: expected {expected}")

    @property
    def consolidates_together(self) -> bool:
        """Without an anchor the result is the mean of all models."""
        return not self.averages.differences

    def compressed_by(self, compressor: str) -> SelSync:
        """Return the method with averages of parameter differences, since only these are compressed."""
        changed = copy.copy(self)
        object.__setattr__(changed, "averages", ANCHORED)
        return changed

    def start(self, run: Run) -> SelSyncWorker:
        return SelSyncWorker(run, self)


class SelSyncWorker(LocalUpdatesWorker):
    """Runs one worker: it raises a flag when gradients change, and all average if any has raised one."""

    def __init__(self, run: Run, method: SelSync) -> None:
        super().__init__(run, method.averages)
        self.method = method
        self.norms: list[float] = []
        """Of this worker's last gradients, oldest first."""
        self.changes: list[float] = []
        """The paper's d of the last steps, oldest first."""
        self.steps = self.means = 0
        """How many there were."""

    # ---- steps ----

    @torch.no_grad()
    def after_update(self) -> None:
        run = self.run
        raised = False
        if run.active and not run.step_pending:
            self._count()
            raised = self._raises(norm_of(run.parameters))
        flag = torch.tensor([float(raised)], device=run.parameters[0].device)
        run.comm.all_reduce(flag, "max").wait()
        self.steps += 1
        if flag.item():
            self.means += 1
            self._apply(self._send(0, since=self.fragments[0].since))

    def _raises(self, norm: float) -> bool:
        """Return whether this worker raises its flag after a gradient of this norm."""
        if not math.isfinite(norm):
            return True
        window = self.method.window
        is_first, before = not self.norms, self._mean(self.norms)  # N(t-1)
        self.norms = [*self.norms, norm][-window:]
        now = self._mean(self.norms)
        if not is_first:
            if not before and now:
                return True  # from nothing, whatever it is relative to that
            change = abs(now - before) / (before or 1.0)
            self.changes = [*self.changes, change][-window:]
        full = len(self.norms) == window
        return not (full and self._mean(self.changes) < self.method.delta)

    def _mean(self, values: list[float]) -> float:
        """Return the EWMA of *values*, oldest first; 0 of none."""
        weights = [(1 - self.method.smoothing) ** age for age in range(len(values))]
        pairs = zip(values, reversed(weights), strict=True)
        return math.fsum(v * w for v, w in pairs) / (math.fsum(weights) or 1.0)

    # ---- the end, and restarts ----

    def finish(self) -> None:
        super().finish()
        if self.steps:
            self.run.report(
                f"sel-sync: parameters were averaged in {self.means} of {self.steps} steps"
            )

    def save_state(self) -> dict[str, Any]:
        return super().save_state() | {
            "norms": self.norms,
            "changes": self.changes,
            "counts": [self.steps, self.means],
        }

    def load_state(self, saved: dict[str, Any]) -> None:
        super().load_state(saved)
        self.norms, self.changes = list(saved["norms"]), list(saved["changes"])
        self.steps, self.means = saved["counts"]

    def redistribute_state(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Give all workers the norms of the first: gradients are about as large.

        All go on from one model.
        """
        return super().redistribute_state(parts)


def norm_of(parameters: Iterable[torch.nn.Parameter]) -> float:
    """Return the sum of the norms of all gradients, tensor by tensor."""
    norms = [
        torch.linalg.vector_norm(p.grad.detach(), dtype=_wide(p.grad)).double()
        for p in parameters
        if p.grad is not None
    ]
    return float(torch.stack(norms).sum()) if norms else 0.0


def _wide(gradient: torch.Tensor) -> torch.dtype | None:
    """Half of the bits would not hold a sum of squares."""
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half else None
