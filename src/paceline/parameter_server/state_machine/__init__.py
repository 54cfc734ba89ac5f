"""The parameter server as a state machine: no I/O, no clock, no threads.

- `server`: `ParameterServer`: takes an event, returns replies; its transitions as a table; start
  here.
- `shard`: one server's part of the model, as disciplines use it, and clipped steps.
- `store`: its parameters, the optimizer that updates them, and untrained tensors.
- `members`: the workers, their incarnations and steps.
- `pushes`: accepts pushes, in the order of steps.
- `barriers`: barriers of all workers, and loads.
- `reductions`: all-reduces on a server, in an order that does not depend on speed.
- `compression`: the server's half of compression, and the valid combinations.
- `replies`: the replies that leave when a transition ends.
"""
