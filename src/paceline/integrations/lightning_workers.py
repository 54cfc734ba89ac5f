"""Which workers a strategy of Lightning's, or of Fabric's, has, and which samples are theirs."""

from __future__ import annotations

import os
from typing import Any

import torch

from paceline.integrations.versions import require

require("lightning", "2.5", "2.7", "lightning")

from lightning.fabric.plugins.environments import ClusterEnvironment  # noqa: E402

from paceline.api import init, rank, world_size  # noqa: E402
from paceline.integrations.lightning_loaders import dealt  # noqa: E402
from paceline.interfaces import current_runtime  # noqa: E402
from paceline.runtimes import launchers  # noqa: E402

_LIGHTNINGS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision_plugin", "precision", "process_group_backend", "timeout"),
    "start_method",
)
"""What Lightning gives its own strategies, and users may."""


class PacelineEnvironment(ClusterEnvironment):
    """The workers that torchrun, Slurm, MPI or paceline itself has started: what Lightning is told
    of devices and nodes does not matter then."""

    @staticmethod
    def detect() -> bool:
        """Whether this process is one of several workers, by whoever launched it."""
        return current_runtime() is not None or launchers.find(os.environ) is not None

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        place = launchers.find(os.environ)
        return "127.0.0.1" if place is None else place.master or "127.0.0.1"

    @property
    def main_port(self) -> int:
        place = launchers.find(os.environ)
        return 0 if place is None else place.port

    def world_size(self) -> int:
        init()
        return world_size()

    def set_world_size(self, size: int) -> None:
        """The launcher has said it."""

    def global_rank(self) -> int:
        init()
        return rank()

    def set_global_rank(self, rank: int) -> None:
        """The launcher has said it."""

    def local_rank(self) -> int:
        place = launchers.find(os.environ)
        return 0 if place is None else place.local_rank

    def node_rank(self) -> int:
        place = launchers.find(os.environ)
        return self.global_rank() if place is None else place.node


def is_simulated() -> bool:
    """Whether this worker is a thread in virtual time."""
    runtime = current_runtime()
    return runtime is not None and runtime.name == "simulated"


def take_lightnings(settings: dict[str, Any]) -> dict[str, Any]:
    """What of *settings* is Lightning's, taken out of them; with the workers' environment, where
    somebody has started these."""
    theirs = {name: settings.pop(name) for name in _LIGHTNINGS if name in settings}
    if not theirs.get("cluster_environment") and PacelineEnvironment.detect():
        theirs["cluster_environment"] = PacelineEnvironment()
    return theirs


class OfLaunched:
    """The part of a strategy that knows its workers; stands before Lightning's class."""

    cluster_environment: Any
    parallel_devices: Any
    world_size: int
    global_rank: int
    local_rank: int
    deals = False
    """Whether samples are dealt out here, and not by Lightning."""

    @property
    def is_launched(self) -> bool:
        """Whether workers were started before Lightning looked."""
        return isinstance(self.cluster_environment, PacelineEnvironment)

    @property
    def root_device(self) -> torch.device:
        """This worker's; workers of one machine share its devices where it has too few."""
        devices = self.parallel_devices
        assert devices is not None
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """This worker's share of the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def process_dataloader(self, dataloader: object) -> object:
        """In virtual time workers are threads: Lightning, which patches loaders' classes to give
        them other samplers, would patch them under one another's hands."""
        if not self.deals:
            return dataloader
        return dealt(dataloader, self.world_size, self.global_rank)
