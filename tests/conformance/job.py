"""``python -m tests.conformance.job``: a row of each method, on the ranks of a real job."""

import sys
from collections import Counter

import paceline
from paceline.methods import METHODS
from paceline.spec import parse
from paceline.testing import CASES
from paceline.testing.__main__ import rows, run_table
from paceline.testing.checks import RULES, trials


def cases():
    """The first row of each registered method."""
    first = {}
    for case in CASES:
        if isinstance(case.method, str):
            first.setdefault(parse(case.method).name, case)
    return [first[name] for name in METHODS]


def chosen(workers):
    """Of each case the trial whose law, and then whose rule, was chosen least before."""
    times, found = Counter(), []
    for case in cases():
        trial = min(
            trials(workers, [case]),
            key=lambda trial: (times[trial.check.name], times[trial.rule]),
        )
        times.update((trial.check.name, trial.rule))
        found.append(trial)
    return found


def ends():
    """The cases whose ends are told, each under one rule."""
    return rows(cases(), len(RULES))


def main():
    paceline.init()
    return run_table(chosen(paceline.world_size()), ends())


if __name__ == "__main__":
    sys.exit(main())
