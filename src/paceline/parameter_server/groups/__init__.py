"""Group servers: each serves a group of workers, and all exchange updates.

- `server`: a group server as a state machine; start here.
- `local_server`: the parameter server of the group's workers.
- `update_log`: applies each update once, in the order of its origin.
- `membership`: lets servers leave and enter, and brings all to one model.
- `state_transfer`: copies a server's whole state to another one.
"""
