"""What `pip install paceline` brings: a wheel in an environment of its own, away from the sources."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import paceline
from tests.docs.test_examples import ROOT

NEEDED = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = [path for path in sys.path if path.endswith("site-packages")]
DATA = (
    *("py.typed", "cluster/workloads/resnet50.json"),
    *(
        "tools/report/page.html",
        "tools/report/page.css",
        "tools/report/page.js",
        "tools/report/timeline.js",
    ),
)

TYPED = """
import paceline
import torch

model = torch.nn.Linear(4, 2)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, plain, method="bsp", clip_norm=1.0)
reveal_type(optimizer)
reveal_type(paceline.rank())
reveal_type(paceline.Workload.load("resnet50"))
paceline.on_step(lambda record: print(record.step_seconds))
paceline.log(loss=1.0)
with optimizer.no_sync():
    pass
optimizer.finish()
paceline.distribute(model, plain, buckets=3)
paceline.now("x")
"""


def test_versions_of_python_are_those_that_are_classified():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    start = "Programming Language :: Python :: "
    versions = [
        line.removeprefix(start) for line in project["classifiers"] if start in line
    ]
    assert versions == ["3 :: Only", "3.11", "3.12", "3.13"]
    assert project["requires-python"] == ">=3.11"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Made from the files that it may need, and from no others."""
    sources, made = (tmp_path_factory.mktemp(name) for name in ("sources", "wheel"))
    for name in NEEDED:
        shutil.copy(ROOT / name, sources / name)
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", sources / "src", ignore=leave)
    words = ["-m", "pip", "wheel", "--no-deps", "--wheel-dir", made, sources]
    check(sys.executable, *words, folder=sources)
    (path,) = made.iterdir()
    return path


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """An environment's Python: the wheel is installed, and its dependencies are to be seen."""
    folder = tmp_path_factory.mktemp("bare")
    check(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    python = folder / "bin" / "python"
    words = ["--python", python, "install", "--no-deps", "--no-index", wheel]
    check(sys.executable, "-m", "pip", *words, folder=folder)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(PACKAGES) + "\n")
    return python


def check(*words, folder):
    """What a command printed that ended well; nothing of this checkout is on its path."""
    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=without | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_wheel_has_the_code_and_what_it_reads(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src" / "paceline"
    code = {f"paceline/{path.relative_to(source)}" for path in source.rglob("*.py")}
    assert code | {f"paceline/{name}" for name in DATA} <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"paceline", f"paceline-{paceline.__version__}.dist-info"}


@pytest.mark.slow
def test_the_installed_package_runs(bare, tmp_path):
    command = bare.parent / "paceline"
    assert (
        check(command, "--version", folder=tmp_path)
        == f"paceline {paceline.__version__}\n"
    )
    where = check(
        bare, "-c", "import paceline; print(paceline.__file__)", folder=tmp_path
    )
    assert Path(where).is_relative_to(bare.parent.parent)
    assert "\nbsp " in check(command, "list", "methods", folder=tmp_path)

    script = [ROOT / "examples" / "workload.py", "--", "resnet50"]
    words = ["--method=bsp", "--workers=2", "--link=100mbit", "--steps=3"]
    said = check(command, "compare", *words, *script, folder=tmp_path)
    assert "bsp" in said
    assert "<script" in (tmp_path / "paceline-runs" / "index.html").read_text()


@pytest.mark.slow
def test_types_are_known_from_outside(bare, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TYPED)
    words = ["-m", "mypy", "--strict", "--python-executable", bare, "--cache-dir=cache"]
    done = subprocess.run(
        [sys.executable, *words, script.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = done.stdout.splitlines()
    told = [line.partition(": ")[2] for line in found]
    assert told[:3] == [
        'note: Revealed type is "paceline.core.optimizer.DistributedOptimizer"',
        'note: Revealed type is "int"',
        'note: Revealed type is "paceline.cluster.workload.Workload"',
    ], done.stdout
    assert [line.rpartition("[")[2] for line in found if "error:" in line] == [
        "arg-type]",
        "call-arg]",
    ], done.stdout
