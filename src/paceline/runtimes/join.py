"""Chooses the runtime of this process."""

from __future__ import annotations

import os

from paceline.core.random_state import seed_everything
from paceline.interfaces import Runtime, current_runtime, enter_runtime
from paceline.run_options import RunOptions
from paceline.runtimes.emulated.runtime import RUNTIME_VARIABLE, EmulatedRuntime
from paceline.runtimes.real.runtime import RealRuntime


def join_runtime() -> Runtime:
    """Return the caller's runtime.

    If there is none yet, this process becomes a worker: an emulated one if its launcher says so,
    else a real one.
    """
    runtime = current_runtime()
    if runtime is None:
        options = RunOptions.from_environment()
        if os.environ.get(RUNTIME_VARIABLE) == EmulatedRuntime.name:
            runtime = EmulatedRuntime(options)
        else:
            runtime = RealRuntime(options)
        enter_runtime(runtime)
        if options.seed is not None:
            seed_everything(options.seed)
    return runtime
