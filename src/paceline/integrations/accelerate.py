"""Accelerate: ``model, optimizer, loader = prepare(accelerator, model, optimizer, loader, method=...)``.

Accelerate wraps each model that it prepares for training in DistributedDataParallel. A model that it prepares
for evaluation it gives its device and its autocast, and leaves alone; its ``no_sync``
is what accumulation asks for. All of this is Accelerate's public API.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.integrations.versions import require

require("accelerate", "1.10", "2", "transformers")

from accelerate import Accelerator  # noqa: E402

from paceline.api import init, world_size  # noqa: E402
from paceline.distributing import distribute  # noqa: E402
from paceline.errors import UsageError  # noqa: E402
from paceline.integrations.accelerate_private import states_of_threads  # noqa: E402
from paceline.integrations.chosen import check_chosen  # noqa: E402
from paceline.optimizer import DistributedOptimizer  # noqa: E402


def prepare(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *others: Any,
    **settings: Any,
) -> tuple[Any, ...]:
    """What ``accelerator.prepare(model, optimizer, *others)`` gives, but trained by paceline.

    *others* are loaders and schedulers; *settings* what `distribute` takes. Raises
    `UsageError` for others, and where Accelerate and paceline do not see the same workers. Clip with
    ``clip_norm``, or, where ``.grad`` holds the mean, as ever. Call ``finish()`` of the
    optimizer's ``optimizer`` when training has ended; else it is done when the script ends.
    """
    check_same_workers(accelerator)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    wrapped = hand_over(model, optimizer, check_chosen(settings))
    prepared = accelerator.prepare(wrapped, *others)
    return (model, *(prepared if others else (prepared,)))


def hand_over(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> DistributedOptimizer:
    """`distribute`, and accumulation asks it instead of DistributedDataParallel."""
    wrapped = distribute(model, optimizer, **settings)
    model.no_sync = wrapped.no_sync  # type: ignore[assignment]
    return wrapped


def check_same_workers(accelerator: Accelerator) -> None:
    """Raise `UsageError` unless Accelerate deals data out to as many as train."""
    init()
    if accelerator.num_processes != world_size():
        raise UsageError(
            f"Accelerate sees {accelerator.num_processes} processes, paceline "
            f"{world_size()}: each would train on the wrong share of the data. Start the "
            "script with torchrun, accelerate launch or paceline run (Accelerate knows no "
            "others), and call paceline.init() after Accelerator() or not at all"
        )


states_of_threads()
