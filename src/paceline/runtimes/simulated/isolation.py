"""Gives each simulated worker the state that a real process has for itself.

Many workers share one process. Each has its own rank variables of the environment, ``__main__``,
and random states of Python, torch and numpy. Variables are looked up per thread, and ``__main__``
is swapped at each hand-over of the turn. Random states are swapped only when a worker resumes that
does not own them.

State that torch and Python have per process is patched when a simulation starts
(`patched_process`), and restored when it ends. All workers share one standard output
(`workers_output`). The first worker's prints pass unchanged. The other workers' prints are dropped,
or appear line by line behind ``[3]``. Standard error of all workers is shown, so that every
worker's errors are visible.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Literal, TextIO

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import DataLoader

from paceline.core.random_state import (
    random_states,
    seed_everything,
    set_random_states,
)
from paceline.errors import UsageError
from paceline.runtimes.python_internals import Environ
from paceline.runtimes.simulated.process_group import BACKEND
from paceline.runtimes.spawn_check import STARTERS, refuse_spawn

_overlay = threading.local()


class _WorkerEnviron(Environ[str]):
    """``os.environ`` with the current worker's variables laid over it.

    A variable that a worker sets or deletes changes for that worker only, as between processes.
    """

    def __getitem__(self, key: str) -> str:
        own: dict[str, str | None] | None = getattr(_overlay, "values", None)
        if own is not None and key in own:
            value = own[key]
            if value is None:
                raise KeyError(key)
            return value
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: str) -> None:
        own = getattr(_overlay, "values", None)
        if own is None:
            super().__setitem__(key, value)
        else:
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError("str expected in os.environ")
            own[key] = value

    def __delitem__(self, key: str) -> None:
        own = getattr(_overlay, "values", None)
        if own is None:
            super().__delitem__(key)
        else:
            # It raises KeyError if there is nothing to delete.
            self[key]
            own[key] = None

    def __iter__(self) -> Iterator[str]:
        own = getattr(_overlay, "values", None) or {}
        for key in super().__iter__():
            if key not in own:
                yield key
        for key, value in list(own.items()):
            if value is not None:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)


class EnvironmentOverlay:
    """Gives worker threads variables of their own within a ``with`` block."""

    def __enter__(self) -> None:
        self._before = type(os.environ)
        os.environ.__class__ = _WorkerEnviron

    def __exit__(self, *exception: object) -> None:
        os.environ.__class__ = self._before

    @staticmethod
    def set_for_this_thread(values: Mapping[str, str]) -> None:
        """Lay *values* over the environment, for the calling thread."""
        _overlay.values = dict(values)


class RandomStates:
    """The process's random generators, owned by one worker at a time.

    As a context manager it restores the process's own states at the end.
    """

    def __init__(self, seed: int) -> None:
        self._owner: int | None = None
        self._saved: dict[int, tuple[Any, ...]] = {}
        self._seed = seed
        self._seeded: Any = None
        """Python's random state directly after seeding, which every worker has first."""
        self._python: Any = None
        """Python's random state when the current owner got it. All workers that have drawn no
        number since share one object."""

    def __enter__(self) -> None:
        if torch.cuda.is_available():
            # Otherwise a worker could find another one's states there.
            torch.cuda.init()
        self._before = _get_states()

    def __exit__(self, *exception: object) -> None:
        _set_states(self._before)

    def hand_to(self, worker: int) -> None:
        """Give the generators to *worker*; at its first turn they are seeded."""
        if worker == self._owner:
            return
        python: Any = None
        if self._owner is not None:
            # Setting Python's state takes longer than the rest of a hand-over, and it has 24 KiB.
            # So workers that draw no numbers share one object.
            python, *others = _get_states()
            if python == self._python:
                python = self._python
            self._saved[self._owner] = (python, *others)
        self._owner = worker
        saved = self._saved.pop(worker, None)
        if saved is None:
            numpy_random = sys.modules.get("numpy.random")
            if numpy_random is not None:
                numpy_random.set_bit_generator(numpy_random.MT19937())
            seed_everything(self._seed)
            if self._seeded is None:
                self._seeded = random.getstate()
            self._python = self._seeded
        else:
            _set_states(saved, python)
            self._python = saved[0]


class UndrawnRandomStates:
    """Replaces `RandomStates` for bodies that draw from no global generator.

    Exchanging states is half of the cost of a hand-over. *drawn* tells at the end whether a worker
    drew a number all the same. Then workers have shared one generator, and their numbers differ
    from those of a run alone.
    """

    drawn = False

    def __enter__(self) -> None:
        self._before = random_states()

    def __exit__(self, *exception: object) -> None:
        self.drawn = not _alike(self._before, random_states())
        if self.drawn:
            set_random_states(self._before)

    def hand_to(self, worker: int) -> None:
        """Do nothing: no states are exchanged."""


def _alike(some: Any, others: Any) -> bool:
    if isinstance(some, torch.Tensor):
        return torch.equal(some, others)
    # numpy may have been loaded in the other one meanwhile.
    if isinstance(some, dict):
        return all(_alike(state, others[key]) for key, state in some.items())
    if isinstance(some, list):
        return all(map(_alike, some, others))
    return bool(some == others)


@contextmanager
def thread_count_kept() -> Iterator[None]:
    """Restore torch's number of threads, for threads that the process starts later.

    Worker threads may call ``torch.set_num_threads``.
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class MainModules:
    """Each worker's own ``__main__``."""

    def __init__(self) -> None:
        self._modules: dict[int, ModuleType] = {}

    def __enter__(self) -> None:
        self._before = sys.modules["__main__"]

    def __exit__(self, *exception: object) -> None:
        sys.modules["__main__"] = self._before

    def register(self, worker: int, module: ModuleType) -> None:
        """Make *module* the ``__main__`` of *worker*, which is running."""
        self._modules[worker] = module
        sys.modules["__main__"] = module

    def hand_to(self, worker: int) -> None:
        """Make ``__main__`` the one of *worker*."""
        module = self._modules.get(worker)
        if module is not None:
            sys.modules["__main__"] = module


def _get_states() -> tuple[Any, ...]:
    numpy_random = sys.modules.get("numpy.random")
    cuda = torch.cuda.is_initialized()
    return (
        random.getstate(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if cuda else None,
        _get_numpy_state() if numpy_random is not None else None,
    )


def _get_numpy_state() -> tuple[Any, Any]:
    # Exchanging the generator object is 35 us cheaper than copying its state back. numpy may also
    # hold a spare normal number, which is rare.
    numpy_random = sys.modules["numpy.random"]
    state = numpy_random.get_state(legacy=False)
    return numpy_random.get_bit_generator(), state if state["has_gauss"] else None


def _set_states(states: tuple[Any, ...], there: Any = None) -> None:
    """Set the generators' states; *there* is Python's present state.

    Python's state is not written if it is the same object.
    """
    python, cpu, cuda, numpy_state = states
    if python is not there:
        random.setstate(python)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    if numpy_state is not None:
        bit_generator, with_spare = numpy_state
        sys.modules["numpy.random"].set_bit_generator(bit_generator)
        if with_spare is not None:
            sys.modules["numpy.random"].set_state(with_spare)


@contextmanager
def patched_process(start_group: Callable[..., None]) -> Iterator[None]:
    """Apply process-wide calls of worker threads to the worker, within a ``with`` block.

    *start_group* is `Simulation.init_process_group`.
    """
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
    """Return a function that calls *replacement* with *original* first."""

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
        # torch replaces it, once per worker.
        sys.excepthook = hook

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
    # The clock itself names missing ranks.
    dist.barrier(group)


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
    refuse_spawn(function)


def _refuse_signal(original: Any, number: Any, handler: Any) -> Any:
    raise UsageError(
        "signal handlers are per process, and all simulated workers share one: install "
        "them only where paceline.runtime_name() is not 'simulated'"
    )


Shown = Literal["first", "all"]

_of_thread = threading.local()


class WorkerStream:
    """Replaces *stream*, and knows which worker writes.

    *shown* says how prints of workers other than the first are shown.
    """

    def __init__(self, stream: TextIO, shown: Shown, *, prefix_first: bool) -> None:
        self._stream = stream
        self._shown = shown
        self._prefix_first = prefix_first
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        rank = getattr(_of_thread, "rank", None)
        if rank is None or (rank == 0 and not self._prefix_first):
            self._stream.write(text)
        elif rank == 0 or self._shown == "all":
            *lines, rest = (self._begun.pop(rank, "") + text).split("\n")
            for line in lines:
                self._put(rank, line)
            if rest:
                # Progress bars redraw their line.
                self._begun[rank] = rest.rpartition("\r")[2]
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Write the last lines of workers, which have no newline."""
        for rank, rest in self._begun.items():
            self._put(rank, rest)
        self._begun.clear()

    def _put(self, rank: int, line: str) -> None:
        self._stream.write(f"[{rank}] {line.rpartition(chr(13))[2]}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def workers_output(shown: Shown | None) -> Iterator[None]:
    """Let the standard streams know which worker prints, within a ``with`` block.

    Threads of workers have called `speak_as`. None: nothing changes.
    """
    if shown is None:
        yield
        return
    before = sys.stdout, sys.stderr
    streams = (
        WorkerStream(sys.stdout, shown, prefix_first=shown == "all"),
        WorkerStream(sys.stderr, "all", prefix_first=False),
    )
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.finish()


def speak_as(rank: int) -> None:
    """Mark the calling thread's prints from now on as this worker's."""
    _of_thread.rank = rank


def locations_of(hosts: Sequence[int], devices: int) -> list[dict[str, str]]:
    """Return each worker's machine, and its number there; *hosts* are all workers'.

    A cluster whose hosts have one worker each counts as one machine, which it really is. "Once per
    machine" then means once, for files that are loaded or written. With GPUs a number is also that
    of a device, and there are *devices* of these.
    """
    if len(set(hosts)) == len(hosts):
        hosts = [0] * len(hosts)
    sizes, so_far, found = Counter(hosts), Counter[int](), []
    for host in hosts:
        number = so_far[host]
        so_far[host] += 1
        found.append(
            {
                "LOCAL_RANK": str(number % devices if devices else number),
                "LOCAL_WORLD_SIZE": str(sizes[host]),
                "GROUP_RANK": str(host),
            }
        )
    return found
