"""Rows that a script registers: the command leaves it to the script whether there are such."""

import json
import sys

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.script_run import may_register
from paceline.collectives.registry import COLLECTIVES
from paceline.compression import COMPRESSORS
from paceline.errors import UsageError
from paceline.methods import METHODS
from tests.support.processes import PACELINE, Job

ROWS = """
from paceline.collectives.registry import COLLECTIVES
from paceline.collectives.algorithms import Tree
from paceline.compression import BF16, COMPRESSORS
from paceline.methods import METHODS
from paceline.methods.bsp import BSP

class OwnCode(BF16):
    name = "own-code"

class OwnSum(Tree):
    name = "own-sum"

class OwnMethod(BSP):
    name = "own-method"

COMPRESSORS["own-code"] = OwnCode
COLLECTIVES["own-sum"] = OwnSum
METHODS["own-method"] = OwnMethod
"""
TRAINING = """
import torch, paceline
paceline.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = paceline.distribute(model, optimizer, buckets="ddp")
for step in range(4):
    optimizer.zero_grad()
    model(torch.full((1, 8), 1.0 + paceline.rank())).sum().backward()
    optimizer.step()
"""
SPECS = ["own-method", "bsp:compression=own-code", "bsp:collective=own-sum"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "own.py").write_text(ROWS + TRAINING)
    (tmp_path / "beside.py").write_text("import rows\n" + TRAINING)
    (tmp_path / "plain.py").write_text(TRAINING)
    monkeypatch.delitem(sys.modules, "rows", raising=False)  # of the test before
    yield tmp_path
    for rows in (METHODS, COMPRESSORS, COLLECTIVES):
        for name in [name for name in rows if name.startswith("own-")]:
            del rows[name]


def ran(*words):
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("script", ["own.py", "beside.py"])
def test_what_a_script_registers_is_trained_with(folder, capfd, script, spec):
    compute = ("--forward", "0.01", "--backward", "0.02", "--workers", "2", "--json")
    done = ran("simulate", script, "--method", spec, *compute)
    assert done.exit_code == 0
    found = json.loads(capfd.readouterr().out)
    assert spec.rpartition(":")[2] in found["brief"]
    assert found["steps"] == 4


def in_processes(folder, *words):
    """The command and its workers, forked."""
    return Job([*PACELINE, *words], folder, forked="all").wait()


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_what_workers_register_is_no_matter_of_who_starts_them(folder, spec):
    words = ("--workers", "2", "--method", spec, "--json", "own.py")
    done = in_processes(folder, "run", *words)
    assert done.status == 0, done.output
    assert spec.rpartition(":")[2] in json.loads(done.stdout)["brief"]


@pytest.mark.slow
def test_a_doctor_does_not_know_a_scripts_rows(folder):
    spec, *_ = SPECS
    words = ("--workers", "2", "--method", spec, "--json", "--no-html", "own.py")
    done = in_processes(folder, "doctor", *words)
    assert done.status in (0, 1), done.output
    found = json.loads(done.stdout)
    assert found["spec"].startswith(spec)
    assert found["predicted_seconds"] is None
    assert found["fixed_seconds"] is None


@pytest.mark.parametrize("spec", SPECS)
def test_what_nobody_registers_is_refused_before_anything_runs(folder, spec):
    (folder / "never.py").write_text(f"open('it-ran', 'w')\n{TRAINING}")
    for verb in ("run", "simulate", "emulate", "doctor"):
        with pytest.raises(UsageError) as error:
            ran(verb, "never.py", "--workers", "2", "--method", spec)
        assert "unknown" in str(error.value)
        assert repr(spec.rpartition("=")[2]) in str(error.value)
    assert not (folder / "it-ran").exists()


def test_what_a_script_names_and_does_not_register_is_refused_by_its_workers(folder):
    (folder / "looks.py").write_text(
        f"from paceline.compression import COMPRESSORS\n{TRAINING}"
    )
    words = ("--method", "bsp:compression=own-code", "--workers", "2")
    with pytest.raises(Exception, match="unknown compression 'own-code'"):
        ran("simulate", "looks.py", *words, "--forward", "0.01", "--backward", "0.02")


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("import torch, paceline", False),
        ("from paceline.methods import METHODS", True),
        ("import paceline.compression as c\nc.COMPRESSORS['x'] = X", True),
        ("import rows", True),
        ("from rows import Code", True),
        ("from package import inner", True),
        ("import package.inner", True),
        ("import package.nothing", False),
        ("import package.circle", False),
        ("not python (", False),
    ],
)
def test_whether_a_script_may_register(folder, text, may):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "inner.py").write_text(ROWS)
    (folder / "package" / "circle.py").write_text("import package.circle, script")
    script = folder / "script.py"
    script.write_text(text)
    assert may_register(script) == may
