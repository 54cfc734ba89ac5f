"""Lightning: ``Trainer(strategy="paceline")``, or ``PacelineStrategy(method="osp")``.

It is Lightning's DDP strategy without DDP. Processes, barriers, metrics, samplers and checkpoints are Lightning's;
gradients are handled by `distribute`. Importing this module registers ``"paceline"`` and, for each method,
``"paceline_METHOD"`` with Lightning.

Lightning's checkpoints do not contain a method's own state (error feedback, rounds): it starts anew after a load.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from paceline.integrations.fabric import (
    LaunchedWorkers,
    is_simulated,
    take_lightning_settings,
)

from lightning.fabric.utilities.seed import reset_seed  # isort: skip
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from paceline import methods
from paceline.api import init
from paceline.core.distribute import distribute
from paceline.core.optimizer import DistributedOptimizer
from paceline.integrations.common import (
    accumulating,
    check_chosen,
    check_plain,
    copied,
    owner_of,
)


class PacelineStrategy(LaunchedWorkers, DDPStrategy):
    """Trains a LightningModule with a method of paceline.

    *method* and *settings* are arguments of `distribute`: ``PacelineStrategy("osp")``,
    ``PacelineStrategy(compression="int8", clip_norm=1.0)``. Arguments of Lightning's own strategies
    (``accelerator``, ``parallel_devices``, ``process_group_backend`` ...) go to Lightning. Raises `UsageError` for
    unknown settings. Under ``paceline run``, ``simulate`` and ``emulate``, torchrun and Slurm the launched
    workers train; otherwise Lightning starts ``devices`` of them.

    ``gradient_clip_val`` works if ``.grad`` holds the mean (bsp and similar methods). Other methods refuse it with
    an error, and need ``clip_norm`` here. With several optimizers each needs a submodule of its own.
    """

    strategy_name = "paceline"
    model: Any
    optimizers: Any

    def __init__(self, method: str | None = None, **settings: Any) -> None:
        super().__init__(**take_lightning_settings(settings))
        self._settings = check_chosen({"method": method, **settings})
        self._looking = ExitStack()

    # ---- setup ----

    def setup_distributed(self) -> None:
        """Connect to the other workers."""
        if not self.is_launched:
            super().setup_distributed()
            return
        reset_seed()
        init()
        self.set_world_ranks()

    def setup(self, trainer: Trainer) -> None:
        connector = trainer._accelerator_connector
        self.shards_loaders = connector.use_distributed_sampler and is_simulated()
        if self.shards_loaders:
            connector.use_distributed_sampler = False
        super().setup(trainer)

    # ---- training ----

    def configure_ddp(self) -> None:
        """Wrap nothing; training steps go through the module's call, which runs the hooks."""
        assert isinstance(self.model, LightningModule)
        self.model = _Called(self.model)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make each optimizer a distributed one."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        for one in self.optimizers:
            check_plain(module, one, type(module).__name__)
        several = len(self.optimizers) > 1
        self.optimizers = [
            distribute(
                owner_of(one, module) if several else module, one, **self._settings
            )
            for one in self.optimizers
        ]

    @property
    def _ours(self) -> list[DistributedOptimizer]:
        return [o for o in self.optimizers if isinstance(o, DistributedOptimizer)]

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Only accumulate gradients in backward passes inside this context."""
        return accumulating(self._ours)

    # ---- evaluation and checkpoints ----

    def on_validation_start(self) -> None:
        """Validate with the method's documented result."""
        self._looking.close()
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            for optimizer in self._ours:
                self._looking.enter_context(optimizer.consolidated())

    def on_validation_end(self) -> None:
        self._looking.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The method's documented result. Collective, as everything that makes checkpoints."""
        with ExitStack() as stack:
            for optimizer in self._ours:
                stack.enter_context(optimizer.consolidated())
            return copied(super().lightning_module_state_dict())

    # ---- end of training ----

    def on_train_end(self) -> None:
        """End together with all workers, with equal models."""
        self._looking.close()
        for optimizer in self._ours:
            optimizer.finish()

    def on_exception(self, exception: BaseException) -> None:
        """Restore each worker's own model, without communication."""
        self._looking.close()
        super().on_exception(exception)

    def teardown(self) -> None:
        if isinstance(self.model, _Called):
            self.model = self.lightning_module
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``"paceline"``, and ``"paceline_METHOD"`` for each method."""
        strategy_registry.register("paceline", cls, description="paceline's bsp")
        for name in methods.METHODS:
            strategy_registry.register(
                f"paceline_{name}", cls, description=f"paceline's {name}", method=name
            )


class _Called(torch.nn.Module):
    """Calls the module: Lightning sends training steps through its supposed wrapper."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)


_REGISTER: Callable[[Any], None] = PacelineStrategy.register_strategies
_REGISTER(StrategyRegistry)
