"""A script's compute times: measured before it is simulated, kept, and made anew when they no
longer fit.

Only one worker runs at a time in a simulation, with its own share of the batch and one thread, so
the host's clock tells what that worker computes. Compressors that the script trains with are
timed afterwards, on a gradient of that worker.

A file that a person made (``paceline profile``) is used as it is, and refused in words where
it does not fit. One that `simulate` made holds also what it was made with: it is this that
tells whether the script would be measured alike again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
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
from paceline.run_options import RunOptions
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
    script: str,
    arguments: Sequence[str],
    cluster: Cluster,
    options: RunOptions,
    *,
    patience: float = 20.0,
) -> Profile | None:
    """Worker 0's medians over a few steps; None where the script says itself what it
    computes, trains a stand-in or more than one model, or never calls the model itself."""
    workers = min(cluster.workers, MAX_WORKERS)
    with TemporaryDirectory(prefix="paceline-") as folder:
        kept = GradientDump(folder, wanted=0)
        simulation = Simulation(
            uniform_cluster(workers, "1gbit", "50us"),
            options=replace(options, steps=PROFILED_STEPS, tells=False),
            profile=True,
            keep=kept,
            patience=patience,
            output="first",
        )
        outcome = run_script(simulation, script, arguments)
        return _profile(outcome, kept, script, workers)


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
    if len(profilers) != 1 or not profilers[0].forwards:
        return None
    workload = profilers[0].workload(f"as paced by {Path(script).name}")
    steps = outcome.recorders[0].settled_steps()
    # What is paced outside of the passes, before them as a loader's time is.
    step = median(step.compute_seconds for step in steps)
    more = max(0.0, step - workload.compute_seconds)
    share = more / len(workload.names) / (workload.passes or 1)
    return replace(workload, forward=tuple(one + share for one in workload.forward))


def _profile(
    outcome: SimulationResult, kept: GradientDump, script: str, workers: int
) -> Profile | None:
    profilers = outcome.profilers
    if outcome.paced_by_script or len(profilers) != 1 or not profilers[0].forwards:
        return None
    profiler = profilers[0]
    workload = profiler.workload(
        f"measured: medians of {len(profiler.forwards)} steps of worker 0 of {workers} "
        f"in {Path(script).name}, CPU, 1 thread"
    )
    if len(kept):
        workload = replace(workload, coding=coding_times(profiler.compressors, kept))
    return Profile(workload, outcome.inputs[0].shapes)


OURS = Path(__file__).resolve().parents[2]


class ProfileKey(msgspec.Struct, kw_only=True):
    """What a profile was made with. *files*: the script, and the modules that it imports
    from its own folder, by their SHA-256; *inputs*: of what shape the model's inputs were,
    or None where they vary; *workers*: among how many, since many scripts cut a batch by that."""

    arguments: list[str]
    files: dict[str, str]
    processor: str
    torch: str
    inputs: Shapes | None
    workers: int

    @classmethod
    def now(
        cls,
        script: Path,
        arguments: Sequence[str],
        inputs: Shapes | None,
        workers: int,
    ) -> ProfileKey:
        """Of a script that has just been run in this process."""
        folder = script.resolve().parent
        files = {script.resolve(), *_modules_in(folder)}
        return cls(
            arguments=list(arguments),
            files={str(f.relative_to(folder)): _hash(f) for f in sorted(files)},
            processor=_processor(),
            torch=version("torch"),
            inputs=inputs,
            workers=workers,
        )

    def changed(
        self, script: Path, arguments: Sequence[str], workers: int
    ) -> str | None:
        """What is other now, in words; None if nothing is that can be told without running
        the script."""
        folder = script.resolve().parent
        if script.resolve().name not in self.files:
            return f"it is another script's, of {next(iter(self.files), 'no name')}"
        for name, known in self.files.items():
            if _hash(folder / name) != known:
                return f"{name} has changed"
        if self.arguments != list(arguments):
            return "the script's arguments have changed"
        if self.workers != workers:
            return (
                f"it was measured as worker 0 of {self.workers}, and of {workers} it may "
                "have another batch"
            )
        if self.processor != _processor():
            return f"it was measured on another processor, {self.processor}"
        if self.torch != version("torch"):
            return f"it was measured with torch {self.torch}"
        return None


@dataclass(frozen=True)
class CachedProfile:
    """A profile in a file; *made*: with what, if `simulate` made it."""

    path: Path
    workload: Workload
    made: ProfileKey | None


def profile_name(script: Path) -> str:
    """What a script's profile is called."""
    return f"{script.stem}.workload.json"


def find_profile(
    script: Path, arguments: Sequence[str], workers: int
) -> tuple[CachedProfile | None, str]:
    """The profile that is kept of a script, if there is one that fits, and of one that does
    not what has changed. Raises `UsageError` for a file that is no profile."""
    stale = ""
    for path in _places(script):
        if not path.exists():
            continue
        workload, content = Workload.load(path), made_with(path)
        made = None
        if content is not None:
            try:
                made = msgspec.convert(content, ProfileKey)
            except msgspec.ValidationError as error:
                stale = f"{path}: {error}"
                continue
        change = None if made is None else made.changed(script, arguments, workers)
        if change is None:
            return CachedProfile(path, workload, made), ""
        stale = stale or f"{path}: {change}"
    return None, stale


def keep_profile(
    script: Path,
    arguments: Sequence[str],
    workload: Workload,
    inputs: Shapes | None,
    workers: int,
) -> CachedProfile:
    """Write down what was measured just now, here or, where nothing can be written, in the
    user's cache. Raises `UsageError` where both are impossible."""
    made = ProfileKey.now(script, arguments, inputs, workers)
    here, cache = _places(script)
    content = msgspec.to_builtins(made)
    try:
        workload.save(here, made=content)
    except UsageError:
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot keep a profile in {cache}: {error}") from error
        workload.save(cache, made=content)
        return CachedProfile(cache, workload, made)
    return CachedProfile(here, workload, made)


def _places(script: Path) -> tuple[Path, Path]:
    """Where a profile is kept: here, or else where caches are."""
    name = profile_name(script)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = f"{Path.cwd()}\n{script.resolve()}"
    number = hashlib.sha256(where.encode()).hexdigest()[:12]
    return Path(name), caches / "paceline" / f"{number}-{name}"


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
