"""Redirects a simulation's checkpoints to a folder of its own.

A checkpoint is a file of `torch.save`, or one whose name ends as one (`overlay.SUFFIXES`). While a
script runs, the functions of Python, torch and safetensors that open, list, rename and remove files
use the simulation's `Overlay`.

Patches never cover all functions. Python's audit events report the others: a change of a checkpoint
that was not redirected is refused before it happens. Only libraries that write files without Python
are not detected.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.util
import io
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.runtimes.simulated.checkpoint_overlay import Overlay

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT


@contextmanager
def redirect_checkpoints(folder: Path) -> Iterator[list[Path]]:
    """Redirect scripts' checkpoints in this block to *folder*.

    Yields a list that has the checkpoints' paths after the block.
    """
    global _current
    made: list[Path] = []
    with _direct():
        overlay = Overlay(folder)
    _listen()
    with _patched():
        _current = overlay
        try:
            yield made
        finally:
            _current = None
            with _direct():
                made += overlay.end()


_current: Overlay | None = None
_thread = threading.local()


@contextmanager
def _direct() -> Iterator[None]:
    """Give the calling thread the real paths in this block."""
    before = getattr(_thread, "direct", False)
    _thread.direct = True
    try:
        yield
    finally:
        _thread.direct = before


def _ask(question: Callable[[Overlay], Any]) -> Any:
    """Return the running simulation's answer; None without a simulation."""
    overlay = _current
    if overlay is None or getattr(_thread, "direct", False):
        return None
    with _direct(), overlay.lock:
        return question(overlay)


def _is_path(path: Any) -> bool:
    return isinstance(path, str | bytes | os.PathLike)


def _full(path: Any, folder: int | None = None) -> str:
    """Return the path as text. *folder*: the descriptor that it is relative to."""
    text = os.fsdecode(path)
    if folder is None or folder < 0:
        return text
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)


def _like(path: Any, text: str) -> Any:
    return os.fsencode(text) if isinstance(os.fspath(path), bytes) else text


# ---- patched functions ----

_Replacement = Callable[[Any], Any]
_Choice = Callable[[Overlay, str, tuple[Any, ...], dict[str, Any]], str | None]


def _in_order(
    names: tuple[str, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, ...]:
    """Return *arguments* with those that were passed by one of *names*."""
    for name in names[len(arguments) :]:
        if name not in keywords:
            break
        arguments += (keywords.pop(name),)
    return arguments


def _elsewhere(choose: _Choice, names: tuple[str, ...] = ("path",)) -> _Replacement:
    """Make a function use the path that *choose* returns.

    *names* are those of its first arguments; the path is the one called path, file, filename or f.
    """
    at = next(n for n, name in enumerate(names) if name in _PATHS)

    def replacement(original: Any) -> Any:
        @functools.wraps(original)
        def call(*arguments: Any, **keywords: Any) -> Any:
            arguments = _in_order(names, arguments, keywords)
            if len(arguments) <= at or not _is_path(arguments[at]):
                return original(*arguments, **keywords)
            path = arguments[at]

            def where(overlay: Overlay) -> str | None:
                full = _full(path, keywords.get("dir_fd"))
                return choose(overlay, full, arguments, keywords)

            place = _ask(where)
            if place is None:
                return original(*arguments, **keywords)
            keywords.pop("dir_fd", None)
            there = _like(path, place)
            return original(*arguments[:at], there, *arguments[at + 1 :], **keywords)

        return call

    return replacement


_PATHS = {"path", "file", "filename", "f"}


def _done(
    act: Callable[[Overlay, tuple[Any, ...], dict[str, Any]], Any], *names: str
) -> _Replacement:
    """Replace a function by *act*; if that returns False or None, call the original."""

    def replacement(original: Any) -> Any:
        @functools.wraps(original)
        def call(*arguments: Any, **keywords: Any) -> Any:
            arguments = _in_order(names, arguments, keywords)
            answer = _ask(lambda overlay: act(overlay, arguments, keywords))
            if answer is None or answer is False:
                return original(*arguments, **keywords)
            return None if answer is True else answer

        return call

    return replacement


def _read(
    overlay: Overlay, path: str, _: tuple[Any, ...], keywords: dict[str, Any]
) -> str | None:
    return overlay.reads(path, follow=keywords.get("follow_symlinks", True))


def _read_link(
    overlay: Overlay, path: str, _: tuple[Any, ...], __: dict[str, Any]
) -> str | None:
    return overlay.reads(path, follow=False)


def _access(original: Any) -> Any:
    asked = _elsewhere(_read)(original)

    @functools.wraps(original)
    def access(*arguments: Any, **keywords: Any) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(asked(*arguments, **keywords))
        return False

    return access


def _change(
    overlay: Overlay, path: str, _: tuple[Any, ...], __: dict[str, Any]
) -> str | None:
    """Redirect a change of a file's times, mode or length."""
    return overlay.writes(path, os.O_RDWR)


def _open_by_flags(
    overlay: Overlay, path: str, arguments: tuple[Any, ...], _: dict[str, Any]
) -> str | None:
    flags = arguments[1]
    return overlay.writes(path, flags) if flags & _WRITES else overlay.reads(path)


def _open_by_mode(
    overlay: Overlay, path: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> str | None:
    if keywords.get("opener") is not None:
        # The opener calls os.open.
        return None
    mode = arguments[1] if len(arguments) > 1 else "r"
    if not isinstance(mode, str) or not set(mode) & set("wax+"):
        return overlay.reads(path)
    flags = {"w": _NEW, "a": os.O_WRONLY | os.O_CREAT, "x": os.O_CREAT | os.O_EXCL}
    return overlay.writes(path, next((flags[c] for c in mode if c in flags), os.O_RDWR))


def _save(
    overlay: Overlay, path: str, _: tuple[Any, ...], __: dict[str, Any]
) -> str | None:
    return overlay.writes(path, _NEW, always=True)


def _rename(overlay: Overlay, paths: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    source, target = paths
    return overlay.renames(
        _full(source, keywords.get("src_dir_fd")),
        _full(target, keywords.get("dst_dir_fd")),
    )


def _link(overlay: Overlay, paths: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    source, target = paths
    return overlay.copies(
        _full(source, keywords.get("src_dir_fd")),
        _full(target, keywords.get("dst_dir_fd")),
    )


def _symlink(
    overlay: Overlay, paths: tuple[Any, ...], keywords: dict[str, Any]
) -> bool:
    text, path = os.fsdecode(paths[0]), _full(paths[1], keywords.get("dir_fd"))
    return overlay.links(text, path)


def _remove(overlay: Overlay, paths: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    return overlay.removes(_full(paths[0], keywords.get("dir_fd")))


def _remove_folder(
    overlay: Overlay, paths: tuple[Any, ...], keywords: dict[str, Any]
) -> bool:
    return overlay.removes_folder(_full(paths[0], keywords.get("dir_fd")))


def _make_folder(
    overlay: Overlay, path: str, _: tuple[Any, ...], __: dict[str, Any]
) -> str | None:
    return overlay.makes_folder(path)


def _list(
    overlay: Overlay, paths: tuple[Any, ...], _: dict[str, Any]
) -> list[Any] | None:
    if paths and not _is_path(paths[0]):
        return None
    path = paths[0] if paths else "."
    names = overlay.lists(_full(path))
    return None if names is None else [_like(path, name) for name in names]


def _scan(overlay: Overlay, paths: tuple[Any, ...], _: dict[str, Any]) -> Any:
    names = _list(overlay, paths, {})
    return None if names is None else _Scan(paths[0] if paths else ".", names)


class _Scan:
    """The result of `os.scandir` for a folder that the overlay lists."""

    def __init__(self, folder: Any, names: list[Any]) -> None:
        self._entries = iter([_Found(folder, name) for name in names])

    def __iter__(self) -> Iterator[_Found]:
        return self._entries

    def __next__(self) -> _Found:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing, since nothing is open."""


class _Found:
    """An `os.DirEntry` whose methods ask the overlay."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name = name
        self.path = os.path.join(os.fspath(folder), name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """The file's `os.stat`."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """The file's number."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder."""
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file."""
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """Return False: only Windows has junctions."""
        return False

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


def _remove_tree(original: Any) -> Any:
    """Replace `shutil.rmtree`, which works with descriptors of folders without a path."""

    @functools.wraps(original)
    def rmtree(path: Any, *arguments: Any, **keywords: Any) -> None:
        listed = keywords.get("dir_fd") is None and _ask(
            lambda overlay: overlay.touches(_full(path))
        )
        if not listed:
            original(path, *arguments, **keywords)
            return
        try:
            for folder, folders, files in os.walk(path, topdown=False):
                for name in folders:
                    where = os.path.join(folder, name)
                    (os.unlink if os.path.islink(where) else os.rmdir)(where)
                for name in files:
                    os.unlink(os.path.join(folder, name))
            os.rmdir(path)
        except OSError:
            if not (keywords.get("ignore_errors") or (arguments and arguments[0])):
                raise

    return rmtree


_READ, _CHANGE = _elsewhere(_read), _elsewhere(_change)
_OPEN = _elsewhere(_open_by_mode, ("file", "mode"))
_OF_OS: dict[str, _Replacement] = {
    **dict.fromkeys(("stat", "listxattr", "getxattr"), _READ),
    **dict.fromkeys(("lstat", "readlink"), _elsewhere(_read_link)),
    "access": _access,
    **dict.fromkeys(("utime", "chmod", "chown", "truncate", "setxattr"), _CHANGE),
    "open": _elsewhere(_open_by_flags, ("path", "flags")),
    **dict.fromkeys(("rename", "replace"), _done(_rename, "src", "dst")),
    **dict.fromkeys(("remove", "unlink"), _done(_remove, "path")),
    "link": _done(_link, "src", "dst"),
    "symlink": _done(_symlink, "src", "dst"),
    "mkdir": _elsewhere(_make_folder),
    "rmdir": _done(_remove_folder, "path"),
    "listdir": _done(_list, "path"),
    "scandir": _done(_scan, "path"),
}
_CAPABILITIES = (
    os.supports_dir_fd,
    os.supports_effective_ids,
    os.supports_fd,
    os.supports_follow_symlinks,
)


@contextmanager
def _patched() -> Iterator[None]:
    with ExitStack() as stack:
        for place, name, replacement in _patches():
            original = getattr(place, name)
            ours = replacement(original)
            for capable in _CAPABILITIES:
                if original in capable:
                    capable.add(ours)
                    stack.callback(capable.discard, ours)
            stack.callback(setattr, place, name, original)
            setattr(place, name, ours)
        yield


def _patches() -> list[tuple[Any, str, _Replacement]]:
    patches: list[tuple[Any, str, _Replacement]] = [
        (os, name, replacement)
        for name, replacement in _OF_OS.items()
        if hasattr(os, name)
    ]
    patches += [
        (builtins, "open", _OPEN),
        (io, "open", _OPEN),
        (shutil, "rmtree", _remove_tree),
        (torch, "save", _elsewhere(_save, ("obj", "f"))),
        (torch, "load", _elsewhere(_read, ("f",))),
    ]
    if importlib.util.find_spec("safetensors") is not None:
        tensors: Any = importlib.import_module("safetensors.torch")
        opens = _elsewhere(_read, ("filename",))
        patches += [
            (
                *(tensors, "serialize_file"),
                _elsewhere(_save, ("tensor_dict", "filename")),
            ),
            (tensors, "safe_open", opens),
            (importlib.import_module("safetensors"), "safe_open", opens),
        ]
    return patches


# ---- Python's audit events ----

_listening = False
_EVENTS = frozenset({"open", "os.rename", "os.remove", "os.truncate"})


def _listen() -> None:
    """Add the audit hook, which Python cannot remove: without a simulation it does nothing."""
    global _listening
    if not _listening:
        sys.addaudithook(_heard)
        _listening = True


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _EVENTS or _current is None or getattr(_thread, "direct", False):
        return
    if event == "open":
        path, _, flags = arguments
        paths = [_full(path)] if _is_path(path) and flags & _WRITES else []
    elif event == "os.rename":
        source, target, source_folder, target_folder = arguments
        paths = [_full(source, source_folder), _full(target, target_folder)]
    elif event == "os.remove":
        paths = [_full(*arguments)]
    else:
        paths = [_full(arguments[0])] if _is_path(arguments[0]) else []
    for path in paths:
        if _ask(partial(Overlay.guards, path=path)):
            raise UsageError(
                f"the script changes the checkpoint {path} in a way that a simulation "
                "cannot redirect: write it with open(), torch.save or safetensors, or "
                'only where paceline.runtime_name() is not "simulated"'
            )
