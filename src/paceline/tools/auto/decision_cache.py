"""The file of a decision: the next start of the same training reads it, and begins with what was found.

It counts where the model, the workers, the class, the runtime and paceline itself are the same; whether the
network is, is measured.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.interfaces import Consistency
from paceline.run_options import RunOptions
from paceline.tools.auto.config import Auto
from paceline.tools.auto.decision import Found

FILE = "paceline-auto.json"
FORMAT = "paceline auto 1"


class About(msgspec.Struct, kw_only=True, frozen=True):
    """What was trained, and where: a decision counts for nothing else. *model*: a digest of the tensors'
    names and sizes."""

    model: str
    optimizer: str
    workers: int
    consistency: Consistency
    runtime: str
    version: str = installed_version("paceline")


class Decision(msgspec.Struct, kw_only=True, frozen=True):
    """*spec* was chosen, with which a step takes so many *seconds*, on the network of *cluster* (TOML).
    *found* is what it was chosen by, *sentence* the same for people."""

    about: About
    spec: str
    seconds: float
    cluster: str
    found: Found
    sentence: str = ""
    format: str = FORMAT


def digest(names: Sequence[str], sizes: Sequence[int]) -> str:
    """Of a model's tensors."""
    text = "\n".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_of(wish: Auto, runtime: str, options: RunOptions) -> Path | None:
    """Where the decision is kept. In virtual time only where the user names a file: else the second of
    two equal runs would be another one."""
    if wish.file:
        return Path(wish.file)
    if runtime == "simulated":
        return None
    return Path(options.records or ".") / FILE


def write(path: Path, decision: Decision) -> None:
    """In one piece. Raises `UsageError` where that is impossible."""
    text = msgspec.json.format(msgspec.json.encode(decision), indent=1)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(text + b"\n")
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error


def read(path: Path, about: About) -> Decision | None:
    """The decision on the same training; None where there is no file. Raises `UsageError` that says why what
    is there does not count."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    try:
        decision = msgspec.json.decode(content, type=Decision)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is no decision of auto: {error}") from error
    if decision.format != FORMAT:
        raise UsageError(f"{path}: its format is {decision.format!r}, not {FORMAT!r}")
    for key in About.__struct_fields__:
        theirs, mine = getattr(decision.about, key), getattr(about, key)
        if theirs != mine:
            raise UsageError(
                f"{path} is of another {key}: {theirs}, and this is {mine}"
            )
    return decision
