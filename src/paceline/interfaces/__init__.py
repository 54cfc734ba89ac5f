"""Every seam of paceline: what methods, collectives, servers and runtimes see of each other.

Import names from here: ``from paceline.interfaces import Run``. Each module's ``__all__`` lists them.

- `method`: `Method`, its `Rounds`, its `Consistency`, and the `WorkerState` that a checkpoint keeps per worker.
- `run`: one worker's training as its method sees it: `Run`, `UpdatingRun`, `ServerRun`, `Remote`, `PartialOptimizer`.
- `buckets`: `Bucket`, the piece in which a gradient travels; what tensors are on the network.
- `communication`: `Comm`, `AllReduceAlgorithm`, and an `Endpoint` of a server.
- `schedules`: collectives as data: `Schedule`, its `Activity`s, the `Placement` of ranks.
- `server`: `Service`, a state machine that workers ask; `Discipline`, what it does with gradients; `Groups` of servers.
- `server_messages`: what workers and servers say to each other; not exported here.
- `runtime`: `Runtime`, where a worker lives; the services it starts; `current_runtime`.
- `trainings`: `TrainingRegistry`, the trainings of one worker's script; not exported here.

No seam here has a time-out of its own: when a peer is gone, the runtime's transport raises
(gloo and NCCL by connection loss, the simulated runtime at once), and every call here lets
that error through. After an error from a collective the contents of its buffer are
undefined and the communicator must not be used again.
"""

# ruff: noqa: F403 - each module lists its names in __all__

from paceline.interfaces.buckets import Bucket as Bucket
from paceline.interfaces.communication import *
from paceline.interfaces.method import *
from paceline.interfaces.run import *
from paceline.interfaces.runtime import *
from paceline.interfaces.schedules import *
from paceline.interfaces.server import *
