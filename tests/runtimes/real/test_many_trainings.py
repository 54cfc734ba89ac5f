"""Trainings that have ended hold neither threads nor connections."""

import json
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.processes import SCRIPTS

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="needs /proc"
)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "beside one that goes on"])
def test_what_trainings_hold_goes_when_they_have_ended(beside, tmp_path):
    """Between the fifth and the twentieth there is less than one thing more for each; and those
    that have ended still have their states."""
    words = [SCRIPTS / "many_trainings.py", beside, tmp_path / "checkpoint"]
    for end in forked.run_together(2, words):
        after_five, after_all = json.loads(end.stdout)
        for what, count in after_all.items():
            assert count - after_five[what] < 15
