"""Checkpoints of a simulation are kept off those of real runs.

While a script runs it writes, reads, renames and removes its checkpoints as it always does.
The first time that it is about to change one, what is there is set aside; in the end what
the simulation has left is moved into a folder of its own, and all that was set aside is put
back. A simulation that was killed is cleaned up by the next one.

A checkpoint is what `torch.save` writes, and a file whose name says so (`SUFFIXES`). Changes
are seen by Python's audit events, which tell of every ``open``, ``os.rename`` and
``os.remove`` before it happens, whoever calls it; and `torch.save`, which opens files past
Python, is asked. A library that writes files of its own accord (safetensors) is not seen.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from paceline.errors import UsageError

SUFFIXES = (".pt", ".pth", ".ckpt", ".pth.tar", ".pt.tar", ".distcp", ".metadata")
INDEX = "index.jsonl"

How = Literal["replaced", "removed", "written into"]
"""A file's content is wholly new; the file itself is renamed, removed or replaced by another;
or its content is kept, and changed."""


class _Entry(msgspec.Struct):
    path: str
    aside: str | None


class SetAside:
    """What one simulation has changed so far. *folder* takes what it leaves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._originals = self._folder / f".before-{os.getpid()}"
        self._changed: dict[str, str | None] = {}
        self._folders: list[str] = []
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._temporary = Path(tempfile.gettempdir()).resolve()
        if Path.cwd().resolve().is_relative_to(self._temporary):
            self._temporary = self._folder  # nothing else is temporary there
        _recover(self._folder)

    # ---- what is about to happen ----

    def opens(self, path: str, flags: int) -> None:
        """A file is opened with these *flags*."""
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT)
        if not writes or not _is_checkpoint(path):
            return
        real = os.path.realpath(path)
        if flags & os.O_EXCL and os.path.exists(real):
            return  # it will be refused
        anew = flags & os.O_TRUNC and flags & os.O_CREAT
        self._changes(real, "replaced" if anew else "written into")

    def saves(self, path: str) -> None:
        """`torch.save` is asked to make this file."""
        self._changes(os.path.realpath(path), "replaced")

    def renames(self, source: str, target: str) -> None:
        """A file or folder gets another name, or takes another one's place."""
        if os.path.isdir(source):
            for file in _files_in(source):
                self._changes(file, "removed")
                self._changes(target + file[len(source) :], "removed")
            for place, _, _ in os.walk(source):
                self._folders.append(target + place[len(source) :])
        elif {_is_checkpoint(source), _is_checkpoint(target)} != {False} or (
            source in self._changed
        ):
            self._changes(source, "removed")
            self._changes(target, "removed")

    def removes(self, path: str) -> None:
        """A file is removed, or a link is made."""
        if _is_checkpoint(path):
            self._changes(path, "removed")

    def makes_folder(self, path: str) -> None:
        """A folder is made."""
        if not os.path.exists(path):
            self._folders.append(path)

    def _changes(self, path: str, how: How) -> None:
        with self._lock:
            if path in self._changed or self._is_ours(path):
                return
            aside = None
            if os.path.lexists(path):
                self._make_folder()
                aside = str(self._originals / str(next(self._numbers)))
                _put_aside(path, aside, how)
            self._changed[path] = aside
            if aside is not None or self._originals.exists():
                with (self._originals / INDEX).open("ab") as index:
                    index.write(msgspec.json.encode(_Entry(path, aside)) + b"\n")

    def _is_ours(self, path: str) -> bool:
        place = Path(path)
        return any(place.is_relative_to(f) for f in (self._folder, self._temporary))

    def _make_folder(self) -> None:
        try:
            self._originals.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot set checkpoints aside in {self._folder}: {error}; name another "
                "folder with --scratch"
            ) from error

    # ---- the end ----

    def put_back(self) -> list[Path]:
        """All is as it was before; returns the files that the simulation has made, where
        they are now."""
        made = []
        for path, aside in self._changed.items():
            if os.path.lexists(path):
                place = self._folder / _relative(path)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, place)
                made.append(place)
            if aside is not None:
                _restore(path, aside)
        for folder in reversed(self._folders):
            with suppress(OSError):
                os.rmdir(folder)  # where only checkpoints were
        if self._originals.exists():
            shutil.rmtree(self._originals)
        return made


@contextmanager
def checkpoints_set_aside(folder: Path) -> Iterator[list[Path]]:
    """Within it scripts' checkpoints are a simulation's. The list that it yields holds in
    the end where these are, in *folder*."""
    global _current
    made: list[Path] = []
    keeper = SetAside(folder)
    save = torch.save

    def asked(obj: object, f: Any, *arguments: Any, **keywords: Any) -> None:
        if isinstance(f, str | os.PathLike):
            with _unseen():
                keeper.saves(os.fspath(f))
        save(obj, f, *arguments, **keywords)

    _listen()
    torch.save = asked
    _current = keeper
    try:
        yield made
    finally:
        _current = None
        torch.save = save
        made += keeper.put_back()


def _put_aside(path: str, aside: str, how: How) -> None:
    if how == "replaced":
        with suppress(OSError):
            os.rename(path, aside)  # the file itself is out of reach then
            return
    if how == "removed":
        with suppress(OSError):
            os.link(path, aside, follow_symlinks=False)
            return
    shutil.copy2(path, aside, follow_symlinks=False)  # also to another disk


def _restore(path: str, aside: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    shutil.move(aside, path)


def _recover(folder: Path) -> None:
    """Put back what simulations have set aside that were killed."""
    for left in folder.glob(".before-*"):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(left.name.rpartition("-")[2]), 0)
            continue  # it runs
        try:
            lines = (left / INDEX).read_bytes()
        except FileNotFoundError:
            lines = b""
        for entry in msgspec.json.Decoder(_Entry).decode_lines(lines):
            if os.path.lexists(entry.path):
                os.unlink(entry.path)
            if entry.aside is not None:
                _restore(entry.path, entry.aside)
                print(
                    f"paceline: {entry.path} is put back: a simulation that was killed "
                    "had changed it",
                    file=sys.stderr,
                )
        shutil.rmtree(left)


def _is_checkpoint(path: str) -> bool:
    return path.lower().removesuffix(".tmp").endswith(SUFFIXES)


def _files_in(folder: str) -> list[str]:
    found = (
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
    )
    return [path for path in found if _is_checkpoint(path)]


def _relative(path: str) -> str:
    here = os.path.join(os.path.realpath(os.curdir), "")
    return path.removeprefix(here).lstrip(os.sep)


# ---- what Python tells ----

_current: SetAside | None = None
_listening = False
_inside = threading.local()


def _listen() -> None:
    """A hook cannot be taken away again: without a simulation it does nothing."""
    global _listening
    if not _listening:
        sys.addaudithook(_heard)
        _listening = True


@contextmanager
def _unseen() -> Iterator[None]:
    """What is done within it is not a script's."""
    _inside.hook = True
    try:
        yield
    finally:
        _inside.hook = False


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    keeper = _current
    if keeper is None or event not in _EVENTS or getattr(_inside, "hook", False):
        return
    with _unseen():
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike):
                keeper.opens(os.fsdecode(path), flags)
        elif event == "os.rename":
            source, target, source_folder, target_folder = arguments
            keeper.renames(_full(source, source_folder), _full(target, target_folder))
        elif event == "os.remove":
            keeper.removes(_full(*arguments))
        elif event in ("os.link", "os.symlink"):
            keeper.removes(_full(arguments[1], arguments[-1]))
        else:
            path, _, folder = arguments
            keeper.makes_folder(_full(path, folder))


_EVENTS = frozenset(
    {"open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink"}
)


def _full(path: Any, folder: int) -> str:
    """A path's folders without links, and its own last name as it is: links are renamed and
    removed themselves. *folder*: the descriptor that it is relative to, or -1."""
    text = os.fsdecode(path)
    if folder >= 0:
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    place, name = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(place), name)
