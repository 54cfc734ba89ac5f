"""Group servers: each serves a group of workers, and all exchange updates.

- `server`: a group server as a state machine; start here.
- `local_server`: the server of the group's workers.
- `message_queue`: messages to the other servers, sent until they are acknowledged.
- `outgoing`, `incoming`: what is sent to the others, and what comes from them.
- `update_log`: updates, applied once by each server, in the order of their source.
- `membership`, `entering`: whether a server takes part, and how it enters.
- `state_transfer`: a consistent snapshot for a server that enters.
- `consistent_cut`: how all servers come to hold the same.
"""
