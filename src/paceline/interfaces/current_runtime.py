"""Which world the caller lives in: this process's, or this virtual worker's."""

from __future__ import annotations

import threading

from paceline.interfaces import World

_of_thread = threading.local()
_of_process: World | None = None


def current_world() -> World | None:
    """The caller's world, or None before `paceline.init`."""
    world: World | None = getattr(_of_thread, "world", None)
    return world if world is not None else _of_process


def enter_world(world: World) -> None:
    """Make *world* this process's."""
    global _of_process
    _of_process = world


def enter_world_in_this_thread(world: World | None) -> None:
    """Make *world* the calling thread's, before this process's."""
    _of_thread.world = world
