"""All times that paceline waits for are in one record, and an environment can override each."""

import dataclasses
import subprocess
import sys

import pytest

from paceline.errors import UsageError
from paceline.timeouts import Timeouts, from_environment


def test_defaults_are_seconds_above_zero():
    values = dataclasses.asdict(from_environment({}))
    assert values == dataclasses.asdict(Timeouts())
    assert min(values.values()) > 0


def test_an_environment_overrides_some():
    words = "server_start=120, worker_arrive = 0.5,"
    found = from_environment({"PACELINE_TIMEOUTS": words})
    expected = Timeouts(server_start=120.0, worker_arrive=0.5)
    assert found == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("server_strat=1", "'server_start'"),
        ("server_start", "server_start=.*above 0"),
        ("server_start=0", "server_start=0"),
        ("server_start=soon", "server_start=soon"),
        ("server_start=inf", "server_start=inf"),
    ],
)
def test_what_is_no_time_is_refused(words, named):
    with pytest.raises(UsageError, match=rf"PACELINE_TIMEOUTS.*{named}"):
        from_environment({"PACELINE_TIMEOUTS": words})


def test_a_command_says_it_in_one_line(tmp_path):
    (tmp_path / "train.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", str(tmp_path / "train.py")],
        env={"PATH": "/usr/bin:/bin", "PACELINE_TIMEOUTS": "server_strat=1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "'server_start'" in done.stderr
