"""Which method a network and a model want: every candidate, predicted in virtual time.

`plan` is a pure function of a cluster and a workload: equal arguments, equal plans, to the bit.
It runs simulations, which take the process for themselves: beside a training it runs in a process
of its own.

- `search`: predicts every candidate; start here.
- `candidates`, `candidate_order`: what is worth predicting, and in which order.
- `predict`: one candidate in virtual time; `predictor`: many of them, in several processes.
- `prediction_cost`, `merged_tensors`: keep predictions quick.
- `compression_times`: measured compression times of the best candidates.
- `break_even`: the network that makes all workers as fast as one machine.
- `estimates`: a plan as data, its lower bound, and which methods it recommends.
- `suggestions`, `what_if`: what other options, more workers or faster links would give.
- `script`: what a script trains.
- `traced_step`: a step of a candidate, moment by moment.
- `report`: a plan for people, in the terminal, on a page and as JSON.
- `switch_upgrades`: ranks racks by the gain of an aggregating switch.
"""

from paceline.tools.plan.estimates import Estimate, Infeasible, Plan
from paceline.tools.plan.search import plan

__all__ = ["Estimate", "Infeasible", "Plan", "plan"]
