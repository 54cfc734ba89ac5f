"""Local updates: workers step by themselves, and average their models every so many steps.

Each preset is a row of the registry with the defaults of its paper. All have the same options, so
that any of them can be turned into any other.

- `presets`: the methods by name: local SGD, SlowMo, DiLoCo and others.
- `rounds`: the program of all presets, `LocalUpdates`, and its worker; start here.
- `options`: the hyperparameters, and groups of workers.
- `fragments`: fragments of the model with their anchors, and the outer step on them; the inner optimizer's state.
"""

from __future__ import annotations

from paceline.methods.local_updates.options import Options
from paceline.methods.local_updates.presets import (
    DiLoCo,
    HierarchicalLocalSGD,
    LocalSGD,
    PostLocalSGD,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from paceline.methods.local_updates.rounds import LocalUpdates

__all__ = [
    "DiLoCo",
    "HierarchicalLocalSGD",
    "LocalSGD",
    "LocalUpdates",
    "Options",
    "PostLocalSGD",
    "SlowMo",
    "SparseLoCo",
    "StreamingDiLoCo",
]
