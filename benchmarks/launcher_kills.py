"""Kills launchers with SIGKILL while their jobs train, and checks that nothing is left and no file of the user has
changed.

    python -m benchmarks.launcher_kills --trials 20

Killed are: ``paceline run``; the supervisor of ``paceline run --survive``; the launcher of ``paceline emulate``,
and its keeper; ``paceline simulate``. A job trains until a random step, or until its first worker process
has begun (every fifth trial of those that have such processes). Within `PROMPT_SECONDS` after the kill there must
be no process of the job and no network namespace of it. On the machine no interface may have appeared. The next
launcher must be able to remove the temporary folder. A launcher is forked from a process that has imported torch; its
workers and servers are started as people start them. Files that were there stay equal to the byte; the script of a
simulation overwrites, renames and removes checkpoints, which must all stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.emulation import network_of, networks, parent_of
from tests.support.processes import PACELINE, Job, kill, launch, wait_until

PROMPT_SECONDS = 30.0
"""Generous, for machines that other work uses, too: the table shows how long it really takes."""
START_SECONDS = 300.0
LAST_STEP = 30
"""A job is killed at the latest when it has reached this step."""
SCRIPT = """
import os, sys, time, torch, paceline
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
own = sys.argv[1] == "own"
for step in range(1, 1000000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).mean().backward()
    optimizer.step()
    time.sleep(0.01)
    if paceline.rank() == 0:
        if own:  # checkpoints that are there, or a simulation's in their place
            os.replace("latest.pt", "previous.pt")
            torch.save(model.state_dict(), "latest.pt")
            if step == 1:
                os.remove("old.pt")
        print(f"step {step}", flush=True)
"""
USER_FILES = ("latest.pt", "previous.pt", "old.pt", "notes.txt")
JOB_FILES = ("tmp", "inductor", "stdout", "stderr", "paceline-runs")
"""What the job's own files in its folder are called."""


@dataclass(frozen=True)
class Row:
    """One way to start a job, the process of it that is killed, and the methods that take turns."""

    name: str
    options: tuple[str, ...]
    methods: tuple[str, ...]
    victim: Callable[[Job], int] = lambda job: job.process.pid


def keeper_of(job: Job) -> int:
    """The process that holds the emulated network: the child of the launcher's guard."""
    named = [p for p in job.processes() if "emulated.keeper" in _words(p)]
    # A worker that the keeper has just forked has its name, too.
    (guard,) = (p for p in named if parent_of(p) not in named)
    (keeper,) = (p for p in named if parent_of(p) == guard)
    return keeper


def _words(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


_EMULATE = ("emulate", "--workers=2", "--link=100mbit", "--latency=1ms")
_SIMULATE = ("simulate", "--workers=4", "--forward=0.01", "--backward=0.02")
ROWS = (
    Row("run", ("run", "--workers=2"), ("bsp", "asp")),
    Row("run --survive", ("run", "--survive", "--workers=2"), ("asp", "gssp")),
    Row("emulate", _EMULATE, ("bsp", "asp")),
    Row("emulate, its keeper", _EMULATE, ("bsp", "asp"), keeper_of),
    Row("simulate", _SIMULATE, ("bsp", "asp")),
)


@dataclass
class Found:
    """What the trials of one row have left."""

    killed: str
    trials: int = 0
    slowest_seconds: float = 0.0
    """From the kill to the end of the job's last process and network."""
    processes_left: int = 0
    networks_left: int = 0
    interfaces_left: int = 0
    folders_left: int = 0
    files_changed: int = 0
    failures: list[str] = field(default_factory=list)
    """Trials in which a job did not come to its step."""

    @property
    def is_clean(self) -> bool:
        """Whether all trials went as they should."""
        left = self.processes_left + self.networks_left + self.interfaces_left
        return not (left or self.folders_left or self.files_changed or self.failures)


def main() -> int:
    """Print a line for each kill and a table of all; the exit status says whether nothing was left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20, help="of each row")
    parser.add_argument(
        "--only", choices=[row.name for row in ROWS], nargs="+", help="these rows"
    )
    parser.add_argument("--at-once", type=int, default=1, help="jobs side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.only is None or row.name in arguments.only]
    found = {row.name: Found(row.name) for row in rows}
    choose = random.Random(arguments.seed)
    trials = []
    for number in range(arguments.trials):
        for row in rows:
            early = number % 5 == 4 and row.options[0] != "simulate"
            step = 0 if early else choose.randint(1, LAST_STEP)
            method = row.methods[number % len(row.methods)]
            trials.append((row, method, step, found[row.name]))
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for line in pool.map(lambda trial: _tried(*trial), trials):
            print(line, file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found.values()]))
    else:
        _print_table(found.values())
    return 0 if all(one.is_clean for one in found.values()) else 1


def _print_table(found: Sequence[Found] | Iterator[Found]) -> None:
    print(
        "\n| killed | trials | slowest end (s) | processes left | networks left | interfaces left | "
        "temporary folders left | files changed | failed |\n" + "|---" * 9 + "|"
    )
    for one in found:
        print(
            f"| {one.killed} | {one.trials} | {one.slowest_seconds:.2f} | {one.processes_left} | "
            f"{one.networks_left} | {one.interfaces_left} | {one.folders_left} | {one.files_changed} | "
            f"{len(one.failures)} |"
        )


def _tried(row: Row, method: str, step: int, found: Found) -> str:
    """One trial: a line that says how it went."""
    interfaces = set(os.listdir("/sys/class/net"))
    with _started(row, method) as job:
        before = _digests(job.folder)
        try:
            if step:
                wait_until(lambda: _reached(job, step), START_SECONDS, f"step {step}")
            else:
                wait_until(lambda: _workers(job), START_SECONDS, "a worker process")
            victim = row.victim(job)
        except (AssertionError, ValueError) as error:
            found.failures.append(f"{error}\n{job.output}")
            return f"{row.name:20} {method:5} failed: {error}\n{job.output}"
        spaces = {network for p in job.processes() if (network := _network(p))}
        spaces.discard(network_of("self"))
        killed = time.monotonic()
        kill(victim)
        left, still = _left_after(job, spaces)
        seconds = time.monotonic() - killed
        new = set(os.listdir("/sys/class/net")) - interfaces
        after = _digests(job.folder)
        changed = [name for name, was in before.items() if after.get(name) != was]
        changed += [name for name in after if name not in before]
        folders = _folders_left(job)
        found.trials += 1
        found.slowest_seconds = max(found.slowest_seconds, seconds)
        found.processes_left += bool(left)
        found.networks_left += bool(still)
        found.interfaces_left += bool(new)
        found.folders_left += bool(folders)
        found.files_changed += bool(changed)
        when = f"at step {step}" if step else "while a worker starts"
        line = f"{row.name:20} {method:5} {when}: gone after {seconds:.2f} s"
        words = [
            *(f"process left: {process}" for process in left),
            *(f"network left: {one}" for one in still),
            *(f"interface left: {one}" for one in new),
            *(f"file left: {one}" for one in folders),
            *(f"file changed: {one}" for one in changed),
        ]
        return "\n    ".join([line, *words])


@contextmanager
def _started(row: Row, method: str) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "job"
        folder.mkdir()
        script = Path(place) / "train.py"
        script.write_text(SCRIPT)
        for name in USER_FILES:
            (folder / name).write_bytes(os.urandom(1000))
        how = "own" if row.options[0] == "simulate" else "none"
        options = [*row.options, f"--method={method}"]
        patient = {"PACELINE_TIMEOUTS": f"server_start={START_SECONDS}"}
        job = launch(
            PACELINE, options, script, how, folder=folder, forked=True, **patient
        )
        try:
            yield job
        finally:
            for process in job.processes():
                kill(process)
            job.stop()


def _reached(job: Job, step: int) -> bool:
    assert job.process.poll() is None, "the job has ended"
    return f"step {step}\n" in job.stdout


def _workers(job: Job) -> list[int]:
    """Processes of the job that a launcher has given a rank."""
    assert job.process.poll() is None, "the job has ended"
    found = []
    for process in job.processes():
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes()
        except OSError:
            continue
        if b"\0RANK=" in environment:
            found.append(process)
    return found


def _network(process: int) -> str:
    try:
        return network_of(process)
    except OSError:  # it has ended
        return ""


def _left_after(job: Job, spaces: set[str]) -> tuple[list[str], set[str]]:
    """The job's processes that have not ended in time, with their commands, and its networks among *spaces* that
    are still there: the kernel takes a process's memory, and so its mark, before its network."""
    over = time.monotonic() + PROMPT_SECONDS

    def processes() -> list[int]:
        launcher = [job.process.pid] if job.process.poll() is None else []
        return [*launcher, *job.processes()]

    while (processes() or spaces & networks()) and time.monotonic() < over:
        time.sleep(0.01)
    return [
        f"{process} {_words(process)}" for process in processes()
    ], spaces & networks()


def _digests(folder: Path) -> dict[str, str]:
    """A digest of each of the user's files, and of what has appeared beside them."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for name in os.listdir(folder)
        if name not in JOB_FILES and ((path := folder / name).exists())
    }


def _folders_left(job: Job) -> list[str]:
    """What is left in the job's folder for temporary files once the next launcher has tidied up."""
    tidy = "from paceline.runtimes.temporary_folder import remove_left; remove_left()"
    subprocess.run(
        [sys.executable, "-c", tidy],
        env=os.environ | {"TMPDIR": str(job.temporary)},
        check=True,
    )
    left = [str(path) for path in job.temporary.iterdir()]
    shutil.rmtree(job.temporary)
    return left


if __name__ == "__main__":
    sys.exit(main())
