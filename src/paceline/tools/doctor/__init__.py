"""What slows a training down, by name: measured (`evidence`), then concluded (`diagnose`).

`diagnose` is a pure function of the evidence. What mending a fault gains is predicted by virtual
runs, which take the process for themselves.
"""

from paceline.tools.doctor.diagnosis import Diagnosis, Fault, diagnose
from paceline.tools.doctor.evidence import Evidence

__all__ = ["Diagnosis", "Evidence", "Fault", "diagnose"]
