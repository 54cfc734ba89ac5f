"""Which runtime the caller lives in: this process's, or this simulated worker's."""

from __future__ import annotations

import threading

from paceline.interfaces import Runtime

_of_thread = threading.local()
_of_process: Runtime | None = None


def current_runtime() -> Runtime | None:
    """The caller's runtime, or None before `paceline.init`."""
    runtime: Runtime | None = getattr(_of_thread, "runtime", None)
    return runtime if runtime is not None else _of_process


def enter_runtime(runtime: Runtime) -> None:
    """Make *runtime* this process's."""
    global _of_process
    _of_process = runtime


def enter_runtime_in_this_thread(runtime: Runtime | None) -> None:
    """Make *runtime* the calling thread's, before this process's."""
    _of_thread.runtime = runtime
