"""Local updates: one program under many names.

Workers take some steps by themselves, and then average what they have become, or make an
outer step with it. `LocalUpdates` is the program, and each preset a row of the registry with
the defaults of its paper; all have the same options, so that any of them can be turned into
any other.
"""

from __future__ import annotations

from paceline.methods.local.daso import DASO
from paceline.methods.local.diloco import DiLoCo
from paceline.methods.local.hierarchical import HierarchicalLocalSGD
from paceline.methods.local.local_sgd import LocalSGD
from paceline.methods.local.options import Options
from paceline.methods.local.post_local_sgd import PostLocalSGD
from paceline.methods.local.sel_sync import SelSync
from paceline.methods.local.slowmo import SlowMo
from paceline.methods.local.sparse_loco import SparseLoCo
from paceline.methods.local.streaming_diloco import StreamingDiLoCo
from paceline.methods.local.updates import LocalUpdates

__all__ = [
    "DASO",
    "DiLoCo",
    "HierarchicalLocalSGD",
    "LocalSGD",
    "LocalUpdates",
    "Options",
    "PostLocalSGD",
    "SelSync",
    "SlowMo",
    "SparseLoCo",
    "StreamingDiLoCo",
]
