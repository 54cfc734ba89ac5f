"""torch's optimizers, applied to parts of their parameters.

- `pieces`: which optimizers may be applied piece by piece, and in which pieces.
- `partitioned`: the optimizer that does it, on a worker or on a server.
- `clipping`: clips a gradient by its norm.
"""
