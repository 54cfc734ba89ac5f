"""The network and the model's load on it, described; no I/O and no clock."""

from paceline.network.cluster import (
    Cluster,
    Rack,
    load_cluster,
    parse_cluster,
    uniform_cluster,
)
from paceline.network.transfer import transfer_times
from paceline.network.workload import Workload

__all__ = [
    "Cluster",
    "Rack",
    "Workload",
    "load_cluster",
    "parse_cluster",
    "transfer_times",
    "uniform_cluster",
]
