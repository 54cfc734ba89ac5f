"""Stand-ins for what integrations import of a trainer or of Ray: their own logic needs none of it.

`replace_ray` is for one test; `without_ray` imports a module for a file of tests.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from paceline.integrations import common


def module(patch: pytest.MonkeyPatch, name: str, **members: object) -> ModuleType:
    """What stands in for a module, until *patch* is undone."""
    made = ModuleType(name)
    vars(made).update(members)
    patch.setitem(sys.modules, name, made)
    return made


def forget(patch: pytest.MonkeyPatch, *names: str) -> None:
    """``paceline.integrations.NAME`` are imported anew, over stand-ins, until *patch* is undone."""
    for name in [f"paceline.integrations.{name}" for name in names]:
        # Set before it is deleted, so that the patch's end removes what was imported over it.
        patch.setitem(sys.modules, name, ModuleType(name))
        patch.delitem(sys.modules, name)


def without_ray(name: str) -> ModuleType:
    """``paceline.integrations.NAME``, imported over stand-ins. Others import it anew."""
    with pytest.MonkeyPatch.context() as patch:
        replace_ray(patch)
        return importlib.import_module(f"paceline.integrations.{name}")


def replace_ray(patch: pytest.MonkeyPatch) -> ModuleType:
    """Returns what stands in for the module ``ray``, until *patch* is undone."""
    forget(patch, "ray", "ray_job")
    patch.setattr(common, "version", lambda package: "2.60.0")
    ray = module(patch, "ray", is_initialized=lambda: True)
    ray.client = SimpleNamespace(is_connected=lambda: False)
    module(patch, "ray.util")
    module(
        patch,
        "ray.util.scheduling_strategies",
        NodeAffinitySchedulingStrategy=None,
    )
    module(patch, "ray.util.client", ray=ray.client)
    module(patch, "ray._private", state=None)
    return ray
