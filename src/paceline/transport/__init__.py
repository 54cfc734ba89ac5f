"""Messages over ZeroMQ: authentication, framing, and who is still there.

- `protocol`: the wire format between a worker and a server, and its limits; start here.
- `listener`: a server process's end: sockets in, events out.
- `sessions`: the workers that a server process knows by their connections.
- `connection`: a worker's end of a server.
- `shared_memory`: payloads between a server and the workers of its machine.
- `peers`: a service's connections to other services.
- `security`: authentication and encryption.
- `liveness`: connections whose end says that a process is gone.
- `poll_loop`: waits for sockets, and calls who reads them.
"""
