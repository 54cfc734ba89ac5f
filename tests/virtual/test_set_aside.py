"""Checkpoints of a simulation do not touch those that are there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.errors import UsageError
from paceline.worlds.virtual.set_aside import checkpoints_set_aside
from tests.hanging import SECONDS

REAL, SIMULATED = b"of a real run", b"of a simulation"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: str, content: bytes = SIMULATED) -> None:
    Path(path).write_bytes(content)


def tree(folder: str = ".") -> dict[str, bytes]:
    """All files, by their paths."""
    paths = (Path(place, name) for place, _, ns in os.walk(folder) for name in ns)
    return {str(path): path.read_bytes() for path in paths}


def replaces_by_rename() -> None:
    write("ckpt.pt.tmp")
    os.replace("ckpt.pt.tmp", "ckpt.pt")


def renames_an_odd_name() -> None:
    torch.save({}, "odd")
    write("odd")
    os.replace("odd", "ckpt.pt")


def removes_and_writes() -> None:
    os.remove("ckpt.pt")
    assert not os.path.exists("ckpt.pt")
    write("ckpt.pt")


def copies() -> None:
    write("new.pth")
    shutil.copyfile("new.pth", "ckpt.pt")


def appends() -> None:
    with open("ckpt.pt", "ab") as file:
        assert file.tell() == len(REAL)
        file.write(SIMULATED)


def writes_inside() -> None:
    with open("ckpt.pt", "r+b") as file:
        file.write(SIMULATED)


def writes_through_a_link() -> None:
    os.symlink("ckpt.pt", "latest.pt")
    write("latest.pt")
    os.remove("latest.pt")


def writes_by_descriptor() -> None:
    descriptor = os.open(os.path.abspath("ckpt.pt"), os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, SIMULATED)
    os.close(descriptor)


def saves_with_torch() -> None:
    torch.save({"a": torch.ones(2)}, Path("ckpt.pt"))
    assert torch.load("ckpt.pt")["a"].tolist() == [1, 1]


def from_a_thread_of_its_own() -> None:
    thread = threading.Thread(target=write, args=("ckpt.pt",))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "change",
    [
        lambda: write("ckpt.pt"),
        replaces_by_rename,
        renames_an_odd_name,
        removes_and_writes,
        copies,
        appends,
        writes_inside,
        writes_through_a_link,
        writes_by_descriptor,
        saves_with_torch,
        from_a_thread_of_its_own,
        lambda: os.rename("ckpt.pt", "old.pt"),
        lambda: os.remove("ckpt.pt"),
    ],
)
def test_whatever_is_done_to_a_checkpoint_it_is_as_it_was(
    change: Callable[[], None],
) -> None:
    write("ckpt.pt", REAL)
    with checkpoints_set_aside(Path("scratch")) as made:
        change()
        there = Path("ckpt.pt").read_bytes() if Path("ckpt.pt").exists() else None
        assert there != REAL
    left = {path: text for path, text in tree().items() if "scratch" not in path}
    assert left == {"ckpt.pt": REAL}
    if there is not None:
        assert Path("scratch/ckpt.pt").resolve() in made
        assert Path("scratch/ckpt.pt").read_bytes() == there


def test_new_checkpoints_and_their_folders_are_moved_and_other_files_stay() -> None:
    with checkpoints_set_aside(Path("runs/scratch")) as made:
        os.makedirs("out/deep")
        torch.save({}, "out/deep/model.best")
        write("out/deep/snapshot.PT")
        os.makedirs("logs")
        write("logs/loss.csv")
    assert [str(path.relative_to(Path.cwd())) for path in made] == [
        "runs/scratch/out/deep/model.best",
        "runs/scratch/out/deep/snapshot.PT",
    ]
    assert not Path("out").exists()
    assert Path("logs/loss.csv").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_is_replaced_as_a_whole_comes_back(there: bool) -> None:
    """As `paceline.save` does it; and one that was not there before is gone."""
    if there:
        os.makedirs("ck/worker-1")
        write("ck/__0_0.distcp", REAL)
        write("ck/worker-1/.metadata", REAL)
        write("ck/.metadata", REAL)
    before = tree()
    with checkpoints_set_aside(Path("scratch")):
        os.makedirs("ck.partial/worker-0")
        write("ck.partial/worker-0/.metadata")
        write("ck.partial/__0_0.distcp")
        write("ck.partial/.metadata.tmp")
        os.rename("ck.partial/.metadata.tmp", "ck.partial/.metadata")
        if there:
            os.rename("ck", "ck.old")
        os.rename("ck.partial", "ck")
        if there:
            shutil.rmtree("ck.old")
        assert set(tree("ck").values()) == {SIMULATED}
    assert sorted(os.listdir()) == (["ck", "scratch"] if there else ["scratch"])
    assert {path: text for path, text in tree().items() if "ck" in path[:2]} == before
    assert set(tree("scratch/ck").values()) == {SIMULATED}


def test_reading_sets_nothing_aside() -> None:
    write("ckpt.pt", REAL)
    number = os.stat("ckpt.pt").st_ino
    with checkpoints_set_aside(Path("scratch")) as made:
        assert Path("ckpt.pt").read_bytes() == REAL
        with pytest.raises(FileExistsError):
            os.open("ckpt.pt", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert made == []
    assert os.listdir() == ["ckpt.pt"]
    assert os.stat("ckpt.pt").st_ino == number


def test_all_is_put_back_after_an_error_and_nothing_is_seen_afterwards() -> None:
    write("ckpt.pt", REAL)
    save = torch.save

    def fails() -> None:
        write("ckpt.pt")
        os.remove("nothing.pt")

    with pytest.raises(FileNotFoundError), checkpoints_set_aside(Path("scratch")):
        fails()
    assert Path("ckpt.pt").read_bytes() == REAL
    assert torch.save is save
    write("ckpt.pt")
    assert Path("ckpt.pt").read_bytes() == SIMULATED


def test_where_nothing_can_be_set_aside_nothing_is_overwritten() -> None:
    write("ckpt.pt", REAL)
    write("file")
    with (
        pytest.raises(UsageError, match="name another folder with --scratch"),
        checkpoints_set_aside(Path("file/scratch")),
    ):
        write("ckpt.pt")
    assert Path("ckpt.pt").read_bytes() == REAL


@pytest.mark.slow
def test_the_next_simulation_puts_back_what_a_killed_one_had_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write("ckpt.pt", REAL)
    script = (
        "import os\nfrom pathlib import Path\n"
        "from paceline.worlds.virtual.set_aside import checkpoints_set_aside\n"
        "with checkpoints_set_aside(Path('scratch')):\n"
        "    Path('ckpt.pt').write_text('x')\n    Path('new.pt').write_text('x')\n"
        "    os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=SECONDS)
    assert done.returncode == 9
    assert sorted(os.listdir()) == ["ckpt.pt", "new.pt", "scratch"]
    with checkpoints_set_aside(Path("scratch")):
        assert Path("ckpt.pt").read_bytes() == REAL
    assert tree() == {"ckpt.pt": REAL}
    assert "ckpt.pt is put back: a simulation that was" in capsys.readouterr().err
