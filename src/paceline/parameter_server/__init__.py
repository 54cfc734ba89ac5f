"""The parameter server: a state machine, and the processes and clients around it.

- `state_machine`: the server without I/O; start here.
- `client`: a worker's access to its servers.
- `process`: starts, monitors and snapshots server processes.
- `groups`: several servers, each with the whole model for a group of workers.
"""
