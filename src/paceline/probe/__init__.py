"""Measure a network as training meets it, and describe it so that it can be simulated.

`measure` runs on every worker of a job, in whatever world; `infer` makes a `Cluster` of what
it found; ``python -m paceline.probe`` is the script that ``paceline probe`` launches.
"""

from paceline.probe.findings import Findings
from paceline.probe.infer import infer_cluster
from paceline.probe.measure import measure

__all__ = ["Findings", "infer_cluster", "measure"]
