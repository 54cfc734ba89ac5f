"""The files in examples/ that start a job on Kubernetes and Slurm are what these can read, and
name what there is."""

import re
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from paceline.cli import app

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def options_of(verb):
    command = get_command(app).commands[verb]
    return {name for option in command.params for name in option.opts}


@pytest.fixture(scope="module")
def kinds():
    """By kind and name: what the manifest asks for."""
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def test_the_manifest_is_what_kubernetes_expects(kinds):
    validate = pytest.importorskip("kubernetes_validate")
    for document in kinds.values():
        validate.validate(document, "1.31", strict=True)


def container(kinds, name):
    pod = kinds["Job", name]["spec"]["template"]["spec"]
    (found,) = pod["containers"]
    return found, {one["name"]: one for one in found["env"]}


def given(found):
    words = [*found["command"], *found["args"]]
    return dict(word.lstrip("-").partition("=")[::2] for word in words if "=" in word)


def test_its_server_and_its_workers_belong_together(kinds):
    server, server_variables = container(kinds, "paceline-server")
    worker, variables = container(kinds, "paceline-workers")
    jobs = kinds["Job", "paceline-workers"]["spec"]
    workers = int(given(server)["workers"])
    assert workers == jobs["completions"] == jobs["parallelism"]
    assert "WORLD_SIZE" not in variables, "the server tells it"
    assert variables["PACELINE_SECRET"] == server_variables["PACELINE_SECRET"]
    name, _, port = given(worker)["server"].partition(":")
    service = kinds["Service", name]["spec"]
    assert given(server)["port"] == port
    assert int(port) in [one["port"] for one in service["ports"]]
    labels = kinds["Job", "paceline-server"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    (mount,) = server["volumeMounts"]
    assert given(server)["snapshot"].startswith(mount["mountPath"])


@pytest.mark.parametrize("name", ["kubernetes.yaml", "slurm.sbatch"])
def test_options_that_they_give_are_there(name):
    text = (EXAMPLES / name).read_text()
    known = options_of("serve") | options_of("run")
    words = re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub(r"#.*", "", text))
    others = {"--overlap", "--nodes", "--ntasks", "--nodelist"}  # srun's
    others.add("--epochs")  # the script's
    assert {word for word in words if word not in others} <= known


def test_the_job_script_is_bash():
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sbatch")], check=True)
