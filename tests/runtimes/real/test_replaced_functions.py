"""Functions of Python's and torch's that are replaced while a script is in a runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import forked

SCRIPT = """
import atexit, builtins, os, sys
import torch.distributed as dist

def there():  # and sys.excepthook, over which torch.distributed puts its own
    return {
        "destroy": dist.destroy_process_group,
        "sys.exit": sys.exit,
        "exit": builtins.exit,
        "quit": builtins.quit,
    }

def replaced():
    return sorted(name for name, one in there().items() if one is not before[name])

def say(when):
    with open(os.environ.get("RANK", "0"), "a") as file:
        print(when, *replaced(), file=file)

builtins.exit = builtins.quit = lambda code=None: None  # a forked process has none
before = there()
atexit.register(say, "in the end")  # called after what is registered later
import paceline
paceline.runtime_name  # its module is imported, too
say("imported")
paceline.init()
say("joined")
if OTHER:
    sys.exit = other = lambda status=None: None
    atexit.register(lambda: say("other" if sys.exit is other else "lost"))
"""
ALL = "destroy exit quit sys.exit"


def told(folder: Path, *words: str, other: bool = False) -> list[str]:
    (folder / "train.py").write_text(SCRIPT.replace("OTHER", str(other)))
    done = forked.run([*words, "train.py"], folder=folder)
    assert done.returncode == 0, done.stderr
    return (folder / "0").read_text().splitlines()


def test_a_job_of_one_keeps_its_exits(tmp_path: Path) -> None:
    lines = told(tmp_path, other=False)
    assert lines == ["imported", "joined destroy", "in the end"]


def test_what_somebody_has_put_over_it_stays(tmp_path: Path) -> None:
    lines = told(tmp_path, other=True)
    assert lines[2:] == ["other destroy sys.exit", "in the end sys.exit"]


@pytest.mark.slow
def test_workers_that_others_wait_for_are_watched(tmp_path: Path) -> None:
    lines = told(
        tmp_path, "-m", "tests.support.forking", "paceline", "run", "--workers=2"
    )
    assert lines == ["imported", f"joined {ALL}", "in the end"]
    assert (tmp_path / "1").read_text().splitlines() == lines
