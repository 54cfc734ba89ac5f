"""A worker's end of its parameter servers.

- `remote_model`: a model's parameters on their servers: the `Remote`; start here.
- `layout`, `partition`, `shards`: which server holds which part of the model.
- `synchronization`: joining, loading, and waiting for the other workers.
- `optimizer_state`, `remote_buffers`: optimizer state and buffers that lie on servers.
- `compression`: the worker's half of compression to and from servers.
"""
