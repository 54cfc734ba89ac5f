"""The real world: one process per worker, launched by torchrun or whatever sets its
variables, on the wall clock."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import torch
import torch.distributed as dist

from paceline.context import current_world, enter_world
from paceline.errors import UsageError
from paceline.instruments import Journal
from paceline.interfaces import World
from paceline.options import RunOptions
from paceline.report.files import write_worker
from paceline.report.result import Result, Summary, gather_summaries
from paceline.torch_private import local_store


class RealWorld:
    """This process as one worker of a job.

    ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` say which; without them
    the process is a job of one.
    """

    name: ClassVar[str] = "real"
    compute = None

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.rank = _whole("RANK", 0)
        self.size = _whole("WORLD_SIZE", 1)
        self.journal = Journal(
            self.rank, self.now, keep_spans=options.records is not None
        )
        self._failed = False
        self._exit_actions: list[Callable[[], None]] = []
        self._hook = sys.excepthook
        sys.excepthook = self._note_failure
        atexit.register(self._at_exit)

    def connect(self) -> None:
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.journal.worker = self.rank
            return
        backend = "gloo"
        if torch.cuda.is_available():
            local = _whole("LOCAL_RANK", 0)
            if local < torch.cuda.device_count():
                torch.cuda.set_device(local)
                backend = "cpu:gloo,cuda:nccl"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=local_store(), rank=0, world_size=1)

    def now(self) -> float:
        return time.perf_counter()

    def pace(self, seconds: float) -> None:
        time.sleep(seconds)

    def at_exit(self, action: Callable[[], None]) -> None:
        self._exit_actions.append(action)

    def _note_failure(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        self._failed = True
        self._hook(kind, error, traceback)

    def _at_exit(self) -> None:
        if self._failed:
            return  # the others learn it from the lost connections and the launcher
        if dist.is_initialized():
            for action in self._exit_actions:
                action()
        self._exit_actions.clear()
        self._write_results()
        if dist.is_initialized():
            # A process group alive at exit aborts some processes; so do references to
            # its work handles that outlive it.
            gc.collect()
            dist.destroy_process_group()
            gc.collect()

    def _write_results(self) -> None:
        if not self.journal.method:
            return
        if self.options.records is not None:
            write_worker(self.options.records, self.journal)
        if self.options.json:
            mine = Summary.of(self.journal)
            summaries = gather_summaries(mine) if dist.is_initialized() else [mine]
            if self.rank == 0:
                result = Result.of("real", self.size, self.journal, summaries)
                if self.options.result is not None:
                    Path(self.options.result).write_text(result.to_json() + "\n")
                else:
                    print(result.to_json(), flush=True)


def join_world() -> World:
    """The caller's world; where there is none yet, this process becomes a real worker."""
    world = current_world()
    if world is None:
        options = RunOptions.from_environment()
        world = RealWorld(options)
        enter_world(world)
        if options.seed is not None:
            from paceline.worlds.virtual.process_state import seed_everything

            seed_everything(options.seed)
    return world


def _whole(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"environment variable {variable}: expected a whole number, got {text!r}"
        ) from None
