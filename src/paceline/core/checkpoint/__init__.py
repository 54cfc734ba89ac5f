"""`save` and `load`: a job's whole state, as plain data in files of `torch.save`.

A checkpoint is a folder: one file with what all workers share, one for each worker's own part,
and an index. It is read as data alone: no checkpoint can run code.

- `folder`: the folder of a checkpoint, and how it replaces the earlier one.
- `files`: writes and reads one file, whole or not at all.
- `worker_state`: each worker's own part: its method's state, residuals, local model, random state.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from paceline.core.broadcast import run_on_all
from paceline.core.checkpoint import files
from paceline.core.checkpoint import folder as folders
from paceline.core.checkpoint.files import as_data
from paceline.core.checkpoint.worker_state import (
    VERSION,
    Index,
    WorkerPart,
    pack_worker_part,
    trained_by,
)
from paceline.core.optimizer import DistributedOptimizer, training_of
from paceline.core.training import Training
from paceline.errors import UsageError
from paceline.interfaces import Runtime, current_runtime

_INDEX = "index"
"""The one state in a checkpoint's index."""


class Stateful(Protocol):
    """An object that `save` and `load` take besides the training: a scheduler, a scaler, ..."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as data."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state that `state_dict` has returned."""
        ...


def save(path: str | Path, **others: Stateful) -> None:
    """Write models, optimizers, samplers, random states and *others* into a folder. Collective.

    Call it between steps. Rank 0 writes the state that is equal on all workers. Each worker writes
    a part of its own: its random states, the model's buffers, and the states of its method and
    compressor. If models differ between steps, the part also has its model and optimizer. All parts
    are of one moment, at which every worker has called `save`. A checkpoint also has ended
    trainings, while the script holds their models, or until another training begins.

    A complete checkpoint replaces an older one in the folder. If a process is killed during the
    save, `load` finds the old or the new checkpoint.

    Under ``paceline run --survive`` the active workers wait for each other, and the lowest active
    rank writes the common state. No worker waits for one that has died, or that has restarted and
    joined the job after this step. The checkpoint has no part of such a worker.

    Args:
        path: One folder for all workers. If machines have no common disk, the parts of workers on
            other machines than rank 0's stay there, in ``PATH.partial``.
        **others: Objects with a ``state_dict``, by name.

    Raises:
        UsageError: A state is not data, or *path* exists and is no checkpoint. Raised on every
            worker, with nothing written.

    Example:
        ::

            paceline.save("checkpoint", scheduler=scheduler)
    """
    runtime = _runtime()
    runtime.registry.drop_unheld()
    if runtime.server_only:
        _save_alone(runtime, _prepare(path, others), others)
        return
    # After the first barrier, each worker has the replies to its requests. After the second one
    # rank 0 has the state; no worker continues before. The servers' barrier comes first: under some
    # methods workers that still train would otherwise wait for workers that are here already.
    for training in _trainings(runtime):
        if training.remote is not None:
            training.meet()
    writes = runtime.rank == 0
    folder = run_on_all(runtime, "save", lambda: _prepare(path, others))
    run_on_all(runtime, "save", lambda: folders.recover(folder) if writes else None)
    try:
        shared, own = run_on_all(
            runtime,
            "save",
            lambda: (
                _write_shared(runtime, others, writes, folder),
                pack_worker_part(runtime),
            ),
        )
        run_on_all(runtime, "save", lambda: _write_own(runtime, own, folder))
        index = Index.of(runtime, shared, list(range(runtime.size)))
        run_on_all(
            runtime, "save", lambda: _complete(index, folder) if writes else None
        )
    except Exception:
        if writes:
            folders.discard(folder)
        raise


def load(path: str | Path, **others: Stateful) -> None:
    """Restore a checkpoint into models, optimizers, samplers and *others*. Collective.

    Call it after `distribute`, and after the same step on every worker. A job with the same number
    of workers continues bit for bit. If it has more or fewer workers, or some had died before the
    save:

    - A sampler continues with its epoch.
    - A worker without a part of its own keeps its random state, and gets rank 0's buffers.
    - All workers get one model: the method's result at the save.
    - Each method and compressor divides its states among the workers, or refuses the load.

    States of methods and compressors are found by name. paceline reports on standard error the
    saved states that this job does not use, and its methods and compressors without a saved state.

    Under ``paceline run --survive`` a restarted worker calls this alone. Then models and optimizers
    stay as the servers hold them, since the job continues.

    Args:
        path: The folder that `save` was given.
        **others: Objects with ``load_state_dict``, by the names that `save` was given.

    Raises:
        UsageError: There is no checkpoint, it holds other states than this job, or a method refuses
            its state. Raised on every worker, with nothing changed.

    Example:
        ::

            optimizer = paceline.distribute(model, optimizer)
            paceline.load("checkpoint", scheduler=scheduler)
    """
    runtime = _runtime()
    runtime.registry.drop_unheld()
    states = dict(_shared_states(runtime, others))
    # The servers' barrier comes first: some servers wait for the fastest workers in each step, and
    # these may be here already.
    for training in _trainings(runtime):
        if training.remote is not None and not runtime.server_only:
            training.meet()
    found = run_on_all(runtime, "load", lambda: _find(runtime, path, set(states)))
    with trained_by(runtime, found.index.specs):
        checkpoint = run_on_all(
            runtime, "load", lambda: _read(runtime, found, set(states))
        )
        run_on_all(runtime, "load", lambda: _load_shared(states, checkpoint.shared))
        used = [training.load_is_complete() for training in _trainings(runtime)]
        run_on_all(runtime, "load", lambda: checkpoint.restore() if all(used) else None)


def _runtime() -> Runtime:
    runtime = current_runtime()
    if runtime is None or not runtime.registry.trainings:
        raise UsageError("call paceline.distribute(...) before save and load")
    return runtime


def _trainings(runtime: Runtime) -> list[Training]:
    """The unfinished trainings."""
    return [training_of(begun.optimizer) for begun in runtime.registry.unfinished]


# ---- jobs whose workers communicate only through servers ----


def _save_alone(runtime: Runtime, folder: Path, others: dict[str, Stateful]) -> None:
    """`save` for workers that communicate only through servers.

    After the training they no longer communicate, and all have equal models. Between two barriers
    each worker writes its part. No worker waits for dead ones. Without a worker's part the
    checkpoint is still complete; without the leader's part it does not replace the earlier one. An
    error is raised after the second barrier, so that no worker is left waiting.
    """
    trainings = _trainings(runtime)
    met = [training for training in trainings if training.meet()]
    here = len(met) == len(trainings)
    leads = here and (met[0].leads if met else runtime.rank == 0)
    shared: list[str] = []
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
            folders.recover(folder)
            folders.begin(folder)
        shared.extend(_write_shared(runtime, others, leads, folder))

    def write_own() -> None:
        if (leads or met) and folders.is_begun(folder):
            _write_own(runtime, pack_worker_part(runtime), folder)

    def complete() -> None:
        if leads:
            parts = folders.parts(folders.partial(folder))
            _complete(Index.of(runtime, shared, parts), folder)

    for action in (begin, write_own, complete):
        attempt(action)
    if errors:
        if leads:
            folders.discard(folder)
        raise errors[0]


# ---- contents of a checkpoint ----


def _prepare(path: str | Path, others: dict[str, Stateful]) -> Path:
    """Check the arguments of `save`; returns the folder."""
    for name in others:
        if not name.isidentifier():
            raise UsageError(
                f"save(path, **others): expected Python identifiers as names, got {name!r}"
            )
    return folders.as_folder(path)


def _shared_states(
    runtime: Runtime, others: dict[str, Stateful]
) -> Iterator[tuple[str, Stateful]]:
    """Names and states that are equal on all workers."""
    for number, begun in runtime.registry.there():
        yield f"model{number}", begun.model
        yield f"optimizer{number}", begun.optimizer
        sampler = training_of(begun.optimizer).context.sampler
        if sampler is not None:
            yield f"sampler{number}", sampler
    for name, state in others.items():
        yield f"other.{name}", state


def _write_shared(
    runtime: Runtime, others: dict[str, Stateful], writes: bool, folder: Path
) -> list[str]:
    """Write the states that are equal on all workers, if this worker *writes*; returns their names.

    Other workers enter `consolidated` too if all of them form the method's result. States are
    written inside it, without a copy.
    """
    for training in _trainings(runtime):
        training.flush_buffers()
    with contextlib.ExitStack() as stack:
        for _, begun in runtime.registry.there():
            # Save the method's result: a worker's own parameters may be tentative.
            if writes or training_of(begun.optimizer).consolidates_together:
                entered = cast(DistributedOptimizer, begun.optimizer).consolidated()
                stack.enter_context(entered)
        if not writes:
            return []
        data = {
            name: as_data(state.state_dict(), name)
            for name, state in _shared_states(runtime, others)
        }
        files.write(data, folders.shared(folders.partial(folder)))
        return list(data)


def _write_own(runtime: Runtime, own: dict[str, Any], folder: Path) -> None:
    files.write(own, folders.part(folders.partial(folder), runtime.rank))


def _complete(index: Index, folder: Path) -> None:
    """Write the index, which completes the checkpoint after all parts."""
    about = as_data(msgspec.to_builtins(index), _INDEX)
    files.write({_INDEX: about}, folders.index(folders.partial(folder)))
    folders.replace(folder)


# ---- loading ----


@dataclass(frozen=True)
class _Found:
    """A checkpoint *at* a folder, and its index."""

    at: Path
    index: Index


@dataclass(frozen=True)
class _Checkpoint:
    """The states that one worker has read: the *shared* ones, and its own, which *restore* restores."""

    shared: dict[str, Any]
    restore: Callable[[], None]


def _find(runtime: Runtime, path: str | Path, wanted: set[str]) -> _Found:
    """Find the checkpoint; changes nothing.

    Raises:
        UsageError: It holds other states than are *wanted*.
    """
    folder = folders.as_folder(path)
    found = folders.find(folder)
    if found != folder and runtime.rank == 0:
        print(
            f"paceline: a save into {folder} was interrupted: loading {found}",
            file=sys.stderr,
        )
    index = _read_index(found)
    gone = {
        f"{kind}{number}"
        for number, begun in enumerate(runtime.registry.trainings)
        for kind in ("model", "optimizer", "sampler")
        if begun.released
    }
    if set(index.shared) - gone != wanted:
        raise UsageError(
            f"the checkpoint in {folder} holds {', '.join(index.shared)}, and this job needs "
            f"{', '.join(sorted(wanted))}. Call distribute as often, and pass the same other "
            "names, as when it was saved"
        )
    return _Found(found, index)


def _read_index(found: Path) -> Index:
    """Read the index. Raises `UsageError` for an unknown version."""
    about = files.read(folders.index(found), [_INDEX])[_INDEX]
    version = about.get("version") if isinstance(about, dict) else None
    if version != VERSION:
        raise UsageError(
            f"the checkpoint in {found} has version {version}, and this paceline reads "
            f"version {VERSION}: load it with the paceline that saved it"
        )
    try:
        return msgspec.convert(about, Index)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"the index of the checkpoint in {found} is wrong: {error}"
        ) from (None)


def _read(runtime: Runtime, found: _Found, wanted: Collection[str]) -> _Checkpoint:
    """Read a checkpoint, and change nothing. Raises `UsageError` if a state is refused."""
    shared = files.read(folders.shared(found.at), wanted)
    return _Checkpoint(shared, WorkerPart(runtime, found.at, found.index).restore)


def _load_shared(states: dict[str, Stateful], shared: dict[str, Any]) -> None:
    for name, state in states.items():
        state.load_state_dict(shared[name])
