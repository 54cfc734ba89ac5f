"""The worker's half of methods whose server updates: push gradients, pull parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.interfaces import (
    ON_SERVERS,
    Bucket,
    Clips,
    Consistency,
    GradientSeen,
    Groups,
    PushedGradient,
    Rounds,
    ServerRun,
    UpdatesOn,
)


@dataclass(frozen=True, kw_only=True)
class PushPull:
    """Push each bucket's gradient to its servers, and receive the bucket's parameters in reply.

    The server's discipline decides when it replies.

    Attributes:
        overlap: Push each bucket during backward. If false, push after backward, as the papers do.
    """

    rounds: ClassVar[Rounds] = ON_SERVERS
    consistency: ClassVar[Consistency] = "asynchronous"
    updates_on: ClassVar[UpdatesOn] = "server"
    visible_gradient: ClassVar[GradientSeen] = "sent"
    compressible_pushes: ClassVar[bool] = True

    overlap: bool = True

    @property
    def clips(self) -> Clips:
        """Own, since a server applies gradients one by one, unless a method overrides this."""
        return "own"

    @property
    def coordinates(self) -> bool:
        """Whether server 0 decides for all: workers tell the others (`Discipline.on_decision`)."""
        return False

    def piece_bytes(self, total: int) -> int | None:
        """Whole buckets travel, so units need not be small."""
        return None

    def groups(self, workers: int) -> Groups | None:
        """Return no groups: all servers share one model."""
        return None

    def start(self, run: ServerRun) -> PushPullWorker:
        return PushPullWorker(run, self)


class PushPullWorker:
    """Runs one worker of a `PushPull` method: pushes each bucket, then waits for the replies."""

    def __init__(self, run: ServerRun, method: PushPull) -> None:
        """Create the worker, and join the training. All ranks must call this together."""
        self.run, self.method = run, method
        self.step = run.remote.join()
        """The number of this worker's next step."""

    def bucket_ready(self, bucket: Bucket) -> None:
        if self.method.overlap:
            self._push(bucket)

    def backward_ended(self) -> None:
        if not self.method.overlap:
            for bucket in self.run.buckets:
                self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        run = self.run
        run.remote.push(bucket, self.step, run.weight, report=self._report(bucket))

    def _report(self, bucket: Bucket) -> bytes:
        """Return the bytes for the method's servers with the push of *bucket*; see `Discipline.decode_report`."""
        return b""

    def after_update(self) -> None:
        self.step = self.run.remote.wait()

    def finish(self) -> None:
        self.run.remote.leave()

    def consolidate(self) -> Callable[[], None]:
        return self.run.remote.consolidate()


def without_gradient(push: PushedGradient) -> PushedGradient:
    """Return the same push for a later reply, without its gradient, which was used: this frees memory."""
    return push._replace(gradient=torch.empty(0))
