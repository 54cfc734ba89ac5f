"""The table of the kit, whole and sampled; also ``python -m tests.conformance.table``, by which
the ranks of a real job try the sample."""

import sys
from itertools import groupby

import paceline
from paceline.testing import CASES
from paceline.testing.__main__ import run_table
from paceline.testing.checks import RULES, trials

ROWS = [(case, rule) for case in CASES for rule in RULES]


def sample(table, every):
    """Of each case's trials one in so many; from case to case others, so that each law and
    each rule is tried."""
    return [
        trial
        for number, (_, of_case) in enumerate(groupby(table, lambda t: t.case))
        for position, trial in enumerate(of_case)
        if (position + number) % every == 0
    ]


def sampled_trials(workers):
    return sample(trials(workers), every=13)


def sampled_rows():
    """Each case under one rule."""
    return [(case, RULES[n % len(RULES)]) for n, case in enumerate(CASES)]


def main():
    paceline.init()
    return run_table(sampled_trials(paceline.world_size()), sampled_rows())


if __name__ == "__main__":
    sys.exit(main())
