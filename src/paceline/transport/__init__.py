"""Messages over ZeroMQ between workers and servers.

The package authenticates peers, frames messages and detects lost processes.

- `protocol`: the wire format between a worker and a server, and its limits; start here.
- `listener`: a server process's sockets for its workers; returns events.
- `sessions`: the workers of each training, as a server process tracks them.
- `connection`: a worker's connections to one server.
- `shared_memory`: payloads between a server and the workers of its machine.
- `peers`: a service's connections to other services.
- `security`: authentication and encryption.
- `liveness`: idle connections that end when a process ends.
- `poll_loop`: waits for sockets, and calls their handlers.
"""
