"""A script's compute times: measured before it is simulated, and cached in the user's cache folder.

Only one worker runs at a time in a simulation, with its own share of the batch and one thread, so
the host's clock tells what that worker computes. Compressors that the script trains with are
timed afterwards, on a gradient of that worker.

A cached file's name is a hash of all that changes these times and is known before the script runs
(`CachedProfile.of`). The modules that a script imports are known only after a run: the file holds
their hashes, and does not count once one of them has changed. The model and its inputs are
compared while the script runs (`StaleProfileError`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import torch

from paceline.cluster.cluster import Cluster
from paceline.cluster.cluster_file import uniform_cluster
from paceline.cluster.profiling import GradientDump, coding_times, coding_times_of_busy
from paceline.cluster.workload import CompressorTimes, Workload, made_with
from paceline.compression import make
from paceline.errors import UsageError
from paceline.records import steady_steps
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.simulated.compute import Shapes
from paceline.runtimes.simulated.launch import run_script
from paceline.runtimes.simulated.simulation import Simulation, SimulationResult

PROFILED_STEPS = 7
MAX_WORKERS = 32
"""A larger job is profiled with so many: others would only compute the same once more."""


@dataclass(frozen=True)
class Profile:
    """What was measured, and the shapes of what the model was given, if these are always
    the same."""

    workload: Workload
    inputs: Shapes | None


def profile_script(
    job: ScriptJob, cluster: Cluster, *, patience: float = 20.0
) -> Profile | None:
    """Worker 0's medians over a few steps; None where the script says itself what it
    computes, trains a stand-in or more than one model, or never calls the model itself."""
    workers = min(cluster.workers, MAX_WORKERS)
    with TemporaryDirectory(prefix="paceline-") as folder:
        kept = GradientDump(folder, wanted=0)
        simulation = Simulation(
            uniform_cluster(workers, "1gbit", "50us"),
            options=replace(job.options, steps=PROFILED_STEPS, tells=False),
            profile=True,
            keep=kept,
            patience=patience,
            output="first",
        )
        outcome = run_script(simulation, job.script, job.arguments)
        return _profile(outcome, kept, job.script, workers)


def measure_compressors(
    script: str, arguments: Sequence[str], codes: Sequence[str], cores: int = 1
) -> dict[str, CompressorTimes]:
    """What each of *codes*, specs of compressors, takes for the script's first gradient, where so
    many *cores* have such work at the same time; nothing where there is none."""
    with TemporaryDirectory(prefix="paceline-") as folder:
        kept = GradientDump(folder)
        simulation = Simulation(
            uniform_cluster(2, "1gbit", "50us"),
            options=RunOptions(method="bsp", steps=2, tells=False),
            profile=True,
            keep=kept,
            output="first",
        )
        run_script(simulation, script, arguments)
        if not len(kept):
            return {}
        if cores > 1:
            return coding_times_of_busy(codes, folder, cores)
        return coding_times([make(code) for code in codes], kept)


def paced_workload(script: str, arguments: Sequence[str]) -> Workload | None:
    """The times that a script says itself (`paceline.pace`), tensor by tensor; None where it
    trains more than one model, or never calls the model itself."""
    simulation = Simulation(
        uniform_cluster(2, "1gbit", "50us"),
        options=RunOptions(method="bsp", steps=PROFILED_STEPS, tells=False),
        profile=True,
        paced=True,
        output="first",
    )
    outcome = run_script(simulation, script, arguments)
    profilers = outcome.profilers
    if len(profilers) != 1 or not profilers[0].profiled_steps:
        return None
    workload = profilers[0].workload(f"as paced by {Path(script).name}")
    steps = steady_steps(list(outcome.recorders[0].steps))
    # What is paced outside of the passes, before them as a loader's time is.
    step = median(step.compute_seconds for step in steps)
    more = max(0.0, step - workload.compute_seconds)
    share = more / len(workload.names) / (workload.passes or 1)
    return replace(workload, forward=tuple(one + share for one in workload.forward))


def _profile(
    outcome: SimulationResult, kept: GradientDump, script: str, workers: int
) -> Profile | None:
    profilers = outcome.profilers
    if (
        outcome.paced_by_script
        or len(profilers) != 1
        or not profilers[0].profiled_steps
    ):
        return None
    profiler = profilers[0]
    workload = profiler.workload_alone(
        f"measured: medians of {profiler.profiled_steps} steps of worker 0 of {workers} "
        f"in {Path(script).name}, CPU, 1 thread",
        idle_counts=False,  # other workers compute while this one waits
    )
    # Beside passes and updates this thread may have summed for other workers.
    workload = replace(workload, input=0.0, overhead=0.0)
    if len(kept):
        workload = replace(workload, coding=coding_times(profiler.compressors, kept))
    return Profile(workload, outcome.inputs[0].shapes)


OURS = Path(__file__).resolve().parents[2]
MAX_AGE_SECONDS = 90 * 86400.0
"""Older files are removed whenever one is written."""


class _Measured(msgspec.Struct, kw_only=True):
    """What else a cached file holds: the SHA-256 of each module that the script has imported from
    its own folder, and the model's inputs, see `Profile`."""

    files: dict[str, str]
    inputs: Shapes | None


_CONTENT = 3
"""What profiles say. It is raised when they say more, and older ones are then made anew."""


@dataclass(frozen=True)
class CachedProfile:
    """The file, named *name*, in which a profile of *script* is cached, or will be."""

    script: Path
    name: str

    @classmethod
    def of(cls, job: ScriptJob, workers: int) -> CachedProfile:
        """The file for the job's script as it is now, among so many *workers*: many scripts cut a
        batch by that."""
        script = Path(job.script).resolve()
        known = [
            *(str(script), _hash(script), str(Path.cwd()), list(job.arguments)),
            *(workers, _processor(), version("torch"), _CONTENT),
        ]
        key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
        return cls(script, f"{script.stem}-{key}.workload.json")

    @property
    def path(self) -> Path:
        """Where it is. Raises `UsageError` where no cache folder is known."""
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            # A relative path does not count, by the XDG specification.
            folder = named if named.is_absolute() else Path.home() / ".cache"
        except RuntimeError as error:
            raise UsageError(
                f"no cache folder is known: {error} Set XDG_CACHE_HOME"
            ) from error
        return folder / "paceline" / self.name

    def load(self) -> Profile | None:
        """What is cached; None where nothing is, or a module of the script has changed."""
        try:
            workload = Workload.load(self.path)
            measured = msgspec.convert(made_with(self.path), _Measured)
        except (UsageError, OSError, msgspec.MsgspecError):
            return None
        folder = self.script.parent
        if any(_hash(folder / name) != of for name, of in measured.files.items()):
            return None
        return Profile(workload, measured.inputs)

    def save(self, profile: Profile) -> None:
        """Cache what was measured in this process just now. Raises `UsageError` where that is
        impossible."""
        path, folder = self.path, self.script.parent
        files = {str(f.relative_to(folder)): _hash(f) for f in _modules_in(folder)}
        measured = _Measured(files=files, inputs=profile.inputs)
        # Two processes may write at once, and a third one read.
        part = path.with_name(f"{os.getpid()}-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_old(path.parent)
            profile.workload.save(part, made=msgspec.to_builtins(measured))
            part.replace(path)
        except (OSError, UsageError) as error:
            with suppress(OSError):
                part.unlink()
            raise UsageError(
                f"cannot cache a profile: {error}. Set XDG_CACHE_HOME to a folder that can be written"
            ) from error


def _remove_old(folder: Path) -> None:
    oldest = time.time() - MAX_AGE_SECONDS
    for file in folder.glob("*.workload.json"):
        with suppress(OSError):  # another process may have removed it
            if file.stat().st_mtime < oldest:
                file.unlink()


def _modules_in(folder: Path) -> list[Path]:
    """Python files of *folder* that this process has imported, but installed packages."""
    found = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        path = Path(file).resolve()
        installed = "site-packages" in path.parts or path.is_relative_to(OURS)
        if path.is_relative_to(folder) and path.is_file() and not installed:
            found.append(path)
    return found


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _processor() -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(names, platform.processor() or platform.machine())
