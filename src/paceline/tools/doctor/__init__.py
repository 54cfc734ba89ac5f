"""What slows a training down, by name: measured (`evidence`), then concluded (`diagnose`).

`diagnose` is a pure function of the evidence. What mending a fault gains is predicted by virtual
runs, which take the process for themselves.

- `__main__`: the script that ``paceline doctor`` launches on every worker.
- `measure`, `measure_network`, `step_phases`, `host_measurement`: one worker's measurements.
- `simulated`: the same in virtual time.
- `evidence`: all measurements as data.
- `diagnosis`: faults by name, and what they cost; start here.
- `fault_kinds`, `thresholds`: what a fault is, and from where on.
- `network_faults`, `worker_faults`, `training_faults`: the faults.
- `network_model`, `training_model`, `racks`: what they are found in.
- `report`, `text`: a diagnosis as a page, and in ten lines.
"""

from paceline.tools.doctor.diagnosis import Diagnosis, Fault, diagnose
from paceline.tools.doctor.evidence import Evidence

__all__ = ["Diagnosis", "Evidence", "Fault", "diagnose"]
