"""The parameter server: a state machine, and the processes and clients around it.

- `state_machine`: the server without I/O; start here.
- `client`: a worker's end of its servers.
- `process`: server processes: started, watched, saved.
- `groups`: several servers, each with the whole model for a group of workers.
"""
