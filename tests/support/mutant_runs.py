"""Pytest in a clone of this repository, forked from a process that has imported torch.

Importing torch takes longer than most runs of a mutant.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

from tests.support.mutant_operators import ROOT

SCRATCH = ROOT / "build" / "mutants"
MARK = "PACELINE_MUTANT_RUN"


def clone(name: str) -> Path:
    """A clone of HEAD: what a run changes is not in this checkout."""
    tree = SCRATCH / name
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", "--shared", ROOT, tree], check=True)
    (tree / "build").mkdir()
    return tree


def run_tests(tree: Path, words: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit status, None past the limit, and the first failed test.

    Pytest runs in a fork of this process, which has imported torch and nothing of paceline.
    """
    run = f"{os.getpid()}-{time.monotonic_ns()}"
    output, end = tree / "build" / "output", time.monotonic() + seconds
    child = os.fork()
    if child == 0:
        become_pytest(tree, words, output, run)
    done = 0
    while not done and time.monotonic() < end:
        time.sleep(0.1)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for process in Path("/proc").glob("[0-9]*"):  # what the tests have started
        with contextlib.suppress(OSError):
            if f"{MARK}={run}".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
    lines = output.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    first = failed[0].partition(" ")[2].partition(" - ")[0] if failed else ""
    if done and os.waitstatus_to_exitcode(status) == 1 and not first:
        raise RuntimeError("\n".join(["pytest failed, and no test did", *lines]))
    return os.waitstatus_to_exitcode(status) if done else None, first


def become_pytest(tree: Path, words: list[str], output: Path, run: str) -> None:
    """Be ``python -m pytest`` in a tree, from here to the end of this process."""
    status = 1
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(tree)
        source = str(tree / "src")
        os.environ |= {MARK: run, "PYTHONPATH": source}
        os.environ["HYPOTHESIS_PROFILE"] = "mutants"
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.path[:] = [source, str(tree), *(p for p in sys.path[1:] if p != str(ROOT))]
        import pytest

        status = int(pytest.main(["-q", "-rfE", "--tb=short", *words]))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
