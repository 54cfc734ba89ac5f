"""Interfaces of paceline's parts: methods, collectives, servers and runtimes see only these of each other.

Import names from here: ``from paceline.interfaces import Run``. Each module's ``__all__`` lists them.

- `method`: `Method`, its `Rounds` and `Consistency`; the `WorkerState` that a checkpoint saves per worker.
- `run`: one worker's training as its method sees it: `Run`, `UpdatingRun`, `ServerRun`, `Remote`,
  `PartialOptimizer`.
- `buckets`: `Bucket`, a flat buffer of gradients; sizes of tensors on the network.
- `communication`: `Comm`, `AllReduceAlgorithm`, and an `Endpoint` of a server.
- `schedules`: collectives as data: `Schedule`, its `Activity`s, the `Placement` of ranks.
- `server`: `Service`, a state machine that answers workers; `Discipline`, what a server does with
  gradients; `Groups` of servers.
- `server_messages`: requests and replies between workers and servers; not exported here.
- `runtime`: `Runtime`, what a worker runs on; the services it starts; `current_runtime`.
- `consolidated_entry`: ranks agree on the step after which they enter `consolidated`; not exported here.
- `trainings`: `TrainingRegistry`, the trainings of one worker's script; not exported here.

No interface here has a time-out of its own. When a peer is lost, the runtime's transport raises an
error: gloo and NCCL by connection loss, the simulated runtime at once. Every call here passes that
error on. After an error from a collective the contents of its buffer are undefined, and the
communicator must not be used again.
"""

# ruff: noqa: F403 - each module lists its names in __all__

from paceline.interfaces.buckets import Bucket as Bucket
from paceline.interfaces.communication import *
from paceline.interfaces.method import *
from paceline.interfaces.run import *
from paceline.interfaces.runtime import *
from paceline.interfaces.schedules import *
from paceline.interfaces.server import *
