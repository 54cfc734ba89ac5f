"""One job under way: start it, inject its faults, wait for its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.chaos.cases import STEPS, Case, Fault
from tests.support.processes import PACELINE, TORCHRUN, Job, kill

FOLDER = Path(__file__).parent
END_SECONDS = float(os.environ.get("CHAOS_END_SECONDS", "150"))
"""A job ends within this after its last fault. A bound, not a measurement."""
ORPHANS_END_SECONDS = 30.0
"""Processes of a job end within this after its launcher."""


@dataclass
class Trial:
    """A job of *case*, started in *folder*, where its script notes what it does."""

    case: Case
    folder: Path
    name: str = "job"
    options: tuple[str, ...] = ()
    """Further options of the launcher."""
    landed: list[Fault] = field(default_factory=list)
    """Faults that have found a process."""

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.job = _start(self.case, self.folder, self.name, self.options)

    def inject(self, fault: Fault) -> None:
        """Wait for the instant of a fault, and send its signal; nothing if the job has ended by then."""
        since = self.began
        if fault.anchor != "start":
            if not self._wait_for_step(int(fault.anchor.removeprefix("step "))):
                return
            since = time.monotonic()
        time.sleep(max(0.0, since + fault.delay - time.monotonic()))
        process = self._find(fault)
        if process is None or self.job.process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, getattr(signal, f"SIG{fault.signal}"))
            self.landed.append(fault)
            if fault.signal == "STOP":
                time.sleep(fault.pause)
                os.kill(process, signal.SIGCONT)

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
            with contextlib.suppress(OSError):
                words = " ".join(self.job.words_of(process))[:200]
                violations.append(f"left: process {process}, {words}")
            kill(process)
        return violations

    def has(self, target: str, *signals: str) -> bool:
        """Whether a fault has found such a target, by one of *signals* if there are any."""
        return any(
            fault.target.startswith(target) and (not signals or fault.signal in signals)
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
            return self.job.process.pid
        started = self.folder.glob("process-*-*")
        workers = {int(file.name.split("-")[2]) for file in started}
        others = sorted(set(self.job.processes()) - workers - {self.job.process.pid})
        if fault.target == "service":
            return next(iter(others), None)
        rank = int(fault.target.removeprefix("worker "))
        if notes := list(self.folder.glob(f"process-{rank}-*")):
            latest = max(notes, key=lambda file: file.stat().st_mtime)
            return int(latest.name.split("-")[2])
        # It has not noted its process yet: another one that starts takes its place.
        return dict(enumerate(others)).get(rank)


def _start(case: Case, folder: Path, name: str, options: tuple[str, ...]) -> Job:
    script = "broken_job.py" if case.defect else "job.py"
    words = [str(FOLDER / script), str(folder), str(STEPS), str(case.save_every)]
    words += [case.defect] if case.defect else []
    root = str(FOLDER.parents[1])
    variables = {
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), root]),
        "PACELINE_TIMEOUTS": "server_start=300",
    }
    if case.launcher == "torchrun":
        variables["PACELINE_METHOD"] = case.spec
        launcher = [*TORCHRUN, "--standalone", f"--nproc-per-node={case.workers}"]
        launcher.append(f"--log-dir={folder / 'logs'}")
    else:
        launcher = [*PACELINE, "run", f"--workers={case.workers}"]
        launcher.append(f"--method={case.spec}")
    if case.survive:
        launcher += ["--survive", f"--snapshot={folder / 'snapshot'}"]
        variables["PACELINE_SNAPSHOT_SECONDS"] = "0.2"
    return Job([*launcher, *options, *words], folder / name, variables, forked="all")
