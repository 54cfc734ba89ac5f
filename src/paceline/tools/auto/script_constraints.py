"""Detects script operations between two steps that bsp allows and other methods do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.optimizer import ActiveTraining
from paceline.core.settings import Settings
from paceline.core.training import Training
from paceline.interfaces import Method
from paceline.interfaces.buckets import Bucket, stamps


class ScriptConstraints:
    """Observes each training whose ``.grad`` holds means after the backward pass.

    Attributes:
        writes: The script writes into gradients between ``backward()`` and ``step()``, for example clips.
        passes_again: It runs several backward passes before ``step()``, without `no_sync`.
        passes_alone: It runs two backward passes without calling the model in between.
    """

    def __init__(self, active: ActiveTraining) -> None:
        self._active = active
        self.writes = self.passes_again = self.passes_alone = False
        self._training: Training | None = None
        self._buckets: Sequence[Bucket] = ()
        self._stamps: list[int] = []
        self._forward_since = self._delivered = False

    def watch(self, training: Training, method: Method) -> None:
        """Observe a training by *method*, which has begun."""
        waits_in_forward = getattr(method, "waits_in_forward", False)
        self._delivered = False
        self._training = None
        if method.visible_gradient == "mean" and not waits_in_forward:
            self._training = training
            training.context.listeners.add(self)

    def reason_against(self, method: Method, settings: Settings) -> str:
        """Why this worker's script does not allow *method*; else an empty string."""
        scales = self._active.uses_grad_scaler
        seen = method.visible_gradient
        waits_in_forward = getattr(method, "waits_in_forward", False)
        clips_own = method.clips == "own" and settings.clip_norm < math.inf
        if (self.writes or scales) and (seen == "sent" or clips_own):
            return (
                "the script changes gradients between backward() and step() (it clips, or has a "
                f"GradScaler), and {method.name} has sent them by then. Clip with "
                "distribute(clip_norm=...), and train in bfloat16 without a scaler"
            )
        if scales and method.rounds.models_may_differ:
            return (
                f"the script has a GradScaler, whose scale would differ between workers under "
                f"{method.name}. Train in bfloat16 without a scaler"
            )
        if self.passes_again and seen == "sent":
            return (
                f"the script has several backward passes before step(), and {method.name} sends "
                "each: run all but the last under optimizer.no_sync()"
            )
        if self.passes_alone and waits_in_forward:
            return (
                "the script has two backward passes without calling the model in between, and "
                f"under {method.name} averages of the first are not there yet. Add the losses up"
            )
        return ""

    # ---- observed events ----

    def forward(self, samples: int | None, training: bool) -> None:
        """Record a call of the model."""
        self._forward_since = self._forward_since or training

    def means_are_there(self) -> None:
        """Record the end of a backward pass."""
        if self._training is None:
            return
        self.passes_again = self.passes_again or self._delivered
        self.passes_alone = self.passes_alone or (
            self._delivered and not self._forward_since
        )
        self._delivered, self._forward_since = True, False
        self._buckets = self._training.context.buckets
        self._stamps = stamps([bucket.buffer for bucket in self._buckets])

    def step_is_called(self) -> None:
        """Record that the script has called ``step()``."""
        if self._training is None or not self._delivered or self.writes:
            return
        buckets = self._buckets
        if buckets is not self._training.context.buckets:
            return  # The buckets were replaced, so gradients have moved.
        replaced = any(
            parameter.grad is not None and parameter.grad is not view
            for bucket in buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        )
        self.writes = replaced or self._stamps != stamps(
            [bucket.buffer for bucket in buckets]
        )

    def step_ended(self) -> None:
        """Record the end of a step."""
        self._delivered = False
