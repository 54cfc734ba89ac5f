"""Reads and writes one file of a checkpoint: whole or not at all, and as data alone.

`as_data` turns a nested state into plain data, which `torch.save` writes. Tensors stay tensors,
without autograd, and without the rest of a larger storage. Numbers and strings of other types
become Python's. A numpy array becomes a dict with one key of bytes, which no state has.

A file is written under another name and renamed when it is on disk. It is read with ``weights_only``:
torch's reader then knows tensors, numbers, texts, lists, tuples and dicts, and refuses everything else
before it runs.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError

_ARRAY = b"ndarray"
# The range of whole numbers that every reader supports.
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1


def write(data: dict[str, Any], file: Path) -> None:
    """Write states by name, as plain data from `as_data`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.tmp")
    with unfinished.open("wb") as stream:
        torch.save(data, stream)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def read(file: Path, wanted: Collection[str] | None = None) -> dict[str, Any]:
    """Read the states in *file* by name: the *wanted* ones, or all.

    Tensors of other states are not read from disk. Raises `UsageError`, without running any code,
    for a file that holds anything but data.
    """
    try:
        # Mapped here and copied below: a mapping must not outlive the file.
        data = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"[Gg][Ll][Oo][Bb][Aa][Ll] ([\w.]+)", str(error))
        name = f" ({found[1]})" if found else ""
        raise _refused(file, f"it holds code{name} where data is expected") from None
    except FileNotFoundError:
        raise UsageError(f"{file}, a part of the checkpoint, is not there") from None
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        raise _refused(
            file, f"torch.save has not written it, or it is damaged: {error}"
        ) from (None)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise _refused(file, "it holds no states by name")
    missing = [name for name in wanted or () if name not in data]
    if missing:
        raise _refused(file, f"it holds no {missing[0]}")
    return {
        name: _from_data(data[name]) for name in (data if wanted is None else wanted)
    }


def _refused(file: Path, why: str) -> UsageError:
    return UsageError(
        f"{file} is no part of a checkpoint that paceline.save has written: {why}. Nothing in "
        "it was run. Load another checkpoint"
    )


# ---- states as plain data ----


def as_data(value: Any, path: str) -> Any:
    """Turn a nested state into plain data; tensors share their memory with it.

    Raises `UsageError`, with the position below *path*, for anything that is not data.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return {_ARRAY: _as_tensor(value, path)}
    if isinstance(value, dict):
        return {
            _plain_key(key, path): as_data(one, f"{path}/{key}")
            for key, one in value.items()
        }
    if isinstance(value, tuple | list):
        items = [as_data(one, f"{path}/{i}") for i, one in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return _plain(value, path)


def _from_data(data: Any) -> Any:
    """Turn plain data back into a state, with copies of tensors; numpy numbers become Python's."""
    if isinstance(data, torch.Tensor):
        return data.clone()
    if isinstance(data, dict):
        if data.keys() == {_ARRAY} and isinstance(data[_ARRAY], torch.Tensor):
            return data[_ARRAY].clone().numpy()
        return {key: _from_data(one) for key, one in data.items()}
    if isinstance(data, list):
        return [_from_data(one) for one in data]
    return tuple(map(_from_data, data)) if isinstance(data, tuple) else data


def _tensor(value: torch.Tensor) -> torch.Tensor:
    tensor = value.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.layout is torch.strided:
        size = tensor.numel() * tensor.element_size()
        if tensor.untyped_storage().nbytes() > size:
            # Without a copy, torch.save would write the whole storage.
            return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
    return tensor


def _plain(value: Any, path: str) -> Any:
    """Turn a number, bool, string or None into Python's own type."""
    if isinstance(value, np.generic) and not isinstance(value, float | str):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        value = int.__int__(value)
        if not _SMALLEST <= value <= _LARGEST:
            raise UsageError(
                f"cannot save {path}: expected a whole number of at most 64 bits, got "
                f"{value}; save it as a text"
            )
        return value
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UsageError(
        f"cannot save {path}: expected tensors, numpy arrays, numbers, texts, lists, "
        f"tuples and dicts of them, got {type(value).__name__}"
    )


def _plain_key(key: Any, path: str) -> Any:
    if isinstance(key, tuple):
        return tuple(_plain_key(part, path) for part in key)
    return _plain(key, f"{path}, the key {key!r}")


def _as_tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError) as error:
        raise UsageError(f"cannot save {path}: {error}") from None
