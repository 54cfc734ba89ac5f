"""Bucket plans: which gradients travel in one all-reduce.

`rules` plans buckets, by the costs of `cost_models`; `timeline` says when messages arrive;
`message_plan` plans for the next forward pass; `tuner` does all of it while a training runs.
"""

from paceline.bucketing.rules import (
    ALL_REDUCES,
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
    "ALL_REDUCES",
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
