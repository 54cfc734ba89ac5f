"""A worker's end of its parameter servers.

- `remote_model`: a model's parameters on their servers: the `Remote`; start here.
- `partition`: which server holds which part of the model.
- `synchronization`: joining, pulling, loading, and barriers.
- `remote_state`: optimizer state and buffers that lie on servers.
- `compression`: the worker's half of compression to and from servers.
"""
