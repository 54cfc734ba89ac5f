"""Fabric: ``Fabric(strategy=FabricStrategy("osp"))``.

`FabricStrategy` is Fabric's DDP strategy without DDP; ``fabric.setup(model, optimizer)`` calls `distribute`.
`PacelineEnvironment` and `LaunchedWorkers` tell a strategy its workers and their samples; Lightning's strategy uses
them, too.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from paceline.integrations.common import require

require("lightning", "2.5", "2.7")

from lightning.fabric.plugins.environments import ClusterEnvironment  # noqa: E402
from lightning.fabric.strategies import DDPStrategy  # noqa: E402
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402

from paceline.api import init, rank, world_size  # noqa: E402
from paceline.core.distribute import distribute  # noqa: E402
from paceline.core.optimizer import DistributedOptimizer  # noqa: E402
from paceline.errors import UsageError  # noqa: E402
from paceline.integrations.common import (  # noqa: E402
    accumulating,
    check_chosen,
    check_plain,
    copied,
    owner_of,
    shard_loader,
)
from paceline.interfaces import current_runtime  # noqa: E402
from paceline.runtimes import launchers  # noqa: E402
from paceline.torch_internals import Uncopied  # noqa: E402

_LIGHTNING_SETTINGS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision_plugin", "precision", "process_group_backend", "timeout"),
    "start_method",
)
"""Settings of Lightning's own strategies, which users may give, too."""


class PacelineEnvironment(ClusterEnvironment):
    """The workers that torchrun, Slurm, MPI or paceline itself has started. Lightning's own settings for devices
    and nodes are then not used."""

    @staticmethod
    def detect() -> bool:
        """Whether this process is one of several launched workers."""
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
        """Do nothing: the launcher has set it."""

    def global_rank(self) -> int:
        init()
        return rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has set it."""

    def local_rank(self) -> int:
        place = launchers.find(os.environ)
        return 0 if place is None else place.local_rank

    def node_rank(self) -> int:
        place = launchers.find(os.environ)
        # If the node is unknown, only rank 0 counts as local rank 0.
        return self.global_rank() if place is None or place.node is None else place.node


def is_simulated() -> bool:
    """Whether this worker is a thread in virtual time."""
    runtime = current_runtime()
    return runtime is not None and runtime.clock.is_virtual


def take_lightning_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove Lightning's own settings from *settings* and return them, with the workers' environment if a launcher
    has started them."""
    theirs = {
        name: settings.pop(name) for name in _LIGHTNING_SETTINGS if name in settings
    }
    if not theirs.get("cluster_environment") and PacelineEnvironment.detect():
        theirs["cluster_environment"] = PacelineEnvironment()
    return theirs


class LaunchedWorkers:
    """Base class of a strategy that handles its workers; goes before Lightning's own class."""

    cluster_environment: Any
    parallel_devices: Any
    world_size: int
    global_rank: int
    local_rank: int
    shards_loaders = False
    """Whether paceline, and not Lightning, shards the loaders."""

    @property
    def is_launched(self) -> bool:
        """Whether workers were started before Lightning."""
        return isinstance(self.cluster_environment, PacelineEnvironment)

    @property
    def root_device(self) -> torch.device:
        """This worker's device; workers of one machine share devices if there are too few."""
        devices = self.parallel_devices
        assert devices is not None
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments of the sampler for this worker's part of the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def process_dataloader(self, dataloader: object) -> object:
        """Pass the loader on in virtual time: Lightning patches loaders' classes to change their samplers,
        and workers that are threads would patch them at the same time."""
        if not self.shards_loaders:
            return dataloader
        return shard_loader(dataloader, self.world_size, self.global_rank)


_Averaged = tuple[weakref.ref[torch.nn.Parameter], weakref.ref[DistributedOptimizer]]
"""A parameter, and the optimizer that averages its gradient."""


class FabricStrategy(LaunchedWorkers, DDPStrategy):
    """Trains with a method of paceline.

    *method* and *settings* are arguments of `distribute`, or Fabric's own (``process_group_backend`` ...).
    Raises `UsageError` for unknown settings. ``optimizer.finish()`` ends a training; otherwise it ends with the
    script. ``fabric.save`` saves the method's documented result, so every rank calls it.
    """

    def __init__(self, method: str | None = None, **settings: Any) -> None:
        super().__init__(**take_lightning_settings(settings))
        self._settings = check_chosen({"method": method, **settings})
        self._backward_sync_control = _NoSync(self)
        # Weak references: a script may train many models, and owns those that have ended.
        self._trained: list[
            tuple[weakref.ref[torch.nn.Module], weakref.ref[DistributedOptimizer]]
        ] = []
        self._averaged: dict[int, list[_Averaged]] = {}
        """By the parameter's id: a guard runs at each gradient, and needs a fast lookup."""
        self._sampler_is_asked_for = False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """The sampler's arguments; None if paceline shards loaders. Unless the script sets
        ``use_distributed_sampler=False``, Fabric calls this just before `process_dataloader`."""
        self._sampler_is_asked_for = True
        return None if is_simulated() else super().distributed_sampler_kwargs

    def process_dataloader(self, dataloader: object) -> object:
        """In virtual time shard the loader here, if the script wants that."""
        self.shards_loaders = is_simulated() and self._sampler_is_asked_for
        self._sampler_is_asked_for = False
        return super().process_dataloader(dataloader)

    def _setup_distributed(self) -> None:
        if self.is_launched:
            init()
            self._set_world_ranks()
        else:
            super()._setup_distributed()

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module unwrapped. Without an optimizer it may only be evaluated: its gradients would
        not be averaged."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and self.world_size > 1:
                parameter.register_post_accumulate_grad_hook(
                    Uncopied(partial(self._require_averaged, name))
                )
        return module

    def _require_averaged(self, name: str, parameter: torch.Tensor) -> None:
        found = self._averaged.get(id(parameter), ())
        if not any(p() is parameter and by() is not None for p, by in found):
            raise UsageError(
                f"{name!r} has a gradient that is not averaged: its model was set up without an "
                "optimizer. model, optimizer = fabric.setup(model, optimizer); or, where it is "
                "not to be trained, model.requires_grad_(False) before fabric.setup(model)"
            )

    def setup_module_and_optimizers(
        self,
        module: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *others: Any,
    ) -> tuple[Any, ...]:
        """Make each optimizer a distributed one."""
        for one in optimizers:
            check_plain(module, one, "fabric.setup(model, optimizer)")
        several = len(optimizers) > 1
        wrapped = [
            distribute(
                owner_of(one, module) if several else module, one, **self._settings
            )
            for one in optimizers
        ]
        self._trained = [
            (weakref.ref(model), weakref.ref(optimizer))
            for model, optimizer in [
                *self._there(),
                *((module, one) for one in wrapped),
            ]
        ]
        averaged: dict[int, list[_Averaged]] = defaultdict(list)
        for model, optimizer in self._there():
            for parameter in model.parameters():
                pair = weakref.ref(parameter), weakref.ref(optimizer)
                averaged[id(parameter)].append(pair)
        self._averaged = dict(averaged)
        return (module, wrapped, *others)

    def setup_optimizer(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.Optimizer:
        """Refuse: gradients of an unknown model would not be averaged."""
        raise UsageError(
            "fabric.setup_module and setup_optimizers apart: paceline needs both at once: "
            "model, optimizer = fabric.setup(model, optimizer)"
        )

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """The method's documented result. Collective."""
        with ExitStack() as stack:
            for optimizer in self.optimizers_of(module):
                stack.enter_context(optimizer.consolidated())
            return copied(super().get_module_state_dict(module))

    def optimizers_of(self, module: torch.nn.Module) -> list[DistributedOptimizer]:
        """The optimizers that train *module*."""
        return [optimizer for model, optimizer in self._there() if model is module]

    def _there(self) -> Iterator[tuple[torch.nn.Module, DistributedOptimizer]]:
        """Models in training, and ended ones that the script still holds."""
        for model, optimizer in self._trained:
            pair = model(), optimizer()
            if pair[0] is not None and pair[1] is not None:
                yield pair[0], pair[1]


class _NoSync(_BackwardSyncControl):
    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        """Only accumulate gradients in backward passes inside, if *enabled*."""
        optimizers = self._strategy.optimizers_of(module)
        return accumulating(optimizers) if enabled else nullcontext()
