"""What is imported, and when: the command line answers before torch is there."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import paceline
from tests.support.hanging import SECONDS

HEAVY = ("torch", "numpy", "zmq", "pyroute2", "matplotlib", "jinja2", "rich", "typer")

NOT_FOR_SCRIPTS = (
    *("matplotlib", "jinja2", "rich", "typer", "scipy", "sklearn", "pyroute2"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo"),
    *("torch.utils.tensorboard", "wandb", "mlflow"),
    *("lightning", "accelerate", "transformers", "ray"),
    *(
        "paceline.runtimes.simulated",
        "paceline.tools.plan",
        "paceline.tools.doctor",
        "paceline.cluster.probe",
    ),
    *(
        "paceline.tools.auto.method_switching",
        "paceline.testing",
    ),
    *("paceline.cli", "paceline.integrations", "paceline.tools.report.charts"),
)
"""What a training of one's own does without: it costs seconds, in all, in each worker."""


def loaded(code, names=HEAVY):
    """Which of *names* a fresh interpreter has imported after *code*."""
    asks = f"import sys; print(*[m for m in {names!r} if m in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", f"{code}\n{asks}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    ).stdout.split("\n")[-2]


def test_a_script_that_imports_paceline_gets_what_it_uses():
    assert loaded("import paceline") == ""
    everything = ", ".join(f"paceline.{name}" for name in paceline.__all__)
    used = f"import paceline\n{everything}"
    assert loaded(used, ("torch", *NOT_FOR_SCRIPTS)) == "torch"


@pytest.mark.slow
def test_imports_go_on_collecting_garbage():
    said = "import gc, paceline\npaceline.distribute\nprint(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
    assert done.stdout == "True\n"


def test_every_public_name_is_there():
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert set(paceline.__all__) <= set(dir(paceline))
    with pytest.raises(AttributeError, match="no attribute 'distrbute'"):
        paceline.distrbute  # noqa: B018


def test_no_module_takes_the_place_of_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(paceline.__path__)}
    assert not modules.intersection(paceline.__all__)
    importlib.import_module("paceline.core.distribute")
    assert callable(paceline.distribute)
