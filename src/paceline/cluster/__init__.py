"""The network and the model's load on it, described; no I/O, and no time but what callers bring."""

from paceline.cluster.cluster import Cluster, Processor, ServerHost
from paceline.cluster.cluster_file import (
    cluster_toml,
    load_cluster,
    parse_cluster,
    uniform_cluster,
)
from paceline.cluster.rack import Rack
from paceline.cluster.rules import Rule
from paceline.cluster.transfer import transfer_times
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
    "transfer_times",
    "uniform_cluster",
]
