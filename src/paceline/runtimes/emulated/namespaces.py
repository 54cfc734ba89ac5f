"""Wraps unshare, setns, mount and prctl, for which Python 3.11 has no functions.

No namespace has a name on the machine: it lives as long as a process or an open descriptor holds
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

from paceline.runtimes.emulated.control_messages import Mode

_NEW_MOUNTS = 0x00020000
_NEW_USER = 0x10000000
_NEW_PIDS = 0x20000000
_NEW_NETWORK = 0x40000000

_MOUNT_NOSUID, _MOUNT_NODEV, _MOUNT_NOEXEC = 2, 4, 8
_MOUNT_RECURSIVE, _MOUNT_SLAVE = 0x4000, 1 << 19

_SET_PARENT_DEATH_SIGNAL = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    """Call a C function; raises `OSError` with its name."""
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def isolate() -> Mode:
    """Give this process a network, mounts and (for its children) process numbers of its own.

    The process must have one thread. It uses its own privilege, or else a user namespace. In the
    user namespace the user keeps its number, so processes started later are as unprivileged as
    before. Raises `PermissionError` or `OSError`.
    """
    own = _NEW_NETWORK | _NEW_MOUNTS | _NEW_PIDS
    try:
        _call("unshare", own)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", _NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _call("unshare", own)
        return "user namespace"
    return "root"


def mount_own_proc() -> bool:
    """Let /proc show the process numbers of this namespace; return False if that is refused.

    Only this process and its children see the mount.
    """
    try:
        _call("mount", b"none", b"/", None, _MOUNT_RECURSIVE | _MOUNT_SLAVE, None)
        flags = _MOUNT_NOSUID | _MOUNT_NODEV | _MOUNT_NOEXEC
        _call("mount", b"proc", b"/proc", b"proc", flags, None)
    except OSError:
        return False
    return True


def die_with(process: int) -> None:
    """Let the kernel kill this process when its parent ends.

    *process* is a descriptor of the parent (pidfd), which may have ended already.
    """
    _call("prctl", _SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    watch = select.poll()
    watch.register(process, select.POLLIN)
    if watch.poll(0):
        os._exit(1)


def network() -> int:
    """Return a descriptor that holds the network namespace of this thread."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_network() -> int:
    """Return a descriptor of a new network namespace; this thread stays in its own."""
    here = network()
    try:
        _call("unshare", _NEW_NETWORK)
        try:
            return network()
        finally:
            _call("setns", here, _NEW_NETWORK)
    finally:
        os.close(here)


@contextlib.contextmanager
def inside(descriptor: int) -> Iterator[None]:
    """Move this thread into another network namespace within a ``with`` block."""
    here = network()
    try:
        _call("setns", descriptor, _NEW_NETWORK)
        try:
            yield
        finally:
            _call("setns", here, _NEW_NETWORK)
    finally:
        os.close(here)
