"""What `paceline run` asks torchrun for."""

from __future__ import annotations

import signal

import pytest

from paceline.run_options import ScriptJob
from paceline.runtimes.real import launch
from tests.support.hanging import SECONDS, free_port
from tests.support.processes import run, somebody_listens, wait_until


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        (["--nnodes=2", "--rdzv-endpoint=10.0.0.1:29400"], "c10d"),
        (["--nnodes=2", "--rdzv_endpoint=10.0.0.1:29400"], "c10d"),
        (["--rdzv-endpoint=10.0.0.1:29400", "--rdzv-backend=etcd-v2"], "etcd-v2"),
        (["--rdzv-endpoint=10.0.0.1:29400", "--nnodes=2", "--node-rank=1"], "static"),
    ],
)
def test_machines_without_a_number_meet_at_the_endpoint(monkeypatch, given, backend):
    """torchrun's own default, static, takes each of them for the first one."""
    asked = []
    monkeypatch.setattr(launch.torchrun, "run", asked.append)
    assert launch.launch(ScriptJob("train.py", []), None, given) == 0
    assert asked[0].rdzv_backend == backend


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_signal_ends_a_launcher_that_waits_for_other_machines(tmp_path, number):
    """torch waits for them outside Python, where no handler of Python's runs."""
    port = free_port()
    job = run(
        1,
        "one_rank_fails.py",
        "nothing",
        tmp_path,
        folder=tmp_path / "job",
        options=["--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{port}"],
        forked=True,
        PACELINE_TIMEOUTS="terminate=0.5",
    )
    wait_until(lambda: somebody_listens(port), SECONDS, "the launcher's port")
    job.process.send_signal(number)
    job.wait()
    assert job.status == 128 + number
    assert f"{number.name} before any worker started" in job.stderr
    job.check_nothing_left()
