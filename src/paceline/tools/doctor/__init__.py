"""Names the causes of slow steps: measures (`evidence`), then concludes (`diagnose`).

`diagnose` is a pure function of the evidence. Simulations predict the gain of each fix; they need the process
for themselves.

- `faults`: the table of all faults, and the training's faults; start here.
- `system_faults`: faults of network and hosts.
- `diagnosis`: selects the faults that cost time, and the gain of each fix.
- `network_model`, `training_model`: links and racks, and the training, derived from the evidence.
- `measure`: collects the evidence on every worker. `host`: cores and interfaces of one worker's host.
- `evidence`: all measurements as data.
- `report`: a diagnosis as a page and for the terminal.
- `__main__`: the script that ``paceline doctor`` launches on every worker.
"""

from paceline.tools.doctor.diagnosis import Diagnosis, Fault, diagnose
from paceline.tools.doctor.evidence import Evidence

__all__ = ["Diagnosis", "Evidence", "Fault", "diagnose"]
