"""What `paceline run` asks torchrun for."""

from __future__ import annotations

import pytest

from paceline.run_options import ScriptJob
from paceline.runtimes.real import launch


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
