"""Accelerate: ``model, optimizer, loader = prepare(accelerator, model, optimizer, loader, method=...)``.

Accelerate wraps each model that it prepares for training in DistributedDataParallel, but not models prepared for
evaluation: those only get device and autocast. So paceline prepares the model for evaluation, and replaces the
``no_sync`` that accumulation calls. All of this is Accelerate's public API. In virtual time workers are threads,
and each needs the state that Accelerate keeps per process: `give_threads_their_state` uses private names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from paceline.integrations import common

common.require("accelerate", "1.10", "2")

# Check before Accelerator() is made: it would wait for workers that no longer exist.
common.check_meets_all("Accelerate", os.environ)

from accelerate import Accelerator  # noqa: E402
from accelerate.state import (  # noqa: E402
    AcceleratorState,
    GradientState,
    PartialState,
    ThreadLocalSharedDict,
)

from paceline.api import init, world_size  # noqa: E402
from paceline.core.distribute import distribute  # noqa: E402
from paceline.core.optimizer import DistributedOptimizer  # noqa: E402
from paceline.errors import UsageError  # noqa: E402
from paceline.interfaces import current_runtime  # noqa: E402


def prepare(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *others: Any,
    **settings: Any,
) -> tuple[Any, ...]:
    """Prepare a model as ``accelerator.prepare(model, optimizer, *others)`` does, but train it by paceline.

    *others* are loaders and schedulers; *settings* are arguments of `distribute`. Clip with ``clip_norm``, or as
    usual if ``.grad`` holds the mean. ``accelerator.save_state`` saves the method's documented result. Call
    ``finish()`` of the optimizer's ``optimizer`` when training has ended; otherwise it is called when the script
    ends.

    Raises:
        UsageError: A setting is unknown, the model or optimizer is already wrapped or sharded, or Accelerate
            and paceline see different workers.
    """
    common.check_plain(model, optimizer, "prepare(accelerator, model, optimizer)")
    check_same_workers(accelerator)
    settings = common.check_chosen(settings)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    wrapped = hand_over(model, optimizer, settings)
    accelerator.register_save_state_pre_hook(partial(_show_result, model, wrapped))
    prepared = accelerator.prepare(wrapped, *others)
    return (model, *(prepared if others else (prepared,)))


def hand_over(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> DistributedOptimizer:
    """Call `distribute`, and let accumulation use the optimizer instead of DistributedDataParallel."""
    wrapped = distribute(model, optimizer, **settings)
    model.no_sync = _NoSync(wrapped.no_sync)  # type: ignore[assignment]
    return wrapped


class _NoSync:
    """The model's ``no_sync``, which accumulation calls. In copies of the model (such as averaged weights) and
    pickles it does nothing."""

    def __init__(
        self, no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._no_sync = no_sync

    def __call__(self) -> AbstractContextManager[None]:
        return self._no_sync()

    def __reduce__(self) -> tuple[type[_NoSync], tuple[()]]:
        return _NoSync, ()


def _show_result(
    model: torch.nn.Module,
    optimizer: DistributedOptimizer,
    models: list[torch.nn.Module],
    weights: list[dict[str, Any]],
    folder: str,
) -> None:
    """Let *model* save the method's documented result. Collective, as `save_state` is."""
    for number, one in enumerate(models):
        if one is model:
            with optimizer.consolidated():
                weights[number] = common.copied(model.state_dict())


def check_same_workers(accelerator: Accelerator) -> None:
    """Raise `UsageError` unless Accelerate shards data for all workers, and each has a whole model."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    kind = "FSDP" if common.asks_for_fsdp() else accelerator.distributed_type.name
    common.check_not_sharded(kind, parallelism)
    init()
    if accelerator.num_processes != world_size():
        raise UsageError(
            f"Accelerate sees {accelerator.num_processes} processes, paceline "
            f"{world_size()}: each would train on the wrong share of the data. Start the "
            "script with torchrun, accelerate launch or paceline run (Accelerate knows no "
            "others), and call paceline.init() after Accelerator() or not at all"
        )


def give_threads_their_state() -> None:
    """Give each thread its own Accelerate state, as on TPUs: in virtual time workers are threads."""
    runtime = current_runtime()
    if runtime is None or not runtime.clock.is_virtual:
        return
    if PartialState._shared_state:
        raise UsageError(
            "in virtual time import paceline.integrations before Accelerator() and "
            "TrainingArguments(): workers are threads here, and each needs a state of its own "
            "from the start"
        )
    for cls in (PartialState, AcceleratorState, GradientState):
        if not isinstance(vars(cls)["_shared_state"], ThreadLocalSharedDict):
            cls._shared_state = ThreadLocalSharedDict()


give_threads_their_state()
