"""Checkpoints of a simulation go to its own folder, and real ones are never touched."""

from __future__ import annotations

import fcntl
import io
import os
import posix  # without what a simulation redirects
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.errors import UsageError
from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
from tests.support.hanging import SECONDS

REAL, SIMULATED = b"of a real run", b"of a simulation"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: str, content: bytes = SIMULATED) -> None:
    Path(path).write_bytes(content)


def on_disk(path: str = "ckpt.pt") -> bytes:
    """What is there for everybody but the simulation."""
    descriptor = posix.open(path, os.O_RDONLY)
    try:
        return posix.read(descriptor, 1000)
    finally:
        posix.close(descriptor)


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


def names_its_arguments() -> None:
    os.rename(src="ckpt.pt", dst="old.pt")
    torch.save(obj={}, f="ckpt.pt")
    os.replace(dst="ckpt.pt", src="old.pt")
    with open(mode="wb", file="ckpt.pt") as file:
        file.write(SIMULATED)


def replaces_by_a_temporary_file() -> None:
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
        torch.save({}, file)
    os.replace(file.name, "ckpt.pt")


def moves_it_away_and_back() -> None:
    Path("ckpt.pt").rename("before.pt")
    assert not Path("ckpt.pt").exists()
    assert "before.pt" in os.listdir()
    assert Path("before.pt").read_bytes() == REAL
    write("before.pt")
    shutil.move("before.pt", "ckpt.pt")


def truncates() -> None:
    os.truncate("ckpt.pt", 2)
    assert os.path.getsize("ckpt.pt") == 2


def by_a_folders_descriptor() -> None:
    folder = os.open(".", os.O_RDONLY)
    os.unlink("ckpt.pt", dir_fd=folder)
    descriptor = os.open("ckpt.pt", os.O_CREAT | os.O_WRONLY, dir_fd=folder)
    os.write(descriptor, SIMULATED)
    os.close(descriptor)
    os.close(folder)


def links_it() -> None:
    write("new.pt")
    os.remove("ckpt.pt")
    os.link("new.pt", "ckpt.pt")
    os.remove("new.pt")


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
        names_its_arguments,
        replaces_by_a_temporary_file,
        moves_it_away_and_back,
        truncates,
        by_a_folders_descriptor,
        links_it,
        from_a_thread_of_its_own,
        lambda: os.rename("ckpt.pt", "old.pt"),
        lambda: os.remove("ckpt.pt"),
    ],
)
def test_whatever_is_done_to_a_checkpoint_it_is_as_it_was(
    change: Callable[[], None],
) -> None:
    write("ckpt.pt", REAL)
    with redirect_checkpoints(Path("scratch")) as made:
        change()
        there = Path("ckpt.pt").read_bytes() if Path("ckpt.pt").exists() else None
        assert there != REAL
        assert on_disk() == REAL
    left = {path: text for path, text in tree().items() if "scratch" not in path}
    assert left == {"ckpt.pt": REAL}
    if there is not None:
        assert Path("scratch/ckpt.pt").resolve() in made
        assert Path("scratch/ckpt.pt").read_bytes() == there


def test_new_checkpoints_and_their_folders_are_moved_and_other_files_stay() -> None:
    with redirect_checkpoints(Path("runs/scratch")) as made:
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
    with redirect_checkpoints(Path("scratch")):
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
        if there:
            assert on_disk("ck/.metadata") == REAL
            assert on_disk("ck/worker-1/.metadata") == REAL
    assert sorted(os.listdir()) == (["ck", "scratch"] if there else ["scratch"])
    assert {path: text for path, text in tree().items() if "ck" in path[:2]} == before
    assert set(tree("scratch/ck").values()) == {SIMULATED}


def test_reading_sets_nothing_aside() -> None:
    write("ckpt.pt", REAL)
    number = os.stat("ckpt.pt").st_ino
    with redirect_checkpoints(Path("scratch")) as made:
        assert Path("ckpt.pt").read_bytes() == REAL
        with pytest.raises(FileExistsError):
            os.open("ckpt.pt", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert made == []
    assert os.listdir() == ["ckpt.pt"]
    assert os.stat("ckpt.pt").st_ino == number


def test_a_call_without_a_path_fails_as_it_would_outside() -> None:
    write("w", REAL)
    with redirect_checkpoints(Path("scratch")), pytest.raises(TypeError):
        open(mode="w")  # type: ignore[call-overload]  # noqa: SIM115


def test_all_is_put_back_after_an_error_and_nothing_is_seen_afterwards() -> None:
    write("ckpt.pt", REAL)
    save = torch.save

    def fails() -> None:
        write("ckpt.pt")
        os.remove("nothing.pt")

    with pytest.raises(FileNotFoundError), redirect_checkpoints(Path("scratch")):
        fails()
    assert Path("ckpt.pt").read_bytes() == REAL
    assert torch.save is save
    write("ckpt.pt")
    assert Path("ckpt.pt").read_bytes() == SIMULATED


def test_where_nothing_can_be_redirected_nothing_is_overwritten() -> None:
    write("ckpt.pt", REAL)
    write("file")
    with (
        pytest.raises(UsageError, match="name another folder with --scratch"),
        redirect_checkpoints(Path("file/scratch")),
    ):
        write("ckpt.pt")
    assert Path("ckpt.pt").read_bytes() == REAL


def test_what_cannot_be_redirected_is_refused_before_it_happens() -> None:
    write("ckpt.pt", REAL)
    with redirect_checkpoints(Path("scratch")):
        with pytest.raises(UsageError, match=r"ckpt\.pt"):
            io.FileIO("ckpt.pt", "w")
        with pytest.raises(UsageError, match=r"ckpt\.pt"):
            posix.rename("ckpt.pt", "other")
        with pytest.raises(UsageError, match=r"ckpt\.pt"):
            posix.unlink("ckpt.pt")
        assert on_disk() == REAL
    assert tree() == {"ckpt.pt": REAL}


def test_files_that_are_not_there_are_missed_by_their_own_names() -> None:
    write("ckpt.pt", REAL)
    with redirect_checkpoints(Path("scratch")):
        os.remove("ckpt.pt")
        for act in (
            lambda: Path("ckpt.pt").read_bytes(),
            lambda: os.stat("ckpt.pt"),
            lambda: os.remove("ckpt.pt"),
            lambda: os.rename("ckpt.pt", "x.pt"),
            lambda: torch.load("ckpt.pt"),
            lambda: write("no/such/folder.pt"),
        ):
            with pytest.raises(FileNotFoundError) as caught:
                act()
            assert "scratch" not in str(caught.value)
        assert not os.access("ckpt.pt", os.F_OK)
    assert on_disk() == REAL


def test_folders_show_what_the_simulation_sees() -> None:
    os.makedirs("runs/step-1")
    write("runs/step-1/model.pt", REAL)
    write("runs/first.pt", REAL)
    write("runs/notes.txt", REAL)
    with redirect_checkpoints(Path("scratch")):
        os.makedirs("runs/step-2")
        write("runs/step-2/model.pt")
        os.remove("runs/first.pt")
        shutil.rmtree("runs/step-1")
        assert sorted(os.listdir("runs")) == ["notes.txt", "step-2"]
        assert sorted(str(p) for p in Path("runs").rglob("*")) == [
            "runs/notes.txt",
            "runs/step-2",
            "runs/step-2/model.pt",
        ]
        with os.scandir("runs/step-2") as entries:
            assert [(e.name, e.is_file(), e.is_dir()) for e in entries] == [
                ("model.pt", True, False)
            ]
        with pytest.raises(FileExistsError):
            os.mkdir("runs/step-2")
        with pytest.raises(OSError, match="not empty"):
            os.rmdir("runs/step-2")
        assert on_disk("runs/step-1/model.pt") == REAL
    assert tree("runs") == {
        "runs/step-1/model.pt": REAL,
        "runs/first.pt": REAL,
        "runs/notes.txt": REAL,
    }


def test_a_link_to_the_last_checkpoint_is_the_simulations() -> None:
    write("1.pt", REAL)
    os.symlink("1.pt", "last.pt")
    with redirect_checkpoints(Path("scratch")):
        write("2.pt")
        os.symlink("2.pt", "next.pt")
        os.replace("next.pt", "last.pt")
        assert os.readlink("last.pt") == "2.pt"
        assert Path("last.pt").read_bytes() == SIMULATED
        assert Path("last.pt").is_symlink()
        with os.scandir(".") as entries:
            inodes = {entry.name: entry.inode() for entry in entries}
        assert inodes["last.pt"] == os.lstat("last.pt").st_ino != inodes["2.pt"]
        write("last.pt", b"more")
        assert Path("2.pt").read_bytes() == b"more"
        assert on_disk("last.pt") == REAL
    assert sorted(os.listdir()) == ["1.pt", "last.pt", "scratch"]
    assert Path("scratch/last.pt").read_bytes() == b"more"


@pytest.mark.slow
def test_two_simulations_in_one_folder_do_not_see_each_other() -> None:
    write("ckpt.pt", REAL)
    with redirect_checkpoints(Path("scratch")):
        write("ckpt.pt")
        script = (
            "from pathlib import Path\n"
            "from paceline.runtimes.simulated.checkpoints import redirect_checkpoints\n"
            "with redirect_checkpoints(Path('scratch')):\n"
            f"    assert Path('ckpt.pt').read_bytes() == {REAL!r}\n"
            "    Path('ckpt.pt').write_text('other')\n"
            "    Path('other.pt').write_text('other')\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=SECONDS)
        assert Path("ckpt.pt").read_bytes() == SIMULATED
        assert not Path("other.pt").exists()
    assert tree() == {
        "ckpt.pt": REAL,
        "scratch/ckpt.pt": SIMULATED,
        "scratch/other.pt": b"other",
    }


def test_safetensors_writes_and_reads_past_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the names of that library, whose files are not Python's `open`'s."""

    def serialize_file(tensors: object, filename: str, metadata: object = None) -> None:
        descriptor = posix.open(filename, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        posix.write(descriptor, SIMULATED)
        posix.close(descriptor)

    def safe_open(filename: str, framework: str) -> bytes:
        return on_disk(filename)

    library, tensors = types.ModuleType("safetensors"), types.ModuleType("of.torch")
    library.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    for place in (library, tensors):
        place.safe_open = safe_open  # type: ignore[attr-defined]
    tensors.serialize_file = serialize_file  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "safetensors", library)
    monkeypatch.setitem(sys.modules, "safetensors.torch", tensors)
    write("model.safetensors", REAL)
    with redirect_checkpoints(Path("scratch")):
        assert library.safe_open("model.safetensors", "pt") == REAL
        tensors.serialize_file({}, filename="model.safetensors")
        assert tensors.safe_open("model.safetensors", framework="pt") == SIMULATED
        assert on_disk("model.safetensors") == REAL
    assert tensors.serialize_file is serialize_file
    assert Path("scratch/model.safetensors").read_bytes() == SIMULATED


KILLED = """
import os, sys
from pathlib import Path
from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
with redirect_checkpoints(Path("scratch")):
    Path("ckpt.pt").write_text("x")
    Path("new.pt").write_text("x")
    os.kill(os.getpid(), 9)
"""


def test_a_killed_simulation_has_changed_nothing_and_the_next_one_cleans_up() -> None:
    write("ckpt.pt", REAL)
    done = subprocess.run([sys.executable, "-c", KILLED], check=False, timeout=SECONDS)
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir()) == ["ckpt.pt", "scratch"]
    assert on_disk() == REAL
    (left,) = os.listdir("scratch")
    # A simulation that runs holds its folder's lock, whatever its process's number is.
    descriptor = os.open(f"scratch/{left}", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with redirect_checkpoints(Path("scratch")):
        assert os.listdir("scratch") == [left]
    os.close(descriptor)
    with redirect_checkpoints(Path("scratch")):
        assert Path("ckpt.pt").read_bytes() == REAL
    assert tree() == {"ckpt.pt": REAL}
    assert os.listdir("scratch") == []


BLOCKED = """
import threading, torch, paceline
paceline.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, optimizer, method="bsp:buckets=ddp")
for step in range(2):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    torch.save({"step": step}, "model.pt")
assert torch.load("model.pt") == {"step": 1}
lock = threading.Lock()
lock.acquire()
lock.acquire()  # outside the clock
"""


@pytest.mark.slow
def test_a_simulation_that_gives_up_leaves_real_checkpoints_in_their_places() -> None:
    """The watchdog ends the process at once: nothing that is put off is done."""
    write("model.pt", REAL)
    write("train.py", BLOCKED.encode())
    words = "simulate train.py --workers 2 --forward .01 --backward .01 --patience 1"
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words.split()],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 70, done.stderr
    assert "blocked outside the virtual clock" in done.stderr
    assert on_disk("model.pt") == REAL
