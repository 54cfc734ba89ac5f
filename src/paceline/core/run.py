"""A method's view of a training: one class for each kind of `Run`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.averages import Averages
from paceline.core.context import TrainingContext
from paceline.core.step import StepDriver
from paceline.errors import UsageError
from paceline.interfaces import Bucket, Message
from paceline.optim.partitioned import (
    PartitionedOptimizer,
    split_pieces,
)
from paceline.parameter_server.client.remote_model import RemoteModel


class WorkerRun:
    """Implements `Run`."""

    def __init__(
        self, context: TrainingContext, averages: Averages, driver: StepDriver
    ) -> None:
        self._context, self._averages, self._driver = context, averages, driver
        self.comm, self.stopwatch = context.comm, context.stopwatch
        self.cluster = context.runtime.cluster
        self.parameters = [parameter for _, parameter in context.parameters]
        updates = context.method.updates_on != "server"
        self.optimizer = context.optimizer if updates else None
        own = context.settings.buffers != "local"
        self.own_buffers = list(context.model.buffers()) if own else []
        self.mean, self.average = averages.mean, averages.average
        self.scatter_mean = averages.scatter_mean
        self.report, self.broadcast_model = context.report, driver.broadcast_model
        self.set_period = context.runtime.recorder.set_period

    @property
    def step(self) -> int:
        return self._context.step

    @property
    def is_round(self) -> bool:
        return self._context.rounds.is_round(self._context.step)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._context.buckets

    @property
    def messages(self) -> Sequence[Message] | None:
        return self._driver.messages(whole_buckets=self._averages.compresses)

    @property
    def active(self) -> bool:
        return self._context.workers.active

    @property
    def weight(self) -> float:
        return self._context.workers.weight

    @property
    def participants(self) -> Sequence[int]:
        return self._context.workers.participants

    @property
    def step_pending(self) -> bool:
        return self._context.workers.step_pending

    @property
    def loss(self) -> float | None:
        return self._context.runtime.recorder.metrics.get("loss")

    def participate_until_all_finish(self) -> int | None:
        workers = self._context.workers
        if not self._context.rounds.every:
            raise UsageError(
                "participate_until_all_finish with Rounds(every=0): workers that communicate "
                "only through servers have no rounds, and none waits for one that is out of "
                "data. Leave the call out"
            )
        last = workers.participants
        while workers.anyone_active:
            last = workers.participants
            self._driver.shadow_step()
        equal = [rank for rank in last if rank not in workers.left_before_step] or last
        return equal[0] if len(equal) < self.comm.size else None


class UpdatingWorkerRun(WorkerRun):
    """Implements `UpdatingRun`."""

    optimizer: torch.optim.Optimizer

    def __init__(
        self, context: TrainingContext, averages: Averages, driver: StepDriver
    ) -> None:
        super().__init__(context, averages, driver)
        if context.optimizer is None:
            raise UsageError(
                f"method {context.method.name!r} applies the update itself, and there is no "
                "optimizer: expected one. Pass it to distribute"
            )
        self.updater: PartitionedOptimizer | None = None

    def clip(self, gradients: Sequence[torch.Tensor]) -> None:
        self._driver.clip_mean(gradients)

    def partition_optimizer(self, most_bytes: int) -> PartitionedOptimizer:
        pieces = split_pieces(self.optimizer, most_bytes)
        self.updater = PartitionedOptimizer(self.optimizer, pieces)
        return self.updater


class ServedRun(WorkerRun):
    """Implements `ServerRun`. *remote*: the parameters on their servers."""

    def __init__(
        self,
        context: TrainingContext,
        averages: Averages,
        driver: StepDriver,
        remote: RemoteModel,
    ) -> None:
        super().__init__(context, averages, driver)
        self.remote = remote


def make_run(
    context: TrainingContext,
    averages: Averages,
    driver: StepDriver,
    remote: RemoteModel | None,
) -> WorkerRun:
    """Make the kind of `Run` that the method needs."""
    if remote is not None:
        return ServedRun(context, averages, driver, remote)
    if context.method.updates_on == "method":
        return UpdatingWorkerRun(context, averages, driver)
    return WorkerRun(context, averages, driver)
