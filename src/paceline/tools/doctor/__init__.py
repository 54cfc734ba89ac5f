"""What slows a training down, by name: measured (`evidence`), then concluded (`diagnose`).

`diagnose` is a pure function of the evidence. Simulated runs predict what fixing a fault saves; they take the
process for themselves.

- `faults`: the table of all faults, and those of the training; start here.
- `system_faults`: faults of network and hosts.
- `diagnosis`: which faults cost something, and what fixing them saves.
- `network_model`, `training_model`: links and racks, and the training, as the evidence shows them.
- `measure`: collects the evidence on every worker. `host`: cores and interfaces of one worker's host.
- `evidence`: all measurements as data.
- `report`: a diagnosis for people.
- `__main__`: the script that ``paceline doctor`` launches on every worker.
"""

from paceline.tools.doctor.diagnosis import Diagnosis, Fault, diagnose
from paceline.tools.doctor.evidence import Evidence

__all__ = ["Diagnosis", "Evidence", "Fault", "diagnose"]
