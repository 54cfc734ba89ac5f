"""Compressors by names that researchers compare with; `plan` and `auto` try none of them unless it is named.

- `ef21`: sends how a worker's gradient has changed.
- `ef_sign`: the sign of each element, and one scale a tensor.
- `qsgd`: unbiased stochastic rounding.
"""
