"""``method="auto"``: a training that switches to the fastest method that it may use.

- `config`: what the user says.
- `method_switching`: one method ends between two steps, another begins; start here.
- `controller`: which method to use, decided step by step on all workers alike, without I/O.
- `measurements`: a step's times, and what the planner is asked.
- `agreement`: small messages among all ranks.
- `script_constraints`: what the script does that some methods do not allow.
- `planner_process`: predictions in another process; `__main__`: that process.
- `decision_cache`: a decision's file, and its text.
"""
