"""The folder of a checkpoint: a reader finds a complete one, even if its writer was killed.

A checkpoint in the folder ``NAME`` is written into ``NAME.partial``: the common part in
``shared.pt``, and worker R's own part in ``worker-R.pt``. The index, ``index.pt``, is written last, by
renaming: a folder with an index is complete. Then ``NAME`` becomes ``NAME.old``, ``NAME.partial``
becomes ``NAME``, and ``NAME.old`` is removed. So at each moment after the first complete checkpoint
one of the three is complete. `find` looks for them in the order of the columns; bold is its result:

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
"""The index of formats 1 and 2, which torch.distributed.checkpoint wrote."""


def find(folder: Path) -> Path:
    """Find the complete checkpoint of *folder*. Raises `UsageError` if there is none."""
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


def recover(folder: Path) -> None:
    """Clean up after a killed process.

    Afterwards a complete checkpoint, if there is one, is in *folder* itself, and the other two
    folders are gone. Raises `UsageError`, with nothing changed, if *folder* holds anything else.
    """
    if not is_complete(folder):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(
                f"{folder} is no checkpoint, so it is not replaced. Name a folder "
                "that does not exist yet, or is empty"
            )
        for place in (partial(folder), _old(folder)):
            if is_complete(place):
                place.rename(folder)
                break
    _remove(_old(folder))
    _remove(partial(folder))


def begin(folder: Path) -> None:
    """Make `partial`. Call `recover` before."""
    partial(folder).mkdir(parents=True)


def replace(folder: Path) -> None:
    """Replace the checkpoint in *folder* by the complete one in `partial`.

    `recover` was called before the latter was written.
    """
    if folder.exists():
        folder.rename(_old(folder))
    partial(folder).rename(folder)
    _remove(_old(folder))


def discard(folder: Path) -> None:
    """Remove an incomplete checkpoint for *folder*."""
    _remove(partial(folder))


def index(folder: Path) -> Path:
    """The file in *folder* that lists its contents, and marks it as complete."""
    return folder / _INDEX


def shared(folder: Path) -> Path:
    """The file in *folder* with the states that are equal on all workers."""
    return folder / "shared.pt"


def partial(folder: Path) -> Path:
    """The folder in which a new checkpoint for *folder* is written."""
    return folder.with_name(folder.name + ".partial")


def part(folder: Path, rank: int) -> Path:
    """The file in *folder* with the part of worker *rank*."""
    return folder / f"{_PART}{rank}.pt"


def parts(folder: Path) -> list[int]:
    """The ranks of the workers whose parts in *folder* are complete."""
    found = folder.glob(f"{_PART}*.pt")
    return sorted(int(file.stem.removeprefix(_PART)) for file in found)


def is_begun(folder: Path) -> bool:
    """Whether a checkpoint for *folder* is being written."""
    return partial(folder).exists() and not is_complete(partial(folder))


def as_folder(path: str | Path) -> Path:
    """Return *path* as an absolute path. Raises `UsageError` if it has no name."""
    folder = Path(os.path.abspath(path))
    if not folder.name:
        raise UsageError(f"expected the path of a folder to make, got {str(path)!r}")
    return folder


def _old(folder: Path) -> Path:
    return folder.with_name(folder.name + ".old")


def is_complete(folder: Path) -> bool:
    """Whether *folder* is complete."""
    return (folder / _INDEX).exists()


def _remove(folder: Path) -> None:
    if folder.exists():
        (folder / _INDEX).unlink(missing_ok=True)
        shutil.rmtree(folder)
