"""Measures a network as training uses it, and describes it as a cluster for simulation.

- `__main__`: the script that ``paceline probe`` launches on every worker.
- `measure`: measures between the workers of a job, in any runtime.
- `quick`: measures for a few seconds, between two steps of a training.
- `pairs`: bandwidth from one worker's host to another's, alone and under load.
- `tcp_counters`: the kernel's counters of this process's TCP connections.
- `infer`: the measurements as data; finds which workers share a rack, and makes a `Cluster`.
- `tables`: the measurements as tables for the user.
"""

from paceline.cluster.probe.infer import ProbeResult, infer_cluster
from paceline.cluster.probe.measure import measure

__all__ = ["ProbeResult", "infer_cluster", "measure"]
