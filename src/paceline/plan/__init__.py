"""Which method a network and a model want: every candidate, predicted in virtual time.

`plan` is a pure function of a cluster and a workload: equal arguments, equal plans, to the bit.
It runs simulations, which take the process for themselves: beside a training it runs in a process
of its own.
"""

from paceline.plan.decide import plan
from paceline.plan.found import LeftOut, Plan, Row

__all__ = ["LeftOut", "Plan", "Row", "plan"]
