"""Overlays a simulation's checkpoints on the real ones: redirects files, and never moves them.

A table maps paths to files and folders. Checkpoints that the simulation writes are in the
simulation's own folder; removed ones are hidden; renamed ones have an entry at their new path. A
path without an entry is the one on disk, so a script reads real checkpoints until it replaces them.
An entry of a folder holds for all paths below it without an entry of their own. So no real
checkpoint is ever moved, changed or removed, whenever the process dies.

The folder of a running simulation is locked (flock(2)). The kernel releases the lock when the
process ends, in any way, and the next simulation removes the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError

SUFFIXES = (
    *(".pt", ".pth", ".ckpt", ".pth.tar", ".pt.tar", ".distcp", ".metadata"),
    ".safetensors",
)
_MOST_LINKS = 40
"""Links that Linux follows before it fails with ELOOP."""
_RUNNING = ".running-"


@dataclass(frozen=True)
class _Entry:
    """The place of a path's file or folder; None: the simulation has removed it.

    *link* is the target of a symbolic link that the simulation has made.
    """

    place: str | None
    link: str = ""


_HIDDEN = _Entry(None)


class Overlay:
    """The checkpoints of one simulation, which moves them to *folder* when it ends.

    Methods take absolute paths and return the file's place, or None if the path is not redirected.
    They raise the operating system's errors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder)
        self._own = ""
        self._lock_file = -1
        self._table: dict[str, _Entry] = {}
        self._made_folders: list[str] = []
        self._made_files: set[str] = set()
        self._number = 0
        self.lock = threading.RLock()
        self._exempt = [self._folder, os.path.realpath(tempfile.gettempdir())]
        if _is_below(os.path.realpath(os.curdir), self._exempt[1]):
            # The script works in the temporary folder.
            del self._exempt[1]
        if os.path.isdir(self._folder):
            with _locked(self._folder):
                _remove_dead(self._folder)

    # ---- lookup of paths ----

    def redirects(self, path: str) -> bool:
        """Return whether *path* is a checkpoint, or below a folder with an entry."""
        if self._entry(path) is not None:
            return True
        return is_checkpoint(path) and not self.is_exempt(path)

    def guards(self, path: str) -> bool:
        """Return whether the checkpoint *path* on disk must not be changed."""
        real = os.path.realpath(path)
        return is_checkpoint(real) and not self.is_exempt(real)

    def touches(self, path: str) -> bool:
        """Return whether the folder *path* has checkpoints, or entries in it or above it."""
        real = self.canonical(path, follow=False)
        if self._entry(real) is not None or self._below(real):
            return True
        return not self.is_exempt(real) and _holds(real)

    def is_exempt(self, path: str) -> bool:
        """Return whether *path* is in the simulation's folder, or temporary."""
        return any(_is_below(path, place) for place in self._exempt)

    def canonical(self, path: str, *, follow: bool = True) -> str:
        """Return *path* without symbolic links; *follow*: the last one, too."""
        for _ in range(_MOST_LINKS):
            folder, name = os.path.split(os.path.abspath(path))
            real = os.path.join(os.path.realpath(folder), name)
            link = self._first_link(real if follow else os.path.dirname(real))
            if link is not None:
                target = os.path.join(os.path.dirname(link), self._table[link].link)
                path = target + real[len(link) :]
            elif follow and self._entry(real) is None and os.path.islink(real):
                path = os.path.join(os.path.dirname(real), os.readlink(real))
            else:
                return real
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def _first_link(self, path: str) -> str | None:
        """Return the shortest prefix of *path* that is a link of the simulation."""
        links = (p for p in self._prefixes(path) if self._table[p].link)
        return min(links, key=len, default=None)

    def _prefixes(self, path: str) -> Iterator[str]:
        """Return the prefixes of *path* that have an entry, longest first."""
        while self._table:
            if path in self._table:
                yield path
            parent = os.path.dirname(path)
            if parent == path:
                return
            path = parent

    def _entry(self, path: str) -> tuple[str, _Entry] | None:
        prefix = next(self._prefixes(path), None)
        return None if prefix is None else (prefix, self._table[prefix])

    def _place(self, path: str) -> str | None:
        """Return the place of a canonical path on disk; None if it is hidden."""
        found = self._entry(path)
        if found is None:
            return path
        prefix, entry = found
        return None if entry.place is None else entry.place + path[len(prefix) :]

    def _visible(self, path: str) -> str | None:
        """Return the place of a canonical path; None if the simulation sees nothing there."""
        place = self._place(path)
        return place if place is not None and os.path.lexists(place) else None

    def _children(self, folder: str) -> dict[str, str]:
        """Return the names with an entry directly in a canonical *folder*, and their paths."""
        return {
            os.path.basename(p): p for p in self._table if os.path.dirname(p) == folder
        }

    def _below(self, path: str) -> list[str]:
        """Return paths with entries below *path*."""
        return [p for p in self._table if p != path and _is_below(p, path)]

    def _is_own(self, place: str) -> bool:
        return bool(self._own) and _is_below(place, self._own)

    # ---- reading ----

    def reads(self, path: str, *, follow: bool = True) -> str | None:
        """Return the place to read *path* from."""
        if not self._table:
            return None
        real = self.canonical(path, follow=follow)
        if self._entry(real) is None:
            return None
        place = self._place(real)
        if place is None:
            raise _missing(path)
        return place

    def lists(self, path: str) -> list[str] | None:
        """Return the names in the folder *path*."""
        if not self._table:
            return None
        real = self.canonical(path)
        children = self._children(real)
        if not children and self._entry(real) is None:
            return None
        place = self._visible(real)
        if place is None:
            raise _missing(path)
        names = {name for name in os.listdir(place) if name not in children}
        names |= {name for name, p in children.items() if self._visible(p)}
        return sorted(names)

    # ---- writing ----

    def writes(self, path: str, flags: int, *, always: bool = False) -> str | None:
        """Return the place to write *path* to, opened with *flags*.

        *always*: whatever its name is.
        """
        real = self.canonical(path)
        if not self.redirects(real) and (not always or self.is_exempt(real)):
            if flags & os.O_CREAT and not os.path.exists(real):
                self._made_files.add(real)
            return None
        there = self._visible(real)
        if there is None and not flags & os.O_CREAT:
            raise _missing(path)
        if there is not None and flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._check_parent(real, path)
        place = self._place(real)
        if place is not None and self._is_own(place):
            return place
        if there is not None:
            if os.path.isdir(there):
                # Opening it will fail.
                return there
            if not os.access(there, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        mine = self._new_place(real)
        if there is not None and flags & os.O_TRUNC:
            Path(mine).touch()
        elif there is not None:
            shutil.copy2(there, mine)
        self._table[real] = _Entry(mine)
        return mine

    def removes(self, path: str) -> bool:
        """Remove the file *path*; False if it is not redirected."""
        real = self.canonical(path, follow=False)
        if not self.redirects(real):
            return False
        place = self._visible(real)
        if place is None:
            raise _missing(path)
        if os.path.isdir(place) and not os.path.islink(place):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._forget(real)
        return True

    def renames(self, source: str, target: str) -> bool:
        """Give *source* the name *target*; False if neither is redirected."""
        old = self.canonical(source, follow=False)
        new = self.canonical(target, follow=False)
        place = self._visible(old)
        if place is None:
            if self._place(old) is None:
                raise _missing(source)
            # The original function will fail.
            return False
        if os.path.isdir(place) and not os.path.islink(place):
            return self._renames_folder(old, new, place)
        if not self.redirects(old) and not self.redirects(new):
            if old in self._made_files:
                self._made_files.add(new)
            return False
        there = self._visible(new)
        if there is not None and os.path.isdir(there) and not os.path.islink(there):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        self._check_parent(new, target)
        if old == new:
            return True
        # A file without a checkpoint's name that the simulation wrote is its own.
        entry = self._take(old, place, new, owned=old in self._made_files)
        self._forget(new)
        self._table[new] = entry
        self._hide(old)
        return True

    def _take(self, old: str, place: str, new: str, *, owned: bool) -> _Entry:
        """Return the entry of *old*, which is at *place*, for its new path.

        A file that the simulation owns is moved, unless it has an entry of its own.
        """
        if old in self._table:
            return self._table[old]
        if self._is_own(place) or (place == old and owned):
            mine = self._new_place(new)
            shutil.move(place, mine)
            return _Entry(mine)
        return _Entry(place)

    def _renames_folder(self, old: str, new: str, place: str) -> bool:
        touched = self._entry(old) or self._entry(new)
        if not (touched or self._below(old) or self._below(new)) and not _holds(place):
            if old in self._made_folders:
                self._made_folders.append(new)
            return False
        there = self._visible(new)
        if there is not None:
            if not os.path.isdir(there):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), new)
            if self._names(new):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), new)
        self._check_parent(new, new)
        if old == new:
            return True
        # All files in a folder that the simulation made are its own.
        entry = self._take(old, place, new, owned=old in self._made_folders)
        self._forget(new)
        for path in self._below(old):
            self._table[new + path[len(old) :]] = self._table.pop(path)
        self._table[new] = entry
        self._hide(old)
        return True

    def copies(self, source: str, target: str) -> bool:
        """Copy *source* to *target* in place of a hard link; False if neither is redirected."""
        old = self.canonical(source, follow=False)
        new = self.canonical(target, follow=False)
        if not self.redirects(old) and not self.redirects(new):
            return False
        place = self._visible(old)
        if place is None:
            raise _missing(source)
        mine = self._is_new(new, target)
        shutil.copy2(place, mine, follow_symlinks=False)
        self._table[new] = _Entry(mine, self._table.get(old, _HIDDEN).link)
        return True

    def links(self, text: str, path: str) -> bool:
        """Make a symbolic link *path* to *text*; False if it is not redirected."""
        real = self.canonical(path, follow=False)
        if not self.redirects(real):
            return False
        mine = self._is_new(real, path)
        os.symlink(text, mine)
        self._table[real] = _Entry(mine, text)
        return True

    def makes_folder(self, path: str) -> str | None:
        """Return the place to make the folder *path* at, unless it exists."""
        real = self.canonical(path, follow=False)
        if self._entry(real) is None:
            if not os.path.lexists(real):
                self._made_folders.append(real)
            return None
        mine = self._is_new(real, path)
        self._table[real] = _Entry(mine)
        return mine

    def removes_folder(self, path: str) -> bool:
        """Remove the empty folder *path*; False if the operating system must do it."""
        real = self.canonical(path, follow=False)
        place = self._visible(real)
        if self._entry(real) is None and not self._below(real):
            return False
        if place is None:
            raise _missing(path)
        if self._names(real):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._forget(real)
        return True

    # ---- the table ----

    def _names(self, folder: str) -> list[str]:
        names = self.lists(folder)
        return os.listdir(folder) if names is None else names

    def _check_parent(self, real: str, path: str) -> None:
        place = self._visible(os.path.dirname(real))
        if place is None:
            raise _missing(path)
        if not os.path.isdir(place):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def _is_new(self, real: str, path: str) -> str:
        """Return a place for a path that must not exist yet."""
        if self._visible(real) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._check_parent(real, path)
        return self._new_place(real)

    def _forget(self, path: str) -> None:
        """Hide *path*, and all paths below it."""
        for below in self._below(path):
            _delete(self._own_place(below))
            del self._table[below]
        _delete(self._own_place(path))
        self._hide(path)

    def _hide(self, path: str) -> None:
        self._table.pop(path, None)
        if self._visible(path) is not None:
            if path in self._made_folders and _is_empty(path):
                os.rmdir(path)
            else:
                self._table[path] = _HIDDEN

    def _own_place(self, path: str) -> str | None:
        """Return the place of the simulation's own file or folder at *path*, if there is one."""
        place = self._place(path)
        return place if place is not None and self._is_own(place) else None

    def _new_place(self, path: str) -> str:
        """Return a path in the simulation's folder, with the last name of *path*."""
        self._begin()
        folder = os.path.join(self._own, str(self._number))
        self._number += 1
        os.mkdir(folder)
        return os.path.join(folder, os.path.basename(path))

    def _begin(self) -> None:
        if self._own:
            return
        try:
            os.makedirs(self._folder, exist_ok=True)
            with _locked(self._folder):
                own = tempfile.mkdtemp(prefix=_RUNNING, dir=self._folder)
                self._lock_file = _lock(own, fcntl.LOCK_EX)
        except OSError as error:
            raise UsageError(
                f"cannot write checkpoints into {self._folder}: {error}; name another "
                "folder with --scratch"
            ) from error
        self._own = own

    # ---- end of the simulation ----

    def end(self) -> list[Path]:
        """Move the simulation's checkpoints into the folder under their names; return their paths."""
        made: list[Path] = []
        for path, entry in self._table.items():
            if entry.place is None or not self._is_own(entry.place):
                continue
            target = os.path.join(self._folder, _relative(path))
            for file, name in _files(entry.place):
                to = os.path.join(target, name) if name else target
                _delete(to)
                _make_way(os.path.dirname(to), self._folder)
                os.rename(file, to)
                made.append(Path(to))
        for folder in reversed(self._made_folders):
            with suppress(OSError):
                # This succeeds if it held only checkpoints.
                os.rmdir(folder)
        if self._own:
            shutil.rmtree(self._own)
            os.close(self._lock_file)
        return made


def is_checkpoint(path: str) -> bool:
    """Return whether a file with this name is a checkpoint."""
    return path.lower().removesuffix(".tmp").endswith(SUFFIXES)


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _is_empty(folder: str) -> bool:
    return os.path.isdir(folder) and not os.listdir(folder)


def _holds(folder: str) -> bool:
    """Return whether checkpoints are in *folder*."""
    return any(is_checkpoint(n) for _, _, names in os.walk(folder) for n in names)


def _files(place: str) -> list[tuple[str, str]]:
    """Yield the files at *place*, each with its path below it."""
    if os.path.islink(place) or not os.path.isdir(place):
        return [(place, "")] if os.path.lexists(place) else []
    found = [
        os.path.join(at, name) for at, _, names in os.walk(place) for name in names
    ]
    return [(file, os.path.relpath(file, place)) for file in found]


def _delete(place: str | None) -> None:
    if place is None or not os.path.lexists(place):
        return
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    else:
        os.unlink(place)


def _make_way(folder: str, root: str) -> None:
    """Make *folder* below *root*, and remove a file of an earlier simulation that has its name."""
    place = folder
    while place != root and not os.path.isdir(place):
        if os.path.lexists(place):
            os.unlink(place)
        place = os.path.dirname(place)
    os.makedirs(folder, exist_ok=True)


def _relative(path: str) -> str:
    here = os.path.join(os.path.realpath(os.curdir), "")
    return path.removeprefix(here).lstrip(os.sep)


def _lock(folder: str, how: int) -> int:
    """Lock a folder; return the descriptor that holds the lock.

    Some network file systems lock no folders: a simulation's folder there stays until the user
    removes it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(descriptor, how)
    return descriptor


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Block other simulations that begin or remove dead ones meanwhile."""
    descriptor = _lock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def _remove_dead(folder: str) -> None:
    """Remove the folders of simulations that were killed."""
    for name in os.listdir(folder):
        place = os.path.join(folder, name)
        if not name.startswith(_RUNNING) or os.path.islink(place):
            continue
        descriptor = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place)
        except OSError:
            # Its simulation is running.
            pass
        finally:
            os.close(descriptor)
