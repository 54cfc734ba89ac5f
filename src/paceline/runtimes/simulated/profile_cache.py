"""Measures a script's compute times before a simulation, and caches them for the user.

`CachedFile` is one file there; `paceline.tools.plan.script` has one, too.

Only one worker runs at a time in a simulation, with its own share of the batch and one thread. So
the host's clock measures that worker's computing. Compressors that the script trains with are timed
afterwards, on a gradient of that worker.

A cached file's name is a hash of everything that changes these times and is known before the script
runs (`CachedFile.of`). The modules that a script imports are known only after a run: the file holds
their hashes, and is ignored once one of them has changed. Environment variables, data and modules
outside the script's folder do not count. When the script runs, the model and its inputs are
compared (`StaleProfileError`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar

import msgspec
import torch

from paceline.cluster.cluster import Cluster
from paceline.cluster.cluster_file import uniform_cluster
from paceline.cluster.profiling import GradientDump, coding_times, coding_times_of_busy
from paceline.cluster.workload import CompressorTimes, Workload, made_with
from paceline.compression import make
from paceline.errors import UsageError, WorkerFailedError
from paceline.records import steady_steps
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.results import standard_output_for_result
from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
from paceline.runtimes.simulated.compute import (
    ComputeModel,
    Shapes,
    StaleProfileError,
    UnmeasuredCodeError,
)
from paceline.runtimes.simulated.launch import run_script
from paceline.runtimes.simulated.simulation import Simulation, SimulationResult

_T = TypeVar("_T")
PROFILED_STEPS = 7
FEW_WORKERS = 2
"""Enough workers if their number does not change the result."""
MAX_WORKERS = 32
"""A larger job is profiled with this many workers: more would repeat the same computation."""


@dataclass(frozen=True)
class Profile:
    """A measured workload, and the shapes of the model's inputs; None: they vary."""

    workload: Workload
    inputs: Shapes | None


def profile_script(
    job: ScriptJob, cluster: Cluster, *, patience: float = 20.0
) -> Profile | None:
    """Profile a script: worker 0's medians over a few steps.

    None if the script paces itself, trains a stand-in or more than one model, or never calls the
    model itself.
    """
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


def profiled(
    job: ScriptJob,
    cluster: Cluster,
    compute: ComputeModel,
    scratch: Path,
    patience: float = 20.0,
) -> ComputeModel:
    """Return *compute* with the script's own times: cached ones, or else measured now.

    The script's prints during the measurement go to standard error.
    """
    cached = CachedProfile.of(job, cluster.workers)
    profile = cached.load()
    if profile is None:
        return _profiled_anew(job, cluster, compute, scratch, patience)
    print(
        f"compute: from {cached.path} (of the same script and arguments; delete it to "
        "profile again)",
        file=sys.stderr,
    )
    return replace(
        compute,
        workload=profile.workload,
        what=str(cached.path),
        cached=True,
        inputs=profile.inputs,
    )


def _profiled_anew(
    job: ScriptJob,
    cluster: Cluster,
    compute: ComputeModel,
    scratch: Path,
    patience: float,
    known: Workload | None = None,
) -> ComputeModel:
    """Return *compute* with the script's own times, measured now.

    If times are *known*, only compressors' times are new. The script's checkpoints go to *scratch*.
    """
    # Make the key before the script runs: its file may be edited meanwhile.
    cached = CachedProfile.of(job, cluster.workers)
    with standard_output_for_result(True), redirect_checkpoints(scratch):
        profile = profile_script(job, cluster, patience=patience)
    if profile is None:
        return replace(compute, workload=None, what="", cached=False, inputs=None)
    workload, what = profile.workload, "measured now"
    if known is not None:
        workload = replace(known, coding={**known.coding, **workload.coding})
    try:
        cached.save(replace(profile, workload=workload))
        what = str(cached.path)
        print(f"compute: profiled {job.script} once: {what}", file=sys.stderr)
    except UsageError as error:
        _say_once(f"compute: profiled {job.script}, for this time: {error}")
    return replace(compute, workload=workload, what=what, cached=False, inputs=None)


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


def run_or_profile_anew(
    make: Callable[[ComputeModel], Simulation],
    job: ScriptJob,
    cluster: Cluster,
    compute: ComputeModel,
    scratch: Path,
    patience: float = 20.0,
) -> tuple[SimulationResult, ComputeModel]:
    """Run the script, and repeat the run with a new profile if the cached one does not fit.

    Returns the result, and the compute model of the last run.
    """
    try:
        return _run(make(compute), job, scratch), compute
    except WorkerFailedError as error:
        cause = error.__cause__
        if not isinstance(cause, StaleProfileError):
            raise
        print(f"compute: profiling again: {cause}", file=sys.stderr)
        # If only a compressor's times are missing, the known times are still valid.
        known = compute.workload if isinstance(cause, UnmeasuredCodeError) else None
    compute = _profiled_anew(job, cluster, compute, scratch, patience, known)
    return _run(make(compute), job, scratch), compute


def _run(simulation: Simulation, job: ScriptJob, scratch: Path) -> SimulationResult:
    with redirect_checkpoints(scratch) as made:
        outcome = run_script(simulation, job.script, job.arguments)
    if made:
        words = made[0].name + ", ..." * (len(made) > 1)
        print(
            f"checkpoints: this simulation's are in {scratch} ({words}); what was there "
            "before is as it was",
            file=sys.stderr,
        )
    return outcome


def measure_compressors(
    script: str, arguments: Sequence[str], codes: Sequence[str], cores: int = 1
) -> dict[str, CompressorTimes]:
    """Return the times of each compressor of *codes*, on the script's first gradient.

    *codes* are full specs; *cores* cores compress at the same time. The result is empty without a
    gradient. Earlier measurements are cached.
    """
    job = ScriptJob(script, arguments)
    cached = CachedFile.of(job, FEW_WORKERS, "compressors")
    known = cached.read(dict[str, dict[str, CompressorTimes]]) or {}
    times = known.setdefault(str(cores), {})
    unknown = [code for code in codes if code not in times]
    if unknown:
        times |= _measure_compressors(job, unknown, cores)
        # If it fails, they are used only this time.
        with suppress(UsageError):
            cached.keep(known)
    return {code: times[code] for code in codes if code in times}


def _measure_compressors(
    job: ScriptJob, codes: Sequence[str], cores: int
) -> dict[str, CompressorTimes]:
    with TemporaryDirectory(prefix="paceline-") as folder:
        kept = GradientDump(folder)
        simulation = Simulation(
            uniform_cluster(FEW_WORKERS, "1gbit", "50us"),
            options=RunOptions(method="bsp", steps=2, tells=False),
            profile=True,
            keep=kept,
            output="first",
        )
        run_script(simulation, job.script, job.arguments)
        if not len(kept):
            return {}
        if cores > 1:
            return coding_times_of_busy(codes, folder, cores)
        return coding_times([make(code) for code in codes], kept)


def paced_workload(script: str, arguments: Sequence[str]) -> Workload | None:
    """Return the times that a script paces (`paceline.pace`), tensor by tensor.

    None if it trains more than one model, or never calls the model itself. They are cached, too.
    """
    job = ScriptJob(script, arguments)
    cached = CachedFile.of(job, FEW_WORKERS, "paced")
    known = cached.read(Workload)
    if known is not None:
        return known
    workload = _paced_workload(job)
    if workload is not None:
        with suppress(UsageError):
            cached.keep(workload)
    return workload


def _paced_workload(job: ScriptJob) -> Workload | None:
    simulation = Simulation(
        uniform_cluster(FEW_WORKERS, "1gbit", "50us"),
        options=RunOptions(method="bsp", steps=PROFILED_STEPS, tells=False),
        profile=True,
        paced=True,
        output="first",
    )
    outcome = run_script(simulation, job.script, job.arguments)
    profilers = outcome.profilers
    if len(profilers) != 1 or not profilers[0].profiled_steps:
        return None
    workload = profilers[0].workload(f"as paced by {Path(job.script).name}")
    steps = steady_steps(list(outcome.recorders[0].steps))
    # Paced time outside the passes goes before them, like a data loader's time.
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
        # Other workers compute while this one waits.
        idle_counts=False,
    )
    # Outside passes and updates this thread may have computed sums for other workers.
    workload = replace(workload, input=0.0, overhead=0.0)
    if len(kept):
        workload = replace(workload, coding=coding_times(profiler.compressors, kept))
    return Profile(workload, outcome.inputs[0].shapes)


OURS = Path(__file__).resolve().parents[2]
MAX_AGE_SECONDS = 90 * 86400.0
"""Age in seconds from which files are removed, whenever one is written."""


class _CachedContent(msgspec.Struct, kw_only=True):
    """A cached file that is no workload file; *files* as in `_Measured`."""

    files: dict[str, str]
    content: Any


class _Measured(msgspec.Struct, kw_only=True):
    """Further content of a cached workload file.

    It has the SHA-256 of each module that the script has imported from its own folder, and the
    model's inputs, see `Profile`.
    """

    files: dict[str, str]
    inputs: Shapes | None


_CONTENT = 3
"""Version of the profiles' content. Increase it if they gain a field: older ones are then measured
again."""


@dataclass(frozen=True)
class CachedFile:
    """The file, called *name*, that caches data about *script*, or will do so."""

    script: Path
    name: str

    @classmethod
    def of(cls, job: ScriptJob, workers: int, kind: str = "workload") -> Self:
        """Return the file for the job's script as it is now, with so many *workers*.

        Many scripts divide a batch by the number of workers. *kind* names the cached data.
        """
        script = Path(job.script).resolve()
        known = [
            *(str(script), _hash(script), str(Path.cwd()), list(job.arguments)),
            *(workers, _processor(), version("torch"), version("paceline"), _CONTENT),
        ]
        key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
        return cls(script, f"{script.stem}-{key}.{kind}.json")

    @property
    def path(self) -> Path:
        """The file's path. Raises `UsageError` if no cache folder is known."""
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            # By the XDG specification a relative path does not count.
            folder = named if named.is_absolute() else Path.home() / ".cache"
        except RuntimeError as error:
            raise UsageError(
                f"no cache folder is known: {error} Set XDG_CACHE_HOME"
            ) from error
        return folder / "paceline" / self.name

    def read(
        self, kind: type[_T], decode: Callable[[type, Any], Any] | None = None
    ) -> _T | None:
        """Return the data that `keep` cached; None if there is none, or a module has changed.

        *decode* makes values of types that msgspec cannot make.
        """
        try:
            held = msgspec.json.decode(self.path.read_bytes(), type=_CachedContent)
            if not self.is_of(held.files):
                return None
            return msgspec.convert(held.content, kind, dec_hook=decode)
        except (UsageError, OSError, msgspec.MsgspecError):
            return None

    def keep(self, content: object, encode: Callable[[Any], Any] | None = None) -> None:
        """Cache data measured in this process. Raises `UsageError` if that is impossible."""
        plain = msgspec.to_builtins(content, enc_hook=encode)
        held = _CachedContent(files=self.modules(), content=plain)
        self.write(lambda part: part.write_bytes(msgspec.json.encode(held)))

    def is_of(self, files: dict[str, str]) -> bool:
        """Return whether the script's modules still have these hashes."""
        folder = self.script.parent
        return all(_hash(folder / name) == known for name, known in files.items())

    def modules(self) -> dict[str, str]:
        """Return the hash of each module that the script has imported from its own folder."""
        folder = self.script.parent
        return {str(f.relative_to(folder)): _hash(f) for f in _modules_in(folder)}

    def write(self, content: Callable[[Path], object]) -> None:
        """Replace the file by the one that *content* writes to a path.

        Raises `UsageError` if that is impossible.
        """
        path = self.path
        # Several processes may write and read at the same time.
        part = path.with_name(f"{os.getpid()}-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_old(path.parent)
            content(part)
            part.replace(path)
        except (OSError, UsageError) as error:
            with suppress(OSError):
                part.unlink()
            raise UsageError(
                f"cannot cache a profile: {error}. Set XDG_CACHE_HOME to a folder that can be written"
            ) from error


@dataclass(frozen=True)
class CachedProfile(CachedFile):
    """The file that caches a script's profile: a workload file."""

    def load(self) -> Profile | None:
        """Return the cached profile; None if there is none, or a module of the script has changed."""
        try:
            workload = Workload.load(self.path)
            measured = msgspec.convert(made_with(self.path), _Measured)
        except (UsageError, OSError, msgspec.MsgspecError):
            return None
        return (
            Profile(workload, measured.inputs) if self.is_of(measured.files) else None
        )

    def save(self, profile: Profile) -> None:
        """Cache a profile measured in this process. Raises `UsageError` if that is impossible."""
        measured = _Measured(files=self.modules(), inputs=profile.inputs)
        made = msgspec.to_builtins(measured)
        self.write(lambda part: profile.workload.save(part, made=made))


def _remove_old(folder: Path) -> None:
    oldest = time.time() - MAX_AGE_SECONDS
    for file in folder.glob("*.json"):
        # Another process may have removed it.
        with suppress(OSError):
            if file.stat().st_mtime < oldest:
                file.unlink()


def _modules_in(folder: Path) -> list[Path]:
    """Return Python files of *folder* that this process has imported, except installed packages."""
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
