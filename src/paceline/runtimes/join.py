"""Which world this process is in."""

from __future__ import annotations

import os

from paceline.core.random_state import seed_everything
from paceline.interfaces import World
from paceline.interfaces.current_runtime import current_world, enter_world
from paceline.run_options import RunOptions
from paceline.runtimes.emulated.runtime import WORLD_VARIABLE, EmulatedWorld
from paceline.runtimes.real.runtime import RealWorld


def join_world() -> World:
    """The caller's world; where there is none yet, this process becomes a real worker, or
    an emulated one where its launcher says so."""
    world = current_world()
    if world is None:
        options = RunOptions.from_environment()
        if os.environ.get(WORLD_VARIABLE) == EmulatedWorld.name:
            world = EmulatedWorld(options)
        else:
            world = RealWorld(options)
        enter_world(world)
        if options.seed is not None:
            seed_everything(options.seed)
    return world
