"""torch's optimizers, applied to parts of their parameters: on workers and on servers.

- `partitioned`: applies an optimizer piece by piece; says which optimizers permit it, and which pieces.
- `clipping`: clips a gradient by its norm.
"""
