"""Plans buckets: groups gradients into all-reduces, and finds the fastest grouping by measurement.

- `rules`: groups gradients into buckets by DDP's rule, MG-WFBP or the optimal rule; start here.
- `cost_models`: the time of an all-reduce by its size: formulas and measured curves.
- `timeline`: predicts when messages arrive.
- `message_plan`: messages that overlap the next forward pass, and the predicted step time.
- `message_search`: finds the best message plan.
- `tuner`: measures, plans and tries plans while a training runs.
- `measure`: the tuner's measurements: times within a step, and the cost of an all-reduce.
"""
