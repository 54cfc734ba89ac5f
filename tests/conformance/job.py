"""``python -m tests.conformance.job``: a row of each method, on the ranks of a real job."""

import sys

import paceline
from paceline.methods import METHODS
from paceline.spec import parse
from paceline.testing import CASES
from paceline.testing.__main__ import rows, run_table
from paceline.testing.method_checks import RULES, trials
from tests.conformance.table import Row, sampled


def cases():
    """The first row of each registered method."""
    first = {}
    for case in CASES:
        if isinstance(case.method, str):
            first.setdefault(parse(case.method).name, case)
    return [first[name] for name in METHODS]


def chosen(workers):
    """A check of each."""
    rows = [[Row(t, workers) for t in trials(workers, [case])] for case in cases()]
    return [row.trial for row in sampled(rows, 1)]


def ends():
    """The cases whose ends are told, each under one rule."""
    return rows(cases(), len(RULES))


def main():
    paceline.init()
    return run_table(chosen(paceline.world_size()), ends())


if __name__ == "__main__":
    sys.exit(main())
