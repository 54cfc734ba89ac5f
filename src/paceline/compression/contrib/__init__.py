"""Compressors for comparisons in research; `plan` and `auto` only try one that the user names.

- `ef21`: sends the change of a worker's gradient.
- `ef_sign`: the sign of each element, and one scale a tensor.
- `qsgd`: unbiased stochastic rounding.
"""
