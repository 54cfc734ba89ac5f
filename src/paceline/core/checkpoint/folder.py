"""Finds a checkpoint's complete folder, whenever its writer was killed.

A checkpoint in the folder ``NAME`` is written into ``NAME.partial``: the common part in
``shared.pt``, and worker R's own part in ``worker-R.pt``. The index, ``index.pt``, is written last, by
renaming: with it a folder is complete. Then ``NAME`` becomes ``NAME.old``, ``NAME.partial`` becomes
``NAME``, and ``NAME.old`` is removed. So at each instant after the first complete checkpoint one of the
three is complete, and the order in which `find` looks is the order in which they may be trusted:

======================= ============ =============== ==============
instant                 ``NAME``     ``.partial``    ``.old``
======================= ============ =============== ==============
writing                 **before**   not complete    -
complete                **before**   now             -
between the renames     -            **now**         before
removing                **now**      -               no longer
======================= ============ =============== ==============

A folder that is removed loses its index first, so a half-removed one never counts as complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from paceline.errors import UsageError

_INDEX = "index.pt"
_PART = "worker-"
_OLD_INDEX = ".metadata"
"""Of formats 1 and 2, which torch.distributed.checkpoint wrote."""


def find(folder: Path) -> Path:
    """The complete checkpoint that stands for *folder*. Raises `UsageError` if there is
    none."""
    for place in (folder, partial(folder), _old(folder)):
        if is_complete(place):
            return place
    for place in (folder, partial(folder), _old(folder)):
        if (place / _OLD_INDEX).exists():
            raise UsageError(
                f"the checkpoint in {place} has format 1 or 2, whose index can run code when "
                "it is read: expected format 3. Save it anew with this paceline"
            )
    raise UsageError(f"there is no checkpoint in {folder}")


def settle(folder: Path) -> None:
    """End what a killed process has begun: a complete checkpoint stands in *folder* itself
    if there is any, and nothing beside it. Raises `UsageError`, with nothing changed, if
    something else is there."""
    if not is_complete(folder):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(
                f"{folder} is no checkpoint, and is not replaced by one: name a folder "
                "that is not there yet, or is empty"
            )
        for place in (partial(folder), _old(folder)):
            if is_complete(place):
                place.rename(folder)
                break
    _remove(_old(folder))
    _remove(partial(folder))


def begin(folder: Path) -> None:
    """Make `partial`. `settle` was called before."""
    partial(folder).mkdir(parents=True)


def replace(folder: Path) -> None:
    """The complete checkpoint in `partial` takes the place of that in *folder*. `settle`
    was called before it was written."""
    if folder.exists():
        folder.rename(_old(folder))
    partial(folder).rename(folder)
    _remove(_old(folder))


def discard(folder: Path) -> None:
    """A checkpoint for *folder* that was begun is given up."""
    _remove(partial(folder))


def index(folder: Path) -> Path:
    """The file in *folder* that says what else is in it, and that all of it is there."""
    return folder / _INDEX


def shared(folder: Path) -> Path:
    """The file in *folder* with what is equal on all workers."""
    return folder / "shared.pt"


def partial(folder: Path) -> Path:
    """Where a new checkpoint for *folder* is written."""
    return folder.with_name(folder.name + ".partial")


def part(folder: Path, rank: int) -> Path:
    """The file in *folder* with the part of worker *rank*."""
    return folder / f"{_PART}{rank}.pt"


def parts(folder: Path) -> list[int]:
    """The ranks of those whose parts in *folder* are complete."""
    found = folder.glob(f"{_PART}*.pt")
    return sorted(int(file.stem.removeprefix(_PART)) for file in found)


def is_begun(folder: Path) -> bool:
    """Whether a checkpoint for *folder* is being written."""
    return partial(folder).exists() and not is_complete(partial(folder))


def as_folder(path: str | Path) -> Path:
    """*path*, with a name. Raises `UsageError` where it has none."""
    folder = Path(os.path.abspath(path))
    if not folder.name:
        raise UsageError(f"expected the path of a folder to make, got {str(path)!r}")
    return folder


def _old(folder: Path) -> Path:
    return folder.with_name(folder.name + ".old")


def is_complete(folder: Path) -> bool:
    """Whether all of *folder* was written."""
    return (folder / _INDEX).exists()


def _remove(folder: Path) -> None:
    if folder.exists():
        (folder / _INDEX).unlink(missing_ok=True)
        shutil.rmtree(folder)
