"""``python -m tests.newcomer.table``: all toys through the kit, on the ranks of a real job."""

import sys

import paceline
from paceline.testing.__main__ import run_table
from paceline.testing.checks import trials
from tests.newcomer.rows import TOYS, register


def main():
    register()
    paceline.init()
    cases = [toy.case for toy in TOYS]
    return run_table(trials(paceline.world_size(), cases), [])


if __name__ == "__main__":
    sys.exit(main())
