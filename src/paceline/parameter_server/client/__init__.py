"""A worker's access to its parameter servers.

- `remote_model`: a model's parameters on their servers: the `Remote`; start here.
- `partition`: assigns parts of the model to servers.
- `synchronization`: joining, pulling, loading, and barriers.
- `remote_state`: optimizer state and buffers on servers.
- `compression`: the worker's half of compression to and from servers.
"""
