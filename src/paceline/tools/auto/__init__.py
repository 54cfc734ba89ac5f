"""``method="auto"``: a training that finds out by which method it goes on.

- `config`: what the user says.
- `controller`: what is decided, step by step, on all workers alike: no network, no clock.
- `course`: joins that to one training; start here.
- `agreement`, `quick_probe`, `step_watch`, `planner_process`, `decision_cache`, `decision_text`: messages, the network, a step's times, predictions in
  another process, the file of the decision, and what people read.
- `method_switching`: how one method ends between two steps, and another begins.
"""
