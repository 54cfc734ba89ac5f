"""Each worker's own part of a checkpoint.

A part holds the entry ``worker``: random states, buffers and the last metrics. It also has one
entry for each `WorkerState` of an unfinished training: the states of its method and compressor and,
if models differ between steps, its model and optimizer. A worker with its own part continues from
it bit for bit. If the number of workers has changed, the owner of each state divides or refuses it
(`WorkerState.redistribute`). Random states and buffers stay as they are then.

A training that switches methods uses the checkpoint's method while its states are restored
(`trained_by`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.core.checkpoint import files
from paceline.core.checkpoint import folder as folders
from paceline.core.checkpoint.files import as_data
from paceline.core.compressed_average import CompressedAverage
from paceline.core.method_hooks import MethodHooks
from paceline.core.optimizer import MethodSwitcher, active_training, training_of
from paceline.core.random_state import random_states, set_random_states
from paceline.core.training import Training
from paceline.errors import UsageError
from paceline.interfaces import Runtime, WorkerState, redistribute_nothing
from paceline.interfaces.buckets import match_strides
from paceline.parameter_server.client.compression import ClientCompression

VERSION = 3
"""The format that `save` writes and `load` reads."""

_WORKER = "worker"


class Index(msgspec.Struct, frozen=True):
    """A checkpoint's index.

    Attributes:
        version: Version of the format.
        shared: Names of the states that are equal on all workers.
        workers: Number of workers of the job.
        parts: Ranks of the workers whose parts are in the checkpoint.
        states: Names of the states in each part.
        progress: Progress of each training; empty for one that the script no longer holds.
        specs: Spec of each training that switches methods, at the save; "" for others.
    """

    version: int
    shared: list[str]
    workers: int
    parts: list[int]
    states: list[str]
    progress: list[dict[str, int]]
    specs: list[str] = []

    @classmethod
    def of(cls, runtime: Runtime, shared: list[str], parts: list[int]) -> Index:
        """The index of a checkpoint that is saved now."""
        progress = [
            {} if begun.released else training_of(begun.optimizer).progress
            for begun in runtime.registry.trainings
        ]
        states = sorted(_owners(runtime))
        return cls(
            *(VERSION, sorted(shared), runtime.size, parts, states),
            *(progress, _specs_of(runtime)),
        )

    def has_parts_for(self, workers: int) -> bool:
        """Whether each worker of a job with *workers* workers has its own part."""
        return self.workers == workers and self.parts == list(range(workers))


def pack_worker_part(runtime: Runtime) -> dict[str, Any]:
    """This worker's own part of a checkpoint, as data."""
    own = {
        "random": random_states(),
        "buffers": _buffers(runtime),
        "metrics": dict(runtime.recorder.metrics),
    }
    states = {_WORKER: own}
    states |= {name: owner.save() for name, owner in _owners(runtime).items()}
    return {name: as_data(state, name) for name, state in states.items()}


class WorkerPart:
    """The states that this worker restores from the checkpoint in the folder *found*.

    The constructor reads all of them, and changes nothing. It raises `UsageError` if the owner of a
    state refuses it, or a part is missing. `restore` changes the job.
    """

    def __init__(self, runtime: Runtime, found: Path, index: Index) -> None:
        self._runtime, self._found, self._index = runtime, found, index
        self._worker = self._read_worker()
        self._owners = _owners(runtime)
        self._states = {
            name: self._state(name, owner)
            for name, owner in self._owners.items()
            if name in index.states
        }
        if runtime.rank == 0:
            self._report_unused()

    def restore(self) -> None:
        """Put the states into all trainings."""
        trainings = self._runtime.registry.trainings
        for begun, progress in zip(trainings, self._index.progress, strict=True):
            if not begun.released:
                training_of(begun.optimizer).progress = progress
        if self._worker is not None:
            _restore_worker(self._runtime, self._worker)
        for name, state in self._states.items():
            self._owners[name].load(state)

    # ---- reading ----

    def _read_worker(self) -> dict[str, Any] | None:
        rank = self._runtime.rank
        if rank not in self._index.parts:
            return None
        place = folders.part(self._found, rank)
        if not place.exists():
            _report(f"{place} does not exist: worker {rank} keeps its random states")
            return None
        return _read(place, _WORKER)

    def _state(self, name: str, owner: WorkerState) -> dict[str, Any]:
        if self._index.has_parts_for(self._runtime.size):
            return _read(self._place(self._runtime.rank), name)
        return owner.redistribute(self._parts(name), self._runtime.size)

    def _parts(self, name: str) -> Iterator[dict[str, Any]]:
        for rank in self._index.parts:
            yield _read(self._place(rank), name)

    def _place(self, rank: int) -> Path:
        place = folders.part(self._found, rank)
        if not place.exists():
            raise UsageError(
                f"{place} does not exist: it is worker {rank}'s part of the checkpoint. If "
                "machines have no common disk, it is on that worker's machine, as "
                f"{place.name} in {folders.partial(self._found).name}. Copy it into "
                f"{self._found} on every machine"
            )
        return place

    def _report_unused(self) -> None:
        there = set(self._index.states)
        for name in sorted(self._owners.keys() - there):
            _report(f"{self._found} holds no {name}: it starts from its initial state")
        for name in sorted(there - self._owners.keys()):
            _report(f"{self._found} holds {name}, which this job does not use")


def _restore_worker(runtime: Runtime, saved: dict[str, Any]) -> None:
    """Restore random states, buffers, and the last logged metrics: methods may read `Run.loss`."""
    set_random_states(saved["random"])
    runtime.recorder.metrics.update(saved["metrics"])
    with torch.no_grad():
        for here, buffers in zip(_buffers(runtime), saved["buffers"], strict=True):
            for name, buffer in here.items():
                buffer.copy_(buffers[name])


def _owners(runtime: Runtime) -> dict[str, WorkerState]:
    """The states of all unfinished trainings, by their names in a checkpoint."""
    return {
        f"training{number}.{owner.name}": owner
        for number, begun in enumerate(runtime.registry.trainings)
        if not begun.training.finished
        for owner in worker_states(training_of(begun.optimizer))
    }


def _buffers(runtime: Runtime) -> list[dict[str, torch.Tensor]]:
    """Each model's buffers on this worker: they differ between ranks between steps."""
    return [
        {} if begun.released else dict(begun.model.named_buffers())
        for begun in runtime.registry.trainings
    ]


def _read(place: Path, name: str) -> dict[str, Any]:
    state: dict[str, Any] = files.read(place, [name])[name]
    return state


def _report(sentence: str) -> None:
    print(f"paceline: {sentence}", file=sys.stderr)


# ---- states of one training ----


def worker_states(training: Training) -> list[WorkerState]:
    """The states of *training* that differ between workers."""
    context, sender = training.context, training.compression
    states: list[WorkerState] = []
    if training.hooks.has("save_state"):
        states.append(MethodState(context.method.name, training.hooks))
    if sender is not None and sender.compression.state != "none":
        tensors: Sequence[tuple[str, torch.Tensor]] = context.parameters
        if isinstance(sender, ClientCompression):
            tensors = sender.tensors()
        states.append(ResidualState(sender, context.comm.rank, tensors))
    if context.rounds.models_may_differ and context.optimizer is not None:
        states.append(LocalModelState(context.parameters, context.optimizer))
    return states


class MethodState:
    """The state that a method's hook `save_state` returns."""

    def __init__(self, method: str, hooks: MethodHooks) -> None:
        self.name = f"method.{method}"
        self._hooks = hooks

    def save(self) -> dict[str, Any]:
        saved: dict[str, Any] = self._hooks.ask("save_state")
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        self._hooks.is_loaded = False
        self._hooks.call("load_state", saved)

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        """Call the method's `redistribute_state`. Without that hook a load is refused."""
        if not self._hooks.has("redistribute_state"):
            return redistribute_nothing(self.name, parts, workers)
        saved: dict[str, Any] = self._hooks.ask("redistribute_state", parts)
        return saved


class ResidualState:
    """A compressor's states by tensor name, such as the residuals of error feedback.

    *sender* compresses the *tensors* that this worker sends, and holds the states.
    """

    def __init__(
        self,
        sender: CompressedAverage | ClientCompression,
        rank: int,
        tensors: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        self.name = f"compression.{sender.compression.name}"
        self._sender, self._rank = sender, rank
        self._tensors = dict(tensors)
        self._device = tensors[0][1].device

    def save(self) -> dict[str, Any]:
        return dict(self._sender.states)

    def load(self, saved: dict[str, Any]) -> None:
        self._sender.states = _moved(saved, self._device)

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        """Call the compressor's `inherit_state` with all *parts*."""
        former = [_moved(part, self._device) for part in parts]
        states: dict[str, Any] = {}
        for name in dict.fromkeys(name for part in former for name in part):
            compression, like = self._sender.compression, self._like(name)
            states[name] = compression.init_state(like, name, self._rank)
            there = [part[name] for part in former if name in part]
            compression.inherit_state(states[name], there, workers)
        return states

    def _like(self, name: str) -> torch.Tensor:
        """A tensor like the one that *name* stands for; see *parts* of `Run.mean`."""
        if name in self._tensors:
            return torch.empty_like(self._tensors[name], requires_grad=False)
        part = _PART.fullmatch(name)
        if part is None or part[1] not in self._tensors:
            raise UsageError(
                f"the checkpoint holds {self.name} of {name!r}, which is no parameter "
                "of this model: load it with as many workers as saved it"
            )
        owner = self._tensors[part[1]].detach()
        row = owner.new_empty(owner.numel())[int(part[2]) : int(part[3])]
        return row if owner.dim() < 2 else row.view(1, -1)


_PART = re.compile(r"(.*)\[(\d+):(\d+)\]")


class LocalModelState:
    """This worker's parameters and optimizer state, if models differ between steps.

    A worker without its own part continues with the shared model: the method's result.
    """

    name = "model"

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._parameters, self._optimizer = dict(parameters), optimizer

    def save(self) -> dict[str, Any]:
        return {
            "parameters": dict(self._parameters),
            "optimizer": self._optimizer.state_dict(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        if not saved:
            return
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(saved["parameters"][name])
        self._optimizer.load_state_dict(saved["optimizer"])
        match_strides(self._optimizer)

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        return {}


def _moved(value: Any, device: torch.device) -> Any:
    """*value* with the tensors in it on *device*."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(one, device) for one in value)
    return value


# ---- trainings that switch methods ----


def _specs_of(runtime: Runtime) -> list[str]:
    """The present spec of each training that switches methods; "" for others."""
    changing = (
        None if begun.released else active_training(begun.optimizer).switcher
        for begun in runtime.registry.trainings
    )
    return ["" if one is None else one.spec for one in changing]


@contextmanager
def trained_by(runtime: Runtime, specs: Sequence[str]) -> Iterator[None]:
    """While the context is open, trainings that switch methods use these *specs*.

    So states that belong to a method can be restored, such as residuals, or a worker's own model in
    the middle of a round. Afterwards each training returns to its method, also if the checkpoint is
    refused. Collective.
    """
    back: list[tuple[MethodSwitcher, str]] = []
    try:
        for begun, spec in zip(runtime.registry.trainings, specs, strict=False):
            if begun.released:
                continue
            active = active_training(begun.optimizer)
            switcher = active.switcher
            if switcher is None or active.finished or spec in ("", switcher.spec):
                continue
            before = switcher.spec
            why = switcher.switch_to(spec, together=True)
            if not why:
                back.append((switcher, before))
            elif runtime.rank == 0:
                print(
                    f"paceline: the checkpoint was saved under {spec}, which cannot run here "
                    f"({why}): that method's own states are not restored",
                    file=sys.stderr,
                )
        yield
    except Exception:
        _go_back(back)  # a load fails on all ranks or on none
        raise
    _go_back(back)


def _go_back(back: list[tuple[MethodSwitcher, str]]) -> None:
    for switcher, before in back:
        switcher.switch_to(before, together=True)
