"""A server's process that does not come to listen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.runtimes.real.server_process import KilledAtStartError, ServerProcess
from paceline.runtimes.real.supervisor import MOST_SERVER_STARTS, SupervisedServers
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


@pytest.mark.parametrize("deaths", [MOST_SERVER_STARTS - 1, MOST_SERVER_STARTS])
def test_a_survived_job_s_server_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    deaths: int,
) -> None:
    """Of two group servers the second one is killed, so many times."""
    stand_in = tmp_path / "python"
    listens = """echo '{"type": "listening", "port": 9, "step": 4}'; cat > /dev/null"""
    stand_in.write_text(
        f"#!/bin/sh\ncase $* in *number=1*)\n  echo >> {tmp_path}/starts\n"
        f"  [ $(wc -l < {tmp_path}/starts) -gt {deaths} ] || kill -9 $$;; esac\n{listens}\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    servers = SupervisedServers(2, groups=2)
    try:
        if deaths == MOST_SERVER_STARTS:
            with pytest.raises(KilledAtStartError, match="server 1 did not start"):
                servers.start()
        else:
            assert servers.start() == 4
    finally:
        servers.close()
    told = "server 1 was killed by SIGKILL while it started; it is started again"
    assert capfd.readouterr().err.count(told) == MOST_SERVER_STARTS - 1
