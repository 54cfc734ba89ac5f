"""``method="auto"``: a training that finds out by which method it goes on.

- `wish`: what the user says.
- `program`: what is decided, step by step, on all workers alike: no network, no clock.
- `course`: joins that to one training; start here.
- `exchange`, `links`, `watch`, `planner`, `kept`, `words`: messages, the network, a step's times, predictions in
  another process, the file of the decision, and what people read.
- `change`: how one method ends between two steps, and another begins.
"""
