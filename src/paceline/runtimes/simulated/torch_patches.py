"""What torch and Python do per process, bent so that scripts run unmodified as threads.

Every patch is made when a simulation starts and undone when it ends.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.runtimes.simulated.process_group import BACKEND
from paceline.runtimes.spawn_check import STARTERS, refuse


@contextmanager
def patched_process(start_group: Callable[..., None]) -> Iterator[None]:
    """Within it, process-wide calls of worker threads mean the worker. *start_group*:
    `Simulation.init_process_group`."""
    with ExitStack() as stack:
        patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (dist, "init_process_group", _init_process_group(start_group)),
            (dist, "new_group", _new_group),
            (dist, "monitored_barrier", _monitored_barrier),
            (torch.nn.parallel.DistributedDataParallel, "__init__", _refuse_ddp),
            (DataLoader, "__init__", _data_loader_init),
            (signal, "signal", _refuse_signal),
            *((torch.multiprocessing, name, _refuse_spawn) for name in STARTERS),
        )
        for target, name, replacement in patches:
            original = getattr(target, name)
            stack.callback(setattr, target, name, original)
            setattr(target, name, replacement_of(replacement, original))
        yield


def replacement_of(replacement: Callable[..., Any], original: Any) -> Any:
    """A function that calls *replacement* with *original* first."""

    def patched(*arguments: Any, **keywords: Any) -> Any:
        return replacement(original, *arguments, **keywords)

    patched.__name__ = getattr(original, "__name__", "patched")
    patched.__doc__ = getattr(original, "__doc__", None)
    return patched


def _init_process_group(start_group: Callable[..., None]) -> Callable[..., None]:
    def init_process_group(
        original: Callable[..., None],
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        **others: Any,
    ) -> None:
        hook = sys.excepthook
        start_group(original, rank=rank, world_size=world_size, timeout=timeout)
        sys.excepthook = hook  # torch wraps it, once per worker

    return init_process_group


def _new_group(
    original: Callable[..., Any],
    ranks: Any = None,
    timeout: Any = None,
    backend: str | None = None,
    pg_options: Any = None,
    **others: Any,
) -> Any:
    return original(ranks, timeout, BACKEND, None, **others)


def _monitored_barrier(
    original: Any, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    dist.barrier(group)  # the clock itself names who is missing


def _refuse_ddp(original: Any, *arguments: Any, **keywords: Any) -> None:
    raise UsageError(
        "DistributedDataParallel cannot run in the simulated runtime: its C++ reducer waits "
        "where the virtual clock cannot see it. Leave the model unwrapped and use "
        "optimizer = paceline.distribute(model, optimizer)"
    )


def _data_loader_init(
    original: Any, self: Any, *arguments: Any, **keywords: Any
) -> None:
    positional = list(arguments)
    workers = positional[5] if len(positional) > 5 else keywords.get("num_workers", 0)
    if workers:
        warnings.warn(
            f"DataLoader(num_workers={workers}) loads in the worker itself in the "
            "simulated runtime",
            stacklevel=3,
        )
        if len(positional) > 5:
            positional[5] = 0
        for key in ("num_workers", "prefetch_factor", "persistent_workers"):
            keywords.pop(key, None)
        for key in ("timeout", "multiprocessing_context"):
            keywords.pop(key, None)
    original(self, *positional, **keywords)


def _refuse_spawn(
    original: Any, function: Any, *arguments: Any, **keywords: Any
) -> None:
    refuse(function)


def _refuse_signal(original: Any, number: Any, handler: Any) -> Any:
    raise UsageError(
        "signal handlers are per process, and all simulated workers share one: install "
        "them only where paceline.runtime_name() is not 'simulated'"
    )
