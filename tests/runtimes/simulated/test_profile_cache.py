"""What tells that a kept profile would not be measured alike again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from paceline.cluster import Workload
from paceline.errors import UsageError
from paceline.runtimes.simulated.profile_cache import (
    ProfileKey,
    find_profile,
    keep_profile,
)

WORKLOAD = Workload(names=("a",), sizes=(4,), forward=(1.0,), backward=(2.0,))
HELPER = "helper_of_a_kept_profile"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that was just run: it has imported a module of its folder."""
    path = tmp_path / "job" / "train.py"
    (path.parent / "lib").mkdir(parents=True)
    path.write_text(f"import {HELPER}")
    (path.parent / "lib" / f"{HELPER}.py").write_text("size = 8")
    monkeypatch.syspath_prepend(path.parent / "lib")
    __import__(HELPER)
    monkeypatch.chdir(tmp_path)
    yield path
    del sys.modules[HELPER]


def append(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write("\n# changed")

    return change


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.py", "train.py has changed"),
        (f"lib/{HELPER}.py", f"lib/{HELPER}.py has changed"),
        ("data.txt", None),
    ],
)
def test_a_file_that_the_script_is_made_of_counts(
    name: str, said: str | None, script: Path
) -> None:
    keep_profile(script, ["--depth", "2"], WORKLOAD, [[3]], 2)
    append(name)(script.parent)
    kept, stale = find_profile(script, ["--depth", "2"], 2)
    assert stale == (f"train.workload.json: {said}" if said else "")
    assert (kept is None) == bool(said)


def test_a_file_that_is_gone_has_changed(script: Path) -> None:
    keep_profile(script, [], WORKLOAD, None, 2)
    (script.parent / "lib" / f"{HELPER}.py").unlink()
    assert find_profile(script, [], 2)[1].endswith(f"lib/{HELPER}.py has changed")


def test_what_it_was_measured_with_counts(script: Path) -> None:
    made = ProfileKey.now(script, ["1"], None, 2)
    assert made.changed(script, ["1"], 2) is None
    for other, said in (
        ({"arguments": ["2"]}, "the script's arguments have changed"),
        ({"processor": "Z80"}, "it was measured on another processor, Z80"),
        ({"torch": "0.4"}, "it was measured with torch 0.4"),
        ({"files": {"other.py": "0"}}, "it is another script's, of other.py"),
        (
            {"workers": 8},
            "it was measured as worker 0 of 8, and of 2 it may have another batch",
        ),
    ):
        changed = msgspec.structs.replace(made, **other)
        assert changed.changed(script, ["1"], 2) == said


def test_what_a_person_made_is_taken_as_it_is(script: Path) -> None:
    WORKLOAD.save("train.workload.json")
    kept, _ = find_profile(script, ["whatever"], 2)
    assert kept is not None
    assert kept.made is None
    assert kept.workload == WORKLOAD


def test_a_kept_profile_reads_back(script: Path) -> None:
    written = keep_profile(script, [], WORKLOAD, [[3, 4], []], 2)
    assert find_profile(script, [], 2) == (written, "")
    assert Workload.load(written.path) == WORKLOAD


def test_a_file_that_is_no_profile_is_refused(script: Path) -> None:
    Path("train.workload.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a workload"):
        find_profile(script, [], 2)
