"""How much of the table of the kit is tried where. All of it is one command
(``torchrun --nproc-per-node 3 -m paceline.testing``); here every row, law and rule is."""

FAST_REAL, FAST_VIRTUAL = 19, 22
"""One in so many trials, in each run of the fast tests."""
SLOW_REAL, SLOW_VIRTUAL = 9, 3
"""Of the slow ones."""
