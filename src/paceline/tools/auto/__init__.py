"""``method="auto"``: a training that finds out by which method it goes on.

- `config`: what the user says.
- `controlled_training`: joins the controller to one training; start here.
- `controller`: decisions, step by step, on all workers alike; `controller_interfaces`: what it needs.
- `measurements`, `step_watch`, `quick_probe`: a step's times, and the network.
- `script_constraints`: what the script does that some methods do not allow.
- `planner_process`, `__main__`: predictions in another process.
- `agreement`: small messages among all ranks.
- `decision`, `decision_text`, `decision_cache`: a decision as data, for people, and in a file.
- `method_switching`, `switched_state`: one method ends between two steps, another begins.
"""
