"""Which method a network and a model want: every candidate, predicted in virtual time.

`plan` is a pure function of a cluster and a workload: equal arguments, equal plans, to the bit.
It runs simulations, which take the process for themselves: beside a training it runs in a process
of its own.
"""

from paceline.tools.plan.estimates import LeftOut, Plan, Row
from paceline.tools.plan.search import plan

__all__ = ["LeftOut", "Plan", "Row", "plan"]
