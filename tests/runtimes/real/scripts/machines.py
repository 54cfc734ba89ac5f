"""A probe among ranks that take themselves for machines of their own."""

import json
import os
import sys

from paceline.cluster.probe import measure
from paceline.runtimes.join import join_runtime
from paceline.runtimes.real.cluster_check import WorkerLocation

name = "node-" + "cabd"[int(os.environ["RANK"])]
module = sys.modules[measure.__module__]
module.worker_location = lambda: WorkerLocation(name=name, machine=name, host=name)
findings = measure(join_runtime(), seconds_per_pair=0.001, largest=4096)
print(json.dumps([findings.hosts, findings.names]))
