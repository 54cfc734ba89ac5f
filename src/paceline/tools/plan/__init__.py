"""Predicts in virtual time how fast every candidate method is for a network and a model.

`plan` is a pure function of a cluster and a workload: equal arguments give bit-equal plans. Its simulations need
the process for themselves. So beside a training it runs in a process of its own.

- `search`: predicts every candidate; start here.
- `candidates`: the specs to predict.
- `predict`: one candidate in virtual time; `predictor`: many of them, in several processes.
- `estimates`: a plan as data, its lower bound, and the recommended methods.
- `recommendation`: the answer in five lines, and when a weaker consistency is worth it.
- `what_if`: break-even links, other ways to gain, more workers and faster links.
- `script`: analyzes a training script.
- `report`: a plan on the terminal, on a page and as JSON.
- `switch_upgrades`: ranks racks by the gain of an aggregating switch.
"""

from paceline.tools.plan.estimates import Estimate, Infeasible, Plan
from paceline.tools.plan.search import plan

__all__ = ["Estimate", "Infeasible", "Plan", "plan"]
