"""``python -m tests.newcomer.table [EVERY]``: toys through the kit, on the ranks of a real job;
one check in so many of each toy's."""

import sys

import paceline
from paceline.testing.__main__ import run_table
from paceline.testing.checks import trials
from tests.newcomer.rows import TOYS, register


def chosen(workers, every):
    table = trials(workers, [toy.case for toy in TOYS])
    return [
        trial
        for number, toy in enumerate(TOYS)
        for place, trial in enumerate(t for t in table if t.case is toy.case)
        if (place + number) % every == 0
    ]


def main():
    register()
    paceline.init()
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    return run_table(chosen(paceline.world_size(), every), [])


if __name__ == "__main__":
    sys.exit(main())
