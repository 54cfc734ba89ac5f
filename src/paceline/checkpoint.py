"""`save` and `load`: a job's whole state, by torch.distributed.checkpoint.

A checkpoint is a folder in torch's own distributed format. It holds tensors only: the
tensors of every state, and per state one byte tensor with its structure (MessagePack), so
that what is not a tensor is data and not code. (torch writes the folder's own index with
pickle: load checkpoints from people you trust.)
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from paceline.context import current_world
from paceline.errors import UsageError
from paceline.interfaces import World
from paceline.worlds.seeding import random_states, set_random_states

_TENSOR, _TUPLE = 1, 2  # MessagePack extension codes
_STRUCTURE = "//structure"  # no name of a tensor: it has an empty part


class Stateful(Protocol):
    """What `save` and `load` take beside the training: a scheduler, a scaler, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save(path: str | Path, **others: Stateful) -> None:
    """Write models, optimizers, random states and *others* into the folder *path*.

    Collective; call it between steps. What is equal on all workers is written once, by
    rank 0; random states and the model's buffers per worker. An older checkpoint there is
    replaced when the new one is complete. Under bsp, any number of workers can load it.
    """
    world = _world()
    folder = Path(path)
    partial, old = (folder.with_name(folder.name + x) for x in (".partial", ".old"))
    tensors: dict[str, torch.Tensor] = {}
    if world.rank == 0:
        with contextlib.ExitStack() as stack:
            for _, optimizer in world.trained:
                # The method's result: a worker's own parameters may be tentative.
                stack.enter_context(optimizer.consolidated())  # type: ignore[attr-defined]
            for name, state in _shared_states(world, others):
                # A copy: what a model holds now is taken out again below.
                _pack(name, copy.deepcopy(state.state_dict()), tensors)
    own = {"random": random_states(), "buffers": _buffers(world)}
    _pack(f"worker{world.rank}", own, tensors)
    save_tensors(tensors, storage_writer=FileSystemWriter(partial, thread_count=1))
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(path: str | Path, **others: Stateful) -> None:
    """Restore what `save` wrote, into the models and optimizers of this job and *others*.

    Collective; call it after `distribute`. Raises `UsageError` if there is no checkpoint,
    or if it holds other states than this job. A worker that the saving job did not have
    keeps its own random state, and has rank 0's buffers.
    """
    world = _world()
    states = dict(_shared_states(world, others))
    if not (Path(path) / ".metadata").exists():
        raise UsageError(f"there is no checkpoint in {path}")
    reader = FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    saved = {key.partition("/")[0] for key in entries}
    saved = {name for name in saved if not name.startswith("worker")}
    if saved != states.keys():
        raise UsageError(
            f"the checkpoint in {path} holds {', '.join(sorted(saved))}; this job wants "
            f"{', '.join(sorted(states))}: call distribute as often, and name the same "
            "others, as when it was saved"
        )
    mine = f"worker{world.rank}"
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
        and key.partition("/")[0] in saved | {mine}
    }
    load_tensors(tensors, storage_reader=reader)
    for name, state in states.items():
        state.load_state_dict(_unpack(name, tensors))
    if f"{mine}{_STRUCTURE}" in tensors:
        own = _unpack(mine, tensors)
        set_random_states(own["random"])
        with torch.no_grad():
            for here, saved_buffers in zip(
                _buffers(world), own["buffers"], strict=True
            ):
                for name, buffer in here.items():
                    buffer.copy_(saved_buffers[name])


def _world() -> World:
    world = current_world()
    if world is None or not world.trained:
        raise UsageError("call paceline.distribute(...) before save and load")
    return world


def _buffers(world: World) -> list[dict[str, torch.Tensor]]:
    """Each model's buffers here: ranks differ in them between steps."""
    return [dict(model.named_buffers()) for model, _ in world.trained]


def _shared_states(
    world: World, others: dict[str, Stateful]
) -> Iterator[tuple[str, Stateful]]:
    """Names and states that are equal on all workers."""
    for number, (model, optimizer) in enumerate(world.trained):
        yield f"model{number}", model
        yield f"optimizer{number}", optimizer
    for name, state in others.items():
        yield f"other.{name}", state


def _pack(name: str, state: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Put a nested state into *tensors*: its tensors, and its structure as bytes."""

    def strip(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[path] = value.detach()
            return msgspec.msgpack.Ext(_TENSOR, path.encode())
        if isinstance(value, dict):
            return {k: strip(v, f"{path}/{k}") for k, v in value.items()}
        if isinstance(value, tuple | list):
            items = [strip(v, f"{path}/{i}") for i, v in enumerate(value)]
            if isinstance(value, list):
                return items
            return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise UsageError(
            f"cannot save {path}: expected tensors, numbers, texts, lists, tuples and "
            f"dicts of them, got {type(value).__name__}"
        )

    structure = msgspec.msgpack.encode(strip(state, name))
    tensors[f"{name}{_STRUCTURE}"] = torch.frombuffer(
        bytearray(structure), dtype=torch.uint8
    )


def _unpack(name: str, tensors: dict[str, torch.Tensor]) -> Any:
    def restore(code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            return tensors[bytes(data).decode()]
        return tuple(decoder.decode(data))

    decoder = msgspec.msgpack.Decoder(ext_hook=restore)
    structure = tensors[f"{name}{_STRUCTURE}"]
    return decoder.decode(bytes(structure.tolist()))
