"""Data in a file: written by `torch.save`, whole or not at all, and read as data alone.

A file is written under another name and renamed when it is on disk. It is read with
``weights_only``: torch's reader then knows tensors, numbers, texts, lists, tuples and dicts,
and refuses everything else before it runs.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from paceline.core.checkpoint.structure import from_data
from paceline.errors import UsageError


def write(data: dict[str, Any], file: Path) -> None:
    """Write what `structure.as_data` has made of some states, by name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.tmp")
    with unfinished.open("wb") as stream:
        torch.save(data, stream)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def read(file: Path, wanted: Collection[str] | None = None) -> dict[str, Any]:
    """The states in *file*, by name: those that are *wanted*, or all. Others' tensors are not
    read from disk.

    Raises `UsageError`, with nothing run, for a file that holds anything but data.
    """
    try:
        # Mapped, and copied below: a mapping must not outlive the file.
        data = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"[Gg][Ll][Oo][Bb][Aa][Ll] ([\w.]+)", str(error))
        name = f" ({found[1]})" if found else ""
        raise _refused(file, f"it holds code{name} where data is expected") from None
    except FileNotFoundError:
        raise UsageError(f"{file}, a part of the checkpoint, is not there") from None
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        raise _refused(
            file, f"it is no file of torch.save's, or damaged: {error}"
        ) from (None)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise _refused(file, "it holds no states by name")
    missing = [name for name in wanted or () if name not in data]
    if missing:
        raise _refused(file, f"it holds no {missing[0]}")
    return {
        name: from_data(data[name]) for name in (data if wanted is None else wanted)
    }


def _refused(file: Path, why: str) -> UsageError:
    return UsageError(
        f"{file} is no part of a checkpoint that paceline.save has written: {why}. Nothing in "
        "it was run. Load another checkpoint"
    )
