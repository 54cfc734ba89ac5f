"""When a cached profile is read, and when a script is measured anew."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.cluster import Workload
from paceline.errors import UsageError
from paceline.run_options import ScriptJob
from paceline.runtimes.simulated import profile_cache
from paceline.runtimes.simulated.profile_cache import (
    MAX_AGE_SECONDS,
    CachedProfile,
    Profile,
)

PROFILE = Profile(
    Workload(names=("a",), sizes=(4,), forward=(1.0,), backward=(2.0,)), [[3, 4], []]
)
HELPER = "helper_of_a_cached_profile"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script that was just run: it has imported a module of its folder."""
    path = tmp_path / "job" / "train.py"
    (path.parent / "lib").mkdir(parents=True)
    path.write_text(f"import {HELPER}")
    (path.parent / "lib" / f"{HELPER}.py").write_text("size = 8")
    monkeypatch.syspath_prepend(path.parent / "lib")
    __import__(HELPER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield path
    del sys.modules[HELPER]


def cached_for(script: Path, workers: int, *arguments: str) -> CachedProfile:
    return CachedProfile.of(ScriptJob(str(script), arguments), workers)


def test_a_cached_profile_reads_back_and_nothing_else_is_written(
    script: Path, tmp_path: Path
) -> None:
    cached = cached_for(script, 2, "--depth", "2")
    assert cached.load() is None
    before = sorted(tmp_path.rglob("*"))
    cached.save(PROFILE)
    written = [tmp_path / "cache", tmp_path / "cache" / "paceline", cached.path]
    assert sorted(tmp_path.rglob("*")) == sorted([*before, *written])
    assert cached_for(script, 2, "--depth", "2").load() == PROFILE
    assert Workload.load(cached.path) == PROFILE.workload


def edit(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write("\n# changed")

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (edit("train.py"), False),
        (edit(f"lib/{HELPER}.py"), False),
        (remove(f"lib/{HELPER}.py"), False),
        (edit("data.txt"), True),
    ],
    ids=["script", "module", "module is gone", "another file"],
)
def test_a_file_that_the_script_is_made_of_counts(
    change: Callable[[Path], None], counts: bool, script: Path
) -> None:
    cached_for(script, 2).save(PROFILE)
    change(script.parent)
    assert (cached_for(script, 2).load() == PROFILE) == counts


def test_what_it_is_measured_with_is_its_name(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "train.py"
    copy.write_text(script.read_text())
    names = {
        cached_for(script, 2, "1", "2").name,
        cached_for(script, 2, "1 2").name,
        cached_for(script, 8, "1", "2").name,
        cached_for(copy, 2, "1", "2").name,
    }
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(script.parent)
        names.add(cached_for(script, 2, "1", "2").name)
    for known in ("_processor", "version"):
        with monkeypatch.context() as other:
            other.setattr(profile_cache, known, lambda *_: "Z80")
            names.add(cached_for(script, 2, "1", "2").name)
    assert len(names) == 7
    assert cached_for(script, 2, "1", "2").name in names


@pytest.mark.parametrize("content", ["{}", "", '{"format": "paceline workload 1"}'])
def test_a_broken_file_is_made_anew(content: str, script: Path) -> None:
    cached = cached_for(script, 2)
    cached.save(PROFILE)
    cached.path.write_text(content)
    assert cached.load() is None
    cached.save(PROFILE)
    assert cached.load() == PROFILE


def test_a_profile_that_does_not_say_what_it_was_measured_with_does_not_count(
    script: Path,
) -> None:
    cached = cached_for(script, 2)
    cached.save(PROFILE)
    PROFILE.workload.save(cached.path)
    assert cached.load() is None


def test_old_files_are_removed_and_other_files_stay(script: Path) -> None:
    cached = cached_for(script, 2)
    cached.save(PROFILE)
    old, young, other = (
        cached.path.with_name(name)
        for name in ("old.workload.json", "young.workload.json", "other.txt")
    )
    for file, age in ((old, 1.1), (young, 0.9), (other, 1.1)):
        file.touch()
        written = file.stat().st_mtime - age * MAX_AGE_SECONDS
        os.utime(file, (written, written))
    cached.save(PROFILE)
    assert sorted(cached.path.parent.iterdir()) == sorted([cached.path, young, other])


def test_the_cache_folder_is_the_users(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = cached_for(script, 2)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("", "relative/to/nothing"):
        monkeypatch.setenv("XDG_CACHE_HOME", name)
        folder = tmp_path / "home" / ".cache" / "paceline"
        assert cached.path.parent == folder


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_without_a_folder_that_can_be_written_nothing_is_cached(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = cached_for(script, 2)
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", "/proc/self"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        assert cached.load() is None
        with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
            cached.save(PROFILE)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert cached.load() is None
    with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
        cached.save(PROFILE)
