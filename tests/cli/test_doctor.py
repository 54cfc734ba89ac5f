"""``paceline doctor``: what it refuses, what it answers, and by which exit status."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import UsageError

SCRIPT = """
import torch, paceline
paceline.init()
torch.manual_seed(1)
model = paceline.stand_in(
    paceline.Workload(
        names=("a", "b", "c"),
        sizes=(400_000, 400_000, 400_000),
        forward=(0.01, 0.01, 0.01),
        backward=(0.02, 0.02, 0.02),
    )
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = paceline.distribute(model, optimizer, buckets="wfbp")
for step in range(30):
    optimizer.zero_grad()
    model(torch.full((1,), 1.0 + paceline.rank())).backward()
    optimizer.step()
"""
CLUSTER = """
[[rack]]
workers = 4
link = "10 Gbit/s"
latency = "20 us"
speed = [1.0, 1.0, {speed}, 1.0]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plain.py").write_text("import paceline\npaceline.init()\n")
    (tmp_path / "equal.toml").write_text(CLUSTER.format(speed=1.0))
    (tmp_path / "slow.toml").write_text(CLUSTER.format(speed=0.4))
    return tmp_path


def doctor(*words):
    return CliRunner().invoke(app, ["doctor", "--no-html", *words])


def refused(*words):
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, ["doctor", *words], catch_exceptions=False)
    assert caught.value.exit_status == 2
    return str(caught.value)


def test_what_is_refused(folder):
    assert "--seconds" in refused("--seconds", "0")
    assert "no script" in refused("other.py")
    assert "waits for no other" in refused("--workers", "1", "train.py")
    assert "--link describes" in refused("--workers", "2", "--link", "1gbit")
    assert "--cluster describes" in refused("--cluster", "slow.toml", "train.py")
    assert "--nnodes=2 means nothing" in refused("--runtime", "simulated", "--nnodes=2")
    assert "or more" in refused("--runtime", "simulated", "--workers", "1")
    assert "did you mean '--runtime'" in refused("--runtme", "simulated")
    assert "--steps" in refused("--runtime", "simulated", "--steps", "0", "train.py")


def test_a_healthy_training(folder, capfd):
    words = ("--runtime", "simulated", "--cluster", "equal.toml")
    ran = doctor(*words, "--json", "train.py")
    told = json.loads(capfd.readouterr().out)
    assert ran.exit_code == 0
    assert told["faults"] == []
    assert "links" in told["checked"]
    assert told["evidence"]["script"] == "train.py"
    assert told["evidence"]["workers"][3]["step"]["steps"] > 10


def test_a_fault_is_named_with_each_worker_s_step(folder, capfd):
    words = ("--runtime", "simulated", "--cluster", "slow.toml")
    ran = doctor(*words, "train.py")
    said = capfd.readouterr().out
    assert ran.exit_code == 1
    assert "Slow host: worker 2" in said
    assert [line.split()[:2] for line in said.splitlines()].count(["worker", "3"]) == 1


def test_a_script_that_trains_nothing_is_told_so(folder):
    ran = doctor("--runtime", "simulated", "--workers", "2", "plain.py")
    assert ran.exit_code == 0
    assert "plain.py took no step of an optimizer" in ran.stderr
