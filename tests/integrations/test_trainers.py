"""Trainers of others, under paceline, learn what they learn under their own DDP, to the bit.

`make test-integrations` installs what these tests need, and runs them. docs/integrations.md has a row for
each framework.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hanging import SECONDS
from tests.real.helpers import TORCHRUN

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "scripts"
OURS = "bsp:fusion=ddp"
Lines = dict[tuple[str, int], dict[str, Any]]


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(
                f"{package} is not installed; make test-integrations installs it"
            )


def trained(
    script: str,
    *words: object,
    by: tuple[str, ...] = (),
    folder: Path | None = None,
) -> Lines:
    """What each worker has printed of each case."""
    command = by or (*TORCHRUN, "--standalone", "--nproc-per-node=2")
    done = started(script, *words, by=command, folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        json.loads(line.split("=== ", 1)[1])
        for line in done.stdout.splitlines()
        if "=== " in line
    ]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    return {(line.pop("case"), line.pop("rank")): line for line in lines}


def started(
    script: str, *words: object, by: tuple[str, ...], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """*folder*: where it runs, and leaves what it measures."""
    return subprocess.run(
        [*by, str(SCRIPTS / script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
        cwd=folder,
    )


def require_alike(ours: Lines, theirs: Lines, but: tuple[str, ...] = ()) -> None:
    """Every worker of ours has what rank 0 of DDP has (there others keep old buffers)."""
    assert ours.keys() == theirs.keys()
    for case, rank in ours:
        expected = theirs[case, 0]
        for name, value in ours[case, rank].items():
            if name not in but:
                assert value == pytest.approx(expected[name], rel=1e-6), (case, name)


@pytest.mark.parametrize(
    ("script", "package", "folder"),
    [
        ("of_accelerate.py", "accelerate", False),
        ("of_fabric.py", "lightning", False),
        ("of_trainer.py", "transformers", True),
    ],
)
def test_learns_what_ddp_learns(
    script: str, package: str, folder: bool, tmp_path: Path
) -> None:
    needs(package)
    ends: list[Lines] = []
    for side in ("ddp", "ours"):
        more = [tmp_path / side] if folder else []
        ends.append(trained(script, side, OURS, *more))
    require_alike(ends[1], ends[0])


def test_lightning_learns_what_ddp_learns(tmp_path: Path) -> None:
    """Two optimizers, a checkpoint in mid-training and early stopping, too. With two optimizers DDP
    has rank 0's statistics at another moment."""
    needs("lightning")
    cases = "plain,accumulation,clipping,bf16,two,resumed,early"
    ends: list[Lines] = []
    for side in ("ddp", "ours"):
        folder = tmp_path / side
        folder.mkdir()
        ends.append(trained("of_lightning.py", side, OURS, cases, folder))
    for end in ends:
        for rank in (0, 1):
            del end["two", rank]["validation"]
    require_alike(ends[1], ends[0])
    plain, resumed = ends[1]["plain", 0], ends[1]["resumed", 0]
    assert plain == resumed


@pytest.mark.parametrize(
    ("script", "package", "words"),
    [
        ("of_accelerate.py", "accelerate", ["plain"]),
        ("of_fabric.py", "lightning", ["plain"]),
        ("of_lightning.py", "lightning", ["plain"]),
        ("of_trainer.py", "transformers", ["FOLDER", "clipping"]),
    ],
)
def test_virtual_workers_learn_what_real_ones_learn(
    script: str, package: str, words: list[str], tmp_path: Path
) -> None:
    needs(package)
    given = [tmp_path if word == "FOLDER" else word for word in words]
    real = trained(script, "ours", OURS, *given)
    virtual = trained(
        *(script, "ours", OURS, *given),
        by=(
            *(sys.executable, "-m", "paceline", "simulate", "--workers=2"),
            *("--link=1gbit", "--output=all"),
        ),
        folder=tmp_path,
    )
    require_alike(virtual, {case: real[case] for case in virtual})


@pytest.mark.parametrize("method", ["osp:budget=constant", "ssp", "local-sgd:every=4"])
@pytest.mark.parametrize(
    ("script", "package", "words"),
    [
        ("of_lightning.py", "lightning", ["plain"]),
        ("of_trainer.py", "transformers", ["FOLDER", "clipping"]),
    ],
)
def test_other_methods_end_with_equal_models(
    script: str, package: str, words: list[str], method: str, tmp_path: Path
) -> None:
    needs(package)
    given = [tmp_path if word == "FOLDER" else word for word in words]
    end = trained(script, "ours", method, *given)
    (first, second) = (end[words[-1], rank] for rank in (0, 1))
    assert first["sum"] == second["sum"]
    assert first["absolute"] == second["absolute"]


def test_clipping_what_has_left_is_refused_in_words() -> None:
    needs("lightning")
    done = started(
        *("of_lightning.py", "ours", "osp", "clipping"),
        by=(*TORCHRUN, "--standalone", "--nproc-per-node=2"),
    )
    assert done.returncode != 0
    assert "Clip with distribute(clip_norm=...)" in done.stderr
