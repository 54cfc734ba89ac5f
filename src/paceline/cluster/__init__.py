"""Describes networks, and a model's load on them. No I/O; callers pass the time.

- `cluster`: a `Cluster`: racks of hosts, their links and speeds, and rules that change them during
  a run.
- `cluster_file`: clusters as TOML files.
- `worker_classes`: groups equal workers of a cluster, so that a few can represent all.
- `workload`: a `Workload`: the compute cost of a training step, tensor by tensor.
- `flop_counter`: counts a workload from a module's operations.
- `stand_in`: a model with a workload's tensors and times, and nothing else.
- `links`: messages over links, first in, first out; start here for simulated networks.
- `bandwidth`: how concurrent flows share links: max-min fairness.
- `probe`: measures a network and describes it as a cluster.
- `profiling`: measures compute times and compression times.
"""

from paceline.cluster.cluster import Cluster, Processor, Rack, Rule, ServerHost
from paceline.cluster.cluster_file import (
    cluster_toml,
    load_cluster,
    parse_cluster,
    uniform_cluster,
)
from paceline.cluster.workload import Workload

__all__ = [
    "Cluster",
    "Processor",
    "Rack",
    "Rule",
    "ServerHost",
    "Workload",
    "cluster_toml",
    "load_cluster",
    "parse_cluster",
    "uniform_cluster",
]
