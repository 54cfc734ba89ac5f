"""`save` and `load`: a job's whole state, by torch.distributed.checkpoint.

A checkpoint is a folder in torch's own distributed format, with one more such folder in it
for each worker's own part (`own`). They hold tensors only: those of every state, and per
state one byte tensor with its structure (`structure`). (torch writes the folders' indices
with pickle: load checkpoints from people you trust.) `folder` says how a checkpoint replaces
the one before.

The format has a version. Version 1 had no folders for workers: random states and buffers of
worker R stood beside what all share, as ``workerR``, and there were no own states.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch

from paceline.checkpoint import files
from paceline.checkpoint import folder as folders
from paceline.checkpoint.changing import trained_by
from paceline.checkpoint.own import (
    OwnPart,
    Saved,
    give_back_worker,
    pack_own,
    states_of,
)
from paceline.checkpoint.structure import name_of, pack, unpack
from paceline.checkpoint.together import together
from paceline.context import current_world
from paceline.errors import UsageError
from paceline.interfaces import World
from paceline.optimizer import DistributedOptimizer, training_of
from paceline.training import Training

VERSION = 2
"""Of the format that `save` writes; `load` reads this and version 1."""

_FORMAT = "paceline"
"""The state that says what a checkpoint is."""


class Stateful(Protocol):
    """What `save` and `load` take beside the training: a scheduler, a scaler, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save(path: str | Path, **others: Stateful) -> None:
    """Write models, optimizers, samplers, random states and *others* into the folder *path*.

    Collective; call it between steps. What is equal on all workers is written once, by
    rank 0. Each worker writes a part of its own: its random states, the model's buffers, and
    what its method and compressor keep; where models differ between steps, its model and
    optimizer too. It is all of one moment, at which every worker has called this: what their
    steps have sent is in it, and nothing that any of them does later.

    Under ``paceline run --survive`` the workers that train then wait for each other, and the
    lowest rank of them writes what is equal on all. Nobody waits for a worker that has died,
    or has come back at a later step than this: the checkpoint has no part of it.

    Trainings that have ended are in it, too, while the script holds their models, or no other has begun.

    An older checkpoint there is replaced when the new one is complete; whenever a process is
    killed meanwhile, `load` finds one of the two. Raises `UsageError` on every worker, with
    nothing written, for states that are not data, or if *path* is there and is no checkpoint.

    *path* is one folder for all workers. Where machines have disks of their own, the parts of
    those on other machines than rank 0's stay on theirs, in ``PATH.partial``.
    """
    world = _world()
    world.job.drop_unheld()
    if world.alone:
        _save_alone(world, _prepare(path, others), others)
        return
    # When all are here, each has the answers to what it sent; and none goes on before all
    # have met again, when rank 0 has the state. Servers are told first: under some methods
    # who is not here yet would wait for those who are.
    for training in _trainings(world):
        if training.updates_on_server:
            training.meet()
    writes = world.rank == 0
    folder = together(world, "save", lambda: _prepare_all(world, path, others))
    together(world, "save", lambda: folders.settle(folder) if writes else None)
    shared, own = together(
        world,
        "save",
        lambda: (_pack_shared(world, others, writes), pack_own(world)),
    )
    together(world, "save", lambda: _write_own(world, own, folder))
    everyone = list(range(world.size))
    if writes:
        _pack_format(world, everyone, shared)
    together(world, "save", lambda: _write(shared, folder) if writes else None)


def load(path: str | Path, **others: Stateful) -> None:
    """Restore what `save` wrote, into the models, optimizers and samplers of this job and
    *others*.

    Collective; call it after `distribute`, and after the same step on every worker. When it
    returns, all go on from what was loaded, and as many workers as saved it go on bit for
    bit. Where there are more or fewer, or some had died, a sampler goes on with its epoch, a
    worker without a part of its own keeps its random state and has rank 0's buffers, all
    have the one model that `save` was given as the method's result, and what methods and
    compressors had is divided or refused, as each of them says.

    Raises `UsageError`, on every worker and with nothing changed, if there is no checkpoint,
    if it holds other states than this job, or if a method refuses what it holds. What a
    method or compressor keeps is taken by that of the same name; what nobody takes, and what
    begins anew, is said on standard error.

    Under ``paceline run --survive`` a worker that was started again calls this too, alone:
    then models and optimizers stay as the servers hold them, since the job goes on.
    """
    world = _world()
    world.job.drop_unheld()
    states = dict(_shared_states(world, others))
    # Servers are told first: some wait for the fastest only, who are here.
    for training in _trainings(world):
        if training.updates_on_server and not world.alone:
            training.meet()
    found = together(world, "load", lambda: _find(world, path, set(states)))
    with trained_by(world, found.specs):
        checkpoint = together(world, "load", lambda: _read(world, found))
        together(world, "load", lambda: _unpack_shared(states, checkpoint.shared))
        used = [training.load_is_complete() for training in _trainings(world)]
        together(world, "load", lambda: checkpoint.give_back() if all(used) else None)


def _world() -> World:
    world = current_world()
    if world is None or not world.job.trainings:
        raise UsageError("call paceline.distribute(...) before save and load")
    return world


def _trainings(world: World) -> list[Training]:
    """Those that go on."""
    return [training_of(begun.optimizer) for begun in world.job.unfinished]


# ---- where workers meet only at their servers ----


def _save_alone(world: World, folder: Path, others: dict[str, Stateful]) -> None:
    """`save` there; after the training workers no longer meet, and all hold the same.

    Between two meetings each does its part. Whoever dies is not waited for: without its
    part the checkpoint is whole, and without the leader it is not replaced. An error is raised
    when all have met: nobody is left waiting."""
    trainings = _trainings(world)
    met = [training for training in trainings if training.meet()]
    here = len(met) == len(trainings)
    leads = here and (met[0].leads if met else world.rank == 0)
    shared: dict[str, torch.Tensor] = {}
    errors: list[Exception] = []

    def attempt(action: Callable[[], None]) -> None:
        try:
            if here and not errors:
                action()
        except Exception as error:
            errors.append(error)
        for training in met:
            training.meet()

    def begin() -> None:
        if leads:
            folders.settle(folder)
        shared.update(_pack_shared(world, others, leads))
        if leads:
            folders.begin(folder)

    def write_own() -> None:
        if (leads or met) and folders.is_begun(folder):
            _write_own(world, pack_own(world), folder)

    def complete() -> None:
        if leads:
            _pack_format(world, folders.parts(folders.partial(folder)), shared)
            _write(shared, folder)

    for action in (begin, write_own, complete):
        attempt(action)
    if errors:
        raise errors[0]


# ---- what a checkpoint holds ----


def _prepare_all(world: World, path: str | Path, others: dict[str, Stateful]) -> Path:
    for training in _trainings(world):
        training.require_all_at_one_place()
    return _prepare(path, others)


def _prepare(path: str | Path, others: dict[str, Stateful]) -> Path:
    """Returns the folder."""
    for name in others:
        if not name.isidentifier():
            raise UsageError(
                f"save(path, **others): expected names as Python has them, got {name!r}"
            )
    return folders.as_folder(path)


def _shared_states(
    world: World, others: dict[str, Stateful]
) -> Iterator[tuple[str, Stateful]]:
    """Names and states that are equal on all workers."""
    for number, begun in world.job.there():
        yield f"model{number}", begun.model
        yield f"optimizer{number}", begun.optimizer
        sampler = training_of(begun.optimizer).sampler
        if sampler is not None:
            yield f"sampler{number}", sampler
    for name, state in others.items():
        yield f"other.{name}", state


def _pack_shared(
    world: World, others: dict[str, Stateful], writes: bool
) -> dict[str, torch.Tensor]:
    """What is equal on all, for the one that *writes* it. The others enter `consolidated`
    too where the method's result takes all of them."""
    tensors: dict[str, torch.Tensor] = {}
    for training in _trainings(world):
        training.settle_buffers()
    with contextlib.ExitStack() as stack:
        for _, begun in world.job.there():
            # The method's result: a worker's own parameters may be tentative.
            if writes or training_of(begun.optimizer).consolidates_together:
                entered = cast(DistributedOptimizer, begun.optimizer).consolidated()
                stack.enter_context(entered)
        if writes:
            for name, state in _shared_states(world, others):
                # A copy: what a model holds now is taken out again below.
                pack(name, copy.deepcopy(state.state_dict()), tensors)
    return tensors


def _pack_format(
    world: World, parts: list[int], tensors: dict[str, torch.Tensor]
) -> None:
    about = {"version": VERSION, **msgspec.to_builtins(Saved.now(world, parts))}
    pack(_FORMAT, about, tensors)


def _write_own(world: World, own: dict[str, torch.Tensor], folder: Path) -> None:
    files.write(own, folders.empty_part(folders.partial(folder), world.rank))


def _write(shared: dict[str, torch.Tensor], folder: Path) -> None:
    """All parts are there: with this the checkpoint is complete."""
    files.write(shared, folders.partial(folder))
    folders.replace(folder)


# ---- what is taken from it ----


@dataclass(frozen=True)
class _Found:
    """A checkpoint of the states that are *wanted*, *at* a folder that has these *names*; *saved*
    is what it says of itself, from version 2 on."""

    at: Path
    names: set[str]
    wanted: set[str]
    saved: Saved | None

    @property
    def specs(self) -> list[str]:
        """See `Saved`."""
        return [] if self.saved is None else self.saved.specs


@dataclass(frozen=True)
class _Checkpoint:
    """What one worker has read: what is *shared*, and its own, which `give_back` restores."""

    shared: dict[str, torch.Tensor]
    give_back: Callable[[], None]


def _find(world: World, path: str | Path, wanted: set[str]) -> _Found:
    """Changes nothing. Raises `UsageError` where the checkpoint holds other states than are
    *wanted*."""
    folder = folders.as_folder(path)
    found = folders.find(folder)
    if found != folder and world.rank == 0:
        print(
            f"paceline: a save into {folder} was interrupted: loading {found}",
            file=sys.stderr,
        )
    names = {name_of(key) for key in files.keys(found)}
    saved = _saved(found) if _FORMAT in names else None
    shared = {name for name in names - {_FORMAT} if not name.startswith("worker")}
    gone = {
        f"{kind}{number}"
        for number, begun in enumerate(world.job.trainings)
        for kind in ("model", "optimizer", "sampler")
        if begun.gone
    }
    if shared - gone != wanted:
        raise UsageError(
            f"the checkpoint in {folder} holds {', '.join(sorted(shared))}; this job wants "
            f"{', '.join(sorted(wanted))}: call distribute as often, and name the same "
            "others, as when it was saved"
        )
    return _Found(found, names, wanted, saved)


def _read(world: World, found: _Found) -> _Checkpoint:
    """Changes nothing. Raises `UsageError` where an own state's owner refuses what it is to have."""
    tensors = files.read(found.at, lambda key: name_of(key) in found.wanted)
    if found.saved is not None:
        return _Checkpoint(tensors, OwnPart(world, found.at, found.saved).give_back)
    return _Checkpoint(tensors, _first_version(world, found.at, found.names))


def _saved(found: Path) -> Saved:
    """Raises `UsageError` for a version that is not known here."""
    about = unpack(_FORMAT, files.read(found, lambda key: name_of(key) == _FORMAT))
    version = about.get("version")
    if version != VERSION:
        raise UsageError(
            f"the checkpoint in {found} has version {version}, and this paceline reads "
            f"versions 1 to {VERSION}: load it with the paceline that saved it, or a later one"
        )
    return msgspec.convert(about, Saved)


def _first_version(world: World, found: Path, names: set[str]) -> Callable[[], None]:
    """What restores the own part of a checkpoint that has no folders for workers."""
    if world.rank == 0:
        for name in states_of(world):
            print(
                f"paceline: {found} was saved by an older paceline, and holds no {name}: "
                "it begins anew",
                file=sys.stderr,
            )
    own = f"worker{world.rank}"
    if own not in names:
        return lambda: None
    tensors = files.read(found, lambda key: name_of(key) == own)
    return lambda: give_back_worker(world, unpack(own, tensors))


def _unpack_shared(
    states: dict[str, Stateful], tensors: dict[str, torch.Tensor]
) -> None:
    for name, state in states.items():
        state.load_state_dict(unpack(name, tensors))
