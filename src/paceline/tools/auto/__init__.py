"""``method="auto"``: a training that switches to the fastest method that is allowed.

- `config`: the user's settings.
- `method_switching`: ends one method between two steps and begins another; start here.
- `controller`: decides step by step which method to use, equally on all workers, without I/O.
- `measurements`: step times, and the questions to the planner.
- `deferred_messages`: small messages among all ranks, read a step later.
- `script_constraints`: properties of the script that rule out some methods.
- `planner_process`: predictions in another process; `__main__`: that process.
- `decision_cache`: saved decisions, and their text.
"""
