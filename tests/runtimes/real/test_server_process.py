"""A server's process that does not come to listen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.runtimes.real.server_process import ServerProcess
from paceline.timeouts import timeouts


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (
            "cat > /dev/null",
            "said nothing within 0.2 s.*PACELINE_TIMEOUTS=server_start=300",
        ),
        ("exit 3", "ended with status 3; see above"),
    ],
)
def test_a_server_that_does_not_start_is_told_apart_from_a_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\n{does}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(timeouts, "server_start", 0.2 if "cat" in does else 60.0)
    process = ServerProcess("server 0", 1, "127.0.0.1")
    with pytest.raises(
        UsageError, match=f"server 0 did not start at 127.0.0.1: it {said}"
    ):
        process.listens()
    assert process.process.poll() is not None
