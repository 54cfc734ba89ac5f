"""What is lost between two processes; what comes to rank 1 gets lost, where ``lossy`` is said."""

import json
import sys
from dataclasses import asdict

from losing import lose

import paceline
from paceline.cluster.probe.pairs import PairProbe
from paceline.runtimes.join import join_runtime

paceline.init()
pairs = PairProbe(join_runtime(), 0.2)
if sys.argv[1:] == ["lossy"] and paceline.rank() == 1:
    assert lose(0.1)
found = pairs.remeasure([(0, 1), (1, 0)] * 3, [1e6] * 6)
if paceline.rank() == 0:
    print(json.dumps([asdict(one) for one in found]))
