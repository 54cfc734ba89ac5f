"""Stand-ins for what the integration of Ray imports of it: its own logic needs none of it.

`replace_ray` is for one test; `without_ray` imports a module for a file of tests.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from paceline.integrations import common

_OURS = ("paceline.integrations.ray", "paceline.integrations.ray_job")


def without_ray(name: str) -> ModuleType:
    """``paceline.integrations.NAME``, imported over stand-ins. Others import it anew."""
    with pytest.MonkeyPatch.context() as patch:
        replace_ray(patch)
        return importlib.import_module(f"paceline.integrations.{name}")


def replace_ray(patch: pytest.MonkeyPatch) -> ModuleType:
    """Returns what stands in for the module ``ray``, until *patch* is undone."""

    def module(name, **members):
        made = ModuleType(name)
        vars(made).update(members)
        patch.setitem(sys.modules, name, made)
        return made

    for name in _OURS:
        # Set before it is deleted, so that the patch's end removes what was imported over it.
        patch.setitem(sys.modules, name, ModuleType(name))
        patch.delitem(sys.modules, name)
    patch.setattr(common, "version", lambda package: "2.60.0")
    ray = module("ray", is_initialized=lambda: True)
    module("ray.util")
    module("ray.util.scheduling_strategies", NodeAffinitySchedulingStrategy=None)
    ray.client = SimpleNamespace(is_connected=lambda: False)
    module("ray.util.client", ray=ray.client)
    module("ray._private", state=None)
    return ray
