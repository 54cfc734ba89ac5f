"""Bucket plans: which gradients travel in one all-reduce.

- `rules`: the registry of bucket rules, and what they share; start here.
- `fixed_rules`: rules by size alone, as DDP's.
- `measured_rules`: MG-WFBP and the optimal rule, which use ready times and costs.
- `cost_models`: the time of an all-reduce by its size: formulas and measured curves.
- `timeline`: when the messages of a plan are in.
- `exposed_time`: how long the next forward pass waits for them.
- `message_plan`: messages in the order in which the next forward pass needs them.
- `message_search`, `local_search`: first plans of that kind, and small changes to them.
- `tuner`: measures, plans and tries plans while a training runs.
- `step_timer`, `measure`: the tuner's measurements: a step's times, an all-reduce's cost.
- `bucket_plan`, `trial`: a plan that can be used, and its trial against another one.
- `rank_agreement`: sums over all ranks, and rank 0's numbers.
"""

from paceline.bucketing.rules import (
    FIXED,
    MEASURED,
    RULES,
    AffineCost,
    Cost,
    TableCost,
    bound,
    check_rule,
    ddp,
    finish,
    finish_groups,
    group,
    plan,
    single,
    wfbp,
)

__all__ = [
    "FIXED",
    "MEASURED",
    "RULES",
    "AffineCost",
    "Cost",
    "TableCost",
    "bound",
    "check_rule",
    "ddp",
    "finish",
    "finish_groups",
    "group",
    "plan",
    "single",
    "wfbp",
]
