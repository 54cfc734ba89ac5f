"""Trainers of others, under paceline, learn what they learn under their own DDP, to the bit.

`make test-integrations` installs what these tests need, and runs them. docs/reference/trainer-compatibility.md
has a column for each framework.
"""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import run

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "scripts"
LAUNCHED = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
"""With what `forked` sets: by these Lightning knows that torchrun has started its processes."""
METHODS = ("osp:budget=constant", "ssp", "local-sgd:sync_every=4")
TO_THE_END = 12 * 8
"""Steps, or more, where nobody stops early."""
Lines = dict[tuple[str, int], dict[str, Any]]


@dataclass(frozen=True)
class Tried:
    """A trainer: *cases* are compared with its own DDP, the *virtual* one with virtual time; *other* ones
    are trained by other methods."""

    name: str
    package: str
    cases: tuple[str, ...]
    virtual: str = "plain"
    other: tuple[str, ...] = ("plain",)

    @property
    def script(self) -> Path:
        return SCRIPTS / f"of_{self.name}.py"

    @property
    def others(self) -> list[str]:
        return [f"{case}@{method}" for case in self.other for method in METHODS]


TRIED = [
    Tried(
        *("accelerate", "accelerate"),
        ("plain", "accumulation", "clipping", "bf16", "seeded", "resumed")
        + ("two", "through"),
        other=("plain", "two"),
    ),
    Tried(
        *("fabric", "lightning"),
        ("plain", "accumulation", "clipping", "fp16", "scheduler", "saved")
        + ("two", "through", "joint"),
        other=("plain", "two"),
    ),
    Tried(
        *("lightning", "lightning"),
        (
            "plain",
            "accumulation",
            "clipping",
            "bf16",
            "two",
            "resumed",
            "early",
            "lbfgs",
        ),
    ),
    Tried(
        *("trainer", "transformers"),
        ("plain", "clipping", "accumulation", "resumed", "early"),
        virtual="clipping",
        other=("clipping", "early"),
    ),
]


def needs(*packages: str) -> None:
    for package in packages:
        spec = importlib.util.find_spec(package)
        # A folder of the name, such as examples/ray beside an example that was run, is no package.
        if spec is None or spec.origin is None:
            target = "test-ray" if package == "ray" else "test-integrations"
            pytest.skip(f"{package} is not installed; make {target} installs it")


def lines_of(said: Iterable[str]) -> Lines:
    """What each worker has printed of each case."""
    lines = [
        json.loads(line.split("=== ", 1)[1])
        for text in said
        for line in text.splitlines()
        if "=== " in line
    ]
    return {(line.pop("case"), line.pop("rank")): line for line in lines}


def trained(tried: Tried, side: str, folder: Path, cases: Iterable[str]) -> Lines:
    """By two processes."""
    words = [tried.script, side, folder, *cases]
    ends = forked.run_together(2, words, environment=LAUNCHED)
    return lines_of(end.stdout for end in ends)


def trained_in_virtual_time(tried: Tried, folder: Path) -> Lines:
    folder.mkdir()
    words = ("simulate", "--workers=2", "--link=1gbit", "--output=all", tried.script)
    done = forked.run(
        ["-m", "paceline", *words, "ours", folder, tried.virtual], folder=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return lines_of([done.stdout])


def require_alike(ours: Lines, theirs: Lines) -> None:
    """Every worker of ours has what rank 0 of DDP has (there others keep old buffers)."""
    for case, rank in ours:
        expected = theirs[case, 0]
        for name, value in ours[case, rank].items():
            if (case, name) != ("two", "validation"):
                # With two optimizers DDP has rank 0's statistics at another moment.
                assert value == pytest.approx(expected[name], rel=1e-6), (case, name)


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: tried.name)
def test_learns_what_ddp_learns_in_both_runtimes(tried: Tried, tmp_path: Path) -> None:
    needs(tried.package)
    theirs = trained(tried, "ddp", tmp_path / "ddp", tried.cases)
    asked = [*tried.cases, *tried.others]
    ours = trained(tried, "ours", tmp_path / "ours", asked)
    assert ours.keys() == {(case, rank) for case in asked for rank in (0, 1)}
    require_alike({k: line for k, line in ours.items() if k[0] in tried.cases}, theirs)
    for end in (theirs, ours):  # saved and resumed: as without a break
        if tried.name == "lightning":
            assert end["resumed", 0] == pytest.approx(end["plain", 0])
        if tried.name == "accelerate":
            assert end["resumed", 0] == pytest.approx(end["seeded", 0])
    for case in tried.others:
        for name in ("sum", "absolute"):
            assert ours[case, 0][name] == ours[case, 1][name]
    for case, rank in ours:  # stopped by one metric: soon, and all at the same step
        if case.startswith("early"):
            steps = ours[case, rank]["steps"]
            assert steps == ours[case, 0]["steps"] < TO_THE_END
    virtual = trained_in_virtual_time(tried, tmp_path / "simulated")
    assert virtual.keys() == {(tried.virtual, rank) for rank in (0, 1)}
    require_alike(virtual, ours)


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: tried.name)
def test_sharded_models_are_refused_in_words(tried: Tried, tmp_path: Path) -> None:
    """By each way to shard one: what it is, that it cannot be, and what to take out."""
    needs(tried.package)
    words = [SCRIPTS / "sharded.py", tried.name, tmp_path]
    for end in forked.run_together(2, words, environment=LAUNCHED):
        said = json.loads(end.stdout.split("=== ", 1)[1])
        for tool in ("FSDP", "fully_shard"):
            assert f"is under {tool}, so each rank holds a part" in said.pop(tool)
        assert "is a DTensor: each rank holds a part" in said.pop("DTensor")
        by_arguments = tried.name in ("accelerate", "trainer")
        assert set(said) == ({"arguments"} if by_arguments else set())
        for words_ in said.values():
            assert "leave " in words_
            assert "fsdp" in words_


@pytest.mark.parametrize(
    ("name", "package"),
    [("accelerate",) * 2, ("trainer", "transformers"), ("fabric", "lightning")],
)
def test_habits_beside_training(name: str, package: str, tmp_path: Path) -> None:
    needs(package)
    words = [SCRIPTS / "habits.py", name, tmp_path]
    for rank, end in enumerate(forked.run_together(2, words, environment=LAUNCHED)):
        assert f"all tried by worker {rank}" in end.stdout


def test_in_virtual_time_fabric_deals_out_what_it_is_asked_for(tmp_path: Path) -> None:
    needs("lightning")
    options = ("--workers=2", "--link=1gbit", "--output=all")
    words = ("simulate", *options, SCRIPTS / "habits.py", "fabric", tmp_path)
    done = forked.run(["-m", "paceline", *words], folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all tried by worker") == 2


def test_clipping_what_has_left_is_refused_in_words(tmp_path: Path) -> None:
    needs("lightning")
    words = [SCRIPTS / "of_lightning.py", "ours", tmp_path, "clipping@osp"]
    ranks = forked.together(2, words, environment=LAUNCHED)
    try:
        ends = [rank.done(job=ranks) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(end.returncode for end in ends)
    assert any("Clip with distribute(clip_norm=...)" in end.stderr for end in ends)


@pytest.mark.parametrize(
    ("name", "package"), [("lightning", "lightning"), ("fabric", "lightning")]
)
def test_a_job_survives_a_worker_that_is_killed(
    name: str, package: str, tmp_path: Path
) -> None:
    """Its second incarnation has the servers' model, and does its own epochs anew."""
    needs(package)
    job = run(
        *(2, SCRIPTS / f"of_{name}.py", "ours", tmp_path, "dies@asp"),
        folder=tmp_path / "job",
        options=["--survive"],
        forked="all",
    )
    job.wait(2 * SECONDS)  # one incarnation after the other
    assert job.status == 0, job.output
    assert job.stderr.count(f"was killed by {signal.SIGKILL.name}") == 1, job.output
    ends = lines_of([job.stdout])
    assert ends["dies@asp", 0]["sum"] == ends["dies@asp", 1]["sum"], ends
    assert ends["dies@asp", 0]["first_step"] == 0
    assert ends["dies@asp", 1]["first_step"] > 0


def test_accelerate_in_a_job_that_survives_is_refused_in_words(tmp_path: Path) -> None:
    needs("accelerate")
    job = run(
        *(2, SCRIPTS / "of_accelerate.py", "ours", tmp_path, "plain@asp"),
        folder=tmp_path / "job",
        options=["--survive"],
        forked="all",
    )
    job.wait()
    assert job.status == 1
    assert "nobody comes back to" in job.stderr, job.output
