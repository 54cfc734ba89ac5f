"""torch's optimizers, applied to parts of their parameters: on workers and on servers.

- `partitioned`: the optimizer, applied piece by piece; which ones may be, and in which pieces.
- `clipping`: clips a gradient by its norm.
"""
