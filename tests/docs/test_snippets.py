"""What pages show works: their commands are understood, their Python runs, their site has no dead link."""

import importlib.util
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import paceline
from paceline.cli import app
from paceline.cluster import parse_cluster, uniform_cluster
from paceline.cluster.cluster_file import TABLE_KEYS
from paceline.runtimes.simulated import Simulation
from tests.docs.test_examples import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("README.md"))
VERBS = get_command(app).commands

ELSEWHERE = {
    "accelerate.md": "needs other packages: tests/integrations",
    "in-network-aggregation.md": "needs an aggregator's address",
    "lightning.md": "needs other packages: tests/integrations",
    "ray.md": "needs other packages: tests/integrations",
    "transformers.md": "needs other packages: tests/integrations",
    "write-a-method.md": "tests/docs/test_methods_howto.py",
    "write-a-compressor.md": "tests/docs/test_extension_guides.py",
    "write-a-collective.md": "tests/docs/test_extension_guides.py",
}


def blocks(page, language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )


def commands(page):
    """Its commands, in one line each; what a shell would do before and after them is left out."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and "=" in words[0] and not words[0].startswith("-"):
                del words[0]
            for stop in (">", "&", "|", "&&"):
                words = words[: words.index(stop)] if stop in words else words
            if words[:1] == ["paceline"]:
                yield words[1:]


SHOWN = sorted(
    {(page.name, shlex.join(words)) for page in PAGES for words in commands(page)}
)


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_command_that_is_shown_is_understood(page, command, tmp_path, monkeypatch):
    """By whoever reads its words; nothing is run."""
    monkeypatch.chdir(tmp_path)
    verb, *words = shlex.split(command)
    if verb.startswith("--"):
        verb, words = "check", []
    for word in words:
        path = Path(word)
        if path.suffix in (".py", ".toml", ".json") and not path.is_absolute():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    VERBS[verb].make_context(verb, words)


def trainings():
    """Pages whose Python is a piece of a training script, or several."""
    for page in PAGES:
        for number, block in enumerate(blocks(page, "python")):
            if page.name not in ELSEWHERE:
                yield pytest.param(block, id=f"{page.stem}-{number}")


@pytest.mark.parametrize("block", list(trainings()))
def test_python_that_is_shown_runs(block, monkeypatch):
    """On two simulated workers, with the names that such a script has by then."""

    def body(rank):
        paceline.init()
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        dataset = torch.utils.data.TensorDataset(
            torch.randn(256, 4), torch.randn(256, 2)
        )
        names = {
            "paceline": paceline,
            "torch": torch,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "dataset": dataset,
            "loader": torch.utils.data.DataLoader(dataset, batch_size=64),
            "loss_fn": torch.nn.functional.mse_loss,
            "evaluate": lambda model: model(torch.zeros(1, 4)),
        }
        if "distribute" not in block and "optimizer." in block:
            names["optimizer"] = paceline.distribute(model, names["optimizer"])
        for part in re.split(r"^(?=paceline\.distribute)", block, flags=re.MULTILINE):
            fresh = dict(names)
            if part.startswith("paceline.distribute"):
                fresh["model"] = torch.nn.Linear(4, 2)
                fresh["optimizer"] = torch.optim.SGD(
                    fresh["model"].parameters(), lr=0.1
                )
            exec(compile(part, "page", "exec"), fresh)

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(body)


def networks():
    """Each cluster file that a page shows."""
    for page in PAGES:
        for number, block in enumerate(blocks(page, "toml")):
            yield pytest.param(block, id=f"{page.stem}-{number}")


@pytest.mark.parametrize("block", list(networks()))
def test_a_cluster_file_that_is_shown_is_read(block):
    assert parse_cluster(block).workers == 4 * block.count("[[rack]]")


@pytest.mark.parametrize("table", list(TABLE_KEYS))
def test_the_reference_of_the_cluster_file_has_every_key(table):
    """And no other: the first column of the table's section."""
    page = (ROOT / "docs" / "reference" / "cluster-file.md").read_text()
    section = re.split(rf"^## `\[+{table}\]+`$", page, flags=re.MULTILINE)[1]
    rows = re.findall(r"^\| `(\w+)` \|", section.split("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted(TABLE_KEYS[table])


def described():
    """Each name whose docstring a page shows."""
    for page in PAGES:
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            yield pytest.param(name, id=name)


@pytest.mark.parametrize("name", list(described()))
def test_a_name_that_a_page_describes_exists(name):
    pkgutil.resolve_name(name)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="make site installs mkdocs"
)
def test_the_site_has_no_dead_link(tmp_path):
    words = ["build", "--quiet", "--strict", f"--site-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words, "--config-file=website/mkdocs.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "how-to/index", "reference/index", "reference/commands"):
        assert "<h1" in (tmp_path / f"{page}.html").read_text()
    text = (tmp_path / "reference" / "python-api.html").read_text()
    for name in paceline.__all__:
        if name not in ("__version__", "BSP", "Workload", "StandIn", "stand_in"):
            assert f'id="paceline.{name}"' in text, (
                f"docs/reference/python-api.md lacks {name}"
            )
