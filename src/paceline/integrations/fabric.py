"""Fabric: ``Fabric(strategy=FabricStrategy("osp"))``.

It is Fabric's DDP strategy, without DDP; ``fabric.setup(model, optimizer)`` calls `distribute`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from paceline.integrations.lightning_workers import (
    OfLaunched,
    is_simulated,
    take_lightnings,
)

from lightning.fabric.strategies import DDPStrategy  # isort: skip
from lightning.fabric.strategies.strategy import _BackwardSyncControl

from paceline.api import init
from paceline.core.distribute import distribute
from paceline.core.optimizer import DistributedOptimizer
from paceline.errors import UsageError
from paceline.integrations.common import (
    accumulating,
    check_chosen,
    check_plain,
    copied,
    owner_of,
)
from paceline.torch_internals import Uncopied

_Averaged = tuple[weakref.ref[torch.nn.Parameter], weakref.ref[DistributedOptimizer]]
"""A parameter, and the optimizer that averages its gradient."""


class FabricStrategy(OfLaunched, DDPStrategy):
    """Trains under a method of paceline; *method* and *settings* are what `distribute` takes, or Fabric's
    own (``process_group_backend`` ...). Raises `UsageError` for what neither knows.

    ``optimizer.finish()`` ends a training; else it ends when the script does. ``fabric.save`` keeps the
    method's documented result, so every rank calls it.
    """

    def __init__(self, method: str | None = None, **settings: Any) -> None:
        super().__init__(**take_lightnings(settings))
        self._settings = check_chosen({"method": method, **settings})
        self._backward_sync_control = _NoSync(self)
        # Weakly: a script may train many, and what has ended is its own.
        self._trained: list[
            tuple[weakref.ref[torch.nn.Module], weakref.ref[DistributedOptimizer]]
        ] = []
        self._averaged: dict[int, list[_Averaged]] = {}
        """By the parameter's id: a guard runs at each gradient, and looks up just one."""
        self._sampler_is_asked_for = False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """This worker's share of the data; None where it is dealt out here. Fabric asks, where the script
        has not said ``use_distributed_sampler=False``, just before it calls `process_dataloader`."""
        self._sampler_is_asked_for = True
        return None if is_simulated() else super().distributed_sampler_kwargs

    def process_dataloader(self, dataloader: object) -> object:
        """In virtual time it is dealt out here, where a script wants that."""
        self.deals = is_simulated() and self._sampler_is_asked_for
        self._sampler_is_asked_for = False
        return super().process_dataloader(dataloader)

    def _setup_distributed(self) -> None:
        if self.is_launched:
            init()
            self._set_world_ranks()
        else:
            super()._setup_distributed()

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Nothing is wrapped. A model without an optimizer may be looked at, and not be trained: nobody
        would average its gradients."""
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
                f"{name!r} has a gradient, and nobody averages it: its model was set up without an "
                "optimizer. model, optimizer = fabric.setup(model, optimizer); or, where it is "
                "not to be trained, model.requires_grad_(False) before fabric.setup(model)"
            )

    def setup_module_and_optimizers(
        self,
        module: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *others: Any,
    ) -> tuple[Any, ...]:
        """Each optimizer becomes one that is in step with all other workers."""
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
        """Refused: gradients of a model that is not known are averaged by nobody."""
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
        """Those that train *module*."""
        return [optimizer for model, optimizer in self._there() if model is module]

    def _there(self) -> Iterator[tuple[torch.nn.Module, DistributedOptimizer]]:
        """What is trained, and what has ended and the script still holds."""
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
        """Backward passes within only accumulate, where *enabled*."""
        optimizers = self._strategy.optimizers_of(module)
        return accumulating(optimizers) if enabled else nullcontext()
