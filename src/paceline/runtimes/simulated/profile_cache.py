"""The profile that `simulate` makes and keeps: made anew when it no longer fits.

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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from paceline.cluster.workload import Workload, made_with
from paceline.errors import UsageError
from paceline.runtimes.simulated.inputs import Shapes

OURS = Path(__file__).resolve().parents[2]


class Circumstances(msgspec.Struct, kw_only=True):
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
    ) -> Circumstances:
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
class Kept:
    """A profile in a file; *made*: with what, if `simulate` made it."""

    path: Path
    workload: Workload
    made: Circumstances | None


def profile_name(script: Path) -> str:
    """What a script's profile is called."""
    return f"{script.stem}.workload.json"


def find_profile(
    script: Path, arguments: Sequence[str], workers: int
) -> tuple[Kept | None, str]:
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
                made = msgspec.convert(content, Circumstances)
            except msgspec.ValidationError as error:
                stale = f"{path}: {error}"
                continue
        change = None if made is None else made.changed(script, arguments, workers)
        if change is None:
            return Kept(path, workload, made), ""
        stale = stale or f"{path}: {change}"
    return None, stale


def keep_profile(
    script: Path,
    arguments: Sequence[str],
    workload: Workload,
    inputs: Shapes | None,
    workers: int,
) -> Kept:
    """Write down what was measured just now, here or, where nothing can be written, in the
    user's cache. Raises `UsageError` where both are impossible."""
    made = Circumstances.now(script, arguments, inputs, workers)
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
        return Kept(cache, workload, made)
    return Kept(here, workload, made)


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
