"""Messages over ZeroMQ between workers and servers: authentication, framing, and detection of lost
processes.

- `protocol`: the wire format between a worker and a server, and its limits; start here.
- `listener`: a server process's end: sockets in, events out.
- `sessions`: the workers that a server process knows by their connections.
- `connection`: a worker's end of a server.
- `shared_memory`: payloads between a server and the workers of its machine.
- `peers`: a service's connections to other services.
- `security`: authentication and encryption.
- `liveness`: idle connections whose end shows that a process has ended.
- `poll_loop`: waits for sockets, and calls their handlers.
"""
