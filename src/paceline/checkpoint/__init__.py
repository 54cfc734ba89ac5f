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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec
import torch

from paceline.checkpoint import folder as folders
from paceline.checkpoint.structure import is_packed, name_of, pack, unpack
from paceline.context import current_world
from paceline.errors import PacelineError, UsageError
from paceline.exchange import gather_bytes
from paceline.interfaces import World
from paceline.optimizer import DistributedOptimizer, is_finished, training_of
from paceline.training import Training
from paceline.worlds.seeding import random_states, set_random_states

T = TypeVar("T")

_WITHOUT_GROUP = "torch.distributed is disabled, unavailable or uninitialized"
"""How torch's warning begins; it is right, and meant."""


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

    Under ``paceline run --survive`` the workers that train then wait for each other, and the
    lowest rank of them writes, with its own random states and buffers only (and raises what
    there is to raise). Nobody waits for a worker that has died, or has come back at a later step
    than this.

    An older checkpoint there is replaced when the new one is complete; whenever a process is
    killed meanwhile, `load` finds one of the two. Raises `UsageError` on every worker, with
    nothing written, for states that are not data, or if *path* is there and is no checkpoint.
    """
    world = _world()
    if world.alone:
        _save_alone(world, path, others)
        return
    tensors: dict[str, torch.Tensor] = {}

    def begin() -> Path:
        folder = _begin(world, path, others, tensors)
        if world.rank == 0:
            folders.settle(folder)
        return folder

    # When all are here, each has the answers to what it sent; and none goes on before all
    # have met again, when rank 0 has the state. Servers are told first: under some methods
    # who is not here yet would wait for those who are.
    for training in _trainings(world):
        if training.updates_on_server:
            training.meet()
    folder = _together("save", begin)
    _together(
        "save",
        lambda: _pack_shared(world, others, tensors) if world.rank == 0 else None,
    )
    _write(tensors, folder)
    _together("save", lambda: folders.replace(folder) if world.rank == 0 else None)


def load(path: str | Path, **others: Stateful) -> None:
    """Restore what `save` wrote, into the models, optimizers and samplers of this job and
    *others*.

    Collective; call it after `distribute`, and after the same step on every worker. When it
    returns, all go on from what was loaded. Raises `UsageError`, on every worker, if there is
    no checkpoint, or if it holds other states than this job. A worker that the saving job
    did not have keeps its own random state, and has rank 0's buffers.

    Under ``paceline run --survive`` a worker that was started again calls this too, alone:
    then models and optimizers stay as the servers hold them, since the job goes on.
    """
    world = _world()
    states = dict(_shared_states(world, others))

    def begin() -> tuple[Path, dict[str, torch.Tensor]]:
        folder = folders.as_folder(path)
        found = folders.find(folder)
        if found != folder and (world.rank == 0 or world.alone):
            print(
                f"paceline: a save into {folder} was interrupted: loading {found}",
                file=sys.stderr,
            )
        return found, _room(folder, found, set(states), _own_name(world))

    together = _by_itself if world.alone else _together
    if not world.alone:
        # Servers are told first: some wait for the fastest only, who are here.
        for training in _trainings(world):
            if training.updates_on_server:
                training.meet()
    found, tensors = together("load", begin)
    _read(tensors, found, world.alone)
    together("load", lambda: _unpack_shared(states, tensors))
    used = [training.load_is_complete() for training in _trainings(world)]
    together("load", lambda: _unpack_own(world, tensors) if all(used) else None)


def _save_alone(world: World, path: str | Path, others: dict[str, Stateful]) -> None:
    """`save` where workers meet only at their servers; after the training they no longer do,
    and all hold the same."""
    tensors: dict[str, torch.Tensor] = {}
    folder = _begin(world, path, others, tensors)
    trainings = _trainings(world)
    met = [training for training in trainings if training.meet()]
    leads = met[0].leads if met else world.rank == 0
    if leads and len(met) == len(trainings):
        folders.settle(folder)
        _pack_shared(world, others, tensors)
        _write(tensors, folder, alone=True)
        folders.replace(folder)
    for training in met:
        training.meet()


def _world() -> World:
    world = current_world()
    if world is None or not world.trained:
        raise UsageError("call paceline.distribute(...) before save and load")
    return world


def _trainings(world: World) -> list[Training]:
    """Those that go on."""
    return [
        training_of(optimizer)
        for _, optimizer in world.trained
        if not is_finished(optimizer)
    ]


class _Fault(msgspec.Struct, frozen=True, array_like=True):
    """What has gone wrong on a rank, if anything; *usage*: it was the caller's fault."""

    failed: bool = False
    usage: bool = False
    words: str = ""


def _by_itself(what: str, attempt: Callable[[], T]) -> T:
    """As `_together`, where there is nobody to wait for."""
    return attempt()


def _together(what: str, attempt: Callable[[], T]) -> T:
    """Do *attempt* on every worker, and return when all have done it. Where it fails on
    one, all raise: nobody is left alone in the collective that comes next."""
    result: list[T] = []
    fault: Exception | None = None
    try:
        result.append(attempt())
    except Exception as error:
        fault = error
    mine = _Fault()
    if fault is not None:
        usage, words = isinstance(fault, UsageError), f"{type(fault).__name__}: {fault}"
        mine = _Fault(True, usage, words)
    device = next(_world().trained[0][0].parameters()).device
    everyone = gather_bytes(msgspec.msgpack.encode(mine), device)
    if fault is not None:
        raise fault
    for rank, encoded in enumerate(everyone):
        theirs = msgspec.msgpack.decode(encoded, type=_Fault)
        if theirs.failed:
            kind = UsageError if theirs.usage else PacelineError
            raise kind(f"{what} failed on rank {rank}: {theirs.words}")
    return result[0]


# ---- torch's part ----


def _write(tensors: dict[str, torch.Tensor], folder: Path, alone: bool = False) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    writer = FileSystemWriter(folders.partial(folder), thread_count=1)
    with _unwarned(alone):
        save_tensors(tensors, storage_writer=writer, no_dist=alone)


def _read(tensors: dict[str, torch.Tensor], found: Path, alone: bool) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    with _unwarned(alone):
        load_tensors(tensors, storage_reader=FileSystemReader(found), no_dist=alone)


@contextlib.contextmanager
def _unwarned(alone: bool) -> Iterator[None]:
    if not alone:  # filters are the whole process's, which workers may share
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _WITHOUT_GROUP)
        yield


# ---- what a checkpoint holds ----


def _begin(
    world: World,
    path: str | Path,
    others: dict[str, Stateful],
    tensors: dict[str, torch.Tensor],
) -> Path:
    """Put this worker's own part into *tensors*; returns the folder."""
    _check_names(others)
    folder = folders.as_folder(path)
    for training in _trainings(world):
        training.settle_buffers()
    own = {"random": random_states(), "buffers": _buffers(world)}
    pack(_own_name(world), own, tensors)
    return folder


def _shared_states(
    world: World, others: dict[str, Stateful]
) -> Iterator[tuple[str, Stateful]]:
    """Names and states that are equal on all workers."""
    for number, (model, optimizer) in enumerate(world.trained):
        yield f"model{number}", model
        yield f"optimizer{number}", optimizer
        sampler = training_of(optimizer).sampler
        if sampler is not None:
            yield f"sampler{number}", sampler
    for name, state in others.items():
        yield f"other.{name}", state


def _pack_shared(
    world: World, others: dict[str, Stateful], tensors: dict[str, torch.Tensor]
) -> None:
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
    folder: Path, found: Path, wanted: set[str], own: str
) -> dict[str, torch.Tensor]:
    """Empty tensors for what this worker reads. Raises `UsageError` where the checkpoint
    holds other states."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(found).read_metadata().state_dict_metadata
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


def _unpack_shared(
    states: dict[str, Stateful], tensors: dict[str, torch.Tensor]
) -> None:
    for name, state in states.items():
        state.load_state_dict(unpack(name, tensors))


def _unpack_own(world: World, tensors: dict[str, torch.Tensor]) -> None:
    if not is_packed(_own_name(world), tensors):
        return
    own = unpack(_own_name(world), tensors)
    set_random_states(own["random"])
    with torch.no_grad():
        for here, saved in zip(_buffers(world), own["buffers"], strict=True):
            for name, buffer in here.items():
                buffer.copy_(saved[name])
