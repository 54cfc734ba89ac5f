"""Run by torchrun: a training by itself, with real links and a planner that answers at once."""

import sys

import torch

import paceline
from paceline.tools.auto import controller, measurements
from tests.tools.auto.cases import assert_equal_everywhere, flat
from tests.tools.auto.test_training import CODED, LOSSY, Canned

controller.SHARE = 1e9  # steps are short, and nothing is to be put off
controller.NOTHING_TO_GAIN = 0.0
controller.MEASURED_STEPS = 4
measurements.PlannerProcess = Canned

paceline.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = paceline.distribute(
    model,
    torch.optim.SGD(model.parameters(), lr=0.01),
    method=f"{LOSSY},file={sys.argv[1]}",
)
recorder = paceline.api._runtime().recorder
specs = set()
for _ in range(2000):
    optimizer.zero_grad()
    model(torch.full((4, 64), 1.0 + paceline.rank())).square().mean().backward()
    optimizer.step()
    specs.add(recorder.brief)
    if CODED in specs and recorder.brief == "bsp":
        break  # tried, and given up: all ranks at the same step
optimizer.finish()
assert_equal_everywhere(flat(model))
asked = Canned.asked
# Where a code was kept, times of a busy machine may let it be decided anew.
assert bool(asked) == (paceline.rank() == 0), asked
if asked:
    assert "workers = 2" in asked[0].cluster
assert specs >= {"bsp", CODED}, specs
sys.stdout.write(f"rank {paceline.rank()}: ok\n")
