"""What is imported, and when: the command line answers before torch is there."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import paceline
from tests.hanging import SECONDS

HEAVY = ("torch", "numpy", "zmq", "pyroute2", "matplotlib", "jinja2", "rich", "typer")


def loaded(code):
    """Which of `HEAVY` a fresh interpreter has imported after *code*."""
    asks = f"import sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", f"{code}\n{asks}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    ).stdout.split("\n")[-2]


def test_a_script_that_imports_paceline_gets_what_it_uses():
    assert loaded("import paceline") == ""
    with_torch = loaded("import paceline\npaceline.distribute, paceline.save").split()
    assert "torch" in with_torch
    assert not {"matplotlib", "jinja2", "rich", "typer"}.intersection(with_torch)


def test_every_public_name_is_there():
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert set(paceline.__all__) <= set(dir(paceline))
    with pytest.raises(AttributeError, match="no attribute 'distrbute'"):
        paceline.distrbute  # noqa: B018


def test_no_module_takes_the_place_of_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(paceline.__path__)}
    assert not modules.intersection(paceline.__all__)
    importlib.import_module("paceline.distributing")
    assert callable(paceline.distribute)
