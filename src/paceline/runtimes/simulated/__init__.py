"""The simulated runtime: real tensors and gradients, virtual time and network.

- `clock`: the virtual clock, its worker threads and events; start here.
- `simulation`: runs a body once per worker, or once per representative; the workers' runtime.
- `launch`: runs a script as that body, and collects its result.
- `isolation`: gives each worker the state that a real process has for itself.
- `worker_group`: one worker's end of a group, and its operations.
- `collective_group`: the group: queues, collectives over links, messages.
- `process_group`: a torch.distributed backend, for scripts that call it themselves.
- `services`: parameter servers and other services.
- `compute`: compute time, charged by a workload.
- `profile_cache`: measures that workload before a simulation, and caches it.
- `checkpoints`, `checkpoint_overlay`: checkpoints in a folder of their own.
"""

from paceline.runtimes.simulated.compute import ComputeModel
from paceline.runtimes.simulated.simulation import Simulation, SimulationResult

__all__ = ["ComputeModel", "Simulation", "SimulationResult"]
