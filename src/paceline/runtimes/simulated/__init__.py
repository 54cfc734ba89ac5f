"""The simulated runtime: real tensors and gradients, virtual time and network.

- `clock`: the virtual clock; start here.
- `simulation`: runs a script once per worker; the workers' runtime.
- `script`, `torch_patches`, `isolation`, `output`: an unmodified script as the body of each worker.
- `process_group`, `work_handle`: the torch.distributed backend, and its handles.
- `collective_group`, `mailbox`, `continuations`: collectives, messages, and the work that follows them.
- `compute`: compute time, charged by a workload.
- `profile`, `profile_cache`, `inputs`: that workload, measured before and cached.
- `services`: parameter servers and other services.
- `rule_schedule`: a cluster's rules in virtual time.
- `checkpoints`, `checkpoint_overlay`: checkpoints in a folder of their own.
- `message_trace`: messages to services, for a trace.
- `watchdog`: stops a simulation that blocks outside the clock.
"""

from paceline.runtimes.simulated.compute import ComputeModel
from paceline.runtimes.simulated.simulation import Simulation, SimulationResult

__all__ = ["ComputeModel", "Simulation", "SimulationResult"]
