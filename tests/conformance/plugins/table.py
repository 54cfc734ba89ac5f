"""``python -m tests.conformance.plugins.table [EVERY]``: toys through the kit, on the ranks of a real job;
one check in so many of each toy's."""

import sys

import paceline
from paceline.testing.__main__ import run_table
from paceline.testing.method_checks import sample, trials
from tests.conformance.plugins.rows import TOYS, register


def chosen(workers, every):
    return sample(trials(workers, [toy.case for toy in TOYS]), every)


def main():
    register()
    paceline.init()
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    return run_table(chosen(paceline.world_size(), every), [])


if __name__ == "__main__":
    sys.exit(main())
