"""The parameter server as a state machine: no I/O, no clock, no threads.

- `server`: `ParameterServer`: one event in, replies out; its transitions as a table; start here.
- `shard`: one server's part of the model, as disciplines see it, and clipped steps.
- `store`: its parameters, the optimizer that updates them, and what nobody trains.
- `members`: the workers, in which incarnation, and how far each is.
- `pushes`: which pushes are accepted, in which order.
- `barriers`: where all workers wait for each other, and what is loaded there.
- `reductions`: all-reduces on a server, in an order that does not depend on speed.
- `compression`: the server's half of compression, and what may be combined.
- `replies`: the replies that leave when a transition ends.
"""
