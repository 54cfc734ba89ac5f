"""Methods that change in real processes: what is left of former ones, and how mistakes end."""

from pathlib import Path

import pytest

from tests.support import forked

ROOT = Path(__file__).parent.parent.parent.parent


def ends_of(mode):
    """Of two workers: the statuses, and what they have said."""
    ranks = forked.together(2, ["-m", "tests.tools.auto.lives", mode], folder=ROOT)
    try:
        ends = [rank.done(job=ranks) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [end.returncode for end in ends], [end.stdout + end.stderr for end in ends]


@pytest.mark.slow
def test_threads_and_descriptors_of_former_methods_are_let_go():
    statuses, said = ends_of("many")
    assert statuses == [0, 0], said


@pytest.mark.slow
def test_a_worker_that_dies_between_two_methods_is_named():
    statuses, said = ends_of("dies")
    assert statuses[0] == 1
    assert "rank 1 (host" in said[0]
    assert "died" in said[0]


@pytest.mark.slow
def test_an_error_of_one_worker_reaches_those_who_change():
    statuses, said = ends_of("raises")
    assert statuses == [1, 1]
    assert "rank 1 failed with ArithmeticError: on purpose" in said[0]


@pytest.mark.slow
def test_a_training_that_cannot_be_begun_on_one_worker_ends_for_all():
    statuses, said = ends_of("breaks")
    assert statuses[0] == 1
    assert "rank 1 broke off its training: ArithmeticError: on purpose" in said[0]
    assert "caught; ArithmeticError: on purpose" in said[1]


@pytest.mark.slow
def test_an_error_that_a_script_catches_ends_one_workers_data():
    statuses, said = ends_of("catches")
    assert statuses == [0, 0], said
    assert "ended" in said[0]
    assert "caught" in said[1]
