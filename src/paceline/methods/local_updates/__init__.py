"""Local updates: one program under many names.

Workers take some steps by themselves, and then average what they have become, or make an
outer step with it. `LocalUpdates` is the program, and each preset a row of the registry with
the defaults of its paper; all have the same options, so that any of them can be turned into
any other.

- `method`: the program: `LocalUpdates`; start here. `options`: its hyperparameters.
- `worker`: one worker: averages of the workers' models, and what a checkpoint keeps.
- `local_sgd`, `post_local_sgd`, `slowmo`, `hierarchical`: presets.
- `diloco`, `streaming_diloco`, `sparse_loco`: presets with hundreds of local steps.
- `fragments`: parts of the model, each with its anchor and outer momentum.
- `outer_optimizer`: the outer step.
- `optimizer_state`: the inner optimizer's state, where that is averaged.
- `groups`: who averages between two averages of all workers.
"""

from __future__ import annotations

from paceline.methods.local_updates.diloco import DiLoCo
from paceline.methods.local_updates.hierarchical import HierarchicalLocalSGD
from paceline.methods.local_updates.local_sgd import LocalSGD
from paceline.methods.local_updates.method import LocalUpdates
from paceline.methods.local_updates.options import Options
from paceline.methods.local_updates.post_local_sgd import PostLocalSGD
from paceline.methods.local_updates.slowmo import SlowMo
from paceline.methods.local_updates.sparse_loco import SparseLoCo
from paceline.methods.local_updates.streaming_diloco import StreamingDiLoCo

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
