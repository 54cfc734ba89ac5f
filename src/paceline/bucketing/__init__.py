"""Bucket plans: which gradients travel in one all-reduce.

- `rules`: groups gradients into buckets: DDP's rule, MG-WFBP, the optimal rule; start here.
- `cost_models`: the time of an all-reduce by its size: formulas and measured curves.
- `timeline`: predicts when messages arrive.
- `message_plan`: messages past the end of backward, and the step time that they lead to.
- `message_search`: finds the best message plan.
- `tuner`: measures, plans and tries plans while a training runs.
- `measure`: the tuner's measurements: times within a step, the cost of an all-reduce.
"""
