"""A launcher's temporary folder goes when the launcher is told to end."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from paceline.runtimes.temporary_folder import LauncherInterrupted, scratch_folder
from tests.support.hanging import SECONDS

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_leaves_the_block_and_no_folder(number: int) -> None:
    def use() -> None:
        with scratch_folder() as folder:
            Path(folder, "file").touch()
            folders.append(folder)
            tell(number)

    folders: list[str] = []
    # Under nohup a hangup is ignored, by us too; here it is not.
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    found = signal.signal(number, usual)
    try:
        with pytest.raises(LauncherInterrupted) as told:
            use()
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, found)
    assert told.value.number == number
    assert told.value.code == 128 + number
    assert not Path(folders[0]).exists()


def test_a_second_signal_does_not_disturb_the_tidying_up() -> None:
    def use() -> None:
        with scratch_folder() as outer, scratch_folder() as inner:
            folders.extend([outer, inner])
            try:
                tell(signal.SIGTERM)
            finally:
                tell(signal.SIGINT)
                done.append("workers ended")

    folders: list[str] = []
    done: list[str] = []
    with pytest.raises(LauncherInterrupted) as told:
        use()
    assert told.value.number == signal.SIGTERM
    assert done == ["workers ended"]
    assert not any(Path(folder).exists() for folder in folders)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_signal_while_folders_are_removed_comes_afterwards(
    monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Also if the block has set a handler of its own, as torchrun does."""
    remove, seen = os.rmdir, []

    def interrupted(*arguments: object, **options: object) -> None:
        tell(signal.SIGTERM)
        seen.append(arguments)
        remove(*arguments, **options)

    def use() -> str:
        with scratch_folder() as folder:
            monkeypatch.setattr(os, "rmdir", interrupted)
            folders.append(folder)
            if replaced:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit("of the block"))
        return folder

    folders: list[str] = []
    with pytest.raises(LauncherInterrupted):
        use()
    assert seen
    assert not Path(folders[0]).exists()


def test_what_was_ignored_before_still_is() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with scratch_folder():
            tell(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_on_another_thread_it_is_a_folder_alone() -> None:
    seen = []

    def use() -> None:
        with scratch_folder() as folder:
            seen.append((Path(folder).is_dir(), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [(True, before)]


def test_what_a_killed_launcher_has_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = (
        "import os, signal; from paceline.runtimes.temporary_folder import scratch_folder\n"
        "with scratch_folder(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    with scratch_folder() as living:
        subprocess.run([sys.executable, "-c", code], timeout=SECONDS)
        (left,) = set(tmp_path.iterdir()) - {Path(living)}
        others = tmp_path / "paceline-of-somebody"
        others.mkdir()
        with scratch_folder():
            assert not left.exists()
            assert Path(living).exists()
            assert others.exists()
