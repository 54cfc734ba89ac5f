"""Between real processes, too: bsp's bits, and a prompt end where a peer has died."""

import pytest

from tests.methods.forward_overlap.ends import METHODS
from tests.support import forked


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_50_steps_end_with_the_bits_of_bsp(workers):
    first, *_ = forked.run_together(
        workers, ["-m", "tests.methods.forward_overlap.ends"]
    )
    expected = [f"{m} {o} True" for m in METHODS for o in ("sgd", "AdamW")]
    assert first.stdout.splitlines() == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_dies_under_way_is_named(method):
    ranks = forked.together(
        2, ["-m", "tests.methods.forward_overlap.ends", method, "1", "9"]
    )
    try:
        ends = [rank.done() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [end.returncode for end in ends] == [1, 7]
    assert "rank 1" in ends[0].stderr
