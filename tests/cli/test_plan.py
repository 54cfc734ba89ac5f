"""``paceline plan``: what it refuses, and one small plan from a script to JSON."""

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli import plan as plan_command
from paceline.cli.plan import _says_what_ended
from paceline.errors import UsageError
from paceline.methods import METHODS
from paceline.runtimes.simulated.profile_cache import paced_workload
from paceline.runtimes.temporary_folder import LauncherInterrupted

SCRIPT = """
import torch, paceline
paceline.init()
torch.manual_seed(paceline.rank())
model = torch.nn.Linear(4, 1)
optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    paceline.pace(0.01)
    optimizer.zero_grad()
    model(torch.randn(2, 4)).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
optimizer.finish()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def refused(*words):
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    return str(caught.value)


def test_what_is_refused(script, tmp_path):
    assert "Did you mean 'delayed'" in refused(script, "--consistency", "delay")
    assert "--max-work" in refused(script, "--max-work", "0")
    for words in ((script, "--budget", "60"), ("--budget=60", script)):
        assert "--max-work" in refused(*words)
    assert "leave --cluster" in refused(script, "--probe", "--link", "1gbit")
    assert "without --probe" in refused("--nnodes", "2", script)
    assert "no script" in refused("other.py")
    words = refused(script, "--workload", "resnet50", "--workers", "2")
    assert "resnet50 is the profile of another model" in words
    nothing = refused(script, "--consistency", "delayed", "--workers", "2")
    assert "no candidate of the allowed consistency levels (delayed)" in nothing
    assert "Clip with distribute(clip_norm=...)" in nothing


def test_what_a_script_paces_is_the_workload(script):
    """Also what it paces outside of its passes."""
    found = paced_workload(script, [])
    assert found.forward_seconds + found.backward_seconds == pytest.approx(0.01)


def test_one_worker_is_one_machine(script):
    ran = CliRunner().invoke(
        app, ["plan", script, "--workers", "1", "--json", "--no-html"]
    )
    assert ran.exit_code == 0, ran.output


OWN = (
    """
from paceline.methods import METHODS
from paceline.methods.bsp import BSP

class Own(BSP):
    name = "own"

METHODS["own"] = Own
"""
    + SCRIPT
)


def test_a_page_does_not_replace_another_one_in_silence(script):
    said = [
        CliRunner().invoke(app, ["plan", script, "--workers", "1", "--output", folder])
        for folder in ("here", "there", "here")
    ]
    assert [one.exit_code for one in said] == [0, 0, 0], said[-1].output
    replaced = ["replaces the page" in one.stdout for one in said]
    assert replaced == [False, False, True]
    assert "--output" in said[-1].stdout


@pytest.mark.slow
def test_a_method_that_the_script_registers_is_a_candidate(
    script, tmp_path, monkeypatch, capfd
):
    """Also where predictions are made in other processes, which do not know it."""
    (tmp_path / "train.py").write_text(OWN)
    monkeypatch.setattr(plan_command, "processes", lambda: 2)
    before = dict(METHODS)
    try:
        ran = CliRunner().invoke(
            app,
            [
                *("plan", script, "--workers", "2", "--consistency", "exact"),
                *("--json", "--no-html", "--max-work", "4e4"),
            ],
        )
    finally:
        METHODS.clear()
        METHODS.update(before)
    assert ran.exit_code == 0, ran.output
    said = json.loads(capfd.readouterr().out)
    assert "own" in [one["spec"] for one in said["estimates"]]
    assert 0 < said["events"] < 4e4
    assert "simulated events in" in ran.output


def test_a_signal_is_answered_with_what_it_ended(capsys):
    with pytest.raises(LauncherInterrupted), _says_what_ended(Path("train.py")):
        raise LauncherInterrupted(signal.SIGINT)
    assert "train.py" in capsys.readouterr().err
