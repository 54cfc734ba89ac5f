"""Measure a network as training meets it, and describe it so that it can be simulated.

`measure` runs on every worker of a job, in whatever world; `infer` makes a `Cluster` of what
it found; ``python -m paceline.cluster.probe`` is the script that ``paceline probe`` launches.
"""

from paceline.cluster.probe.infer import infer_cluster
from paceline.cluster.probe.measure import measure
from paceline.cluster.probe.result import Findings

__all__ = ["Findings", "infer_cluster", "measure"]
