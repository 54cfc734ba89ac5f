"""Helpers of all integrations: versions, options, plain models, sharded loaders.

Importing this needs no trainer.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from paceline import spec
from paceline.core.distribute import distribute
from paceline.core.misuse import check_not_parallel
from paceline.core.optimizer import DistributedOptimizer
from paceline.core.settings import parse_method
from paceline.errors import UsageError, unknown
from paceline.interfaces import Method, current_runtime
from paceline.runtimes.real.server_process import SURVIVE_VARIABLE

_NOT_HERE = ("model", "optimizer", "sampler")
_SHARDING = {
    "FSDP": "fsdp_plugin=",
    "DEEPSPEED": "deepspeed_plugin=",
    "MEGATRON_LM": "megatron_lm_plugin=",
    "TP": "parallelism_config=",
}
"""Accelerate's names for sharded models, and how a user requests them."""
_SPREAD = ("tp", "cp", "sp", "dp_shard")
"""The same as fields of its ``ParallelismConfig``."""
_WRAPPING = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose optimizers are wrappers of a trainer."""


def require(package: str, first: str, before: str) -> None:
    """Raise `UsageError` unless *package* is installed, from version *first* on and below *before*."""
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UsageError(
            f"{package} is not installed: pip install '{package}>={first},<{before}'"
        ) from None
    if not _numbers(first) <= _numbers(found) < _numbers(before):
        raise UsageError(
            f"{package} {found}: this integration reaches into what {package} {first} and its "
            f"successors below {before} do, and may be silently wrong with others; install "
            f"one of these ('{package}>={first},<{before}')"
        )


def _numbers(text: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", text)
    return () if release is None else tuple(map(int, release.group().split(".")))


def check_chosen(settings: dict[str, Any]) -> dict[str, Any]:
    """Return *settings* if `distribute` knows them all; raises `UsageError` for others."""
    known = [
        name
        for name in inspect.signature(distribute).parameters
        if name not in _NOT_HERE
    ]
    for name in settings:
        if name not in known:
            raise UsageError(unknown("option", name, known))
    return settings


def shows_mean(method: str | Method | None) -> bool:
    """Whether ``.grad`` holds the mean under *method*, or under the command line's method. Not under ``auto``,
    which may change it."""
    runtime = current_runtime()
    requested = None if runtime is None else runtime.registry.options.method
    chosen = requested or method or "bsp"
    if isinstance(chosen, str):
        if spec.parse(chosen).name == "auto":
            return False
        chosen, _ = parse_method(chosen)
    return chosen.visible_gradient == "mean"


def check_plain(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, call: str
) -> None:
    """Raise `UsageError` if *model* or *optimizer*, given to *call*, is already wrapped or sharded."""
    try:
        check_not_parallel(model)
    except UsageError as error:
        raise UsageError(
            f"{call}: {error}. Take out the line before it that wraps or shards the model "
            "(DistributedDataParallel(model), FSDP(model), fully_shard(model), "
            "accelerator.prepare(model), from_pretrained(..., tp_plan=...))"
        ) from None
    if _is_wrapped_by_trainer(optimizer):
        raise UsageError(
            f"{call}: the optimizer is wrapped already ({type(optimizer).__name__}): take out "
            f"the line before it that prepares it; {call} does that itself"
        )


def _is_wrapped_by_trainer(optimizer: object) -> bool:
    """Whether a trainer wraps the optimizer. Other nested optimizers (Lookahead, SAM) do not count: `distribute`
    accepts them."""
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        return False
    packages = {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}
    return not packages.isdisjoint(_WRAPPING)


def asks_for_fsdp() -> bool:
    """Whether this process's Accelerator, or ``accelerate launch``, was told to shard models. Accelerate stores
    that in a variable, and silently ignores it on CPUs."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def check_not_sharded(kind: str, parallelism: object = None) -> None:
    """Raise `UsageError` if Accelerate's distribution type *kind*, or its configuration *parallelism*, spreads
    models or samples over workers."""
    if kind in _SHARDING:
        raise UsageError(
            f"the Accelerator shards models ({kind}), and paceline averages gradients of whole "
            f"models that every worker holds: leave {_SHARDING[kind]} out of Accelerator(), and "
            "what asks for it out of accelerate launch and its configuration"
        )
    for spread in _SPREAD:
        if getattr(parallelism, f"{spread}_enabled", False):
            raise UsageError(
                f"the Accelerator's ParallelismConfig spreads each model, or each sample, over "
                f"workers ({spread}_size), and paceline averages gradients of whole models, of "
                f"which every worker has its own samples: leave {spread}_size out"
            )


def check_meets_all(trainer: str, environment: Mapping[str, str]) -> None:
    """Raise `UsageError` in a job under ``--survive`` if the *trainer* needs a process group."""
    if environment.get(SURVIVE_VARIABLE) == "1":
        raise UsageError(
            f"{trainer} holds all workers together in one process group, which nobody comes back to "
            "after a death: leave --survive out, or train by Lightning, Fabric or a plain loop"
        )


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a module's *state*, with its metadata and type. Tensors that share memory, as tied
    weights do, also share it in the copy: savers that drop duplicates must still see it."""
    made: dict[tuple[object, ...], torch.Tensor] = {}

    def copy_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # Other kinds may have no memory of their own: all would have address 0.
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.numel():
            return value.detach().clone()
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in made:
            made[key] = value.detach().clone()
        return made[key]

    made_of_it = copy.copy(state)
    for name, value in state.items():
        made_of_it[name] = copy_of(value)
    return made_of_it


@contextmanager
def accumulating(optimizers: Iterable[DistributedOptimizer]) -> Iterator[None]:
    """Only accumulate gradients in backward passes inside this context."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.no_sync())
        yield


def owner_of(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> torch.nn.Module:
    """Return the smallest module within *model* that holds all parameters of *optimizer*.

    With several optimizers each has its own training, and needs a module whose trainable parameters are
    exactly its own. Raises `UsageError` if there is none.
    """
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    holding = [m for m in model.modules() if mine <= _ids(m.parameters())]
    if holding:
        smallest = min(holding, key=lambda m: len(_ids(m.parameters())))
        trainable = (p for p in smallest.parameters() if p.requires_grad)
        if _ids(trainable) <= mine:
            return smallest
    raise UsageError(
        f"several optimizers: the {type(optimizer).__name__} with {len(mine)} parameters "
        "trains a part of a module and leaves other parts of it to another one; paceline trains "
        "module by module: put what one optimizer trains into a submodule of its own"
    )


def _ids(parameters: Iterable[torch.nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def shard_loader(loader: object, workers: int, rank: int) -> object:
    """Return a loader like *loader* with the samples of worker *rank*, as Lightning makes it: shuffled if
    *loader* was, and padded to equal numbers of samples.

    Returns *loader* itself if it has a custom sampler, or is not a plain `DataLoader`.
    """
    if type(loader) is not DataLoader or loader.batch_size is None:
        return loader
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return loader
    sampler: DistributedSampler[object] = DistributedSampler(
        loader.dataset,
        num_replicas=workers,
        rank=rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=0,  # Workers share this process.
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
    )
