"""What a method sees of a training: one class for each kind of `Run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.buckets import Bucket
from paceline.cluster import Cluster
from paceline.core.averages import Means
from paceline.core.presence import Presence
from paceline.errors import UsageError
from paceline.interfaces import Comm, Message, Method, Rounds, Stopwatch
from paceline.parameter_server.client.remote_model import RemoteParameters
from paceline.parameter_server.optim.partitioned import TorchUpdater, split_pieces


class WorkerRun:
    """The `Run`. *buckets* gives those of now, *metric* what the script has logged under a
    name; *company* does one step without data, *broadcast_model* takes a rank's."""

    def __init__(
        self,
        comm: Comm,
        rounds: Rounds,
        presence: Presence,
        means: Means,
        parameters: Sequence[torch.nn.Parameter],
        stopwatch: Stopwatch,
        say: Callable[[str], None],
        set_period: Callable[[int], None],
        buckets: Callable[[], Sequence[Bucket]],
        metric: Callable[[str], float | None],
        company: Callable[[], None],
        broadcast_model: Callable[[int], None],
        optimizer: torch.optim.Optimizer | None,
        own_buffers: Sequence[torch.Tensor],
        cluster: Cluster | None,
        sending: Callable[[], Sequence[Message] | None],
    ) -> None:
        self.comm, self.parameters = comm, parameters
        self.optimizer, self.own_buffers, self.cluster = optimizer, own_buffers, cluster
        self.stopwatch, self.broadcast_model = stopwatch, broadcast_model
        self.say, self.set_period = say, set_period
        self.mean, self.average = means.mean, means.average
        self.scatter_mean = means.scatter_mean
        self._rhythm, self._presence, self._buckets = rounds, presence, buckets
        self._metric, self._company, self._sending = metric, company, sending
        self.step = 0

    @property
    def meets(self) -> bool:
        return self._rhythm.meets(self.step)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets()

    @property
    def sending(self) -> Sequence[Message] | None:
        return self._sending()

    @property
    def active(self) -> bool:
        return self._presence.active

    @property
    def weight(self) -> float:
        return self._presence.weight

    @property
    def participants(self) -> Sequence[int]:
        return self._presence.participants

    @property
    def step_is_due(self) -> bool:
        return self._presence.step_is_due

    @property
    def loss(self) -> float | None:
        return self._metric("loss")

    def participate_until_all_finish(self) -> int | None:
        presence = self._presence
        if not self._rhythm.every:
            raise UsageError(
                "participate_until_all_finish with Rounds(every=0): workers that meet at "
                "servers alone have no rounds, and nobody waits for one that is out of data"
            )
        last = presence.participants
        while presence.somebody_trains:
            last = presence.participants
            self._company()
        equal = [rank for rank in last if rank not in presence.behind] or last
        return equal[0] if len(equal) < self.comm.size else None


class UpdatingWorkerRun(WorkerRun):
    """The `UpdatingRun`; *clip_mean* scales mean gradients where these are clipped."""

    optimizer: torch.optim.Optimizer

    def __init__(
        self, clip_mean: Callable[[Sequence[torch.Tensor]], None], *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self.clip = clip_mean
        self.updater: TorchUpdater | None = None

    def partition_optimizer(self, most_bytes: int) -> TorchUpdater:
        pieces = split_pieces(self.optimizer, most_bytes)
        self.updater = TorchUpdater(self.optimizer, pieces)
        return self.updater


class ServedRun(WorkerRun):
    """The `ServerRun`."""

    def __init__(self, remote: RemoteParameters, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.remote = remote


def run_for(
    method: Method,
    has_optimizer: bool,
    clip_mean: Callable[[Sequence[torch.Tensor]], None],
    remote: RemoteParameters | None,
    *arguments: Any,
) -> WorkerRun:
    """The `Run` of a method's kind; *arguments* are those of `WorkerRun`."""
    if method.updates_on == "server":
        assert remote is not None
        return ServedRun(remote, *arguments)
    if method.updates_on == "method":
        if not has_optimizer:
            raise UsageError(
                f"method {method.name!r} updates, and there is no optimizer"
            )
        return UpdatingWorkerRun(clip_mean, *arguments)
    return WorkerRun(*arguments)
