"""The parameter server as a state machine: no I/O, no clock, no threads.

- `server`: `ParameterServer`: one request in, answers out; start here.
- `shard`: one server's part of the model, as disciplines see it, and clipped steps.
- `store`: its parameters, and the optimizer that updates them.
- `members`, `admission`: the workers that train, and how they join.
- `pushes`, `pulls`: which gradients are taken, and which reads wait.
- `replies`: answers, each request done once.
- `barriers`, `pending_loads`: where all workers wait for each other; loaded parameters.
- `norms`: the norm of a gradient that lies on several servers.
- `reductions`, `sums`: all-reduces on a server, in an order that does not depend on speed.
- `compression`, `compression_checks`: the server's half of compression, and what may be combined.
- `untrained_tensors`: frozen parameters and buffers.
- `checks`: what workers, and the gradients of a step, must have in common.
"""
