"""The network and the model's load on it, described; no I/O, and no time but what callers bring."""

from paceline.network.cluster import Cluster, Processor, ServerHost
from paceline.network.cluster_file import (
    cluster_toml,
    load_cluster,
    parse_cluster,
    uniform_cluster,
)
from paceline.network.rack import Rack
from paceline.network.rules import Rule
from paceline.network.transfer import transfer_times
from paceline.network.workload import Workload

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
