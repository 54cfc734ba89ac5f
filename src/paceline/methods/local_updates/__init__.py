"""Local-update methods: each worker trains alone for H steps, then all workers average their models.

Each preset is a method of the registry with the defaults of its paper. All presets have the same
options, so any preset can be configured as any other.

- `presets`: the methods by name: local SGD, SlowMo, DiLoCo and others.
- `rounds`: `LocalUpdates`, the algorithm of all presets, and its worker; start here.
- `options`: the hyperparameters, their checks, and groups of workers.
- `fragments`: fragments of the model with their anchors and outer steps, and the averaging of the
  inner optimizer's state.
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
