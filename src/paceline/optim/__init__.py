"""Applies torch's optimizers to parts of their parameters, on workers and on servers.

- `partitioned`: applies an optimizer piece by piece, and checks which optimizers and pieces allow it.
- `clipping`: clips gradients by their norm.
"""
