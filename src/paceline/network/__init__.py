"""The network and the model's load on it, described; no I/O and no clock."""

from paceline.network.cluster import Cluster, Rack
from paceline.network.cluster_file import load_cluster, parse_cluster, uniform_cluster
from paceline.network.rules import Rule
from paceline.network.transfer import transfer_times
from paceline.network.workload import Workload

__all__ = [
    "Cluster",
    "Rack",
    "Rule",
    "Workload",
    "load_cluster",
    "parse_cluster",
    "transfer_times",
    "uniform_cluster",
]
