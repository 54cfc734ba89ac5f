"""Which method fits a network and a model: every candidate, predicted in virtual time.

`plan` is a pure function of a cluster and a workload: equal arguments, equal plans, to the bit.
It runs simulations, which take the process for themselves: beside a training it runs in a process
of its own.

- `search`: predicts every candidate; start here.
- `candidates`: what is worth predicting.
- `predict`: one candidate in virtual time; `predictor`: many of them, in several processes.
- `estimates`: a plan as data, its lower bound, and which methods it recommends.
- `what_if`: break-even links, other ways to gain, more workers and faster links.
- `script`: what a script trains.
- `report`: a plan for people, in the terminal, on a page and as JSON.
- `switch_upgrades`: ranks racks by the gain of an aggregating switch.
"""

from paceline.tools.plan.estimates import Estimate, Infeasible, Plan
from paceline.tools.plan.search import plan

__all__ = ["Estimate", "Infeasible", "Plan", "plan"]
