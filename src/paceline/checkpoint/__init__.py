"""`save` and `load`: a job's whole state, by torch.distributed.checkpoint.

A checkpoint is a folder in torch's own distributed format. It holds tensors only: those of
every state, and per state one byte tensor with its structure (`structure`). (torch writes
the folder's own index with pickle: load checkpoints from people you trust.) `folder` says
how a checkpoint replaces the one before.

torch.distributed.checkpoint is imported when it is used: it takes half a second.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from paceline.checkpoint import folder as folders
from paceline.checkpoint.structure import is_packed, name_of, pack, unpack
from paceline.context import current_world
from paceline.errors import PacelineError, UsageError
from paceline.interfaces import World
from paceline.optimizer import DistributedOptimizer
from paceline.worlds.seeding import random_states, set_random_states

T = TypeVar("T")


class Stateful(Protocol):
    """What `save` and `load` take beside the training: a scheduler, a scaler, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save(path: str | Path, **others: Stateful) -> None:
    """Write models, optimizers, samplers, random states and *others* into the folder *path*.

    Collective; call it between steps. What is equal on all workers is written once, by
    rank 0; random states and the model's buffers per worker. It is all of one moment, at
    which every worker has called this: what their steps have sent is in it, and nothing that
    any of them does later. Under bsp, any number of workers can load it.

    An older checkpoint there is replaced when the new one is complete; whenever a process is
    killed meanwhile, `load` finds one of the two. Raises `UsageError` on every worker, with
    nothing written, for states that are not data, or if *path* is there and is no checkpoint.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    world = _world()
    tensors: dict[str, torch.Tensor] = {}

    def begin() -> Path:
        _check_names(others)
        folder = folders.as_folder(path)
        own = {"random": random_states(), "buffers": _buffers(world)}
        pack(_own_name(world), own, tensors)
        if world.rank == 0:
            folders.settle(folder)
        return folder

    # When all are here, each has the answers to what it sent; and none goes on before all
    # have met again, when rank 0 has the state.
    folder = _together("save", begin)
    _together("save", lambda: _pack_shared(world, others, tensors))
    partial = folders.partial(folder)
    save_tensors(tensors, storage_writer=FileSystemWriter(partial, thread_count=1))
    _together("save", lambda: folders.replace(folder) if world.rank == 0 else None)


def load(path: str | Path, **others: Stateful) -> None:
    """Restore what `save` wrote, into the models, optimizers and samplers of this job and
    *others*.

    Collective; call it after `distribute`. Raises `UsageError`, on every worker, if there is
    no checkpoint, or if it holds other states than this job. A worker that the saving job
    did not have keeps its own random state, and has rank 0's buffers.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    world = _world()
    states = dict(_shared_states(world, others))

    def begin() -> tuple[FileSystemReader, dict[str, torch.Tensor]]:
        folder = folders.as_folder(path)
        found = folders.find(folder)
        if found != folder and world.rank == 0:
            print(
                f"paceline: a save into {folder} was interrupted: loading {found}",
                file=sys.stderr,
            )
        reader = FileSystemReader(found)
        entries = reader.read_metadata().state_dict_metadata
        return reader, _room(folder, entries, set(states), _own_name(world))

    reader, tensors = _together("load", begin)
    load_tensors(tensors, storage_reader=reader)
    _together("load", lambda: _unpack_all(world, states, tensors))


def _world() -> World:
    world = current_world()
    if world is None or not world.trained:
        raise UsageError("call paceline.distribute(...) before save and load")
    return world


def _together(what: str, attempt: Callable[[], T]) -> T:
    """Do *attempt* on every worker, and return when all have done it. Where it fails on
    one, all raise: nobody is left alone in the collective that comes next."""
    result: list[T] = []
    fault: Exception | None = None
    try:
        result.append(attempt())
    except Exception as error:
        fault = error
    mine = None
    if fault is not None:
        mine = isinstance(fault, UsageError), f"{type(fault).__name__}: {fault}"
    everyone: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if fault is not None:
        raise fault
    for rank, theirs in enumerate(everyone):
        if theirs is not None:
            kind = UsageError if theirs[0] else PacelineError
            raise kind(f"{what} failed on rank {rank}: {theirs[1]}")
    return result[0]


# ---- what a checkpoint holds ----


def _shared_states(
    world: World, others: dict[str, Stateful]
) -> Iterator[tuple[str, Stateful]]:
    """Names and states that are equal on all workers."""
    for number, (model, wrapped) in enumerate(world.trained):
        optimizer = cast(DistributedOptimizer, wrapped)
        yield f"model{number}", model
        yield f"optimizer{number}", optimizer
        if optimizer.sampler is not None:
            yield f"sampler{number}", optimizer.sampler
    for name, state in others.items():
        yield f"other.{name}", state


def _pack_shared(
    world: World, others: dict[str, Stateful], tensors: dict[str, torch.Tensor]
) -> None:
    if world.rank != 0:
        return
    with contextlib.ExitStack() as stack:
        for _, optimizer in world.trained:
            # The method's result: a worker's own parameters may be tentative.
            stack.enter_context(cast(DistributedOptimizer, optimizer).consolidated())
        for name, state in _shared_states(world, others):
            # A copy: what a model holds now is taken out again below.
            pack(name, copy.deepcopy(state.state_dict()), tensors)


def _own_name(world: World) -> str:
    return f"worker{world.rank}"


def _buffers(world: World) -> list[dict[str, torch.Tensor]]:
    """Each model's buffers here: ranks differ in them between steps."""
    return [dict(model.named_buffers()) for model, _ in world.trained]


def _check_names(others: dict[str, Stateful]) -> None:
    for name in others:
        if not name.isidentifier():
            raise UsageError(
                f"save(path, **others): expected names as Python has them, got {name!r}"
            )


# ---- what is taken from it ----


def _room(
    folder: Path, entries: dict[str, Any], wanted: set[str], own: str
) -> dict[str, torch.Tensor]:
    """Empty tensors for what this worker reads. Raises `UsageError` where the checkpoint
    holds other states."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    saved = {name_of(key) for key in entries}
    saved = {name for name in saved if not name.startswith("worker")}
    if saved != wanted:
        raise UsageError(
            f"the checkpoint in {folder} holds {', '.join(sorted(saved))}; this job wants "
            f"{', '.join(sorted(wanted))}: call distribute as often, and name the same "
            "others, as when it was saved"
        )
    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name_of(key) in saved | {own}
    }


def _unpack_all(
    world: World, states: dict[str, Stateful], tensors: dict[str, torch.Tensor]
) -> None:
    for name, state in states.items():
        state.load_state_dict(unpack(name, tensors))
    mine = _own_name(world)
    if not is_packed(mine, tensors):
        return
    own = unpack(mine, tensors)
    set_random_states(own["random"])
    with torch.no_grad():
        for here, saved in zip(_buffers(world), own["buffers"], strict=True):
            for name, buffer in here.items():
                buffer.copy_(saved[name])
