"""One job under way: start it, inject its faults, wait for its end."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.chaos.cases import EMULATED, RAY, SERVED, STEPS, Case, Fault
from tests.support.processes import PACELINE, PYTHON, TORCHRUN, Job, kill, python_path

SCRIPTS = Path(__file__).parent
END_SECONDS = float(os.environ.get("CHAOS_END_SECONDS", "150"))
"""A job ends within this after its last fault. A bound, not a measurement."""
ORPHANS_END_SECONDS = 30.0
"""Processes of a job end within this after its launcher."""
DISK_BYTES = 1 << 20
SERVICES = {SERVED: ("serve",), RAY: ("ray::Server",)}
"""By launcher: how a word of a service's command line begins, where a job has other processes, too."""


@dataclass
class Trial:
    """A job of *case*, started in *folder*, where its script notes what it does."""

    case: Case
    folder: Path
    name: str = "job"
    resumes: bool = False
    """Whether it goes on from its snapshot."""
    landed: list[Fault] = field(default_factory=list)
    """Faults that have found a process."""

    def __post_init__(self) -> None:
        kinds = {fault.kind for fault in self.case.faults}
        self._disk = self.folder / "disk"
        self._reader = _Reader(self.folder / "output") if "CLOSE" in kinds else None
        self._undo: list[Callable[[], None]] = []
        self.began = time.monotonic()
        self.job = self._start()

    def inject(self, fault: Fault) -> None:
        """Wait for the instant of a fault, and let it happen; nothing if the job has ended by then."""
        if fault.kind == "CUT":
            self.landed.append(fault)  # by the cluster file
            return
        since = self.began
        if fault.anchor != "start":
            if not self._wait_for_step(int(fault.anchor.removeprefix("step "))):
                return
            since = time.monotonic()
        time.sleep(max(0.0, since + fault.delay - time.monotonic()))
        if self.job.process.poll() is not None:
            return
        if fault.kind == "FULL":
            self._pass(fault, _fill(self._disk))
        elif fault.kind == "CLOSE":
            assert self._reader is not None
            if self._reader.has_writer(self.job.process.pid):
                self._reader.close()
                self.landed.append(fault)
        elif process := self._find(fault):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if fault.kind == "FILES":
                    self._pass(fault, _exhaust(process, self.job))
                else:
                    os.kill(process, getattr(signal, f"SIG{fault.kind}"))
                    self.landed.append(fault)
                if fault.kind == "STOP":
                    time.sleep(fault.pause)
                    os.kill(process, signal.SIGCONT)

    def end(self) -> None:
        """Leave nothing of the job, and no fault."""
        for undo in self._undo:
            undo()
        self.job.stop()
        if self._reader:
            self._reader.close()

    def _pass(self, fault: Fault, undo: Callable[[], None]) -> None:
        self.landed.append(fault)
        self._undo.append(undo)
        timer = threading.Timer(fault.pause, undo)
        timer.daemon = True
        timer.start()

    def wait(self, seconds: float = END_SECONDS) -> list[str]:
        """Wait for the end of the launcher, then of its processes; returns violations, and leaves no process."""
        deadline = time.monotonic() + seconds
        while self.job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.job.process.poll() is None:
            stacks = getattr(self.job.process, "stacks", str)()
            self.job.stop()
            return [f"hangs: it runs {seconds:.0f} s after the last fault\n{stacks}"]
        deadline = time.monotonic() + ORPHANS_END_SECONDS
        while (left := self.job.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        violations = []
        for process in left:
            # What Ray has started for itself ends when Ray lets it.
            if self.case.launcher != RAY or self._is(
                process, *SERVICES[RAY], "ray::Worker"
            ):
                with contextlib.suppress(OSError):
                    words = " ".join(self.job.words_of(process))[:200]
                    violations.append(f"left: process {process}, {words}")
            kill(process)
        return violations

    def has(self, target: str, *kinds: str) -> bool:
        """Whether a fault has found such a target, one of *kinds* if there are any."""
        return any(
            fault.target.startswith(target) and (not kinds or fault.kind in kinds)
            for fault in self.landed
        )

    def results(self) -> list[torch.Tensor | None]:
        """By rank, the final model's counts."""
        files = [self.folder / f"result-{rank}" for rank in range(self.case.workers)]
        return [torch.load(file) if file.exists() else None for file in files]

    def incarnations(self, rank: int) -> list[list[int]]:
        """The steps that a worker has noted as done, in each of its processes."""
        files = self.folder.glob(f"steps-{rank}-*")
        notes = [file.read_text().split() for file in files]
        return [[int(word) for word in words if word.isdigit()] for words in notes]

    def _wait_for_step(self, step: int) -> bool:
        """Whether some worker has done *step* before the job ends."""
        while self._most_steps() < step:
            late = time.monotonic() > self.began + END_SECONDS
            if late or self.job.process.poll() is not None:
                return False
            time.sleep(0.003)
        return True

    def _most_steps(self) -> int:
        ranks = range(self.case.workers)
        done = (
            step
            for rank in ranks
            for steps in self.incarnations(rank)
            for step in steps
        )
        return max(done, default=-1)

    def _find(self, fault: Fault) -> int | None:
        """The process that a fault is for."""
        if fault.target == "launcher":
            return self._launcher()
        started = self.folder.glob("process-*-*")
        workers = {int(file.name.split("-")[2]) for file in started}
        others = sorted(set(self.job.processes()) - workers - {self._launcher()})
        if self.case.launcher in SERVICES:
            names = SERVICES[self.case.launcher]
            others = [process for process in others if self._is(process, *names)]
        if fault.target.startswith("service"):
            number = int(fault.target.removeprefix("service "))
            return others[number % len(others)] if others else None
        rank = int(fault.target.removeprefix("worker "))
        if notes := list(self.folder.glob(f"process-{rank}-*")):
            latest = max(notes, key=lambda file: file.stat().st_mtime)
            return int(latest.name.split("-")[2])
        # It has not noted its process yet: another one that starts takes its place.
        return dict(enumerate(others)).get(rank)

    def _launcher(self) -> int:
        """The process that starts workers. The manager of a job with ``paceline serve`` is no part of paceline."""
        if self.case.launcher == SERVED:
            for process in self.job.processes():
                if self._is(process, "run"):
                    return process
        return self.job.process.pid

    def _is(self, process: int, *names: str) -> bool:
        """Whether a word of a process's command line begins so."""
        with contextlib.suppress(OSError):
            return any(word.startswith(names) for word in self.job.words_of(process))
        return False

    def _start(self) -> Job:
        case, folder = self.case, self.folder
        script = "broken_job.py" if case.defect else "job.py"
        words = [str(SCRIPTS / script), str(folder), str(STEPS), str(case.save_every)]
        words += [case.defect] if case.defect else []
        variables = {
            "PYTHONPATH": python_path(SCRIPTS.parents[1]),
            "PACELINE_TIMEOUTS": "server_start=300",
        }
        snapshot = str(self._disk / "snapshot") if case.survive else "-"
        if case.survive:
            variables["PACELINE_SNAPSHOT_SECONDS"] = "0.2"
        if case.launcher == "torchrun":
            variables["PACELINE_METHOD"] = case.spec
            launcher = [*TORCHRUN, "--standalone", f"--nproc-per-node={case.workers}"]
            launcher.append(f"--log-dir={folder / 'logs'}")
        elif case.launcher == SERVED:
            # A worker that dies after its training waits so long for a server that has ended.
            variables["PACELINE_TIMEOUTS"] += ",server_listen=60"
            launcher = [*PYTHON, "-m", "tests.chaos.served_job", case.spec]
            launcher += [str(case.workers), str(case.serves), snapshot]
        elif case.launcher == RAY:
            launcher = [*PYTHON, str(SCRIPTS / "ray_job.py"), case.spec]
            launcher += [str(case.workers), snapshot, str(folder / "ray")]
        else:
            launcher = [*PACELINE, case.launcher.split()[1], f"--method={case.spec}"]
            if case.launcher == EMULATED:
                cluster = folder / f"{self.name}.toml"
                cluster.write_text(case.cluster)
                launcher.append(f"--cluster={cluster}")
            else:
                launcher.append(f"--workers={case.workers}")
            if case.survive:
                launcher += ["--survive", f"--snapshot={snapshot}"]
                launcher += ["--resume"] * self.resumes
        return Job(
            [*launcher, *words],
            folder / self.name,
            variables,
            forked=True if case.launcher == RAY else "all",
            pipe=self._reader.path if self._reader else None,
        )


class _Reader:
    """The other end of a job's output, which it can close."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def has_writer(self, process: int) -> bool:
        """Wait until a process has opened the pipe: one that came later would wait for a reader."""
        deadline = time.monotonic() + ORPHANS_END_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process}/fd/1").readlink() == self.path:
                    return True
            time.sleep(0.002)
        return False

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            os.close(self._end)

    def _read(self) -> None:
        while not self._closing.is_set():
            if select.select([self._end], [], [], 0.01)[0] and not os.read(
                self._end, 1 << 16
            ):
                self._closing.wait(0.01)  # Nobody has opened it yet.


@contextlib.contextmanager
def disk(case: Case, folder: Path) -> Iterator[None]:
    """The disk of a job's checkpoints and snapshots: of its own, where it is to be full."""
    place = folder / "disk"
    place.mkdir()
    if not any(fault.kind == "FULL" for fault in case.faults):
        yield
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(place)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _fill(place: Path) -> Callable[[], None]:
    """Fill a disk; returns what frees it."""
    ballast = place / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        for _ in range(DISK_BYTES):
            file.write(bytes(1 << 12))
    return lambda: ballast.unlink(missing_ok=True)


def _exhaust(process: int, job: Job) -> Callable[[], None]:
    """Let a process of a job open no further descriptor; returns what permits it again.

    What it starts meanwhile inherits the limit, so this is permitted, too: the fault passes.
    """
    opened = [int(name) for name in os.listdir(f"/proc/{process}/fd")]
    if not opened:
        raise ProcessLookupError  # It is ending.
    limit = resource.RLIMIT_NOFILE
    before = resource.prlimit(process, limit)
    lowered = max(opened) + 1, before[1]
    resource.prlimit(process, limit, lowered)

    def permit() -> None:
        for one in {process, *job.processes()}:
            with contextlib.suppress(ProcessLookupError):
                if resource.prlimit(one, limit) == lowered:
                    resource.prlimit(one, limit, before)

    return permit
