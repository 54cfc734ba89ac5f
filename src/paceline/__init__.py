"""Data-parallel PyTorch training over slow, shared or uneven networks.

Example:
    A training loop for one worker becomes one for many by one line; ``torchrun`` or
    ``paceline run`` starts the workers::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, optimizer)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()

Packages stand in layers, and each imports only what is below it: docs/explanation/architecture.md
shows them.

Each public name is imported when it is first used, so that the command line can answer
before torch, which takes seconds, is there. No module has a public name's name: importing
it would put the module in the name's place.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.api import (
        init,
        log,
        now,
        on_step,
        pace,
        rank,
        report_to,
        runtime_name,
        steps,
        world_size,
    )
    from paceline.cluster.stand_in import StandIn, stand_in
    from paceline.cluster.workload import Workload
    from paceline.core.checkpoint import load, save
    from paceline.core.distribute import distribute
    from paceline.core.optimizer import DistributedOptimizer
    from paceline.core.sampler import Sampler
    from paceline.errors import PacelineError
    from paceline.methods.bsp import BSP

__version__ = "0.1.0"

__all__ = [
    "BSP",
    "DistributedOptimizer",
    "PacelineError",
    "Sampler",
    "StandIn",
    "Workload",
    "__version__",
    "distribute",
    "init",
    "load",
    "log",
    "now",
    "on_step",
    "pace",
    "rank",
    "report_to",
    "runtime_name",
    "save",
    "stand_in",
    "steps",
    "world_size",
]

_HOMES = {
    "api": (
        *("init", "log", "now", "on_step", "pace", "rank", "report_to"),
        *("steps", "runtime_name", "world_size"),
    ),
    "core.checkpoint": ("load", "save"),
    "core.distribute": ("distribute",),
    "errors": ("PacelineError",),
    "methods.bsp": ("BSP",),
    "cluster.workload": ("Workload",),
    "core.optimizer": ("DistributedOptimizer",),
    "core.sampler": ("Sampler",),
    "cluster.stand_in": ("StandIn", "stand_in"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if "PACELINE_LAUNCHER" in os.environ:
    from paceline.runtimes.processes import leave_interrupts_to_launcher

    leave_interrupts_to_launcher()

if "TORCHELASTIC_RUN_ID" in os.environ:
    # This process is a worker that a launcher has started. A script that goes on to start
    # workers itself hangs before it calls anything else of ours.
    from paceline.runtimes.spawn_check import refuse_spawn_from_now_on

    refuse_spawn_from_now_on()


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # an import leaves no garbage, and each search for it visits all of torch
    try:
        module = importlib.import_module(f"paceline.{home}")
    finally:
        if collects:
            gc.enable()
    value = getattr(module, name)
    globals()[name] = value  # from now on without asking
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
