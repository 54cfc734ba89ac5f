"""Messages over ZeroMQ: authentication, framing, and who is still there.

- `protocol`: the wire format between a worker and a server, and its limits; start here.
- `listener`: runs any `Server` behind a ZeroMQ socket, in one thread.
- `sessions`: the workers that a server knows by their connections.
- `connection`, `channel`: a worker's end of a server.
- `peers`: a service's connections to other services.
- `payloads`, `shared_memory`: tensors in chunks, on sockets or in shared memory.
- `security`: authentication and encryption.
- `liveness`: connections whose end says that a process is gone.
- `poll_loop`: waits for sockets, and calls who reads them.
- `traffic`: bytes sent and received.
"""
