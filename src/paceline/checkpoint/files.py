"""Tensors in a folder, in torch's distributed format, written and read by one process.

Each worker writes a folder of its own and reads what it needs, so nothing goes through
another worker's memory or over the network. torch writes the folder's index, ``.metadata``,
last, and with pickle.

torch.distributed.checkpoint is imported when it is used: it takes half a second.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"
"""How torch's warning begins: that one process saves is meant."""


def write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write *tensors* into *folder*, which is not there yet or holds no tensors."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _unwarned():
        save(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)


def keys(folder: Path) -> list[str]:
    """The names of what is in *folder*."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def read(folder: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The tensors in *folder* whose names are *wanted*."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and wanted(key)
    }
    with _unwarned():
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Without torch's warning. Filters are the whole process's, and virtual workers share
    it: nothing within waits for another worker."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ALONE)
        yield
